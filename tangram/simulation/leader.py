"""The log, and who leads: the core as the product runs it, with virtual stamps."""

from collections.abc import Callable
from typing import Final

from tangram import messages as m
from tangram import subjects
from tangram.errors import TangramError
from tangram.scheduler.compose import Outgoing, compose
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import Action, State
from tangram.scheduler.window import plan
from tangram.simulation.clock import Clock

_STAMP_NS: Final = 1_800_000_000_000_000_000
"""Of the first message; any would do."""
_PAYLOADS: Final = {
    "noop": m.encode(m.Noop()),
    "session.open": m.encode(m.SessionOpen()),
    "session.close": m.encode(m.SessionClose()),
    "file.write": m.encode(m.FileWrite(path="file", data=b"")),
    "file.read": m.encode(m.FileRead(path="file")),
}
_RUN: Final = m.encode(m.Run(argv=("true",)))


def payload_of(kind: str) -> bytes:
    """What suits a kind; nobody runs it."""
    return _PAYLOADS.get(kind, _RUN)


class Log:
    """Folds each message as it is stored; `observe` is told it before."""

    def __init__(self, clock: Clock, observe: Callable[[Record], None] | None = None) -> None:
        self.state = State()
        self._clock, self._observe = clock, observe

    def put(self, subject: str, message: m.LogMessage) -> None:
        """Raises TangramError for a message that the fold skips: the simulation has written something wrong."""
        record = Record(self.state.seq + 1, _STAMP_NS + self._clock.now_ns, subject, m.encode(message))
        if self._observe is not None:
            self._observe(record)
        folded = step(self.state, record)
        if folded.skipped:
            raise TangramError(f"the simulated message {record.seq} on {subject} was skipped: {folded.skipped}")


class Leader:
    """Plans when its last window has come back, `round_trip_ns` after it was written: what comes meanwhile is the next window.

    on_read(outgoing) is called for each of its messages when it has been folded. pass_ns: what each pass took by `real_ns`, the
    only thing here that may read a real clock.
    """

    def __init__(
        self,
        clock: Clock,
        log: Log,
        started: m.LeaderStarted,
        round_trip_ns: int,
        on_read: Callable[[Outgoing], None],
        real_ns: Callable[[], int],
    ) -> None:
        self.pass_ns: list[int] = []
        self._clock, self._log = clock, log
        self._round_trip_ns = round_trip_ns
        self._on_read = on_read
        self._real_ns = real_ns
        self._is_writing = False
        self._last_tick_ns = 0
        log.put(subjects.LEADER, started)

    def turn(self) -> None:
        """One window, if there is anything to decide or owed and none is on its way."""
        state = self._log.state
        if self._is_writing or not (state.queues or state.owed):
            return
        start_ns = self._real_ns()
        window = plan(state)
        self.pass_ns.append(self._real_ns() - start_ns)
        if not (window.decisions or window.prefetches or state.owed):
            return
        outgoing = compose(state, window, _payload)
        self._is_writing = True
        self._clock.at(self._clock.now_ns + self._round_trip_ns, lambda: self._read(outgoing))

    def _read(self, outgoing: list[Outgoing]) -> None:
        self._is_writing = False
        for each in outgoing:
            self._log.put(each.subject, each.message)
            self._on_read(each)

    def next_tick_ns(self) -> int | None:
        """When the next tick is due (see `State.next_tick_ns`); None if none is wanted."""
        state, now_ns = self._log.state, self._clock.now_ns
        if not state.wants_ticks:
            return None
        behind_ns = now_ns - state.now_ns
        return max(state.next_tick_ns(self._last_tick_ns - behind_ns) + behind_ns, now_ns)

    def tick(self) -> None:
        self._last_tick_ns = self._clock.now_ns
        self._log.put(subjects.CLOCK, m.Ticked(epoch=self._log.state.epoch))


def _payload(action: Action) -> bytes:
    return payload_of(action.spec.kind)
