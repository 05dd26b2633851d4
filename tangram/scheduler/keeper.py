"""Keeps the log within its limit: checkpoints as it grows, trims behind them, and says when submissions have to wait.

The log always begins behind a checkpoint, so all that is kept can be folded; and there is a second one further on, in case
the first cannot be read.

It works beside the scheduler's turns and writes nothing to the log itself: what it wants the leader to write stands in
`admission_closed` and `wants_record_above`.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, BrokerError, StreamState, bytes_limit, has_reserve, lend_reserve, purge, read_up_to, state_of
from tangram.scheduler import checkpoints
from tangram.scheduler.payloads import Payloads
from tangram.scheduler.state import State

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
RETRY_S: Final = 5.0
"""After a checkpoint that could not be stored."""


class Keeper:
    """One a scheduler; works while `run` is awaited. `ends` are those of the checkpoints that are kept, oldest first."""

    def __init__(self, broker: Broker, payloads: Payloads, ends: list[m.CheckpointEnded]) -> None:
        self._broker, self._payloads = broker, payloads
        self.ends = ends
        self.admission_closed = False
        self.wants_record_above = 0
        """The log is to be trimmed up to here, and the leader's record must not go with it."""
        self._hole_to = 0
        """What was trimmed around the leader's record goes up to here."""
        self._grown_from_bytes: int | None = None
        """The log's size at the last checkpoint, less what was trimmed since."""
        self._nudge = asyncio.Event()
        self._nudge_bytes = limits.CHECKPOINT_BYTES_MAX
        self._read_bytes = 0
        self._retry_s = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._complaint = ""

    async def run(self, state: State) -> None:
        """Returns never. `state` may change between two awaits, by whole steps."""
        swept = False
        try:
            while True:
                try:
                    if not swept:
                        await checkpoints.sweep(self._broker)
                        swept = True
                    await self._look(state)
                except BrokerError as error:
                    self._complain(error)
                await self._nudged()
        finally:
            if self._writing is not None:
                self._writing.cancel()

    def read(self, size: int) -> None:
        """Says that so many bytes have come from the log: it is looked at when it has grown by much, or after LOOK_S."""
        self._read_bytes += size
        if self._read_bytes > self._nudge_bytes:
            self._nudge.set()

    async def _nudged(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nudge.wait(), LOOK_S)
        self._nudge.clear()
        self._read_bytes = 0

    def _complain(self, error: BrokerError) -> None:
        """Once, however long it lasts."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.error("the log cannot be trimmed: %s", error)

    async def _look(self, state: State) -> None:
        info = await self._broker.api(f"STREAM.INFO.{subjects.STREAM}")
        stored, limit = state_of(info), bytes_limit(info)
        fill = stored.bytes / limit if limit > 0 else 0.0
        self.admission_closed = fill > (limits.LOG_REOPEN if self.admission_closed else limits.LOG_CLOSE)
        await self._reserve(info, fill, limit)
        if self._grown_from_bytes is None:
            self._grown_from_bytes = self._bytes_before(stored, self.ends[-1].seq if self.ends else 0)
        trim_to = self._trim_to(stored, fill)
        behind = trim_to > (self.ends[-2].seq if len(self.ends) > 1 else 0)
        grown = stored.bytes - self._grown_from_bytes
        step = min(limits.CHECKPOINT_BYTES_MAX, limit * limits.CHECKPOINT_PART if limit > 0 else limits.CHECKPOINT_BYTES_MAX)
        self._nudge_bytes = int(step / 4)
        # When the log is full nothing moves: a second checkpoint of the same state is as good a spare as an earlier one.
        due = behind or (grown > step and (not self.ends or state.seq > self.ends[-1].seq))
        if due and self._writing is None and time.monotonic() >= self._retry_s:
            self._grown_from_bytes = stored.bytes
            # Beside the looks: what it takes must not delay a refusal.
            self._writing = asyncio.create_task(self._checkpoint(state, info["created"]))
        if self._hole_to and state.epoch > self._hole_to:
            await purge(self._broker, subjects.STREAM, before_seq=self._hole_to + 1)
            self._hole_to = 0
        if trim_to:
            await self._trim(state, stored, trim_to, fill)

    async def _reserve(self, info: dict[str, Any], fill: float, limit: int) -> None:
        if fill > limits.LOG_LEND and not has_reserve(info):
            log.warning("the log is nearly full: it is lent %d KiB for outcomes", int(limit * limits.LOG_RESERVE) >> 10)
            await lend_reserve(self._broker, info, int(limit * limits.LOG_RESERVE))
        elif fill < limits.LOG_REOPEN and has_reserve(info):
            await lend_reserve(self._broker, info, 0)

    @staticmethod
    def _bytes_before(stored: StreamState, seq: int) -> int:
        """About how much of the log stands up to `seq`."""
        width = stored.last_seq - stored.first_seq + 1
        return stored.bytes * max(0, min(seq - stored.first_seq + 1, width)) // max(width, 1)

    @staticmethod
    def _trim_to(stored: StreamState, fill: float) -> int:
        """Up to which sequence the log should go; 0 if it is small enough. Nearly full, as far as it can."""
        if fill <= limits.LOG_TRIM:
            return 0
        if fill > limits.LOG_CLOSE:
            return stored.last_seq
        width = stored.last_seq - stored.first_seq + 1
        return stored.first_seq + int(width * (1 - limits.LOG_KEEP / fill))

    async def _checkpoint(self, state: State, log_created: str) -> None:
        try:
            end, places = await checkpoints.write(self._broker, state, log_created, self._payloads)
            self._payloads.checkpointed({action: place for action, place in places.items() if action in state.actions})
            self.ends.append(end)
            self._complaint = ""
            log.info("checkpoint at sequence %d: %d KiB of state, %d payloads", end.seq, end.state_bytes >> 10, end.payloads)
            await self._forget()
        except BrokerError as error:
            self._retry_s = time.monotonic() + RETRY_S
            self._complain(error)
        except Exception:  # a bug in here must not stop decisions; the log grows until somebody reads this
            self._retry_s = time.monotonic() + RETRY_S
            log.exception("no checkpoint")
        finally:
            self._writing = None

    async def _forget(self) -> None:
        """Old checkpoints go when there are many, or when the next ones would find no room; two stay whatever they take."""
        limit = bytes_limit(await self._broker.api(f"STREAM.INFO.{subjects.CHECKPOINTS}"))
        while len(self.ends) > 2:
            taken = sum(end.state_bytes + end.payload_bytes for end in self.ends)
            if len(self.ends) <= limits.CHECKPOINTS_MAX and (limit <= 0 or taken <= limit * limits.CHECKPOINTS_PART):
                break
            del self.ends[0]
        await checkpoints.forget_before(self._broker, self.ends[0])

    async def _trim(self, state: State, stored: StreamState, wanted_seq: int, fill: float) -> None:
        """Deletes up to about `wanted_seq`, to exactly where a checkpoint was taken that is not the newest, but nothing that a
        live executor still has to read; unless the log is so full that not even the executor's loss could be written. One
        that misses decisions joins anew."""
        pinned_seq = stored.last_seq
        for holder in list(state.incarnations.values()):
            if holder.live and fill < limits.LOG_LEND:
                consumer = subjects.consumer(holder.id)
                pinned_seq = min(pinned_seq, await read_up_to(self._broker, subjects.STREAM, consumer, pinned_seq))
        possible = [end.seq for end in self.ends[:-1] if stored.first_seq <= end.seq <= pinned_seq]
        if not possible:
            return
        to_seq = next((seq for seq in possible if seq >= wanted_seq), possible[-1])
        if state.epoch > to_seq:
            await purge(self._broker, subjects.STREAM, before_seq=to_seq + 1)
        else:
            self.wants_record_above = to_seq
            if fill < limits.LOG_CLOSE:
                return
            # There may be no room for a record. All but the old one can go, which leaves a hole until there is a new one.
            for subject in subjects.ALL_BUT_LEADER:
                await purge(self._broker, subjects.STREAM, before_seq=to_seq + 1, subject=subject)
            self._hole_to = to_seq
        assert self._grown_from_bytes is not None
        self._grown_from_bytes = max(0, self._grown_from_bytes - self._bytes_before(stored, to_seq))
        log.info("log trimmed up to sequence %d", to_seq)
        self.ends = [end for end in self.ends if end.seq >= to_seq]
        await checkpoints.forget_before(self._broker, self.ends[0])
