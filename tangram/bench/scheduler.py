"""`tangram bench scheduler`: what a pass and a turn of the pure core cost, whatever is queued behind, and what a backlog takes
of a real scheduler process."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

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

SIZES: Final = ((64, 1, 64), (2_048, 15, 256))
"""Candidates of a pass, hosts, cores of each: an everyday window, and the paper's largest."""
ENVELOPE: Final = 500
CLIENT_IDS: Final = 50_000
"""Of one client: the core keeps a bounded number above those that have ended."""
PAYLOAD: Final = m.encode(m.Noop())


class Core:
    """A scheduler without a shell: a state, and a log that nobody keeps."""

    def __init__(self, hosts: int, cores: int) -> None:
        self.state = State()
        self._stamp_ns = 1
        self._n = 0
        self._k = {f"i{host}": 1 for host in range(hosts)}
        self.put(subjects.LEADER, m.LeaderStarted(leader="bench", behaviour=BEHAVIOUR, policy="tangram"))
        for host in range(hosts):
            joined = m.ExecutorJoined(
                incarnation=f"i{host}", key="cpu", host=f"h{host}", machine_id="m", boot_id="b", cores=[list(range(cores))]
            )
            self.put(subjects.executors(f"e{host}"), joined)

    def put(self, subject: str, message: m.LogMessage) -> None:
        self._stamp_ns += 1_000
        step(self.state, Record(self.state.seq + 1, self._stamp_ns, subject, m.encode(message)))

    def submit(self, count: int) -> None:
        for at in range(0, count, ENVELOPE):
            ids = list(range(self._n, self._n + min(ENVELOPE, count - at)))
            self._n += len(ids)
            spec = m.encode(m.ActionSpec(nonce=bytes(8), kind="noop", cost={"cpu": Demand(low=1_000, high=4_000)}))
            part = ids[0] // CLIENT_IDS
            submitted = m.ActionsSubmitted(
                client=f"c{part}", done_below=part * CLIENT_IDS, ids=ids, specs=[spec] * len(ids), payloads=[PAYLOAD] * len(ids)
            )
            self.put(subjects.actions("cpu", "bench"), submitted)

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
        result = m.encode(m.Result(nonce=bytes(8), outcome=Outcome.OK))
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
    for candidates, hosts, cores in SIZES:
        for behind in queued:
            core = Core(hosts, cores)
            core.submit(candidates + behind)
            gc.collect()
            gc.freeze()
            taken_s = [_pass_s(core.state) for _ in range(count)]
            turn_us = _turn_us(core, count)
            gc.unfreeze()
            row = {
                "candidates": candidates,
                "units": hosts * cores,
                "queued": behind,
                "p50_ms": round(1e3 * percentile(taken_s, 50), 4),
                "p99_ms": round(1e3 * percentile(taken_s, 99), 4),
                "turn_us": round(turn_us, 2),
            }
            rows.append(row)
            say(
                f"candidates {candidates:5}  units {hosts * cores:5}  queued {behind:7}: pass p50 {row['p50_ms']:8.3f} ms  "
                f"p99 {row['p99_ms']:8.3f} ms, turn {turn_us:6.1f} us an action"
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
    """Actions a second through the pure core: each submitted, decided and finished."""
    core = Core(1, 1_000)
    start_s = time.perf_counter()
    core.submit(actions)
    ended = 0
    while ended < actions:
        ended += sum(core.finish(made) for _, made in list(core.decide()))
    return actions / (time.perf_counter() - start_s)


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
