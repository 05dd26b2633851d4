"""What an executor does with what it reads: pure, so that it can be tested against any order of anything.

The shell feeds it stored messages and endings, and performs the instructions that come back. Messages to one incarnation
are numbered from 1; what follows a hole is held until the hole is filled by redelivery, so neither redelivery nor
reordering can start an action twice or overtake a cancel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tangram import messages as m
from tangram.executors.backend import ActionKey, SessionKey
from tangram.outcomes import Outcome


class Attempt(NamedTuple):
    action: ActionKey
    attempt: int


# --- instructions ------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Start this attempt now, and call `ended` when it has ended, or `refused`. number: of the decision's message."""

    start: m.Start
    attempt: Attempt
    number: int


class Kill(NamedTuple):
    """End this attempt; its `ended` follows."""

    attempt: Attempt


class CloseSession(NamedTuple):
    """Close a sandbox that nobody closes, then call `session_closed`."""

    session: SessionKey


class Finish(NamedTuple):
    """Report an outcome, and the tokens of quotas that it really took."""

    action: ActionKey
    result: m.Result
    output: m.Output | None
    spent: Mapping[str, int] | None = None


class Return(NamedTuple):
    """Give a start back: it was never begun."""

    item: m.Returned


class Report(NamedTuple):
    """Say that a sandbox is gone."""

    item: m.SessionEnded


class Answer(NamedTuple):
    """Answer a probe on the heartbeat subject."""

    probe: int


class Leave(NamedTuple):
    """Nothing is held and nothing more will come."""


class Abandon(NamedTuple):
    """This incarnation was lost: end everything at once, then join anew; unless another has taken its name."""

    reason: str
    replaced: bool = False


class Fetch(NamedTuple):
    """Bring a service's weights, for an action that will come."""

    item: m.Prefetch


Instruction = Begin | Fetch | Kill | CloseSession | Finish | Return | Report | Answer | Leave | Abandon


@dataclass(slots=True)
class ExecutorCore:
    """One incarnation. `running`: attempts that were begun and have not ended. `sessions`: sandboxes that exist."""

    executor: str
    incarnation: str
    next_number: int = 1
    epoch: int = 0
    """The newest leader's record that was seen; 0 before the first."""
    draining: bool = False
    lost: bool = False
    running: dict[Attempt, m.Start] = field(default_factory=dict)
    sessions: dict[SessionKey, None] = field(default_factory=dict)
    held: dict[int, m.DecisionsMade] = field(default_factory=dict)
    """Messages behind a hole, by number."""

    def led(self, seq: int) -> None:
        """A leader's record stands at `seq`: what an older one is said to have decided behind it is not a decision."""
        self.epoch = max(self.epoch, seq)

    def decisions(self, message: m.DecisionsMade, seq: int) -> list[Instruction]:
        """A message that is stored at `seq`. One that the fold calls stale uses up no number, here as there; an older leader's
        that comes again late still fills its hole, because it stands before the newer record."""
        if self.lost or message.incarnation != self.incarnation:
            return []
        if message.epoch >= seq or message.epoch < self.epoch < seq:
            return []
        if message.number < self.next_number or message.number in self.held:
            return []
        self.held[message.number] = message
        instructions: list[Instruction] = []
        while (following := self.held.pop(self.next_number, None)) is not None:
            self.next_number += 1
            for item in following.items:
                instructions += self._item(following.number, item)
        return instructions

    def clock(self, message: m.ClockMessage) -> list[Instruction]:
        if isinstance(message, m.ExecutorLost) and message.incarnation == self.incarnation:
            return self.abandon(message.reason or "lost")
        return []

    def abandon(self, reason: str, *, replaced: bool = False) -> list[Instruction]:
        """Nothing is begun from here on."""
        if self.lost:
            return []
        self.lost = True
        self.held.clear()
        return [Abandon(reason, replaced)]

    def joined(self, message: m.ExecutorJoined) -> list[Instruction]:
        """A join under our name: if it is not ours, we are replaced from there on, and what follows in the log is void."""
        if message.incarnation == self.incarnation:
            return []
        return self.abandon(f"replaced by {message.incarnation} on host {message.host}", replaced=True)

    def _item(self, number: int, item: m.Item) -> list[Instruction]:
        match item:
            case m.Start():
                return self._start(number, item)
            case m.Cancel():
                attempt = Attempt(ActionKey(item.task, item.client, item.n), item.attempt)
                # Otherwise it has ended, and its answer is in the log or on its way there.
                return [Kill(attempt)] if attempt in self.running else []
            case m.EndSession():
                session = SessionKey(item.task, item.client, item.session)
                if session in self.sessions:
                    return [CloseSession(session)]
                return [Report(m.SessionEnded(task=item.task, client=item.client, session=item.session, reason="unknown"))]
            case m.Probe():
                return [Answer(item.number)]
            case m.Dismiss():
                return [Leave()]
            case m.Prefetch():
                return [Fetch(item)] if item.gpus and not self.draining else []
            case _:
                return []  # resize, interrupt, evict: not for a back end of this kind

    def _start(self, number: int, start: m.Start) -> list[Instruction]:
        action = ActionKey(start.task, start.client, start.n)
        attempt = Attempt(action, start.attempt)
        if start.session:
            if SessionKey(start.task, start.client, start.session) not in self.sessions:
                return [self._finish(start, m.Result(
                    nonce=start.nonce, attempt=start.attempt, outcome=Outcome.ENVIRONMENT_LOST, detail="no such session here"
                ))]  # fmt: skip
        elif self.draining:
            return [self._return(start, number, "draining")]
        self.running[attempt] = start
        return [Begin(start, attempt, number)]

    def refused(
        self, attempt: Attempt, number: int, reason: str, *, retry_after_ms: int = 0, failed: bool = False
    ) -> list[Instruction]:
        """An attempt could not be begun on this host just now, or failed and may be tried again. Raises KeyError if it was not
        running."""
        return [self._return(self.running.pop(attempt), number, reason, retry_after_ms, failed)]

    def ended(
        self,
        attempt: Attempt,
        result: m.Result,
        output: m.Output | None,
        *,
        session_lost: bool = False,
        spent: Mapping[str, int] | None = None,
    ) -> list[Instruction]:
        """An attempt that was begun has ended. Raises KeyError if it was not running."""
        start = self.running.pop(attempt)
        instructions: list[Instruction] = [self._finish(start, result, output, spent)]
        if start.kind == "session.open":
            if result.outcome is Outcome.OK:
                self.sessions[SessionKey(start.task, start.client, start.n)] = None
        elif start.session:
            session = SessionKey(start.task, start.client, start.session)
            if (start.kind == "session.close" and result.outcome is Outcome.OK) or session_lost:
                self.sessions.pop(session, None)
        return instructions

    @staticmethod
    def _return(start: m.Start, number: int, reason: str, retry_after_ms: int = 0, failed: bool = False) -> Return:
        return Return(
            m.Returned(
                task=start.task,
                client=start.client,
                n=start.n,
                attempt=start.attempt,
                number=number,
                reason=reason,
                retry_after_ms=retry_after_ms,
                failed=failed,
            )
        )

    @staticmethod
    def _finish(
        start: m.Start, result: m.Result, output: m.Output | None = None, spent: Mapping[str, int] | None = None
    ) -> Finish:
        return Finish(ActionKey(start.task, start.client, start.n), result, output, spent)

    def session_closed(self, session: SessionKey, reason: str) -> list[Instruction]:
        self.sessions.pop(session, None)
        return [Report(m.SessionEnded(task=session.task, client=session.client, session=session.session, reason=reason))]

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.sessions
