"""A log event by event, forward and back. Pure: its source is asked for records, and whoever walks shows what it returns.

Going back folds again from the last snapshot before. Snapshots are taken on the way, and thinned out when there are many, so that
memory does not grow with the log.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tangram import messages as m
from tangram.replay.told import count, ranges, told
from tangram.replay.why import asked
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.cores import cores_of
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import Action, ActionId, Host, Phase, State
from tangram.subjects import parse

SNAPSHOT_EVERY: Final = 256
"""Messages, at first; what lies between two snapshots is folded again in a fraction of a second."""
SNAPSHOTS_BYTES_MAX: Final = 128 * 1024 * 1024
SNAPSHOTS_MAX: Final = 512
SHOWN_MAX: Final = 20
"""Lines of one step, and of a list."""

Open = Callable[[int], AsyncIterator[list[Record]]]
"""The records behind a sequence, in batches."""


class Breakpoint(NamedTuple):
    """One of: an action, a task, an outcome."""

    action: ActionId | None = None
    task: str = ""
    outcome: str = ""

    def __str__(self) -> str:
        return f"action {self.action}" if self.action else f"task {self.task}" if self.task else f"outcome {self.outcome}"

    def meets(self, subject: str, message: m.LogMessage) -> bool:
        return any(
            (self.action is None or action == self.action)
            and (not self.task or action.task == self.task)
            and (not self.outcome or outcome == self.outcome)
            for action, outcome in mentioned(subject, message)
        )


class Step(NamedTuple):
    """One event and what it changed, in lines."""

    seq: int
    lines: list[str]


@dataclass(slots=True)
class Walker:
    """first: makes the state before the first record; None: the log's beginning. `at` is the sequence of the last event that was
    folded, 0 (or the checkpoint's) before the first."""

    open: Open
    first: Callable[[], Awaitable[State | None]]
    state: State = field(default_factory=State)
    at: int = 0
    begin: int = 0
    _records: AsyncIterator[list[Record]] | None = None
    _batch: list[Record] = field(default_factory=list)
    _snapshots: dict[int, bytes] = field(default_factory=dict)
    _every: int = SNAPSHOT_EVERY

    async def start(self) -> None:
        self.state = await self.first() or State()
        self.begin = self.at = self.state.seq

    async def forward(self) -> Step | None:
        """The next event; None at the end. Raises TangramError if it cannot be read."""
        record = await self._next()
        if record is None:
            return None
        before = _Seen(self.state)
        self._fold(record)
        return Step(record.seq, [_event(record), *before.changes(self.state)])

    async def back(self) -> Step | None:
        """To before the last event; the event that is the last then, None at the beginning."""
        return await self.goto(self.at - 1) if self.at > self.begin else None

    async def goto(self, seq: int) -> Step | None:
        """Until that event is the last, or the log ends; the step to it, None at the beginning."""
        seq = max(seq, self.begin)
        if seq <= self.at:
            await self._rewind(max(seq - 1, self.begin))
        found: Step | None = None
        while self.at < seq:
            record = await self._next()
            if record is None:
                break
            if record.seq < seq and self._batch:
                self._fold(record)
                continue
            before = _Seen(self.state)
            self._fold(record)
            found = Step(record.seq, [_event(record), *before.changes(self.state)])
        return found

    async def until(self, breakpoints: list[Breakpoint]) -> Step | None:
        """Forward to the next event that meets one; None: there is none, and this is the end."""
        while (record := await self._next()) is not None:
            if _meets(record, breakpoints):
                before = _Seen(self.state)
                self._fold(record)
                return Step(record.seq, [_event(record), *before.changes(self.state)])
            self._fold(record)
        return None

    async def back_until(self, breakpoints: list[Breakpoint]) -> Step | None:
        """Back to the last event before this one that meets one; None: there is none, and this is the beginning."""
        here, bound = self.at, self.at
        while bound > self.begin:
            low = max((seq for seq in self._snapshots if seq < bound - 1), default=self.begin)
            await self._rewind(low)
            latest = 0
            while (record := await self._next()) is not None and record.seq < min(bound, here):
                if _meets(record, breakpoints):
                    latest = record.seq
                self._fold(record)
            if latest:
                return await self.goto(latest)
            bound = low + 1
            if low == self.begin:
                break
        await self._rewind(self.begin)
        return None

    # --- records and snapshots ---

    async def _next(self) -> Record | None:
        while not self._batch:
            if self._records is None:
                self._records = self.open(self.at)
            batch = await anext(self._records, None)
            if batch is None:
                self._records = None
                return None
            self._batch = batch[::-1]
        return self._batch.pop()

    def _fold(self, record: Record) -> None:
        """Raises NewerVersion."""
        if self.at > self.begin and self.at % self._every == 0 and self.at not in self._snapshots:
            self._snapshots[self.at] = dump(self.state)
            self._thin()
        step(self.state, record)
        self.at = record.seq

    def _thin(self) -> None:
        """Every second one goes, as often as it takes."""
        while len(self._snapshots) > SNAPSHOTS_MAX or sum(map(len, self._snapshots.values())) > SNAPSHOTS_BYTES_MAX:
            self._every *= 2
            self._snapshots = {seq: data for seq, data in self._snapshots.items() if seq % self._every == 0}

    async def _rewind(self, seq: int) -> None:
        """To after that event. It is not read on from there yet."""
        self._records, self._batch = None, []
        low = max((each for each in self._snapshots if each <= seq), default=self.begin)
        self.state = load(self._snapshots[low]) if low in self._snapshots else await self.first() or State()
        self.at = self.state.seq
        while self.at < seq and (record := await self._next()) is not None:
            self._fold(record)


def mentioned(subject: str, message: m.LogMessage) -> list[tuple[ActionId, str]]:
    """The actions of which a message speaks, and the outcome that it has for each, "" if none."""
    address = parse(subject)
    if address is None:
        return []
    match message:
        case m.ActionsSubmitted() | m.CancelsRequested():
            task = address.second if isinstance(message, m.ActionsSubmitted) else address.first
            return [(ActionId(task, message.client, n), "") for n in message.ids]
        case m.ActionsFinished():
            return [
                (ActionId(address.first, address.second, n), _outcome(raw))
                for n, raw in zip(message.ids, message.results, strict=True)
            ]
        case m.DecisionsMade():
            items = [each for each in message.items if isinstance(each, m.Start | m.Cancel)]
            return [(ActionId(each.task, each.client, each.n), "") for each in items]
        case m.ActionsReturned():
            return [(ActionId(each.task, each.client, each.n), "returned") for each in message.returned]
        case _:
            return []


def _outcome(raw: bytes) -> str:
    try:
        return str(m.decode_result(raw).outcome)
    except m.MALFORMED:
        return ""


def _meets(record: Record, breakpoints: list[Breakpoint]) -> bool:
    try:
        _, message = m.decode(record.subject, record.data)
    except m.Malformed:
        return False
    return any(each.meets(record.subject, message) for each in breakpoints)


# --- in words --------------------------------------------------------------------------------------------------------


def _event(record: Record) -> str:
    try:
        address, message = m.decode(record.subject, record.data)
    except m.Malformed as error:
        return f"{record.seq}  {record.subject}: skipped: {error}"
    names = [f"{action} {outcome}".rstrip() for action, outcome in mentioned(record.subject, message)]
    what = type(message).__name__
    match message:
        case m.DecisionsMade():
            what = f"window {message.window} for {address.second}, planned on {message.through_seq}"
            other = [told(each) for each in message.items if not isinstance(each, m.Start | m.Cancel)]
            names += other
        case m.ActionsFinished():
            what += f" by {message.executor or 'the leader'}"
        case m.LeaderStarted():
            what += f" {message.leader}, policy {message.policy}, behaviour {message.behaviour}"
        case m.ExecutorJoined() | m.ExecutorChanged() | m.ExecutorDraining() | m.ExecutorLeft() | m.ActionsReturned():
            what += f" {address.first}"
        case m.ExecutorLost():
            what += f" {message.executor}: {message.reason}"
        case _:
            pass
    more = f", and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return f"{record.seq}  {what}" + (f": {', '.join(names[:SHOWN_MAX])}{more}" if names else "")


class _Seen:
    """What a step is compared with."""

    def __init__(self, state: State) -> None:
        self.now_ns = state.now_ns
        self.phases = {action.id: action.phase for action in state.actions.values()}
        self.used = {host.key.name: _used(host) for host in state.hosts.values()}
        self.queued = queued(state)
        self.sessions = set(state.sessions)
        self.executors = {each.id: _condition(each) for each in state.incarnations.values()}
        self.settings = (state.policy, state.settings, state.shares, state.admission_closed)
        self.skipped = state.skipped

    def changes(self, state: State) -> list[str]:
        lines: list[str] = []
        for action in state.actions.values():
            was = self.phases.pop(action.id, None)
            if was is None:
                lines.append(f"+ {action.id} ({action.spec.kind}) {action.phase.name.lower()}; asks for {asked(state, action)}")
            elif was is not action.phase:
                lines.append(f"  {action.id} {was.name.lower()} -> {_phase(state, action)}")
        lines += [f"- {action_id} has its outcome" for action_id in self.phases if action_id not in state.actions]
        for host in state.hosts.values():
            was_used, used = self.used.get(host.key.name, "not there"), _used(host)
            if was_used != used:
                lines.append(f"  {host.key.name}: {was_used} -> {used}")
        now = {each.id: _condition(each) for each in state.incarnations.values()}
        for name in {**self.executors, **now}:
            if self.executors.get(name) != now.get(name):
                lines.append(f"  incarnation {name}: {self.executors.get(name, 'not there')} -> {now.get(name, 'gone')}")
        lines += [f"+ session {each}" for each in state.sessions if each not in self.sessions]
        lines += [f"- session {each}" for each in sorted(self.sessions) if each not in state.sessions]
        if queued(state) != self.queued:
            lines.append(f"  queued {self.queued} -> {queued(state)}")
        if self.settings != (state.policy, state.settings, state.shares, state.admission_closed):
            lines.append(f"  policy {state.policy}, settings {state.settings}, shares {state.shares}")
        if state.skipped != self.skipped:
            lines.append("  the fold skipped it")
        if state.now_ns != self.now_ns:
            lines.append(f"  log time {self.now_ns / 1e9:.3f} -> {state.now_ns / 1e9:.3f} s")
        more = len(lines) - SHOWN_MAX
        return [*lines[:SHOWN_MAX], f"  and {count(more, 'line')} more"] if more > 0 else lines


def queued(state: State) -> int:
    return sum(len(queue) for queue in state.queues.values())


def _phase(state: State, action: Action) -> str:
    if action.phase is Phase.DECIDED and action.incarnation in state.incarnations:
        holder = state.incarnations[action.incarnation]
        for grant in holder.grants.values():
            if grant.key.action == action.id and grant.key.attempt == action.attempt:
                parts = [f"cores {ranges(grant.cores)}"] if grant.cores else []
                parts += [f"GPUs {ranges(cores_of(grant.gpus))}"] if grant.gpus else []
                return f"decided: {', '.join(parts) or 'no units'} on {holder.host.name}"
    return action.phase.name.lower()


def _used(host: Host) -> str:
    parts = [f"{host.pool.used.bit_count()} of {count(host.pool.all.bit_count(), 'core')}"] if host.pool.all else []
    if host.gpus.all:
        parts.append(f"{host.gpus.used.bit_count()} of {count(host.gpus.all.bit_count(), 'GPU')}")
        parts += [f"{copy.service} on {ranges(cores_of(copy.gpus))}" for copy in host.gpus.copies]
    parts += [f"{host.used.get(name, 0)} of {amount} {name}" for name, amount in host.capacity.items()]
    return ", ".join(parts) or "nothing"


def _condition(holder: object) -> str:
    return "draining" if getattr(holder, "draining", False) else "live" if getattr(holder, "live", False) else "lost"


def overview(state: State) -> list[str]:
    """What there is."""
    live = sum(each.live for each in state.incarnations.values())
    return [
        f"sequence {state.seq}, log time {state.now_ns / 1e9:.3f} s, window {state.window}, epoch {state.epoch}",
        f"policy {state.policy}, settings {state.settings}",
        f"{count(len(state.actions), 'action')} open: {queued(state)} queued, {len(state.owed.rulings)} owed a ruling",
        f"{count(len(state.sessions), 'session')}, {count(len(state.clients), 'client')}, {count(live, 'executor')}",
    ]


def pools(state: State) -> list[str]:
    found = [f"{host.key.name}: {_used(host)}" for host in state.hosts.values()]
    for name, pool in state.quotas.items():
        found.append(f"quota {name}: {pool.in_use} of {pool.limit.concurrency or 'any'} at once")
    return found or ["no hosts"]


def queue(state: State) -> list[str]:
    """Who waits, in order of arrival."""
    ready = sorted((action for each in state.queues.values() for action in each), key=lambda each: each.order)
    lines = [
        f"{action.id} ({action.spec.kind}) for {(state.now_ns - action.ready_ns) / 1e9:.3f} s: {asked(state, action)}"
        for action in ready[:SHOWN_MAX]
    ]
    more = len(ready) - len(lines)
    return [*lines, f"and {more} more"] if more > 0 else lines or ["nobody waits"]


def about(state: State, action_id: ActionId) -> list[str]:
    action = state.actions.get(action_id)
    if action is None:
        return [f"{action_id} is not open here"]
    spec = action.spec
    return [
        f"{action.id}: {spec.kind}, {_phase(state, action)}, attempt {action.attempt}",
        f"asks for {asked(state, action)}; time-out {spec.timeout_ms / 1e3:g} s, deadline {spec.deadline_ms / 1e3:g} s",
        f"submitted at {action.submitted_ns / 1e9:.3f}, ready at {action.ready_ns / 1e9:.3f} s of log time",
    ]
