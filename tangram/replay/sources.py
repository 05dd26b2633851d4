"""Where a recorded log comes from, a live broker or a file: the state it starts from and the messages since. The shell's side."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Protocol

from tangram import messages as m
from tangram import subjects
from tangram.broker import Broker, read_log, recorded_through, stream_state
from tangram.errors import ApiError, ConfigError, TangramError
from tangram.replay.logfile import LogFile
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.checkpoints import Restored, payload_parts, restore
from tangram.scheduler.fold import Record
from tangram.scheduler.state import State

DECISIONS: Final = "tangram.decisions.*.*"
_DECISIONS_PREFIX: Final = "tangram.decisions."
_BATCH: Final = 1_000


class Source(Protocol):
    """without_payloads: what stands for them is filling. problem: why it ended early, once it has been read."""

    without_payloads: bool

    @property
    def problem(self) -> str: ...

    async def state(self) -> State | None:
        """A new one each time; None if the log is there from its first message on."""

    def payloads(self) -> AsyncIterator[m.CheckpointPayloads]:
        """Of what is open in the state."""

    def batches(self, after_seq: int = 0) -> AsyncIterator[list[Record]]:
        """The messages since the state, or behind a later sequence, in order, without a gap."""

    def decisions(self) -> AsyncIterator[list[Record]]:
        """Of those, the ones with a leader's decisions."""


class FileSource:
    def __init__(self, path: Path, *, partial: bool = False) -> None:
        """Raises UnreadableLog, here and in all that reads."""
        self._file = LogFile(path, partial=partial)
        self.without_payloads = self._file.header.without_payloads

    @property
    def problem(self) -> str:
        return self._file.problem

    async def state(self) -> State | None:
        return self._file.state()

    async def payloads(self) -> AsyncIterator[m.CheckpointPayloads]:
        for part in self._file.payloads():
            yield part

    async def batches(self, after_seq: int = 0) -> AsyncIterator[list[Record]]:
        batch: list[Record] = []
        for record in self._file.records():
            if record.seq > after_seq:
                batch.append(record)
            if len(batch) >= _BATCH:
                yield batch
                batch = []
        yield batch

    async def decisions(self) -> AsyncIterator[list[Record]]:
        async for batch in self.batches():
            yield [record for record in batch if record.subject.startswith(_DECISIONS_PREFIX)]


class BrokerSource:
    """What is stored now, from one of its checkpoints on."""

    without_payloads = False
    problem = ""

    def __init__(self, broker: Broker, restored: Restored | None, last_seq: int) -> None:
        self._broker, self._restored = broker, restored
        self._dumped = b"" if restored is None else dump(restored.state)
        self.after_seq = 0 if restored is None else restored.state.seq
        self.last_seq = last_seq

    @classmethod
    async def open(cls, broker: Broker, *, from_ns: int | None = None, until_ns: int | None = None) -> "BrokerSource":
        """The log from its beginning, or its oldest checkpoint, on. from_ns: from the last checkpoint before that stamp;
        until_ns: up to it. Raises TangramError if there is no log, or none that can be folded;
        ConfigError if there is nothing up to then."""
        try:
            stored = await stream_state(broker, subjects.STREAM)
        except ApiError as error:
            raise TangramError(f"the broker has no log ({error.description}); tangram streams apply makes one") from None
        if not stored.messages:
            raise TangramError("the log is empty: nothing has run on this broker yet")
        is_whole = stored.messages == stored.last_seq
        last_seq = stored.last_seq
        if until_ns is not None:
            last_seq = await _first_from(broker, stored.first_seq, stored.last_seq, until_ns + 1) - 1
        if from_ns is not None:
            first_seq = await _first_from(broker, stored.first_seq, stored.last_seq, from_ns)
            restored = await restore(broker, oldest=False, seq_max=first_seq - 1)
            if is_whole and restored is not None and restored.state.seq >= first_seq:
                restored = None
        else:
            restored = None if is_whole else await restore(broker, oldest=True)
        if restored is None and not is_whole:
            raise TangramError(f"the log begins at {stored.first_seq}, and no checkpoint leads up to it: it cannot be folded")
        found = cls(broker, restored, last_seq)
        if found.last_seq <= found.after_seq:
            raise ConfigError("--until: nothing of the log that can be folded is as old as that")
        return found

    async def state(self) -> State | None:
        return load(self._dumped) if self._dumped else None

    async def payloads(self) -> AsyncIterator[m.CheckpointPayloads]:
        if self._restored is not None:
            async for _, part in payload_parts(self._broker, self._restored):
                yield part

    def batches(self, after_seq: int = 0) -> AsyncIterator[list[Record]]:
        return stored_records(self._broker, max(self.after_seq, after_seq), self.last_seq)

    def decisions(self) -> AsyncIterator[list[Record]]:
        return stored_records(self._broker, self.after_seq, self.last_seq, DECISIONS)


async def stored_records(
    broker: Broker, after_seq: int, last_seq: int, subject: str | None = None
) -> AsyncIterator[list[Record]]:
    """What is stored behind `after_seq`, up to `last_seq`; on `subject` alone if given.

    Raises TangramError if the log was trimmed past it meanwhile, BrokerError.
    """
    through_seq = recorded_through(await broker.api(f"STREAM.INFO.{subjects.STREAM}"))
    while after_seq < last_seq:
        messages = await read_log(broker, subjects.STREAM, after_seq + 1, subject=subject)
        if subject is None:
            for expected, message in enumerate(messages, after_seq + 1):
                if message.seq != expected:
                    raise TangramError(
                        f"messages {expected} to {message.seq - 1} are gone: the log was trimmed while it was read"
                    )
        batch = [
            Record(message.seq, message.recorded_ns(through_seq), message.subject, message.data)
            for message in messages
            if message.seq <= last_seq
        ]
        if not batch:
            return
        yield batch
        after_seq = batch[-1].seq


async def _first_from(broker: Broker, first_seq: int, last_seq: int, stamp_ns: int) -> int:
    """The first sequence that is stamped so or later; one more than the last if none is. Stamps rise, but for a clock that was
    set back."""
    through_seq = recorded_through(await broker.api(f"STREAM.INFO.{subjects.STREAM}"))
    low, high = first_seq, last_seq + 1
    while low < high:
        middle = (low + high) // 2
        found = await read_log(broker, subjects.STREAM, middle, batch=1)
        if not found or found[0].recorded_ns(through_seq) >= stamp_ns:
            high = middle
        else:
            low = max(middle, found[0].seq) + 1
    return low
