"""What a recorded log asked for, apart from what was decided: the actions, what each of them waited for before it came, how long
it ran, and the pool. Pure.

Arrivals are a closed loop. Actions belong to threads: those of a session, from its opening on; and what a client submits without
a session goes on with that thread of its own that has rested for the shortest time. An action comes a thinking time after the
last outcome of its thread; one that did not wait for the one before, after that one's arrival.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.cores import cores_of
from tangram.scheduler.elasticity import Curve, declared, learnt
from tangram.scheduler.fold import Record, step
from tangram.scheduler.models import exported
from tangram.scheduler.policies import model_key, prior_of
from tangram.scheduler.state import Action, ActionId, HostKey, Session, SessionPhase, State
from tangram.simulation.pool import Machine


@dataclass(slots=True, eq=False)
class Recorded:
    """One action. Times in nanoseconds since the recording began. after: the action for whose outcome (or, with `at_once`, for
    whose arrival) it waited, None: it came by itself; delay_ns: from there on. run_ns: its start-up, but for weights, and its
    run. units: cores or GPUs that it had."""

    id: ActionId
    key: str
    spec: m.ActionSpec
    raw: bytes
    arrived_ns: int
    after: ActionId | None = None
    at_once: bool = False
    delay_ns: int = 0
    ended_ns: int = 0
    queued_ns: int = 0
    run_ns: int = 0
    units: int = 0
    outcome: Outcome | None = None
    """None: it had none when the recording ended."""

    @property
    def ran(self) -> bool:
        return self.outcome is not None and (self.run_ns > 0 or self.units > 0 or self.outcome is Outcome.OK)


@dataclass(slots=True, eq=False)
class _Thread:
    last: ActionId
    last_ns: int
    has_ended: bool = False
    """The last one has its outcome."""
    open: int = 0


@dataclass(slots=True)
class Recording:
    """`add` each record, in order; then the rest may be read. `actions` are in order of their arrival."""

    state: State = field(default_factory=State)
    actions: dict[ActionId, Recorded] = field(default_factory=dict)
    machines: dict[HostKey, Machine] = field(default_factory=dict)
    services: dict[str, m.Service] = field(default_factory=dict)
    seeds: list[m.LearntModel] = field(default_factory=list)
    """What was known at the beginning, or was seeded since."""
    renumbered: int = 0
    """Actions that are left out, because their number stands for another one that ran."""
    begin_ns: int = 0
    """The server's stamp at which it begins."""
    _open: dict[ActionId, Recorded] = field(default_factory=dict)
    _threads: dict[ActionId, _Thread] = field(default_factory=dict)
    """Of open actions."""
    _of_session: dict[ActionId, _Thread] = field(default_factory=dict)
    _resting: dict[tuple[str, str], dict[int, _Thread]] = field(default_factory=dict)
    """By client, those without an open action; the last has rested for the shortest time."""

    def __post_init__(self) -> None:
        """With a state from a checkpoint, what was open there comes at the beginning."""
        self.begin_ns = self.state.stamp_ns
        self.seeds = [
            exported(task, kind, model)
            for (task, kind), model in self.state.models.items()
            if "/" not in kind  # of a service on GPUs: does not travel
        ]
        for host in self.state.hosts:
            self._see(host)
        for session in self.state.sessions.values():
            if session.phase is SessionPhase.OPEN:
                self._was_open(session)
        for action in sorted(self.state.actions.values(), key=lambda each: each.order):
            self._came(action, m.encode(action.spec))

    @property
    def end_ns(self) -> int:
        return self.state.stamp_ns - self.begin_ns

    def add(self, record: Record) -> None:
        """Raises NewerVersion, and ValueError if records do not come in rising order."""
        state = self.state
        if not state.stamp_ns:
            self.begin_ns = record.stamp_ns
        folded = step(state, record)
        address = folded.address
        if folded.skipped or address is None:
            return
        match folded.message:
            case m.ActionsSubmitted() as submitted:
                for index, n in enumerate(submitted.ids):
                    action = state.actions.get(ActionId(address.second, submitted.client, n))
                    if action is not None and action.order == (state.seq, index):
                        self._came(action, submitted.specs[index])
            case m.ActionsFinished() as finished:
                for n, raw in zip(finished.ids, finished.results, strict=True):
                    action_id = ActionId(address.first, address.second, n)
                    known = self._open.get(action_id)
                    if known is None or action_id in state.actions:
                        continue
                    with suppress(*m.MALFORMED):  # another item of this message is its outcome
                        result = m.decode_result(raw)
                        if result.nonce == known.spec.nonce:
                            self._ended(action_id, result)
            case m.ModelsSeeded() as seeded:
                self.seeds += seeded.models
            case m.ExecutorJoined() | m.ExecutorChanged():
                for host in state.hosts:
                    self._see(host)

    # --- actions -----------------------------------------------------------------------------------------------

    def _came(self, action: Action, raw: bytes) -> None:
        now_ns = max(0, self.state.stamp_ns - self.begin_ns)
        earlier = self.actions.get(action.id)
        if earlier is not None and earlier.ran:  # its client was forgotten, and counts from the beginning again
            self.renumbered += 1
            return
        found = Recorded(action.id, action.key, action.spec, raw, now_ns)
        self.actions[action.id] = self._open[action.id] = found
        client = action.id[:2]
        resting = self._resting.setdefault(client, {})
        session = ActionId(*client, action.spec.session) if action.spec.session else None
        thread = self._of_session.get(session) if session is not None else None
        if thread is None and resting:
            thread = resting[next(reversed(resting))]
        if thread is None:
            thread = _Thread(action.id, now_ns)
        else:
            found.after, found.at_once, found.delay_ns = thread.last, not thread.has_ended, now_ns - thread.last_ns
        if earlier is not None:  # it was refused and is sent again: nothing may wait for itself
            found.after, found.at_once = earlier.after, earlier.at_once
            found.delay_ns = earlier.delay_ns + now_ns - earlier.arrived_ns
        resting.pop(id(thread), None)
        thread.open += 1
        self._threads[action.id] = thread
        if not thread.has_ended or thread.open == 1:
            thread.last, thread.last_ns, thread.has_ended = action.id, now_ns, False
        if action.spec.kind == "session.open":
            self._of_session[action.id] = thread

    def _ended(self, action_id: ActionId, result: m.Result) -> None:
        now_ns = self.state.stamp_ns - self.begin_ns
        found = self._open.pop(action_id)
        found.outcome, found.ended_ns, found.queued_ns = result.outcome, now_ns, result.queued_ns
        found.units = result.units
        found.run_ns = result.run_ns + (0 if found.spec.service else result.startup_ns)
        thread = self._threads.pop(action_id)
        thread.open -= 1
        thread.last, thread.last_ns, thread.has_ended = action_id, now_ns, True
        if not thread.open:
            resting = self._resting[action_id[:2]]
            resting.pop(id(thread), None)
            resting[id(thread)] = thread
        if found.spec.kind == "session.close" and found.outcome is Outcome.OK:
            self._of_session.pop(ActionId(*action_id[:2], found.spec.session), None)

    def _was_open(self, session: Session) -> None:
        """A sandbox at the checkpoint: it is made at once."""
        holder = self.state.incarnations[session.incarnation]
        amounts = holder.grants[session.grant].amounts if session.grant in holder.grants else {}
        cost = {name: m.Demand(low=amount) for name, amount in amounts.items() if name != "cpu"}
        idle_ms = max(1, session.idle_ttl_ns // 1_000_000)
        spec = m.ActionSpec(nonce=bytes(8), kind="session.open", cost=cost, idle_ttl_ms=idle_ms)
        found = Recorded(session.id, holder.key, spec, m.encode(spec), 0, outcome=Outcome.OK)
        thread = _Thread(session.id, 0, has_ended=True)
        self.actions[session.id] = found
        self._of_session[session.id] = thread
        self._resting.setdefault(session.id[:2], {})[id(thread)] = thread

    # --- the pool ----------------------------------------------------------------------------------------------

    def _see(self, key: HostKey) -> None:
        """A host as it was at its largest."""
        host = self.state.hosts[key]
        known = self.machines.get(key, Machine())
        nodes = tuple(node.bit_count() for node in host.pool.nodes)
        self.machines[key] = Machine(
            nodes if sum(nodes) >= known.cores else known.nodes,
            max(host.capacity.get("memory", 0), known.memory_mib if key in self.machines else 0),
            max(len(cores_of(host.gpus.all)), known.gpus),
            max(host.gpus.memory_mib, known.gpu_memory_mib if known.gpus else 0),
            _larger(known.others, {name: amount for name, amount in host.capacity.items() if name != "memory"}),
            _larger(known.kinds, {holder.key: bool(holder.cores_mask) for holder in host.live}),
        )
        for holder in host.live:
            self.services |= holder.services

    # --- how long it would take --------------------------------------------------------------------------------

    def run_ns(self, action_id: ActionId, units: int) -> int:
        """How long an action runs on so many units: as it did, by the curve of its kind as far as the recording has learnt it.
        What timed out gets no faster."""
        action = self.actions[action_id]
        if units == action.units or not units or not action.units or action.outcome is Outcome.TIMED_OUT:
            return action.run_ns
        curve = self._curve(action)
        if curve is None:
            return action.run_ns
        scaled_ns = round(action.run_ns * curve.at(units) / curve.at(action.units))
        return min(scaled_ns, max(action.spec.timeout_ms * 1_000_000, action.run_ns))

    def outcome(self, action_id: ActionId, units: int) -> Outcome:
        """As it was; what takes longer than it may on so many units is timed out."""
        action = self.actions[action_id]
        run_ns = self.run_ns(action_id, units)
        if run_ns > action.run_ns and run_ns >= action.spec.timeout_ms * 1_000_000:
            return Outcome.TIMED_OUT
        return action.outcome or Outcome.OK

    def _curve(self, action: Recorded) -> Curve | None:
        hint, prior = action.spec.hint, prior_of(self.state)
        if hint is not None and hint.table_us:
            return declared(hint, prior)
        model = self.state.models.get(model_key(action))
        if model is not None:
            return learnt(model)
        return declared(hint, prior) if hint is not None else None


_N = TypeVar("_N", int, bool)


def _larger(known: tuple[tuple[str, _N], ...], now: dict[str, _N]) -> tuple[tuple[str, _N], ...]:
    """By name, the larger of both."""
    found = dict(known)
    for name, amount in now.items():
        found[name] = max(found.get(name, amount), amount)
    return tuple(found.items())
