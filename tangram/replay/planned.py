"""On which states windows were planned, found before the log is folded: a window's messages come later than that. Pure."""

from array import array
from typing import Final

import msgspec

from tangram import messages as m
from tangram.scheduler.fold import Record

FALLBACK_POLICY: Final = "fcfs-minimum"
"""Of windows whose pass had failed."""


class _Note(msgspec.Struct):
    fallback: bool = False


class _Head(msgspec.Struct):
    through_seq: int
    note: _Note | None = None


_decode = msgspec.msgpack.Decoder(_Head).decode


class Planned:
    """`add` each message with decisions, in order; eight bytes a window are kept. Then `at` is asked in rising order."""

    def __init__(self) -> None:
        self._seqs = array("q")
        self._fallbacks: set[int] = set()
        self._next = 0

    def add(self, record: Record) -> None:
        try:
            head = _decode(record.data)
        except m.MALFORMED:
            return  # every fold skips it
        if not self._seqs or head.through_seq > self._seqs[-1]:
            self._seqs.append(head.through_seq)
        if head.note is not None and head.note.fallback:
            self._fallbacks.add(head.through_seq)

    def at(self, seq: int) -> bool:
        """Whether a window was planned on the state after this message."""
        while self._next < len(self._seqs) and self._seqs[self._next] < seq:
            self._next += 1
        return self._next < len(self._seqs) and self._seqs[self._next] == seq

    def policy(self, seq: int) -> str | None:
        """What the window planned there overrode the leader's policy with, as `plan` takes it."""
        return FALLBACK_POLICY if seq in self._fallbacks else None
