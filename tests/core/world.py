"""A world around the pure core: a log, a leader, hosts with executors on them, and clients. No clock, no broker, no task.

`World` stores what everybody writes in one log and folds it as it is stored, as the leader does. The leader is the real
`plan` and `compose`; what it writes waits in `in_flight` until `deliver`, so anything else can get into the log before it.
An executor (`Worker`) does what it reads and says so through its outbox, so its words can be late, doubled, or stored
after its death. What it does really use is known here, whatever the core believes, and is compared with it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tangram import messages as m
from tangram import subjects
from tangram.outcomes import Outcome
from tangram.scheduler.compose import cancels_for, compose
from tangram.scheduler.fold import Folded, Record, step
from tangram.scheduler.state import BEHAVIOUR, Action, ActionId, GrantKey, HostKey, Phase, State
from tangram.scheduler.window import Window, plan

START_NS: Final = 1_800_000_000_000_000_000
MS: Final = 1_000_000
SECOND: Final = 1_000 * MS


def cores(count: int, nodes: int = 1) -> list[list[int]]:
    """`count` core ids, split evenly over NUMA nodes."""
    each = count // nodes
    return [list(range(node * each, (node + 1) * each)) for node in range(nodes)]


def payload_for(kind: str) -> m.Payload:
    """A payload that suits a kind."""
    match kind:
        case "session.open":
            return m.SessionOpen()
        case "session.close":
            return m.SessionClose()
        case "file.write":
            return m.FileWrite(path="f", data=b"x")
        case "file.read":
            return m.FileRead(path="f")
        case "noop":
            return m.Noop()
        case _:
            return m.Run(argv=("true",))


class Item(NamedTuple):
    """One action of a submission as bytes, so that it can be bad ones."""

    n: int
    spec: bytes
    payload: bytes


@dataclass(eq=False)
class Running:
    start: m.Start
    number: int
    """Of the message that started it."""
    cancelled: bool = False


@dataclass(eq=False)
class Worker:
    """One start of an executor process. It uses what it runs until it has ended it; if it dies, until somebody on its host
    has found it dead."""

    world: "World"
    executor: str
    incarnation: str
    key: str
    host: HostKey
    boot: str
    nodes: list[list[int]]
    capacity: dict[str, int]
    gpus: tuple[int, ...] = ()
    services: dict[str, m.Service] = field(default_factory=dict)
    resident: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """Copies that it has on GPUs -> MiB on each of them."""
    alive: bool = True
    """The process exists, and reads and writes."""
    gone: bool = False
    """Nothing of it is left on its host, and its host has said so."""
    draining: bool = False
    k: int = 0
    next_number: int = 1
    held: dict[int, m.DecisionsMade] = field(default_factory=dict)
    """Messages that came before one with a lower number."""
    running: dict[GrantKey, Running] = field(default_factory=dict)
    sandboxes: dict[ActionId, m.Start] = field(default_factory=dict)
    """Session -> what made it, which says what it holds."""
    endings: dict[ActionId, None] = field(default_factory=dict)
    """Sessions it was asked to end."""
    unread: deque[m.LogMessage] = field(default_factory=deque)
    outbox: deque[tuple[str, m.LogMessage]] = field(default_factory=deque)
    sent: list[tuple[str, m.LogMessage]] = field(default_factory=list)

    # --- what it says ---

    def _k(self) -> int:
        self.k += 1
        return self.k

    def say(self, message: m.LogMessage) -> None:
        self.outbox.append((subjects.executors(self.executor), message))

    def send(self, count: int | None = None) -> None:
        """Stores the next `count` messages of the outbox, or all."""
        while self.outbox and count != 0:
            subject, message = self.outbox.popleft()
            self.sent.append((subject, message))
            self.world.put(subject, message)
            count = None if count is None else count - 1

    def drain(self) -> None:
        self.draining = True
        self.say(m.ExecutorDraining(incarnation=self.incarnation, k=self._k()))

    def change(
        self,
        *,
        nodes: list[list[int]] | None = None,
        capacity: dict[str, int] | None = None,
        gpus: tuple[int, ...] | None = None,
        services: dict[str, m.Service] | None = None,
    ) -> None:
        self.world.announced(self.host, nodes or [], capacity or {})
        if capacity is not None and self.gpus:
            capacity = capacity | {"gpu_memory": self.world.gpu_memory_mib[self.host]}
        if gpus is not None:
            self.gpus = gpus
            self._forget_copies()
        self.services = self.services if services is None else services
        listed = None if gpus is None else list(gpus)
        changed = m.ExecutorChanged(
            incarnation=self.incarnation, k=self._k(), cores=nodes, capacity=capacity, gpus=listed, services=services
        )
        self.say(changed)

    def _forget_copies(self) -> None:
        """What lies on GPUs that it does not have any more goes, once nothing runs on it."""
        busy = {(start.service, start.gpus) for start in self.uses()}
        for copy in [each for each in self.resident if not set(each[1]) <= set(self.gpus) and each not in busy]:
            del self.resident[copy]

    def find_dead(self, dead: Iterable["Worker"]) -> None:
        found = list(dead)
        self.say(m.ExecutorChanged(incarnation=self.incarnation, k=self._k(), dead=[w.incarnation for w in found]))
        self.world.bury(found)

    def leave(self) -> None:
        """Its last word: it runs nothing any more."""
        self.unread.clear()
        self.running.clear()
        self.sandboxes.clear()
        self.endings.clear()
        self.resident.clear()
        self.say(m.ExecutorLeft(incarnation=self.incarnation, k=self._k()))
        self.alive = False
        self.gone = True

    def die(self) -> None:
        """The process is gone without a word; what it ran may run on."""
        self.alive = False
        self.unread.clear()

    # --- what it does ---

    def read(self, count: int | None = None) -> None:
        """Takes in the next `count` messages for it, or all there are."""
        while self.unread and self.alive and count != 0:
            message = self.unread.popleft()
            count = None if count is None else count - 1
            if isinstance(message, m.ExecutorLost):
                self.die()
                return
            assert isinstance(message, m.DecisionsMade)
            new = message.number >= self.next_number and message.number not in self.held
            assert new, f"{self.incarnation}: a second message {message.number}, which it would drop"
            self.held[message.number] = message
            while (following := self.held.pop(self.next_number, None)) is not None:
                self.next_number += 1
                for item in following.items:
                    self._item(following.number, item)

    def _item(self, number: int, item: m.Item) -> None:
        match item:
            case m.Start():
                self._start(number, item)
            case m.Cancel():
                running = self.running.get(GrantKey(ActionId(item.task, item.client, item.n), item.attempt))
                if running is not None:
                    running.cancelled = True
            case m.Prefetch():
                assert all(not set(r.start.gpus) & set(item.gpus) for r in self.running.values()), f"{item} onto what is used"
                self._restore(item)
            case m.EndSession():
                session = ActionId(item.task, item.client, item.session)
                if session in self.sandboxes:
                    self.endings[session] = None
                else:
                    self.say_ended(session, "unknown")
            case m.Dismiss():
                assert not self.running, f"{self.incarnation} dismissed while it runs {list(self.running)}"
                assert not self.sandboxes, f"{self.incarnation} dismissed while it holds {list(self.sandboxes)}"
                self.leave()

    def _start(self, number: int, start: m.Start) -> None:
        action = ActionId(start.task, start.client, start.n)
        key = GrantKey(action, start.attempt)
        assert key not in self.running, f"{key} started twice"
        self.world.begun(self, start)
        if start.gpus and not self._restore(start):
            self._result(start, Outcome.ERROR)
            return
        if start.session:
            session = ActionId(start.task, start.client, start.session)
            if session not in self.sandboxes:
                self._result(start, Outcome.ENVIRONMENT_LOST)
                return
            others = [k for k, r in self.running.items() if r.start.session == start.session and k.action[:2] == action[:2]]
            assert not others, f"{key} started in {session} beside {others}"
        self.running[key] = Running(start, number)

    def _restore(self, start: m.Start | m.Prefetch) -> bool:
        """Makes room, and brings the weights onto the GPUs if they are not there. Returns whether it can serve this."""
        for each in start.evicts:
            held = (each.service, each.gpus)
            assert all((r.start.service, r.start.gpus) != held for r in self.running.values()), f"{held} is evicted and runs"
            self.resident.pop(held, None)
        offer = self.services.get(start.service)
        if (start.service and offer is None) or not set(start.gpus) <= set(self.gpus):
            return False
        weights = -(-offer.weights_mib // len(start.gpus)) if offer is not None else self.world.gpu_memory_mib[self.host]
        self.resident[(start.service, start.gpus)] = weights
        self.world.weigh(self.host)
        return True

    def _result(
        self,
        start: m.Start,
        outcome: Outcome,
        nonce: bytes | None = None,
        run_ns: int = 0,
        spent: dict[str, int] | None = None,
    ) -> None:
        used = start.nonce if nonce is None else nonce
        result = m.Result(nonce=used, attempt=start.attempt, outcome=outcome, run_ns=run_ns)
        message = m.ActionsFinished(
            executor=self.executor,
            incarnation=self.incarnation,
            k=self._k(),
            ids=[start.n],
            results=[m.encode(result)],
            outputs=[b""],
            spent=[(start.n, spent)] if spent else [],
        )
        self.outbox.append((subjects.completions(start.task, start.client), message))

    def end(
        self,
        key: GrantKey,
        outcome: Outcome = Outcome.OK,
        nonce: bytes | None = None,
        run_ns: int = 0,
        spent: dict[str, int] | None = None,
    ) -> None:
        """What it runs has ended, and the outcome is on its way."""
        start = self.running.pop(key).start
        if start.kind == "session.open" and outcome is Outcome.OK:
            self.sandboxes[key.action] = start
        else:
            self._free(start)
        session = ActionId(start.task, start.client, start.session)
        if start.session and (outcome is Outcome.ENVIRONMENT_LOST or (start.kind == "session.close" and outcome is Outcome.OK)):
            self._remove(session)
        self._result(start, outcome, nonce, run_ns, spent)

    def _free(self, start: m.Start) -> None:
        """A program's own memory ends with it; the weights of a service stay."""
        if start.gpus and not start.service:
            self.resident.pop(("", start.gpus), None)
        self._forget_copies()

    def _remove(self, session: ActionId) -> None:
        self.endings.pop(session, None)
        made = self.sandboxes.pop(session, None)
        if made is not None:
            self._free(made)

    def give_back(self, key: GrantKey, reason: str = "busy", retry_after_ms: int = 0, *, failed: bool = False) -> None:
        """It never began this one; or it failed, and may be tried again."""
        running = self.running.pop(key)
        self._free(running.start)
        action = key.action
        item = m.Returned(
            task=action.task,
            client=action.client,
            n=action.n,
            attempt=key.attempt,
            number=running.number,
            reason=reason,
            retry_after_ms=retry_after_ms,
            failed=failed,
        )
        self.say(m.ActionsReturned(incarnation=self.incarnation, k=self._k(), returned=[item]))

    def end_session(self, session: ActionId, reason: str = "asked") -> None:
        """A sandbox is closed; whatever still ran in it ends with it."""
        for key, running in list(self.running.items()):
            if running.start.session and ActionId(running.start.task, running.start.client, running.start.session) == session:
                self.end(key, Outcome.ENVIRONMENT_LOST)
        self._remove(session)
        self.say_ended(session, reason)

    def say_ended(self, session: ActionId, reason: str) -> None:
        item = m.SessionEnded(task=session.task, client=session.client, session=session.n, reason=reason)
        self.say(m.ActionsReturned(incarnation=self.incarnation, k=self._k(), ended=[item]))

    # --- shorthand for readable tests ---

    def finish(
        self, action: ActionId, outcome: Outcome = Outcome.OK, run_ns: int = 0, spent: dict[str, int] | None = None
    ) -> None:
        """Reads all, ends the one attempt of this action that it runs, and says so."""
        self.read()
        (key,) = [k for k in self.running if k.action == action]
        self.end(key, outcome, run_ns=run_ns, spent=spent)
        self.send()

    def refuse(self, action: ActionId, retry_after_ms: int = 0, *, failed: bool = False) -> None:
        self.read()
        (key,) = [k for k in self.running if k.action == action]
        self.give_back(key, "busy", retry_after_ms, failed=failed)
        self.send()

    def answer_all(self) -> None:
        """Reads all, ends everything it runs, closes what it was asked to close, and says all it has to say."""
        self.read()
        for key, running in list(self.running.items()):
            self.end(key, Outcome.CANCELLED if running.cancelled else Outcome.OK)
        for session in list(self.endings):
            self.end_session(session)
        self.send()

    @property
    def findable(self) -> bool:
        """It is dead, and nobody has said so in a way that the core has taken in: then it is said again."""
        return not self.alive and (not self.gone or self.incarnation in self.world.state.incarnations)

    def uses(self) -> list[m.Start]:
        """What its host really spends on it."""
        return [] if self.gone else [*(r.start for r in self.running.values()), *self.sandboxes.values()]


