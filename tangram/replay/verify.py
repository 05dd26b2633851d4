"""Whether a recorded log is what the core decides: every window is planned anew on the state that its leader had. Pure.

A window is planned on the state at its `through_seq`, and its messages come later; each is compared with what `compose` makes
now. What a leader rules outside of windows is compared with what the state says that it owes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.replay.planned import Planned
from tangram.replay.told import told
from tangram.scheduler.compose import PAYLOAD_GONE, compose
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import BEHAVIOUR, BEHAVIOUR_OLDEST, Action, ActionId, State
from tangram.scheduler.window import plan

KEPT_MAX: Final = 10
"""Differences that are kept with their story; one makes all that follow."""
_PAYLOAD_BYTES: Final = 16
_ZEROS: Final = bytes(limits.ITEM_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Change:
    """One item that differs; "" where there is none."""

    what: str
    decided: str
    would_be: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A window, or (window 0) a ruling. seq: of the message that differs, or behind which one is missing. same_state: here is
    the state that the leader had. agreed_seq: the last sequence after which it was so; what differs comes behind it."""

    window: int
    seq: int
    through_seq: int
    same_state: bool
    agreed_seq: int
    leader: str
    changes: tuple[Change, ...] = ()
    failed: str = ""
    """What the pass raised."""


@dataclass(slots=True)
class Report:
    """windows: that were made anew. others: by behaviour version, those of leaders with another. unmade: planned before the
    log begins. first_seq 0: there were no messages."""

    windows: int = 0
    differ: int = 0
    fallbacks: int = 0
    unmade: int = 0
    rulings: int = 0
    rulings_differ: int = 0
    others: dict[int, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    actions: int = 0
    messages: int = 0
    skipped: int = 0
    first_seq: int = 0
    last_seq: int = 0
    policies: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.differ or self.rulings_differ)


@dataclass(slots=True, eq=False)
class _Window:
    through_seq: int
    digest: bytes
    expected: dict[tuple[str, int], m.DecisionsMade] = field(default_factory=dict)
    """By incarnation and number, those that have not come yet."""
    failed: str = ""
    number: int = 0
    """0: none of its messages has come."""
    differs: bool = False


