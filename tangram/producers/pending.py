"""The actions of one client that have no outcome yet, and how far its completions have been read. No I/O, no clock."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from tangram import limits, subjects
from tangram import messages as m
from tangram.outcomes import Outcome, RejectReason
from tangram.producers.request import Wire

_SEQUENCE: Final = re.compile("[0-9]{1,18}")


def republished(headers: Mapping[str, str], subject: str) -> tuple[int, int] | None:
    """The sequence of a message of the log that the stream has republished, and that of the one before it on `subject`; None if
    it is no such message."""
    if headers.get("Nats-Stream") != subjects.STREAM or headers.get("Nats-Subject") != subject:
        return None
    own, previous = headers.get("Nats-Sequence", ""), headers.get("Nats-Last-Sequence", "")
    return (int(own), int(previous)) if _SEQUENCE.fullmatch(own) and _SEQUENCE.fullmatch(previous) else None


class Waiter(Protocol):
    """Whoever waits for an outcome. One of the two is called, once."""

    def settle(self, result: m.Result, output: m.Output, executor: str) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class Pending:
    """One open action. Times are the caller's monotonic seconds."""

    n: int
    wire: Wire
    waiter: Waiter
    asked_s: float
    patience_s: float
    after_seq: int
    """All of it stands behind this sequence of the log. (Not behind the acknowledged one: its submission may have been stored
    before, unheard.)"""
    stored: bool = False
    """Its submission has been acknowledged."""
    cancelled: bool = False
    on_output: Callable[[str, bytes], None] | None = None
    shown: dict[str, int] = field(default_factory=dict)
    """Bytes of live output that were passed on, by stream."""

    def settle(self, outcome: Outcome, reason: str = "", detail: str = "") -> None:
        """An outcome that nobody else will tell."""
        result = m.Result(nonce=self.wire.spec.nonce, outcome=outcome, reason=reason, detail=detail[: limits.DETAIL_LENGTH_MAX])
        self.waiter.settle(result, _NO_OUTPUT, "")


class Ledger:
    """Open actions by number. Numbers rise by one; `done_below` is the lowest that may still be sent."""

    def __init__(self) -> None:
        self.open: dict[int, Pending] = {}
        self.next_n = 1  # 0 stands for "no session"
        self.read_seq = 0
        """All completions of this client up to here have been taken."""
        self.behind = False
        """Some were missed: ask."""
        self.recalled: dict[int, list[tuple[bytes, Waiter]]] = {}
        """Actions of an earlier process of this name that somebody waits for, with their nonces."""
        self.on_shared: Callable[[Waiter, m.Result], None] | None = None
        """Called for what shares the outcome of another action (`m.Result.same_as`), which has to be read."""

    @property
    def done_below(self) -> int:
        return next(iter(self.open), self.next_n)  # numbers are added in rising order

    def add(self, pending: Pending) -> None:
        assert pending.n == self.next_n
        self.open[pending.n] = pending
        self.next_n += 1

    def live(self, seq: int, previous_seq: int, data: bytes) -> None:
        """A republished completion. `previous_seq` is that of the one before it on the same subject: a gap shows there."""
        if previous_seq > self.read_seq:
            self.behind = True
        else:
            self.read_seq = max(self.read_seq, seq)
        self.take(data)

    def take(self, data: bytes) -> None:
        """Settles what these stored bytes name. Bad bytes and unknown numbers are ignored; raises nothing."""
        try:
            finished = m.decode("tangram.completions.any.any", data)[1]
        except m.Malformed:
            return
        assert isinstance(finished, m.ActionsFinished)
        for n, raw, output in zip(finished.ids, finished.results, finished.outputs, strict=True):
            pending, recalled = self.open.get(n), self.recalled.get(n, [])
            if pending is None and not recalled:
                continue
            try:
                result = m.decode_result(raw)
                wrote = m.decode_output(output) if output else _NO_OUTPUT
            except m.MALFORMED:
                continue
            waiters = [waiter for nonce, waiter in recalled if nonce == result.nonce]
            if waiters:
                del self.recalled[n]
            if pending is not None and result.nonce == pending.wire.spec.nonce:
                del self.open[n]
                waiters.append(pending.waiter)
            for waiter in waiters:
                if result.same_as and self.on_shared is not None:
                    self.on_shared(waiter, result)
                else:
                    waiter.settle(result, wrote, finished.executor)

    def doubtful(self, now_s: float) -> list[int]:
        """What to ask for: stored actions without an outcome for longer than their patience; all when one was missed."""
        if self.behind:
            return list(self.open)
        return [n for n, p in self.open.items() if p.stored and now_s - p.asked_s >= p.patience_s]

    def answered(self, asked: list[int], answer: m.Answer, now_s: float, patience_max_s: float) -> list[int]:
        """Takes the answer to a question for `asked`. Returns the stored ones that the log does not have after all."""
        for _, data in answer.completions:
            self.take(data)
        open_, unseen = set(answer.open), set(answer.unseen)
        nonces = dict(zip(answer.open, answer.nonces, strict=False))  # an older scheduler says none
        again: list[int] = []
        for n in asked:
            pending = self.open.get(n)
            if pending is None:
                continue
            waited_s, pending.asked_s = now_s - pending.asked_s, now_s
            if pending.stored and nonces.get(n, pending.wire.spec.nonce) != pending.wire.spec.nonce:
                del self.open[n]
                detail = f"name: another client uses it, and number {n} is its action's; give each a name of its own"
                pending.settle(Outcome.REJECTED, RejectReason.CONFLICT, detail)
            elif n in open_:
                if waited_s >= pending.patience_s:  # asked for its own sake, and not because another was missed
                    pending.patience_s = min(2 * pending.patience_s, patience_max_s)
            elif n in unseen and pending.stored:
                again.append(n)
        return again


def size_bytes(item: Pending | int) -> int:
    """About what a submission, or the number of one to be cancelled, takes of its message."""
    return len(item.wire.spec_bytes) + len(item.wire.payload_bytes) + 32 if isinstance(item, Pending) else 9


_NO_OUTPUT = m.Output()