class World:
    def __init__(self) -> None:
        self.state = State()
        self.log: list[Record] = []
        self.digests: list[bytes] = []
        """Of the state after each record of the log."""
        self.stamp_ns = START_NS
        self.in_flight: deque[tuple[str, m.LogMessage]] = deque()
        """What the leader has written and the log does not have yet."""
        self.workers: dict[str, Worker] = {}
        self.boots: dict[str, str] = {}
        self.nonces: dict[ActionId, bytes] = {}
        self.starts: dict[tuple[str, GrantKey], m.Start] = {}
        """What each incarnation was told to start and the core granted."""
        self.largest: dict[HostKey, dict[str, int]] = {}
        """The most that a host has ever announced."""
        self.cores_ever: dict[HostKey, set[int]] = {}
        self.accepted: dict[ActionId, int] = {}
        self.finishes: dict[ActionId, int] = {}
        """How often an accepted action was finished by the core."""
        self.granted: list[GrantKey] = []
        """In the order of the log."""
        self.impostors: list[tuple[ActionId, bytes]] = []
        """(id, nonce) of what was sent under an id or a name that another process has."""
        self.gpu_memory_mib: dict[HostKey, int] = {}
        """Of each GPU of a host."""
        self.tokens: dict[str, list[tuple[int, int]]] = {}
        """By quota: (log time, tokens) of the starts within its interval, as a provider counts them."""
        self.requests: dict[str, list[int]] = {}
        """The same for requests that are counted by intervals."""
        self._interval_ms: dict[str, int] = {}
        self.garbage = 0
        self.stories: list[str] = []
        """All that the core has said it did."""
        self._names = 0

    # --- the log ---

    def put(self, subject: str, message: m.LogMessage | bytes, *, garbage: bool = False, seqs: int = 1) -> Folded:
        """Stores and folds one message. Only garbage may be skipped, and never because the core broke."""
        data = message if isinstance(message, bytes) else m.encode(message)
        record = Record(self.state.seq + seqs, self.stamp_ns, subject, data)
        self.log.append(record)
        folded = step(self.state, record)
        self.digests.append(self.state.digest)
        assert not folded.skipped.startswith("broken"), folded.skipped
        assert bool(folded.skipped) == garbage, f"{subject}: {folded.skipped or 'garbage was taken'}"
        self.garbage += garbage
        self._note_story()
        self._count_tokens(folded.message)
        return folded

    def _count_tokens(self, message: m.LogMessage | None) -> None:
        granted = isinstance(message, m.DecisionsMade) and any(line[0] == "granted" for line in self.state.story)
        for start in message.items if isinstance(message, m.DecisionsMade) and granted else ():
            if isinstance(start, m.Start):
                for name, amount in start.amounts.items():
                    pool = self.state.quotas.get(name)
                    if pool is not None and pool.limit.tokens:
                        self.tokens.setdefault(name, []).append((self.state.now_ns, amount))
                    if pool is not None and pool.limit.requests and not pool.limit.burst:
                        self.requests.setdefault(name, []).append(self.state.now_ns)
        kept: dict[str, list[tuple[int, int]]] = {}
        for name, pool in self.state.quotas.items():
            # Until a message that changes the interval, time went on under the old one.
            interval_ms = min(pool.limit.interval_ms, self._interval_ms.get(name, pool.limit.interval_ms))
            since_ns = self.state.now_ns - interval_ms * MS
            kept[name] = [(at_ns, amount) for at_ns, amount in self.tokens.get(name, []) if at_ns > since_ns]
            self.requests[name] = [at_ns for at_ns in self.requests.get(name, []) if at_ns > since_ns]
        self.tokens = kept
        self._interval_ms = {name: pool.limit.interval_ms for name, pool in self.state.quotas.items()}

    def _note_story(self) -> None:
        for line in self.state.story:
            self.stories.append(line if isinstance(line, str) else " ".join(map(str, line)))
            if isinstance(line, str):
                continue
            word, action = line[:2]
            if word == "submitted":
                assert isinstance(action, ActionId)
                assert action not in self.accepted, f"{action} was accepted twice"
                self.accepted[action] = self.state.seq
            elif word == "finished":
                assert isinstance(action, ActionId)
                if action in self.accepted:
                    self.finishes[action] = self.finishes.get(action, 0) + 1
                    assert self.finishes[action] == 1, f"{action} finished twice"

    def after(self, ms: int) -> None:
        """The server's clock goes on, or jumps."""
        self.stamp_ns += ms * MS

    def pass_time(self, seconds: float) -> None:
        """Log time goes on by ticks of at most a second."""
        left_ms = round(seconds * 1_000)
        while left_ms > 0:
            self.after(min(left_ms, 1_000))
            left_ms -= 1_000
            self.tick()

    # --- the leader ---

    def lead(
        self,
        policy: str = "tangram",
        quotas: dict[str, m.Quota] | None = None,
        shares: dict[str, int] | None = None,
        **settings: int,
    ) -> None:
        """A scheduler takes the lead: what another had on its way is refused from here on."""
        self.in_flight.clear()
        started = m.LeaderStarted(
            leader="s", behaviour=BEHAVIOUR, policy=policy, settings=settings, quotas=quotas or {}, shares=shares or {}
        )
        self.put(subjects.LEADER, started)

    def set_quotas(self, quotas: dict[str, m.Quota]) -> None:
        self.put(subjects.CLOCK, m.Settings(epoch=self.state.epoch, quotas=quotas))

    def tick(self) -> None:
        self.put(subjects.CLOCK, m.Ticked(epoch=self.state.epoch))

    def plan(self, without_payload: Iterable[ActionId] = ()) -> Window:
        """One pass; what it writes waits in `in_flight`."""
        assert not self.in_flight
        gone = set(without_payload)
        window = plan(self.state)
        outgoing = compose(self.state, window, lambda action: None if action.id in gone else self.payload_of(action))
        self.in_flight.extend(outgoing)
        return window

    def payload_of(self, action: Action) -> bytes | None:
        """Reads it back from the log by the place that the core remembers."""
        seq, index = action.order
        for record in reversed(self.log):
            if record.seq == seq:
                message = m.decode(record.subject, record.data)[1]
                assert isinstance(message, m.ActionsSubmitted)
                assert message.ids[index] == action.id.n
                return message.payloads[index]
        return None

    def deliver(self, count: int | None = None) -> list[m.Start]:
        """Stores the next `count` messages of the leader, or all; its executors get them to read. Returns the starts that
        were granted."""
        granted: list[m.Start] = []
        while self.in_flight and count != 0:
            subject, message = self.in_flight.popleft()
            count = None if count is None else count - 1
            holder = self.state.incarnations.get(message.incarnation) if isinstance(message, m.DecisionsMade) else None
            live = holder is not None and holder.live
            self.put(subject, message)
            if isinstance(message, m.ExecutorLost):
                self._tell(message.incarnation, message)
            elif isinstance(message, m.DecisionsMade) and live:
                self._tell(message.incarnation, message)
                for item in message.items:
                    if isinstance(item, m.Start):
                        key = GrantKey(ActionId(item.task, item.client, item.n), item.attempt)
                        self.starts[(message.incarnation, key)] = item
                        self.granted.append(key)
                        granted.append(item)
        return granted

    def _tell(self, incarnation: str, message: m.LogMessage) -> None:
        worker = self.workers.get(incarnation)
        if worker is not None and worker.alive:
            worker.unread.append(message)

    def decide(self) -> list[m.Start]:
        """One window from plan to log. Returns what was started."""
        self.plan()
        return self.deliver()

    def rule(self) -> None:
        """Windows until nothing is owed and nothing can start. The executors do not get to answer in between."""
        for _ in range(100):
            self.plan()
            if not self.in_flight:
                return
            self.deliver()
        raise AssertionError(f"the leader does not come to rest: {self.state.owed}")

    def lose(self, worker: Worker, reason: str = "silent") -> None:
        """The leader gives an executor up."""
        message = m.ExecutorLost(epoch=self.state.epoch, executor=worker.executor, incarnation=worker.incarnation, reason=reason)
        self.put(subjects.CLOCK, message)
        self._tell(worker.incarnation, message)

    # --- executors ---

    def join(
        self,
        executor: str = "",
        *,
        key: str = "cpu",
        host: str = "h1",
        nodes: list[list[int]] | None = None,
        dead: Iterable[Worker] = (),
        reboot: bool = False,
        later: bool = False,
        gpus: Iterable[int] = (),
        gpu_memory_mib: int = 100,
        services: dict[str, m.Service] | None = None,
        **capacity: int,
    ) -> Worker:
        """An executor starts on a host. `dead` are workers that it found dead there. later: its word stays in its outbox."""
        self._names += 1
        where = HostKey(host, f"machine-{host}")
        if reboot or host not in self.boots:
            self.boots[host] = f"boot-{self._names}"
        found = [w for w in self.workers.values() if w.host == where] if reboot else list(dead)
        worker = Worker(
            self,
            executor or f"executor-{self._names}",
            f"i{self._names}",
            key,
            where,
            self.boots[host],
            cores(4) if nodes is None else nodes,
            (capacity or {"memory": 1_024}) | ({"gpu_memory": gpu_memory_mib} if gpus else {}),
            tuple(gpus),
            services or {},
        )
        if worker.gpus:
            self.gpu_memory_mib[where] = gpu_memory_mib
        self.workers[worker.incarnation] = worker
        self.announced(where, worker.nodes, worker.capacity)
        worker.say(
            m.ExecutorJoined(
                incarnation=worker.incarnation,
                k=worker._k(),
                key=key,
                host=where.name,
                machine_id=where.machine_id,
                boot_id=worker.boot,
                cores=worker.nodes,
                capacity=worker.capacity,
                dead=[] if reboot else [w.incarnation for w in found],
                gpus=list(worker.gpus),
                services=worker.services,
            )
        )
        for other in found:
            other.die()
            if reboot and other.outbox and isinstance(other.outbox[0][1], m.ExecutorJoined):
                other.outbox.clear()  # a machine does not say that it is up after it has gone down
        self.bury(found)
        if not later:
            worker.send()
        return worker

    def announced(self, host: HostKey, nodes: list[list[int]], capacity: dict[str, int]) -> None:
        largest = self.largest.setdefault(host, {})
        self.cores_ever.setdefault(host, set()).update(core for node in nodes for core in node)
        largest["cpu"] = 1_000 * len(self.cores_ever[host])
        for name, amount in capacity.items():
            largest[name] = max(largest.get(name, 0), amount)

    def bury(self, workers: Iterable[Worker]) -> None:
        """Nothing of these is left on their hosts."""
        for worker in workers:
            assert not worker.alive, f"{worker.incarnation} is alive and was called dead"
            worker.running.clear()
            worker.sandboxes.clear()
            worker.endings.clear()
            worker.resident.clear()
            worker.gone = True

    def begun(self, worker: Worker, start: m.Start) -> None:
        """A worker begins what it read. Nobody on its host may use any of the cores or GPUs that it was given alone."""
        for other in self.workers.values() if start.gpus else ():
            if other.host == worker.host:
                for used in other.uses():
                    assert not set(used.gpus) & set(start.gpus), f"{start.client}/{start.n} and {used.n} have GPUs {used.gpus}"
        if "cpu" not in start.amounts:
            return
        share = start.amounts["cpu"]
        of_core: dict[int, int] = {}
        for other in self.workers.values():
            if other.host == worker.host:
                for used in other.uses():
                    if "cpu" in used.amounts:
                        for core in used.cores:
                            of_core[core] = of_core.get(core, 0) + min(used.amounts["cpu"], 1_000)
        for core in start.cores:
            total = of_core.get(core, 0) + min(share, 1_000)
            assert total <= 1_000, f"core {core} of {worker.host.name} is used {total} millicores by {start.client}/{start.n}"

    def weigh(self, host: HostKey) -> None:
        """No GPU of a host may hold more than its memory."""
        of_gpu: dict[int, int] = {}
        for worker in self.workers.values():
            if worker.host == host and not worker.gone:
                for (_, gpus), mib in worker.resident.items():
                    for gpu in gpus:
                        of_gpu[gpu] = of_gpu.get(gpu, 0) + mib
        assert all(mib <= self.gpu_memory_mib[host] for mib in of_gpu.values()), f"GPUs of {host.name} hold {of_gpu} MiB"

    # --- clients ---

    def item(self, action: ActionId, spec: m.ActionSpec) -> Item:
        return Item(action.n, m.encode(spec), m.encode(payload_for(spec.kind)))

    def nonce(self, action: ActionId) -> bytes:
        """The one that the client put into this action, now and whenever it sends it again."""
        return self.nonces.setdefault(action, (len(self.nonces) + 1).to_bytes(8, "big"))

    def send_actions(
        self,
        task: str,
        client: str,
        items: list[Item],
        *,
        key: str = "cpu",
        born: int = 0,
        done_below: int = 0,
        instance: int = 0,
        cancel_on_disconnect: bool = False,
    ) -> None:
        message = m.ActionsSubmitted(
            client=client,
            born=born,
            done_below=done_below,
            instance=instance,
            cancel_on_disconnect=cancel_on_disconnect,
            ids=[item.n for item in items],
            specs=[item.spec for item in items],
            payloads=[item.payload for item in items],
        )
        self.put(subjects.actions(key, task), message)

    def submit(
        self,
        n: int | None = None,
        *,
        task: str = "t",
        client: str = "c",
        key: str = "cpu",
        kind: str = "run",
        instance: int = 0,
        **spec: object,
    ) -> ActionId:
        """One action of one client, with the rest of its spec by name; `cpu` and the like make its cost, and `own_key` is the
        caller's own."""
        if n is None:
            n = 1 + max((a.n for a in self.nonces if a[:2] == (task, client)), default=0)
        action = ActionId(task, client, n)
        cost = {name: spec.pop(name) for name in ("cpu", "memory", "gpu", "api") if name in spec}
        demands = {name: low if isinstance(low, m.Demand) else m.Demand(low=low) for name, low in cost.items()}  # type: ignore[arg-type]
        own_key = str(spec.pop("own_key", ""))
        made = m.ActionSpec(nonce=self.nonce(action), kind=kind, cost=demands, key=own_key, **spec)  # type: ignore[arg-type]
        self.send_actions(task, client, [self.item(action, made)], key=key, instance=instance)
        return action

    def impostor(self, action: ActionId, *, instance: int = 0) -> bytes:
        """Another process sends something of its own under this id. Returns its nonce."""
        nonce = b"other" + len(self.impostors).to_bytes(3, "big")
        self.impostors.append((action, nonce))
        spec = m.ActionSpec(nonce=nonce, kind="noop")
        self.send_actions(action.task, action.client, [self.item(action, spec)], instance=instance)
        return nonce

    def disconnect(self, task: str, client: str) -> None:
        """The leader ends what a client that has fallen silent has open."""
        for subject, message in cancels_for(self.state, task, client):
            self.put(subject, message)

    def cancel(self, *actions: ActionId) -> None:
        task, client, _ = actions[0]
        message = m.CancelsRequested(client=client, ids=[action.n for action in actions])
        self.put(subjects.cancels(task), message)

    # --- what can be seen ---

    def phase(self, action: ActionId) -> Phase:
        found = self.state.actions.get(action)
        return Phase.GONE if found is None else found.phase

    def owed(self, action: ActionId) -> str:
        """The outcome that the leader owes for it, or ""."""
        result = self.state.owed.rulings.get(action)
        return "" if result is None else result.outcome.value

    def result(self, action: ActionId, nonce: bytes | None = None) -> m.Result | None:
        """The action's outcome by the client's rule: the first in the log that names it and carries its nonce."""
        subject = subjects.completions(action.task, action.client)
        nonces = (self.nonces[action], bytes(8)) if nonce is None else (nonce,)
        for record in self.log:
            if record.subject == subject:
                message = m.decode(subject, record.data)[1]
                assert isinstance(message, m.ActionsFinished)
                for n, raw in zip(message.ids, message.results, strict=True):
                    result = m.decode_result(raw)
                    if n == action.n and result.nonce in nonces:
                        return result
        return None

    def outcome(self, action: ActionId) -> str:
        """Its outcome once the leader has written all it owes, or "" while it is open."""
        self.rule()
        result = self.result(action)
        return "" if result is None else result.outcome.value

    def free_cores(self, host: str = "h1") -> int:
        return self.state.hosts[HostKey(host, f"machine-{host}")].pool.free().bit_count()

    def used(self, name: str, host: str = "h1") -> int:
        return self.state.hosts[HostKey(host, f"machine-{host}")].used.get(name, 0)


def fold_again(log: Iterable[Record]) -> list[bytes]:
    """The digests of a second fold of the same log."""
    state = State()
    digests = []
    for record in log:
        step(state, record)
        digests.append(state.digest)
    return digests
