"""Why an action waited: what every pass that left it behind found, and what it got. Pure."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from tangram import messages as m
from tangram.replay.left import left_behind
from tangram.replay.planned import Planned
from tangram.replay.told import amount, count, told
from tangram.scheduler.fold import Folded, Record, step
from tangram.scheduler.policies import charge
from tangram.scheduler.state import Action, ActionId, Phase, State
from tangram.scheduler.window import consider


@dataclass(frozen=True, slots=True)
class Event:
    """what: submitted, waits, ready, left (by a pass), decided, again, owed or ended. at_ns: log time. reason: of a pass, which
    kind (`left.Left`). window: 0 if it is of none."""

    what: str
    at_ns: int
    seq: int
    text: str
    window: int = 0
    reason: str = ""


@dataclass(slots=True)
class Story:
    """One action. begin_ns: its submission, or the checkpoint from which the log was read."""

    action: ActionId
    kind: str = ""
    begin_ns: int = 0
    events: list[Event] = field(default_factory=list)


class Why:
    """`add` each record, in order; `stories` has those of the wanted actions that the log knows."""

    def __init__(self, state: State | None, planned: Planned, wanted: Iterable[ActionId]) -> None:
        self.stories: dict[ActionId, Story] = {}
        self._state = State() if state is None else state
        self._planned = planned
        self._wanted = dict.fromkeys(wanted)
        self._open: dict[ActionId, tuple[Action, Phase]] = {}
        self._changed(None)
        self._look()

    def add(self, record: Record) -> None:
        """Raises NewerVersion, and ValueError if records do not come in rising order."""
        folded = step(self._state, record)
        self._changed(folded)
        self._look()

    # --- what became of it ---

    def _changed(self, folded: Folded | None) -> None:
        state = self._state
        for action_id in self._wanted:
            action = state.actions.get(action_id)
            known = self._open.get(action_id)
            if action is None:
                if known is not None:
                    self._ended(known[0], folded)
                continue
            if known is None or known[0] is not action:
                story = self.stories[action_id] = Story(action_id, action.spec.kind, action.submitted_ns)
                if folded is None:
                    story.begin_ns = max(story.begin_ns, state.now_ns)
                self._say(action, "submitted", f"submitted; asks for {asked(state, action)}")
            elif known[1] is action.phase:
                continue
            self._open[action_id] = (action, action.phase)
            match action.phase:
                case Phase.WAITING:
                    self._say(action, "waits", _behind(state, action))
                case Phase.READY if known is not None and known[1] is Phase.DECIDED:
                    self._say(action, "again", f"given back: {_given_back(folded, action)}; it waits again")
                case Phase.READY:
                    self._say(action, "ready", "ready: nothing but units, and what came before it, keeps it from starting")
                case Phase.DECIDED:
                    self._decided(action, folded)
                case Phase.OWED:
                    self._say(action, "owed", f"will not start: {told(state.owed.rulings[action_id])}")

    def _decided(self, action: Action, folded: Folded | None) -> None:
        state = self._state
        holder = state.incarnations.get(action.incarnation)
        where = f"{holder.host.name} ({holder.executor})" if holder is not None else action.incarnation
        text, window = f"on {where}", 0
        if folded is not None and isinstance(folded.message, m.DecisionsMade):
            window = folded.message.window
            for item in folded.message.items:
                if isinstance(item, m.Start) and (item.task, item.client, item.n) == action.id:
                    text = f"{told(item)} on {where}"
        waited_s = (state.now_ns - action.ready_ns) / 1e9
        self._say(action, "decided", f"got {text}, {waited_s:.3f} s after it was ready", window)

    def _ended(self, action: Action, folded: Folded | None) -> None:
        del self._open[action.id]
        text = "ended"
        if folded is not None and isinstance(folded.message, m.ActionsFinished):
            for n, raw in zip(folded.message.ids, folded.message.results, strict=True):
                if n == action.id.n:
                    result = m.decode_result(raw)
                    text = f"ended: {told(result)}, after {result.run_ns / 1e9:.3f} s of running"
        self._say(action, "ended", text)

    # --- the passes ---

    def _look(self) -> None:
        """Whether a window was planned now, and what it says of those that are ready."""
        state = self._state
        if not self._planned.at(state.seq):
            return
        ready = [action for action, phase in self._open.values() if phase is Phase.READY]
        if not ready:
            return
        window, found = consider(state, self._planned.policy(state.seq))
        for action in ready:
            left = left_behind(state, window, found, action)
            if left is not None:
                self._say(action, "left", left.text, window.number, left.reason)

    def _say(self, action: Action, what: str, text: str, window: int = 0, reason: str = "") -> None:
        state = self._state
        self.stories[action.id].events.append(Event(what, state.now_ns, state.seq, text, window, reason))


class Waits:
    """How long the actions of a task waited, ready, for their decision, in log time: `worst` are those that waited longest."""

    def __init__(self, state: State | None, task: str, number: int) -> None:
        self._state = State() if state is None else state
        self._task, self._number = task, number
        self._open = {each.id: each for each in self._state.actions.values() if each.id.task == task}
        self._waited: dict[ActionId, int] = {}
        """Of open ones, up to their last decision."""
        self._worst: list[tuple[int, ActionId]] = []
        """A heap of those that have ended."""

    def add(self, record: Record) -> None:
        """Raises NewerVersion, and ValueError if records do not come in rising order."""
        folded = step(self._state, record)
        message, address, state = folded.message, folded.address, self._state
        if isinstance(message, m.ActionsSubmitted) and address is not None and address.second == self._task:
            for n in message.ids:
                action = state.actions.get(ActionId(self._task, message.client, n))
                if action is not None:
                    self._open[action.id] = action
        elif isinstance(message, m.DecisionsMade):
            for item in message.items:
                action = self._open.get(ActionId(item.task, item.client, item.n)) if isinstance(item, m.Start) else None
                if action is not None and action.phase is Phase.DECIDED:
                    self._waited[action.id] = self._waited.get(action.id, 0) + state.now_ns - action.ready_ns
        elif isinstance(message, m.ActionsFinished) and address is not None and address.first == self._task:
            for n in message.ids:
                action_id = ActionId(self._task, address.second, n)
                if action_id in self._open and action_id not in state.actions:
                    self._end(self._open.pop(action_id))

    def _end(self, action: Action) -> None:
        waited_ns = self._waited.pop(action.id, None)
        if waited_ns is None:  # it was never decided
            waited_ns = self._state.now_ns - action.ready_ns if action.ready_ns else 0
        heapq.heappush(self._worst, (waited_ns, action.id))
        if len(self._worst) > self._number:
            heapq.heappop(self._worst)

    def worst(self) -> list[tuple[int, ActionId]]:
        """(nanoseconds, action), the longest first; of those that still wait up to now."""
        now_ns = self._state.now_ns
        still = [
            (self._waited.get(each.id, 0) + (now_ns - each.ready_ns if each.phase is Phase.READY else 0), each.id)
            for each in self._open.values()
        ]
        return sorted([*self._worst, *still], key=lambda each: (-each[0], each[1]))[: self._number]


def asked(state: State, action: Action) -> str:
    """Its cost, in words."""
    found = [amount(name, demand.low, demand.high) for name, demand in charge(state, action).items()]
    service = f" with {action.spec.service}" if action.spec.service else ""
    return (", ".join(found) or "no units") + service


def _behind(state: State, action: Action) -> str:
    session = action.session
    if session is None:
        return "waits for the outcome of the first action with its key"
    if session.current is None:
        return f"waits for its session {session.id} to open"
    before = sum(each.order < action.order for each in session.waiting)
    return f"waits behind {count(1 + before, 'action')} of its session; {session.current} is on"


def _given_back(folded: Folded | None, action: Action) -> str:
    message = folded.message if folded is not None else None
    if isinstance(message, m.ActionsReturned):
        for each in message.returned:
            if (each.task, each.client, each.n) == action.id:
                return each.reason or "without a reason"
    return "its executor was lost" if not isinstance(message, m.ActionsReturned) else "without a reason"
