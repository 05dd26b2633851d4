"""`tangram bench scheduler`: what a pass and a turn of the pure core cost, whatever is queued behind, and what a backlog takes
of a real scheduler process."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tangram import messages as m
from tangram import subjects
from tangram.bench.load import percentile
from tangram.errors import TangramError
from tangram.local import LocalStack
from tangram.messages import Demand
from tangram.outcomes import Outcome
from tangram.producers.client import Client
from tangram.scheduler.compose import compose
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import BEHAVIOUR, State
from tangram.scheduler.window import plan


class Case(NamedTuple):
    """A pool, and so many that wait for it. nodes: cores of each NUMA node of a host; gpus: of each host, instead."""

    candidates: int
    hosts: int
    nodes: tuple[int, ...] = ()
    gpus: int = 0

    @property
    def units(self) -> int:
        return self.hosts * (sum(self.nodes) + self.gpus)


CASES: Final = (Case(64, 1, (64, 64)), Case(2_048, 15, (64, 64, 64, 64)), Case(2_048, 5, gpus=8))
"""An everyday window, and the paper's largest on its cores and on its GPUs."""
SERVICES: Final = {
    f"s{number}": m.Service(weights_mib=65_536, restore_us=2_700_000, restore_fixed_us=100_000) for number in range(9)
}
"""Nine teachers of 64 GiB."""
GPU_MEMORY_MIB: Final = 73_728
ENVELOPE: Final = 64
"""Actions of a message: what 64 callers at once come to."""
CLIENT_IDS: Final = 50_000
"""Of one client: the core keeps a bounded number above those that have ended."""
PAYLOAD: Final = m.encode(m.Run(argv=("python3", "-m", "pytest", "-q", "tests/test_solution.py"), env={"PYTHONHASHSEED": "0"}))


def _kind(name: str, high: int, parallel: float = 0.0, duration_s: float = 1.0, legal: tuple[int, ...] = ()) -> m.ActionSpec:
    hint = m.Hint(duration_us=int(1e6 * duration_s), parallel_ppm=int(1e6 * parallel)) if parallel else None
    cpu = Demand(low=1_000, high=1_000 * high, legal=tuple(1_000 * each for each in legal))
    return m.ActionSpec(nonce=b"nonce---", kind=name, cost={"cpu": cpu}, hint=hint)


KINDS: Final = (
    _kind("inspect", 1),
    _kind("edit", 1),
    _kind("shell", 1),
    _kind("lint", 4),
    _kind("search", 2, 0.5, 0.3),
    _kind("test", 8, 0.8, 2.6),
    _kind("build", 16, 0.9, 30),
    _kind("reward", 8, 0.8, 5),
    _kind("prove", 8, 0.95, 60, (1, 2, 4, 8)),
    _kind("sample", 4, 0.7),
    _kind("score", 2),
)
"""What is submitted, in turn: a number of them that shares no divisor with that of the hosts, so that all get all."""
GPU_SPECS: Final = tuple(
    m.encode(
        m.ActionSpec(nonce=b"nonce---", kind="score", cost={"gpu": Demand(low=1, high=8, legal=(1, 2, 4, 8))}, service=service)
    )
    for service in SERVICES
)
SPECS: Final = tuple(m.encode(spec) for spec in KINDS)
RESULT: Final = m.Result(
    nonce=KINDS[0].nonce, outcome=Outcome.OK, exit_code=0, units=1, queued_ns=10**6, run_ns=10**9, cpu_ns=10**9
)


