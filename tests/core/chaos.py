"""Everything that can happen to the log, in any order: each method is one event, with its choices drawn from a `Random`.

The same events are driven by hypothesis (which can shrink what it finds) and by a seeded `random.Random` (which is fast,
and makes a log that can be recorded).
"""

import sys
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from tangram import limits, subjects
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.fold_clients import next_n
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.state import ActionId, HostKey
from tests.core import invariants
from tests.core.world import Item, Worker, World, cores, fold_again

T = TypeVar("T")

HOSTS: Final = {
    "h1": (cores(4, nodes=2), {"memory": 1_000}),
    "h2": (cores(8), {"memory": 500}),
    "h3": ([[0, 1], [2]], {"memory": 2_000}),
}
GPUS: Final[dict[str, tuple[int, int]]] = {"h2": (4, 100), "h3": (8, 60)}
"""How many a host has, and the MiB of each."""
SERVICES: Final = {
    "s": m.Service(weights_mib=80, restore_us=1_000_000, restore_fixed_us=100_000),
    "t": m.Service(weights_mib=100, restore_us=3_000_000),
    "u": m.Service(weights_mib=240, restore_us=500_000, restore_fixed_us=1_000_000),
}
GPU_DEMANDS: Final = (
    m.Demand(low=1), m.Demand(low=1, high=8), m.Demand(low=2, high=8), m.Demand(low=1, high=4, legal=(1, 4)), m.Demand(low=4),
    m.Demand(low=8), m.Demand(low=1, high=2), m.Demand(low=2, high=8, legal=(2, 8)),
)  # fmt: skip
QUOTAS: Final[tuple[dict[str, m.Quota], ...]] = (
    {},
    {"q": m.Quota(concurrency=2)},
    {"q": m.Quota(concurrency=1), "r": m.Quota(tokens=10, interval_ms=5_000)},
    {"r": m.Quota(tokens=10, interval_ms=1_500), "q": m.Quota(concurrency=3, tokens=4, interval_ms=20_000)},
    {"r": m.Quota(tokens=4, interval_ms=5_000)},
    {"q": m.Quota(requests=3, interval_ms=5_000), "r": m.Quota(requests=2, tokens=9, interval_ms=3_000)},
    {"q": m.Quota(requests=4, interval_ms=8_000, burst=2), "r": m.Quota(concurrency=2, requests=5, interval_ms=700, burst=5)},
)
QUOTA_DEMANDS: Final = (
    {"q": m.Demand(low=0)},
    {"q": m.Demand(low=1)},
    {"r": m.Demand(low=3)},
    {"q": m.Demand(low=2), "r": m.Demand(low=6)},
)
COSTS: Final[tuple[dict[str, m.Demand], ...]] = (
    {},
    {"cpu": m.Demand(low=1_000)},
    {"cpu": m.Demand(low=3_000)},
    {"cpu": m.Demand(low=1_000, high=4_000)},
    {"cpu": m.Demand(low=1_000, high=4_000, legal=(1_000, 2_000, 4_000))},
    {"cpu": m.Demand(low=400)},
    {"cpu": m.Demand(low=600), "memory": m.Demand(low=300)},
    {"cpu": m.Demand(low=2_000), "memory": m.Demand(low=400)},
    {"memory": m.Demand(low=600)},
    {"cpu": m.Demand(low=16_000)},
    {"cpu": m.Demand(low=1_500)},
)
OUTCOMES: Final = (Outcome.OK, Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.ERROR, Outcome.CANCELLED)
STAMPS_MS: Final = (0, 1, 1, 20, 400, 1_500, 3_000, -5_000, 10_000_000)
SUBJECTS: Final = (
    "tangram.actions.cpu.t", "tangram.cancels.t", "tangram.executors.e1", "tangram.completions.t.a",
    "tangram.decisions.cpu.e1", subjects.LEADER, subjects.CLOCK, "tangram.nowhere", "foreign.subject",
)  # fmt: skip


