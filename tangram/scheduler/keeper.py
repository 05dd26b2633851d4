"""Keeps the log within its limit: checkpoints as it grows, trims behind them, and says when submissions have to wait.

It works beside the scheduler's turns and writes nothing to the log itself: what it wants the leader to write stands in
`admission_closed` and `wants_record_above`.
"""

import asyncio
import logging
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
        self._grown_from_bytes: int | None = None
        """The log's size at the last checkpoint, less what was trimmed since."""
        self._complaint = ""

    async def run(self, state: State) -> None:
        """Returns never. `state` may change between two awaits, by whole steps."""
        while True:
            pause_s = LOOK_S
            try:
                await self._look(state)
                self._complaint = ""
            except BrokerError as error:
                pause_s = RETRY_S
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.error("the log cannot be trimmed: %s", error)
            await asyncio.sleep(pause_s)

    async def _look(self, state: State) -> None:
        info = await self._broker.api(f"STREAM.INFO.{subjects.STREAM}")
        stored, limit = state_of(info), bytes_limit(info)
        fill = stored.bytes / limit if limit > 0 else 0.0
        self.admission_closed = fill > (limits.LOG_REOPEN if self.admission_closed else limits.LOG_CLOSE)
        await self._reserve(info, fill, limit)
        if self._grown_from_bytes is None:
            self._grown_from_bytes = self._bytes_before(stored, self.ends[-1].seq if self.ends else 0)
        trim_to = self._trim_to(stored, fill)
        behind = trim_to > self._trimmable()
        grown = stored.bytes - self._grown_from_bytes
        step = min(limits.CHECKPOINT_BYTES_MAX, limit * limits.CHECKPOINT_PART if limit > 0 else limits.CHECKPOINT_BYTES_MAX)
        if (grown > step or behind) and (not self.ends or state.seq > self.ends[-1].seq):
            self._grown_from_bytes = stored.bytes
            await self._checkpoint(state, info["created"])
        if trim_to:
            await self._trim(state, stored, min(trim_to, self._trimmable()))

    async def _reserve(self, info: dict[str, Any], fill: float, limit: int) -> None:
        if fill > limits.LOG_LEND and not has_reserve(info):
            log.warning("the log is nearly full: it is lent %d MiB for outcomes", int(limit * limits.LOG_RESERVE) >> 20)
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

    def _trimmable(self) -> int:
        """The older of two checkpoints has to do if the newer cannot be read."""
        return self.ends[0].seq if len(self.ends) > 1 else 0

    async def _checkpoint(self, state: State, log_created: str) -> None:
        end, places = await checkpoints.write(self._broker, state, log_created, self._payloads)
        self._payloads.checkpointed({action: place for action, place in places.items() if action in state.actions})
        self.ends = [*self.ends[-1:], end]
        log.info("checkpoint at sequence %d: %d KiB of state, %d payloads", end.seq, end.state_bytes >> 10, end.payloads)
        await checkpoints.forget_before(self._broker, self.ends[0])

    async def _trim(self, state: State, stored: StreamState, to_seq: int) -> None:
        """Deletes up to `to_seq`, which a checkpoint has, but nothing that a live executor still has to read."""
        for holder in state.incarnations.values():
            if holder.live:
                to_seq = min(to_seq, await read_up_to(self._broker, subjects.STREAM, subjects.consumer(holder.id), to_seq))
        if to_seq < stored.first_seq:
            return
        if state.epoch <= to_seq:
            self.wants_record_above = to_seq
            return
        await purge(self._broker, subjects.STREAM, before_seq=to_seq + 1)
        assert self._grown_from_bytes is not None
        self._grown_from_bytes = max(0, self._grown_from_bytes - self._bytes_before(stored, to_seq))
        log.info("log trimmed up to sequence %d", to_seq)