class Verifier:
    """`payloads` of the checkpoint, `add` each record, in order; `complete` is the report.

    state: from which the log goes on, None for its beginning; it changes. without_payloads: words that may quote one are not
    compared.
    """

    def __init__(self, state: State | None, planned: Planned, *, without_payloads: bool = False) -> None:
        self.report = Report()
        self._state = State() if state is None else state
        self._begin_seq = self._agreed_seq = self._state.seq
        self._planned, self._without_payloads = planned, without_payloads
        self._window: _Window | None = None
        self._leader = ""
        self._finished = self._state.finished
        self._payloads: dict[ActionId, bytes] = {}
        """A hash of each, of open actions."""
        if state is not None:
            self.report.policies.append(state.policy)
            self._plan()

    def payloads(self, part: m.CheckpointPayloads) -> None:
        for each, payload in zip(part.ids, part.payloads, strict=True):
            self._payloads[ActionId(*each)] = _hash(payload)

    def add(self, record: Record) -> None:
        """Raises NewerVersion, and ValueError if records do not come in rising order."""
        state, report = self._state, self.report
        if b"incarnation" not in record.data and record.subject.startswith("tangram.completions."):
            self._rulings(record)  # before the state forgets what it owes
        folded = step(state, record)
        report.first_seq = report.first_seq or record.seq
        report.last_seq = record.seq
        report.messages += 1
        match folded.message:
            case m.DecisionsMade():
                if folded.message.epoch == state.epoch:
                    self._decided(record.seq, folded.message)
            case m.ActionsSubmitted():
                assert folded.address is not None
                self._submitted(folded.address.second, folded.message)
            case m.ActionsFinished():
                assert folded.address is not None
                for n in folded.message.ids:
                    action_id = ActionId(folded.address.first, folded.address.second, n)
                    if action_id not in state.actions:
                        self._payloads.pop(action_id, None)
            case m.LeaderStarted() if not folded.skipped:
                self._led(folded.message)
        self._plan()

    def complete(self) -> Report:
        report = self.report
        report.actions = self._state.finished - self._finished
        report.skipped = self._state.skipped
        return report

    @property
    def _is_known(self) -> bool:
        """Whether this code decides as the leader did."""
        return BEHAVIOUR_OLDEST <= self._state.behaviour <= BEHAVIOUR

    # --- what should come ---

    def _plan(self) -> None:
        state = self._state
        if not self._planned.at(state.seq):
            return
        self._close()
        window = self._window = _Window(state.seq, state.digest)
        if not self._is_known:
            return
        try:
            outgoing = compose(state, plan(state, self._planned.policy(state.seq)), _filling)
        except Exception as error:
            window.failed = f"{type(error).__name__}: {error}"
            return
        for each in outgoing:
            if isinstance(each.message, m.DecisionsMade):
                window.expected[(each.message.incarnation, each.message.number)] = each.message

    def _close(self) -> None:
        """A leader plans again when all of its last window has come back."""
        window = self._window
        if window is None or not window.number or not window.expected or not self._is_known:
            return
        changes = [change for each in window.expected.values() for change in _changes([], each.items)]
        self._differs(window, self._state.seq, changes or [Change("a message", "", "that fills a hole in the numbers")])

    def _led(self, message: m.LeaderStarted) -> None:
        """What the one before has not written will not come."""
        self._window = None
        self._leader = f"{message.leader}, version {message.code_version or '?'}, Python {message.python_version or '?'}"
        if not self.report.policies or self.report.policies[-1] != message.policy:
            self.report.policies.append(message.policy)

    # --- what came ---

    def _decided(self, seq: int, message: m.DecisionsMade) -> None:
        window, report = self._window, self.report
        if window is None or message.through_seq != window.through_seq:
            if message.through_seq < self._begin_seq:
                report.unmade += message.note is not None
                return None
            window = _Window(message.through_seq, message.digest)  # of a state that no leader can have had then
            return self._differs(window, seq, _changes(message.items, []), message.window)
        if not self._is_known:
            if not window.number:
                report.others[self._state.behaviour] = report.others.get(self._state.behaviour, 0) + 1
            window.number = message.window
            return None
        if not window.number:
            window.number = message.window
            report.windows += 1
            report.fallbacks += self._planned.policy(window.through_seq) is not None
            if message.digest == window.digest and not report.differ:
                self._agreed_seq = window.through_seq
        expected = window.expected.pop((message.incarnation, message.number), None)
        changes: list[Change] = []
        if expected is None:
            changes = _changes(message.items, []) or [
                Change("a message", f"number {message.number} for {message.incarnation}", "")
            ]
        elif not self._is_same(message, expected):
            changes = _changes(message.items, [self._with_payload(each, message) for each in expected.items])
            changes = changes or _others(message, expected)
        if changes or message.digest != window.digest:
            self._differs(window, seq, changes)
        return None

    def _is_same(self, message: m.DecisionsMade, expected: m.DecisionsMade) -> bool:
        if len(message.items) != len(expected.items):
            return False
        for item, other in zip(message.items, expected.items, strict=True):
            if item == other:
                continue
            if not (isinstance(item, m.Start) and isinstance(other, m.Start)):
                return False
            if not self._is_payload(item) or replace(other, payload=item.payload) != item:
                return False
        return replace(expected, items=message.items) == message

    def _is_payload(self, start: m.Start) -> bool:
        known = self._payloads.get(ActionId(start.task, start.client, start.n))
        return known is None or known == _hash(start.payload)

    def _with_payload(self, item: m.Item, message: m.DecisionsMade) -> m.Item:
        """What would be decided, with the payload that was: filling is no difference, another payload is."""
        if isinstance(item, m.Start):
            for each in message.items:
                if isinstance(each, m.Start) and each.n == item.n and each.client == item.client and each.task == item.task:
                    return replace(item, payload=each.payload) if self._is_payload(each) else item
        return item

    def _differs(self, window: _Window, seq: int, changes: Sequence[Change], number: int = 0) -> None:
        report = self.report
        if not window.differs:
            window.differs = True
            report.differ += 1
            report.windows += not window.number
        if len(report.differences) >= KEPT_MAX:
            return
        same_state = self._agreed_seq == window.through_seq
        report.differences.append(
            Difference(
                window=window.number or number,
                seq=seq,
                through_seq=window.through_seq,
                same_state=same_state,
                agreed_seq=self._agreed_seq,
                leader=self._leader,
                changes=tuple(changes),
                failed=window.failed,
            )
        )

    def _submitted(self, task: str, message: m.ActionsSubmitted) -> None:
        seq, actions = self._state.seq, self._state.actions
        for index, n in enumerate(message.ids):
            action = actions.get(ActionId(task, message.client, n))
            if action is not None and action.order == (seq, index):
                self._payloads[action.id] = _hash(message.payloads[index])

    # --- rulings ---

    def _rulings(self, record: Record) -> None:
        try:
            address, message = m.decode(record.subject, record.data)
        except m.Malformed:
            return
        state, report = self._state, self.report
        if not isinstance(message, m.ActionsFinished) or message.incarnation or message.epoch != state.epoch:
            return
        if not self._is_known:
            return
        for n, raw in zip(message.ids, message.results, strict=True):
            try:
                result = m.decode_result(raw)
            except m.MALFORMED:
                continue
            action_id = ActionId(address.first, address.second, n)
            owed = [state.owed.rulings.get(action_id), state.owed.conflicts.get((action_id, result.nonce))]
            report.rulings += 1
            if any(each is not None and self._is_ruling(result, each) for each in owed):
                continue
            if owed == [None, None] and (action_id not in state.actions or result.detail == PAYLOAD_GONE):
                continue  # its outcome came first; or its payload was not to be had, of which the log knows nothing
            report.rulings_differ += 1
            would = next((told(each) for each in owed if each is not None), "")
            change = Change(str(action_id), told(result), would)
            if len(report.differences) < KEPT_MAX:
                known = self._agreed_seq
                report.differences.append(Difference(0, record.seq, record.seq, False, known, self._leader, (change,)))

    def _is_ruling(self, result: m.Result, owed: m.Result) -> bool:
        return result == owed or (self._without_payloads and replace(result, detail=owed.detail) == owed)