class Chaos:
    def __init__(self, random: Random, policy: str = "tangram") -> None:
        self.random = random
        self.world = World()
        self.world.lead(policy, self.pick(QUOTAS))
        self.next_n: dict[tuple[str, str], int] = {}
        self.done_below: dict[tuple[str, str], int] = {}
        self.known: list[ActionId] = []
        """All ids that any client has used."""
        self.opens: list[ActionId] = []
        self.instances: dict[tuple[str, str], int] = {}
        self.keyed: dict[tuple[str, str, str], m.ActionSpec] = {}
        """What was last asked for under each key."""
        self.steps = 0

    # --- choices ---

    def pick(self, things: list[T] | tuple[T, ...]) -> T:
        return things[self.random.randrange(len(things))]

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def client(self) -> tuple[str, str]:
        return self.pick(("t", "u")), self.pick(("a", "b"))

    def worker(self, accept: Callable[[Worker], bool]) -> Worker | None:
        found = [worker for worker in self.world.workers.values() if accept(worker)]
        return self.pick(found) if found else None

    # --- clients ---

    def submit(self) -> None:
        task, client = self.client()
        key = "gpu" if self.chance(30) else "cpu"
        items = [self._item(task, client, key) for _ in range(1 + self.random.randrange(3))]
        below = self.done_below.get((task, client), 0)
        instance = self.instances.get((task, client), 0)
        flag = self.chance(50)
        self.world.send_actions(task, client, items, key=key, done_below=below, instance=instance, cancel_on_disconnect=flag)

    def _item(self, task: str, client: str, key: str) -> Item:
        at = (task, client)
        n = self.next_n.get(at, 0)
        if self.chance(10):
            n = self.random.randrange(n + 1)  # sent before, most likely
        elif self.chance(3):
            n = self.done_below.get(at, 0) + limits.CLIENT_SEEN_WIDTH_MAX + self.random.randrange(2)
        else:
            n += 2 if self.chance(5) else 0
            self.next_n[at] = n + 1
        action = ActionId(task, client, n)
        self.known.append(action)
        spec = self._spec(action, key)
        item = self.world.item(action, spec)
        if self.chance(4):
            return self.pick((item._replace(spec=b"\xc1"), item._replace(payload=b"?"), item._replace(spec=item.spec[:-1])))
        return item

    def _spec(self, action: ActionId, key: str) -> m.ActionSpec:
        kind, session, cost = "run", 0, self.pick(COSTS)
        if key == "gpu":
            return self._gpu_spec(action)
        opens = [open_ for open_ in self.opens if open_[:2] == action[:2]]
        if self.chance(20):
            kind = "session.open"
            cost = self.pick(({}, {"memory": m.Demand(low=200)}, {"memory": m.Demand(low=450)}))
            self.opens.append(action)
        elif opens and self.chance(60):
            session = self.pick(opens).n
            kind = self.pick(("run", "run", "run", "file.write", "session.close"))
            if kind != "run":
                cost = {}
        elif self.chance(3):
            session = 99
        if self.chance(25):
            cost = {**cost, **self.pick(QUOTA_DEMANDS)}
        own_key = self.pick(("k1", "k2")) if self.chance(20) else ""
        asked = self.keyed.get((action.task, action.client, own_key))
        if asked is not None and self.chance(70):
            return replace(asked, nonce=self.world.nonce(action))
        spec = m.ActionSpec(
            nonce=self.world.nonce(action),
            key=own_key,
            kind=kind,
            cost=cost,
            session=session,
            timeout_ms=self.pick((500, 2_000, 20_000)),
            deadline_ms=self.pick((0, 3_000, 60_000, 60_000, 60_000)),
            retry=self.pick(("never", "safe")),
            idle_ttl_ms=self.pick((1_000, 20_000)),
            hint=m.Hint(duration_us=1_000_000, parallel_ppm=self.pick((0, 500_000, 990_000))) if self.chance(50) else None,
        )
        if own_key:
            self.keyed[(action.task, action.client, own_key)] = spec
        return spec

    def _gpu_spec(self, action: ActionId) -> m.ActionSpec:
        cost = {"gpu": self.pick(GPU_DEMANDS)}
        if self.chance(30):
            cost |= self.pick(({"memory": m.Demand(low=300)}, {"cpu": m.Demand(low=1_000)}, {"cpu": m.Demand(low=2_000)}))
        if self.chance(25):
            cost |= self.pick(QUOTA_DEMANDS)
        opens = self.chance(5)
        if opens:
            self.opens.append(action)
        return m.ActionSpec(
            nonce=self.world.nonce(action),
            kind="session.open" if opens else "run",
            cost=cost,
            service=self.pick(("", "s", "s", "t", "t", "u", "none")) if not opens else "",
            timeout_ms=self.pick((500, 20_000)),
            deadline_ms=self.pick((3_000, 60_000, 60_000, 60_000)),
            retry=self.pick(("never", "safe")),
            idle_ttl_ms=self.pick((1_000, 20_000)),
            hint=m.Hint(duration_us=self.pick((1_000, 1_000_000, 30_000_000)), parallel_ppm=900_000) if self.chance(50) else None,
        )

    def cancel(self) -> None:
        task, client = self.client()
        ids = [action.n for action in self.known if action[:2] == (task, client)]
        chosen = [self.pick(ids) for _ in range(1 + self.random.randrange(2))] if ids else []
        if self.chance(25):
            chosen.append(self.next_n.get((task, client), 0) + self.random.randrange(3))  # not sent yet
        self.world.put(subjects.cancels(task), m.CancelsRequested(client=client, ids=chosen))

    def forget_below(self) -> None:
        """A client says which of its ids it will never send again; it may still wait for some of them."""
        at = self.client()
        below = self.random.randrange(self.next_n.get(at, 0) + 1)
        self.done_below[at] = max(below, self.done_below.get(at, 0))
        self.world.put(subjects.cancels(at[0]), m.CancelsRequested(client=at[1], ids=[], done_below=self.done_below[at]))

    def impostor(self) -> None:
        """Another process sends something under the id of an open action; or one that was replaced goes on."""
        open_ = list(self.world.state.actions)
        if open_ and self.chance(50):
            action = self.pick(open_)
            self.world.impostor(action, instance=self.instances.get(action[:2], 0))
        at = self.client()
        if self.instances.get(at, 0) > 1:
            n = self.next_n.get(at, 0) + self.random.randrange(2)
            self.world.impostor(ActionId(*at, n), instance=self.instances[at] - 1)

    def take_name(self) -> None:
        """A process comes back under its name, and asks where to go on."""
        at = self.client()
        known = self.world.state.clients.get(at)
        self.next_n[at] = max(self.next_n.get(at, 0), next_n(known) if known is not None else 0)
        self.instances[at] = self.instances.get(at, 0) + 1
        cancels = m.CancelsRequested(client=at[1], ids=[], done_below=self.next_n[at], instance=self.instances[at])
        self.done_below[at] = self.next_n[at]
        self.world.put(subjects.cancels(at[0]), cancels)

    def disconnect(self) -> None:
        at = self.client()
        if at in self.world.state.clients:
            self.world.disconnect(*at)

    # --- the leader ---

    def plan(self) -> None:
        if not self.world.in_flight:
            missing = [action.id for queue in self.world.state.queues.values() for action in queue if self.chance(2)]
            invariants.check_window(self.world, self.world.plan(missing))

    def deliver(self) -> None:
        if self.chance(10):  # the first was not acknowledged, and its retry will stand behind its successors
            self.world.in_flight.rotate(-1)
        self.world.deliver(1)

    def decide(self) -> None:
        self.world.deliver()
        self.plan()
        self.world.deliver()

    def take_over(self) -> None:
        shares = self.pick(({}, {"t": 3}, {"t": 1, "u": 4}))
        more = {"static_units": self.pick((1, 2, 3)), "patience_ms": self.pick((0, 1_000, 20_000))}
        self.world.lead(self.pick(tuple(POLICIES)), self.pick(QUOTAS), shares, **more)

    def settings(self) -> None:
        changed = self.pick(
            ({"static_units": 1}, {"static_units": 3}, {"fixed_units": 2}, {"fixed_units": 8}, {"count_restore": 0})
        )
        shares = self.pick(({}, {"u": 2}))
        self.world.put(subjects.CLOCK, m.Settings(epoch=self.world.state.epoch, settings=changed, shares=shares))

    def quotas(self) -> None:
        self.world.set_quotas(self.pick(QUOTAS))

    def seed(self) -> None:
        """What another log has learnt, some of it of kinds that have a model by now."""
        kinds = [self.pick(("run", "test", "file.write")), f"k{self.random.randrange(5)}"]
        sizes = [
            m.SizeSeen(units=units, duration_us=self.random.randrange(1, 10**9), weight_ppm=10**6, times=2) for units in (1, 4)
        ]
        known = [
            m.LearntModel(task="t", kind=kind, count=4, serial_us=self.random.randrange(10**9), spread_ppm=400_000, sizes=sizes)
            for kind in kinds
        ]
        self.world.put(subjects.CLOCK, m.ModelsSeeded(epoch=self.world.state.epoch, models=known))

    def tick(self) -> None:
        self.world.tick()

    def time(self) -> None:
        self.world.after(self.pick(STAMPS_MS))

    def lose(self) -> None:
        worker = self.worker(lambda w: w.incarnation in self.world.state.incarnations)
        if worker is not None:
            self.world.lose(worker)

    def stale(self) -> None:
        """What a leader of an earlier epoch would write; the server refuses it, and the fold must not mind it either."""
        world, epoch = self.world, self.random.randrange(self.world.state.epoch)
        live = [i for i in world.state.incarnations.values() if i.live]
        world.put(subjects.CLOCK, m.Settings(epoch=epoch, settings={"static_units": 7}))
        if live:
            holder = self.pick(live)
            lost = m.ExecutorLost(epoch=epoch, executor=holder.executor, incarnation=holder.id)
            start = m.Start(
                task="t", client="a", n=0, nonce=bytes(8), kind="run", amounts={"cpu": 1_000}, cores=(0,), timeout_ms=1
            )
            made = m.DecisionsMade(
                epoch=epoch, incarnation=holder.id, number=1, window=1, through_seq=1, digest=b"", items=[start, m.Dismiss()]
            )
            world.put(subjects.CLOCK, lost)
            world.put(subjects.decisions(holder.key, holder.executor), made)

    # --- executors ---

    def join(self) -> None:
        host = self.pick(tuple(HOSTS))
        where = HostKey(host, f"machine-{host}")
        found = [w for w in self.world.workers.values() if w.host == where and w.findable and self.chance(60)]
        key = "gpu" if host in GPUS and self.chance(50) else "cpu"
        executor = f"e{self.random.randrange(4)}"
        self._join(executor, key, host, dead=found, later=self.chance(20))

    def _join(self, executor: str, key: str, host: str, *, whole: bool = False, **given: Any) -> None:
        """A GPU executor has all GPUs of its host, a half, or some; and serves all, or some."""
        nodes, capacity = HOSTS[host]
        if key == "gpu":
            given |= self._gpus(host, whole)
        self.world.join(executor, key=key, host=host, nodes=nodes, **capacity, **given)

    def _gpus(self, host: str, whole: bool) -> dict[str, Any]:
        count, memory_mib = GPUS[host]
        every = tuple(range(count))
        gpus = every if whole else self.pick((every, every, every[: count // 2], every[count // 2 :], every[1:]))
        served = tuple(SERVICES) if whole else self.pick((("s", "t", "u"), ("s", "t", "u"), ("s",), ("t", "u")))
        return {"gpus": gpus, "gpu_memory_mib": memory_mib, "services": {name: SERVICES[name] for name in served}}

    def restart(self) -> None:
        """A process dies and comes back under its name at once, having cleaned up after itself."""
        worker = self.worker(lambda w: w.alive)
        if worker is not None:
            worker.die()
            self._join(worker.executor, worker.key, worker.host.name, dead=[worker], later=self.chance(20))

    def reboot(self) -> None:
        host = self.pick(tuple(HOSTS))
        if host in self.world.boots:
            self._join(f"e{self.random.randrange(4)}", self.pick(("cpu", "gpu")) if host in GPUS else "cpu", host, reboot=True)

    def read(self) -> None:
        worker = self.worker(lambda w: bool(w.unread))
        if worker is not None:
            worker.read(1 if self.chance(50) else None)

    def end(self) -> None:
        worker = self.worker(lambda w: w.alive and bool(w.running))
        if worker is not None:
            key = self.pick(list(worker.running))
            outcome = self.pick(OUTCOMES)
            if worker.running[key].start.session and self.chance(5):
                outcome = Outcome.ENVIRONMENT_LOST
            run_ns = self.pick((0, 1_000, 300_000_000, 2_000_000_000, 90_000_000_000))
            worker.end(key, outcome, nonce=b"mistaken" if self.chance(3) else None, run_ns=run_ns)
            self._send(worker)

    def give_back(self) -> None:
        worker = self.worker(lambda w: w.alive and bool(w.running))
        if worker is not None:
            after_ms, failed = (self.pick((1, 900, 30_000)), False) if self.chance(40) else (0, self.chance(40))
            worker.give_back(self.pick(list(worker.running)), "busy", after_ms, failed=failed)
            self._send(worker)

    def end_session(self) -> None:
        worker = self.worker(lambda w: w.alive and bool(w.sandboxes))
        if worker is not None:
            asked = list(worker.endings)
            worker.end_session(self.pick(asked) if asked and self.chance(80) else self.pick(list(worker.sandboxes)))
            self._send(worker)

    def answer_all(self) -> None:
        worker = self.worker(lambda w: w.alive)
        if worker is not None:
            worker.answer_all()

    def _send(self, worker: Worker) -> None:
        if self.chance(70):
            worker.send()

    def send(self) -> None:
        worker = self.worker(lambda w: bool(w.outbox))
        if worker is not None:
            worker.send(1 if self.chance(50) else None)

    def repeat(self) -> None:
        """A message that was stored is stored once more."""
        worker = self.worker(lambda w: bool(w.sent))
        if worker is not None:
            self.world.put(*self.pick(worker.sent))

    def drain(self) -> None:
        worker = self.worker(lambda w: w.alive)
        if worker is not None:
            worker.drain()
            self._send(worker)

    def change(self) -> None:
        worker = self.worker(lambda w: w.alive)
        if worker is not None:
            nodes, capacity = HOSTS[worker.host.name]
            if worker.key == "gpu" and self.chance(60):
                facts = self._gpus(worker.host.name, self.chance(30))
                if self.chance(50):
                    worker.change(gpus=facts["gpus"])
                else:
                    worker.change(services=facts["services"])
            elif self.chance(50):
                worker.change(nodes=self.pick((nodes, nodes[:1], [])))
            else:
                worker.change(capacity=self.pick((capacity, {"memory": 250}, {})))
            self._send(worker)

    def leave(self) -> None:
        worker = self.worker(lambda w: w.alive and not w.running and not w.sandboxes)
        if worker is not None:
            worker.leave()
            self._send(worker)

    def die(self) -> None:
        worker = self.worker(lambda w: w.alive)
        if worker is not None:
            worker.die()

    def find_dead(self) -> None:
        worker = self.worker(lambda w: w.alive)
        if worker is not None:
            worker.find_dead([w for w in self.world.workers.values() if w.host == worker.host and w.findable])
            self._send(worker)

    # --- nobody's ---

    def forge(self) -> None:
        """An outcome with the right nonce from somebody unknown, or with a wrong one."""
        actions = list(self.world.state.actions.values())
        if not actions:
            return
        action = self.pick(actions)
        right = self.chance(50) and action.id in self.world.accepted and action.spec.kind != "session.close"
        result = m.Result(
            nonce=action.spec.nonce if right else b"mistaken", attempt=1 + self.random.randrange(2), outcome=self.pick(OUTCOMES)
        )
        subject = subjects.completions(action.id.task, action.id.client)
        ids, results = [action.id.n], [m.encode(result)]
        self.world.put(subject, m.ActionsFinished(incarnation="unknown", k=1, ids=ids, results=results, outputs=[b""]))

    def garbage(self) -> None:
        subject = self.pick(SUBJECTS)
        seed = self.random.randrange(1 << 16)
        noise = bytes((seed * 31 + i * seed) & 0xFF for i in range(seed % 40))
        last = self.world.log[self.random.randrange(len(self.world.log))].data
        data = self.pick((b"\xc1" + noise, last[: len(last) // 2], b"", b"\x91" * 2_000, b"\xc0"))
        self.world.put(subject, data, garbage=True)

    def checkpoint(self) -> None:
        """The leader goes on from a checkpoint of its state."""
        self.world.state = load(dump(self.world.state))

    # --- all of it ---

    EVENTS: Final = (
        ("submit", 30), ("cancel", 6), ("forget_below", 2), ("plan", 12), ("deliver", 14), ("decide", 14), ("take_over", 2),
        ("settings", 1), ("quotas", 1), ("seed", 1), ("tick", 4), ("time", 8), ("lose", 2), ("stale", 1), ("join", 7),
        ("restart", 3),
        ("reboot", 1),
        ("read", 16), ("end", 22), ("give_back", 5), ("end_session", 3), ("answer_all", 4), ("send", 8), ("repeat", 3),
        ("impostor", 3), ("take_name", 1), ("disconnect", 1),
        ("drain", 1), ("change", 2), ("leave", 1), ("die", 1), ("find_dead", 2), ("forge", 2), ("garbage", 2), ("checkpoint", 3),
    )  # fmt: skip

    def run(self, steps: int, check_every: int = 1) -> None:
        names = [name for name, weight in self.EVENTS for _ in range(weight)]
        for index in range(steps):
            getattr(self, self.pick(names))()
            self.steps += 1
            if index % check_every == 0:
                invariants.check(self.world)

    def heal(self) -> None:
        """From here on everybody is alive and answers: all that was accepted must end, and all units must come back."""
        world, state = self.world, self.world.state
        world.deliver()
        for worker in list(world.workers.values()):
            worker.send()
        rested = 0
        for _ in range(2_000):
            self._revive()
            world.plan()
            quiet = not world.in_flight
            world.deliver()
            for worker in list(world.workers.values()):
                quiet = quiet and not worker.unread and not worker.running and not worker.endings
                if worker.alive:
                    worker.answer_all()
                worker.send()
            if quiet:
                if rested < 5:
                    rested += 1
                    invariants.check(world)
                    invariants.check_nothing_stalls(world)
                if not state.wants_ticks:
                    break
                world.after(2_000)
                world.tick()
        else:
            raise AssertionError(f"no rest after 2,000 rounds: {state.actions} {state.sessions} {state.owed}")
        self._check_all_is_over()

    def _revive(self) -> None:
        """Who was given up dies, who is dead is found, and each host and kind has an executor that takes work."""
        world, state = self.world, self.world.state
        for worker in world.workers.values():
            holder = state.incarnations.get(worker.incarnation)
            if worker.alive and (holder is None or not holder.live):
                worker.die()
            elif holder is not None and holder.live and not worker.alive:
                world.lose(worker)
        for host in HOSTS:
            here = [w for w in world.workers.values() if w.host.name == host]
            dead = [w for w in here if w.findable]
            for key in ("cpu", "gpu") if host in GPUS else ("cpu",):
                if not any(w.alive and not w.draining and w.key == key for w in here):
                    self._join(f"healer-{host}-{key}", key, host, whole=True, dead=dead)
                    dead = []
            for worker in here:
                if worker.alive and dead:
                    worker.find_dead(dead)
                    worker.send()
                    break

    def _check_all_is_over(self) -> None:
        world, state = self.world, self.world.state
        assert (state.actions, state.sessions, state.queues, bool(state.owed)) == ({}, {}, {}, False)
        for holder in state.incarnations.values():
            assert holder.live, f"{holder.id} is lost, dead and held"
            assert not holder.grants
            assert not holder.draining, f"{holder.id} drains, holds nothing and is not dismissed"
        for host in state.hosts.values():
            assert host.pool.used == 0
            assert not host.pool.shared
            assert not any(host.used.values())
            assert not host.gpus.used
        assert not any(pool.in_use for pool in state.quotas.values())
        assert world.finishes.keys() == world.accepted.keys()
        every = outcomes(world)
        first = {
            action: every[(action, world.nonces[action])] for action in world.accepted if (action, world.nonces[action]) in every
        }
        missing = world.accepted.keys() - first.keys()
        assert not missing, f"accepted without an outcome in the log: {missing}"
        self._check_shared(first)
        records = {record.seq: record for record in world.log}
        for (task, name), client in state.clients.items():
            for n, seq in client.ended.items():
                _, message = m.decode(records[seq].subject, records[seq].data)
                assert isinstance(message, m.ActionsFinished)
                if (action := ActionId(task, name, n)) in first:  # else it was refused as it came
                    assert m.encode(first[action]) in message.results, f"{action} did not end at {seq}"
        for action, nonce in world.impostors:
            told = every[(action, nonce)]
            assert (told.outcome, told.reason) == (Outcome.REJECTED, "conflict")
        assert fold_again(world.log) == world.digests

    def _check_shared(self, first: dict[ActionId, m.Result]) -> None:
        """What shares the outcome of another never started, and says where that stands."""
        started = {key.action for key in self.world.granted}
        records = {record.seq: record for record in self.world.log}
        for action, result in first.items():
            if result.same_as:
                assert action not in started
                shared = ActionId(action.task, action.client, result.same_as)
                assert first[shared].outcome is result.outcome
                _, message = m.decode(records[result.at_seq].subject, records[result.at_seq].data)
                assert isinstance(message, m.ActionsFinished)
                assert m.encode(first[shared]) in message.results


def outcomes(world: World) -> dict[tuple[ActionId, bytes], m.Result]:
    """What clients read: for each action and nonce the first outcome in the log."""
    found: dict[tuple[ActionId, bytes], m.Result] = {}
    for record in world.log:
        if record.subject.startswith("tangram.completions."):
            try:
                _, message = m.decode(record.subject, record.data)
            except m.Malformed:
                continue
            _, _, task, client = record.subject.split(".")
            assert isinstance(message, m.ActionsFinished)
            for n, raw in zip(message.ids, message.results, strict=True):
                result = m.decode_result(raw)
                found.setdefault((ActionId(task, client, n), result.nonce), result)
    return found


def main(first: int, last: int, steps: int) -> None:
    """`python -m tests.core.chaos FIRST LAST STEPS` looks further than the suite does; a failure names its seed."""
    records = 0
    for seed in range(first, last):
        chaos = Chaos(Random(seed), sorted(POLICIES)[seed % len(POLICIES)])
        try:
            chaos.run(steps)
            chaos.heal()
        except Exception as error:
            error.add_note(f"seed {seed}, step {chaos.steps}, record {len(chaos.world.log)}")
            raise
        records += len(chaos.world.log)
    print(f"{(last - first) * steps} steps, {records} records")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
