"""Reading every message of a stream, in order, none missing, none twice, whatever restarts."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from tangram.broker.connection import Broker
from tangram.broker.errors import BrokerError, BrokerUnavailable, LogGap, LogTruncated
from tangram.broker.log import StoredMessage, next_stored, state_of
from tangram.broker.mailbox import Mailbox
from tangram.broker.pull import HELD_BATCHES_MAX, HELD_BYTES_MAX, Pull
from tangram.broker.wire import Delivery, ack_metadata

log = logging.getLogger(__name__)

BATCH: Final = 512
HEARTBEAT_S: Final = 1.0
TICK_S: Final = 0.2
RETRY_S: Final = 0.1
SAY_S: Final = 5.0
"""Between two words about a stream that cannot be read."""
EXPECT_S: Final = 1.0
"""A message known to be stored, and not read this long after, means that the consumer is dead without saying so."""
INACTIVE_S: Final = 30.0
_GAP = "gap"


class LogReader:
    """Owns a consumer (no acknowledgements, in memory, deleted by the server when left alone) and re-makes it at the
    next sequence: at a gap, after a reconnect, when heartbeats stay away, when an expected message does.

    `next_seq` is the sequence after the last one that has arrived (taken by `batch` or not); `remakes` counts; `state` is
    "reading" or why it is not.
    """

    def __init__(self, broker: Broker, stream: str, start_seq: int, on_gap: Callable[[int, int], None] | None) -> None:
        self._broker, self._stream, self._on_gap = broker, stream, on_gap
        self.next_seq = start_seq
        self.remakes = 0
        self.state = "starting"
        self._mailbox: Mailbox[StoredMessage] = Mailbox()
        self._pull: Pull | None = None
        self._consumer = ""
        self._created = ""
        self._expected_seq = 0
        self._progress_s = 0.0
        self._said_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._forget = broker.on_reconnect(lambda: self._fail("reconnected"))
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, broker: Broker, stream: str, start_seq: int, *, on_gap: Callable[[int, int], None] | None = None
    ) -> "LogReader":
        """Reads from `start_seq` (>= 1). `on_gap(first, last)` is called when messages have been deleted, and reading goes
        on behind them; without it `batch` then raises LogGap.

        Raises LogGap or LogTruncated if that is so from the start, ApiError (no such stream), BrokerUnavailable,
        BrokerTimeout.
        """
        self = cls(broker, stream, max(1, start_seq), on_gap)
        try:
            await self._open()
        except BaseException:
            self._forget()
            raise
        self._task = asyncio.create_task(self._run())
        return self

    async def batch(self, timeout_s: float | None = None) -> list[StoredMessage]:
        """Waits for a message and returns all that have arrived; [] after `timeout_s` seconds. One caller at a time.

        Raises LogGap, LogTruncated, BrokerUnavailable (closed for good), after everything before it was returned.
        """
        messages = await self._mailbox.take(timeout_s)
        if messages and self._pull is not None:
            self._pull.top_up()
        return messages

    def wake(self) -> None:
        """Lets `batch` return at once."""
        self._mailbox.wake()

    def expect(self, seq: int) -> None:
        """Says that message `seq` is stored (its acknowledgement was seen), so it has to arrive within EXPECT_S."""
        if seq >= self.next_seq and self._expected_seq < self.next_seq:
            self._progress_s = self._loop.time()
        self._expected_seq = max(self._expected_seq, seq)

    async def close(self) -> None:
        self._forget()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._leave()

    # ---------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        reason = ""
        while not self._broker.is_closed:
            try:
                if self._pull is None:
                    await self._open(look_for_gap=reason == _GAP)
                pull = self._pull
                assert pull is not None
                while not await pull.ended(TICK_S):
                    self._check_expected(pull)
                reason = pull.trouble
            except (LogGap, LogTruncated) as error:
                self.state = str(error)
                self._mailbox.fail(error)
                await self._leave()
                return
            except BrokerError as error:
                reason = str(error)
            await self._leave()
            self.remakes += 1
            if self.state == "reading" or self._loop.time() - self._said_s >= SAY_S:
                self._said_s = self._loop.time()
                log.warning("%s: reader re-made at %d: %s", self._stream, self.next_seq, reason)
            self.state = reason
            if reason not in ("reconnected", _GAP):
                await asyncio.sleep(RETRY_S)
        self._mailbox.fail(BrokerUnavailable("the connection is closed"))

    async def _open(self, *, look_for_gap: bool = False) -> None:
        info = await self._broker.api(f"STREAM.INFO.{self._stream}")
        state = state_of(info)
        if info["created"] != (self._created or info["created"]):
            raise LogTruncated(self._stream, 0, self.next_seq)  # deleted and made again: nothing of what was seen is in it
        self._created = info["created"]
        if state.last_seq < self.next_seq - 1:
            raise LogTruncated(self._stream, state.last_seq, self.next_seq)
        if state.first_seq > self.next_seq:
            self._skip_to(state.first_seq)
        elif look_for_gap:
            following = await next_stored(self._broker, self._stream, self.next_seq)
            if following is not None and following.seq > self.next_seq:
                self._skip_to(following.seq)
        self._consumer = "reader-" + secrets.token_hex(8)
        config = {
            "name": self._consumer,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.next_seq,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        body = {"stream_name": self._stream, "config": config, "action": "create"}
        await self._broker.api(f"CONSUMER.CREATE.{self._stream}.{self._consumer}", body)
        pull = Pull(
            self._broker,
            self._stream,
            self._consumer,
            self._take,
            batch=BATCH,
            heartbeat_s=HEARTBEAT_S,
            has_room=self._has_room,
        )
        await pull.open()
        self._pull = pull
        self._progress_s = self._loop.time()
        self.state = "reading"

    async def _leave(self) -> None:
        pull, self._pull = self._pull, None
        if pull is not None:
            await pull.close()
        if self._consumer:
            # A courtesy: unread, it goes by itself after INACTIVE_S.
            self._broker.send_soon(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}", b"")
            self._consumer = ""

    def _skip_to(self, seq: int) -> None:
        first, last = self.next_seq, seq - 1
        if self._on_gap is None:
            raise LogGap(self._stream, first, last)
        log.warning("%s: messages %d to %d are no longer stored; skipped", self._stream, first, last)
        self._on_gap(first, last)
        self.next_seq = seq

    def _take(self, delivery: Delivery) -> None:
        try:
            metadata = ack_metadata(delivery.reply)
        except ValueError as error:
            self._fail(str(error))
            return
        if metadata.stream_seq != self.next_seq:
            if metadata.stream_seq > self.next_seq:
                self._fail(_GAP)
            return
        self.next_seq += 1
        self._progress_s = self._loop.time()
        message = StoredMessage(metadata.stream_seq, metadata.stamp_ns, delivery.subject, delivery.data, delivery.headers)
        self._mailbox.put(message, len(delivery.data))

    def _check_expected(self, pull: Pull) -> None:
        if self._expected_seq >= self.next_seq and self._has_room() and pull.overdue(self._progress_s, EXPECT_S):
            pull.fail(f"{self._expected_seq} is stored and has not arrived")

    def _fail(self, reason: str) -> None:
        if self._pull is not None:
            self._pull.fail(reason)

    def _has_room(self) -> bool:
        return len(self._mailbox) < HELD_BATCHES_MAX * BATCH and self._mailbox.bytes_held < HELD_BYTES_MAX