def _filling(action: Action) -> bytes:
    """In place of a payload: what is decided depends on its length."""
    return _ZEROS[: action.payload_bytes]


def _hash(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_PAYLOAD_BYTES).digest()


def _changes(items: Sequence[m.Item], expected: Sequence[m.Item]) -> list[Change]:
    """By what each item is about; an order of its own counts too."""
    decided, would = ({_about(item): item for item in each} for each in (items, expected))
    return [
        Change(about, *_in_words(decided.get(about), would.get(about)))
        for about in {**would, **decided}
        if decided.get(about) != would.get(about)
    ]


def _in_words(decided: m.Item | None, would: m.Item | None) -> tuple[str, str]:
    """Where the words are the same, the fields that differ."""
    one, other = ("" if each is None else told(each) for each in (decided, would))
    if one != other or type(decided) is not type(would) or decided is None:
        return one, other
    names = [name for name in decided.__struct_fields__ if getattr(decided, name) != getattr(would, name)]
    one, other = (", ".join(f"{name} {getattr(each, name)!r:.100}" for name in names) for each in (decided, would))
    return one, other


def _about(item: m.Item) -> str:
    match item:
        case m.Start() | m.Cancel():
            verb = "" if isinstance(item, m.Start) else "cancel of "
            return f"{verb}{item.task}/{item.client}/{item.n}" + (f" (attempt {item.attempt})" if item.attempt > 1 else "")
        case m.EndSession():
            return f"end of session {item.task}/{item.client}/{item.session}"
        case _:
            return type(item).__name__.lower()


def _others(message: m.DecisionsMade, expected: m.DecisionsMade) -> list[Change]:
    """Fields of the message, where its items do not differ."""
    names = [name for name in message.__struct_fields__ if name not in ("items", "digest")]
    found = [
        Change(name, repr(getattr(message, name)), repr(getattr(expected, name)))
        for name in names
        if getattr(message, name) != getattr(expected, name)
    ]
    if not found and message.digest == expected.digest:
        found = [Change("order of items", ", ".join(map(_about, message.items)), ", ".join(map(_about, expected.items)))]
    return found