class Core:
    """A scheduler without a shell: a state, and a log."""

    def __init__(self, case: Case) -> None:
        self._key, self._specs = ("gpu", GPU_SPECS) if case.gpus else ("cpu", SPECS)
        hosts, nodes = case.hosts, case.nodes
        self.state = State()
        self.log: list[Record] = []
        self._stamp_ns = 1
        self._n = 0
        self._k = {f"i{host}": 1 for host in range(hosts)}
        self.put(subjects.LEADER, m.LeaderStarted(leader="bench", behaviour=BEHAVIOUR, policy="tangram"))
        cores = [list(range(sum(nodes[:index]), sum(nodes[: index + 1]))) for index in range(len(nodes))]
        for host in range(hosts):
            joined = m.ExecutorJoined(
                incarnation=f"i{host}",
                key=self._key,
                host=f"h{host}",
                machine_id="m",
                boot_id="b",
                cores=cores,
                gpus=list(range(case.gpus)),
                capacity={"gpu_memory": GPU_MEMORY_MIB} if case.gpus else {},
                services=SERVICES if case.gpus else {},
            )
            self.put(subjects.executors(f"e{host}"), joined)

    def put(self, subject: str, message: m.LogMessage) -> None:
        self._stamp_ns += 1_000
        self.log.append(Record(self.state.seq + 1, self._stamp_ns, subject, m.encode(message)))
        folded = step(self.state, self.log[-1])
        assert not folded.skipped, folded.skipped

    def submit(self, count: int) -> None:
        for at in range(0, count, ENVELOPE):
            ids = list(range(self._n, self._n + min(ENVELOPE, count - at)))
            self._n += len(ids)
            part = ids[0] // CLIENT_IDS
            specs = [self._specs[n % len(self._specs)] for n in ids]
            submitted = m.ActionsSubmitted(
                client=f"c{part}", done_below=part * CLIENT_IDS, ids=ids, specs=specs, payloads=[PAYLOAD] * len(ids)
            )
            self.put(subjects.actions(self._key, "bench"), submitted)

    def decide(self) -> Iterator[tuple[str, m.DecisionsMade]]:
        """One window, decided and read back."""
        for subject, message in compose(self.state, plan(self.state), lambda _: PAYLOAD):
            self.put(subject, message)
            if isinstance(message, m.DecisionsMade):
                yield subject, message

    def finish(self, made: m.DecisionsMade) -> int:
        """All that was started with this message ends well; returns how many those were."""
        by_client: dict[str, list[int]] = {}
        for item in made.items:
            assert isinstance(item, m.Start)
            by_client.setdefault(item.client, []).append(item.n)
        result = m.encode(RESULT)
        for client, ids in by_client.items():
            self._k[made.incarnation] += 1
            finished = m.ActionsFinished(
                incarnation=made.incarnation,
                k=self._k[made.incarnation],
                ids=ids,
                results=[result] * len(ids),
                outputs=[b""] * len(ids),
            )
            self.put(subjects.completions("bench", client), finished)
        return len(made.items)


