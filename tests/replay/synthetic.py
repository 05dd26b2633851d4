"""Logs of any size by the real `plan` and `compose`, without a clock or a process: the same seed gives the same bytes."""

import heapq
from random import Random

from tangram import messages as m
from tangram import subjects
from tangram.outcomes import Outcome
from tangram.scheduler.fold import Record
from tangram.scheduler.state import Action, ActionId, GrantKey
from tests.core.world import MS, Worker, World, cores

_PAYLOADS = {
    "session.open": m.encode(m.SessionOpen()),
    "session.close": m.encode(m.SessionClose()),
    "file.write": m.encode(m.FileWrite(path="f", data=b"x")),
}
_RUN = m.encode(m.Run(argv=("true",)))
_TEST_OUTCOMES = (Outcome.OK,) * 30 + (Outcome.FAILED, Outcome.FAILED, Outcome.TIMED_OUT)
_MEMORY_MIB = 1_000_000


class _World(World):
    def payload_of(self, action: Action) -> bytes | None:
        return _PAYLOADS.get(action.spec.kind, _RUN)


class Busy:
    """Trajectories of three tasks: each opens a session, writes files and runs tests in it, and closes it. Halfway an
    executor dies, and another takes its place."""

    def __init__(self, actions: int, hosts: int, cores_each: int, seed: int) -> None:
        self.actions, self.hosts, self.cores_each = actions, hosts, cores_each
        self.random, self.world = Random(seed), _World()
        self.workers: list[Worker] = []
        self.ends: list[tuple[int, int, str, GrantKey]] = []
        self.known: set[tuple[str, GrantKey]] = set()
        self.left: dict[tuple[str, str], list[tuple[str, int]]] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        self.sessions: dict[tuple[str, str], int] = {}
        self.active: dict[tuple[str, str], None] = {}
        self.submitted = 0

    def submit(self, client: tuple[str, str], kind: str, units: int) -> None:
        n = self.numbers[client] = self.numbers.get(client, 0) + 1
        cost = {"cpu": m.Demand(low=1_000, high=units * 1_000)} if units else {}
        if kind == "session.open":
            self.sessions[client] = n
            cost = {"memory": m.Demand(low=256)}
        spec = m.ActionSpec(
            nonce=n.to_bytes(8, "big"), kind=kind, cost=cost, session=0 if kind == "session.open" else self.sessions[client]
        )
        message = m.ActionsSubmitted(client=client[1], ids=[n], specs=[m.encode(spec)], payloads=[_PAYLOADS.get(kind, _RUN)])
        self.world.put(subjects.actions("cpu", client[0]), message)
        self.active[client] = None
        self.submitted += 1

    def go_on(self, client: tuple[str, str]) -> None:
        self.active.pop(client, None)
        left = self.left.get(client)
        if left:
            self.submit(client, *left.pop(0))
        elif self.submitted < self.actions:
            fresh = (self.random.choice(("coding", "coding", "math", "deepsearch")), f"c{len(self.left)}")
            rounds = self.random.randint(2, 12)
            steps = [step for _ in range(rounds) for step in (("file.write", 0), ("test", self.random.choice((1, 1, 4))))]
            self.left[fresh] = [*steps, ("session.close", 0)]
            self.submit(fresh, "session.open", 0)

    def begin(self) -> None:
        for worker in self.workers:
            worker.read()
            for key, running in worker.running.items():
                if (worker.incarnation, key) not in self.known:
                    self.known.add((worker.incarnation, key))
                    units = max(1, running.start.units)
                    test_ms = self.random.expovariate(1 / 700) / units + 20
                    ms = {"session.open": 90.0, "test": test_ms}.get(running.start.kind, 3.0)
                    heapq.heappush(self.ends, (self.world.stamp_ns + int(ms * MS), len(self.known), worker.incarnation, key))

    def crash(self) -> None:
        dead = self.workers.pop(0)
        dead.die()
        self.world.after(300)
        self.workers.append(self.join(0, "cpu-9", [dead]))
        self.world.rule()
        for client in list(self.active):
            if ActionId(*client, self.sessions[client]) not in self.world.state.sessions:
                self.left[client].clear()
                self.go_on(client)

    def join(self, host: int, executor: str, dead: list[Worker] | None = None) -> Worker:
        nodes = cores(self.cores_each, nodes=2)
        return self.world.join(executor, host=f"node-{host}", nodes=nodes, dead=dead or [], memory=_MEMORY_MIB)

    def run(self) -> list[Record]:
        self.world.lead()
        for host in range(self.hosts):
            self.world.after(40)
            self.workers.append(self.join(host, f"cpu-{host}"))
        for _ in range(self.hosts * self.cores_each * 3):
            self.go_on(("", ""))
        crashed = False
        while True:
            self.world.decide()
            self.begin()
            if not self.ends:
                return self.world.log
            at_ns, _, incarnation, key = heapq.heappop(self.ends)
            self.world.stamp_ns = max(self.world.stamp_ns, at_ns)
            worker = self.world.workers[incarnation]
            if worker.alive:
                kind = worker.running[key].start.kind
                worker.end(key, self.random.choice(_TEST_OUTCOMES) if kind == "test" else Outcome.OK)
                worker.send()
                self.go_on((key.action.task, key.action.client))
            if not crashed and self.submitted > self.actions // 2:
                crashed = True
                self.crash()


def busy_log(actions: int, *, hosts: int = 4, cores_each: int = 16, seed: int = 1) -> list[Record]:
    return Busy(actions, hosts, cores_each, seed).run()