def passes(queued: Sequence[int], count: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each size and each number queued: milliseconds of one pass, microseconds of a turn for each action that it
    decides (fold the submission, pass, compose, fold the decision, fold the outcome)."""
    rows = []
    for case in CASES:
        for behind in queued:
            core = Core(case)
            core.submit(case.candidates + behind)
            core.log.clear()
            gc.collect()
            gc.freeze()
            taken_s = [_pass_s(core.state) for _ in range(count)]
            turn_us = _turn_us(core, count)
            gc.unfreeze()
            row = {
                "candidates": case.candidates,
                "units": case.units,
                "key": "gpu" if case.gpus else "cpu",
                "queued": behind,
                "p50_ms": round(1e3 * percentile(taken_s, 50), 4),
                "p99_ms": round(1e3 * percentile(taken_s, 99), 4),
                "turn_us": round(turn_us, 2),
            }
            rows.append(row)
            say(
                f"candidates {case.candidates:5}  {'GPUs' if case.gpus else 'cores':5} {case.units:5}  queued {behind:7}: "
                f"pass p50 {row['p50_ms']:8.3f} ms  p99 {row['p99_ms']:8.3f} ms, turn {turn_us:6.1f} us an action"
            )
    return rows


def _pass_s(state: State) -> float:
    start_s = time.perf_counter()
    plan(state)
    return time.perf_counter() - start_s


def _turn_us(core: Core, rounds: int) -> float:
    """The median over rounds in which as much is submitted as is decided."""
    taken_us = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        ended = sum(core.finish(made) for _, made in list(core.decide()))
        core.submit(ended)
        taken_us.append(1e6 * (time.perf_counter() - start_s) / ended)
    return percentile(taken_us, 50)


def fold_per_s(actions: int = 20_000) -> float:
    """Actions a second from a log in memory to a state: the submission, the decision and the outcome of each decoded and
    folded, ENVELOPE actions a message."""
    core = Core(Case(ENVELOPE, 1, (2 * ENVELOPE, 2 * ENVELOPE)))
    ended = 0
    while ended < actions:
        core.submit(ENVELOPE)
        ended += sum(core.finish(made) for _, made in list(core.decide()))
    gc.collect()
    taken_s = []
    for _ in range(3):
        state = State()
        start_s = time.perf_counter()
        for record in core.log:
            step(state, record)
        taken_s.append(time.perf_counter() - start_s)
        assert state.digest == core.state.digest
    return ended / min(taken_s)


async def backlog(actions: int, payload_bytes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Queues so many actions at a real scheduler that has no executor yet, then lets one that runs no programs answer them.

    Returns {actions, payload_bytes, peak_rss_mib, submitted_per_s, answered_per_s}; peak_rss_mib of the scheduler, over both.
    """
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        async with LocalStack(Path(folder), executors=0) as stack:
            assert stack.scheduler is not None
            clients = [Client(stack.url, task="bench") for _ in range(1 + actions // CLIENT_IDS)]
            for client in clients:
                await client.connect()
            start_s = time.perf_counter()
            waiting = []
            for index in range(actions):
                client = clients[index % len(clients)]
                spec, payload = _sized(client, payload_bytes)
                waiting.append((await client.submit(spec, payload))[1])
                if index % 1_000 == 999:
                    await asyncio.sleep(0)
            for client in clients:
                _, probe = await client.submit(*_sized(client, payload_bytes, deadline_ms=0))
                await probe  # its outcome comes after all before it was read
            submitted_s = time.perf_counter() - start_s
            peak = _peak_rss_mib(stack.scheduler.pid)
            say(f"{actions} actions queued in {submitted_s:.1f} s: scheduler's peak RSS {peak:.0f} MiB")
            await stack.start_executor("--sandbox", "none", "--cores", "4096")
            start_s = time.perf_counter()
            results = [await each for each in waiting]
            finished_s = time.perf_counter() - start_s
            refused = sum(result.outcome is Outcome.REJECTED and bool(result.executor) for result in results)
            if refused != actions:  # by the executor, as it runs no programs: the whole way there and back
                raise TangramError(f"{actions - refused} of {actions} actions were not answered by the executor")
            peak = _peak_rss_mib(stack.scheduler.pid)
            say(f"answered by an executor that runs nothing in {finished_s:.1f} s: peak RSS {peak:.0f} MiB")
            for client in clients:
                await client.close()
    return {
        "actions": actions,
        "payload_bytes": payload_bytes,
        "peak_rss_mib": round(peak, 1),
        "submitted_per_s": round(actions / submitted_s, 1),
        "answered_per_s": round(actions / finished_s, 1),
    }


def _sized(client: Client, payload_bytes: int, deadline_ms: int = 3_600_000) -> tuple[m.ActionSpec, m.Payload]:
    spec = m.ActionSpec(
        nonce=time.monotonic_ns().to_bytes(8, "big"), kind="run", cost={"cpu": Demand(low=1_000)}, deadline_ms=deadline_ms
    )
    return spec, m.Run(argv=("true",), stdin=b"x" * payload_bytes)


def _peak_rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no VmHWM")
