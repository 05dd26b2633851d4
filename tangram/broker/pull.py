"""Reading a consumer: pull requests are kept outstanding, messages are taken as they arrive.

nats-py's fetch() can stall for its whole time-out with the message in hand, so this is a loop of our own. `Pull`
is one inbox with its requests, and ends at the first trouble; `PullLoop` opens the next one for as long as it lives.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from tangram.broker.connection import Broker
from tangram.broker.errors import BrokerError, BrokerUnavailable
from tangram.broker.link import Subscription
from tangram.broker.mailbox import Mailbox
from tangram.broker.wire import Delivery, ack_metadata

log = logging.getLogger(__name__)

EXPIRES_S: Final = 30.0
"""How long the server keeps one request; after that it says 408 and we ask again."""
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of one request. Two may be open; the server cuts a connection off that owes more than max_pending (64 MiB)."""
HELD_BYTES_MAX: Final = 64 * 1024 * 1024
HELD_BATCHES_MAX: Final = 4
"""A reader that does not take what has arrived gets no more than this."""
RETRY_S: Final = 0.075
"""Between tries while the consumer does not exist yet, which is normal: somebody else makes it."""
HEARTBEATS_MISSED_MAX: Final = 2.5
PROOF_TIMEOUT_S: Final = 30.0
GRACE_S: Final = 0.2
"""Between the proof that the server has our request and the judgement that what should have come did not."""
_REQUEST_ENDED = ("Message Size Exceeds MaxBytes", "Batch Completed")


class Delivered(NamedTuple):
    """A stored message that a consumer handed out. `stamp_ns` is the server's wall clock when it was stored,
    `deliveries` is 1 unless it is a redelivery, `token` is what an acknowledgement is sent to."""

    seq: int
    stamp_ns: int
    subject: str
    data: bytes
    headers: "dict[str, str] | None"
    deliveries: int
    token: str


class Pull:
    """Requests on one inbox. After `trouble` is set (the reason, in words) it takes nothing more."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        consumer: str,
        on_message: Callable[[Delivery], None],
        *,
        batch: int,
        heartbeat_s: float,
        has_room: Callable[[], bool],
    ) -> None:
        self._broker, self._on_message, self._has_room = broker, on_message, has_room
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._batch, self._heartbeat_s = batch, heartbeat_s
        self._body = msgspec.json.encode(
            {
                "batch": batch,
                "max_bytes": REQUEST_BYTES_MAX,
                "expires": int(EXPIRES_S * 1e9),
                "idle_heartbeat": int(heartbeat_s * 1e9),
            }
        )
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._asked_s = self._heard_s = self._loop.time()
        self._proved_s = 0.0
        self._proof: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._ended = asyncio.Event()
        self.trouble = ""
        self.missing = False
        """The trouble is that there is no such consumer."""
        self.confirmed = False
        """The consumer has answered: a message or a heartbeat."""

    async def open(self) -> None:
        """Raises BrokerUnavailable if the connection is closed."""
        self._inbox = self._broker.new_inbox()
        self._subscription = await self._broker.subscribe(self._inbox, self._take, confirm=False)
        self.top_up()

    def top_up(self) -> None:
        """Asks for another batch when half of the last is used up and there is room. Cheap; call it when room was made."""
        if self._asked > self._batch // 2 or self.trouble or not self._has_room():
            return
        if self._asked == 0:
            self._heard_s = self._loop.time()  # no heartbeats came while nothing was asked
        self._asked += self._batch
        self._asked_s = self._loop.time()
        self._broker.send_soon(self._subject, self._body, reply=self._inbox)

    def fail(self, reason: str) -> None:
        if not self.trouble:
            self.trouble = reason
            self._ended.set()

    async def ended(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for trouble, checking the heartbeats; True if there is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            if self._broker.is_closed:
                self.fail("the connection is closed")
            elif self._asked > 0 and self.overdue(self._heard_s, HEARTBEATS_MISSED_MAX * self._heartbeat_s):
                self.fail(f"no heartbeat for {self._loop.time() - self._heard_s:.1f} s")
            self.top_up()
        return bool(self.trouble)

    def overdue(self, since_s: float, patience_s: float) -> bool:
        """True when more than `patience_s` have passed since `since_s` (loop time) and it is not the connection's fault.

        Our request may wait behind thousands of publishes that the server still has to sync; asking anew would only make
        that worse. So silence counts when a ping sent after the request has been answered. Call it again and again.
        """
        now_s = self._loop.time()
        if now_s - since_s <= patience_s or not self._broker.is_connected:
            return False
        if self._proved_s < self._asked_s:
            if self._proof is None or self._proof.done():
                self._proof = asyncio.create_task(self._prove())
            return False
        return now_s - max(since_s, self._proved_s) > GRACE_S

    async def _prove(self) -> None:
        begin_s = self._loop.time()
        try:
            await self._broker.flush(PROOF_TIMEOUT_S)
        except BrokerError:
            return
        if begin_s >= self._asked_s:
            self._proved_s = self._loop.time()

    async def close(self) -> None:
        self.fail("closed")
        if self._proof is not None:
            self._proof.cancel()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def _take(self, delivery: Delivery) -> None:
        if self.trouble:
            return
        self._heard_s = self._loop.time()
        headers = delivery.headers
        if headers is not None and not delivery.reply and "Status" in headers:
            self._take_status(headers["Status"], headers.get("Description", ""), headers.get("Nats-Pending-Messages", ""))
            return
        self.confirmed = True
        self._asked = max(0, self._asked - 1)
        self._on_message(delivery)
        self.top_up()

    def _take_status(self, status: str, description: str, pending: str) -> None:
        if status == "100":
            self.confirmed = True
        elif status in ("404", "408") or (status == "409" and description in _REQUEST_ENDED):
            self._asked = max(0, self._asked - int(pending or self._batch))
            self.top_up()
        else:
            self.missing = status == "503" or "Consumer Deleted" in description
            self.fail(f"{status} {description}".strip() if status != "503" else "no such consumer")


class PullLoop:
    """Reads a durable consumer that somebody else makes, for as long as it lives, over restarts of anything.

    `state` is "waiting" (no sign from the consumer yet), "reading", "missing" (it does not exist: tried again quietly) or
    "disconnected".
    """

    def __init__(self, broker: Broker, stream: str, consumer: str, *, batch: int, heartbeat_s: float) -> None:
        self._broker, self._stream, self._consumer = broker, stream, consumer
        self._batch, self._heartbeat_s = batch, heartbeat_s
        self._mailbox: Mailbox[Delivered] = Mailbox()
        self._pull: Pull | None = None
        self._missing = False
        self._forget = broker.on_reconnect(lambda: self._fail("reconnected"))
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, broker: Broker, stream: str, consumer: str, *, batch: int = 256, heartbeat_s: float = 1.0) -> "PullLoop":
        """Starts reading. The consumer need not exist yet."""
        self = cls(broker, stream, consumer, batch=batch, heartbeat_s=heartbeat_s)
        self._task = asyncio.create_task(self._run())
        return self

    @property
    def state(self) -> str:
        if not self._broker.is_connected:
            return "disconnected"
        if self._missing:
            return "missing"
        return "reading" if self._pull is not None and self._pull.confirmed else "waiting"

    async def batch(self, timeout_s: float | None = None) -> list[Delivered]:
        """Waits for a message and returns all that have arrived; [] after `timeout_s`. A time-out loses nothing.

        Raises BrokerUnavailable when the connection is closed for good.
        """
        messages = await self._mailbox.take(timeout_s)
        if messages and self._pull is not None:
            self._pull.top_up()
        return messages

    def ack(self, delivered: Delivered) -> None:
        """Acknowledges, without waiting; it may get lost, then the message comes again after the consumer's ack_wait."""
        self._broker.send_soon(delivered.token, b"+ACK")

    async def close(self) -> None:
        """Stops reading. What was not acknowledged is delivered again to the next reader."""
        self._forget()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _fail(self, reason: str) -> None:
        if self._pull is not None:
            self._pull.fail(reason)

    def _has_room(self) -> bool:
        return len(self._mailbox) < HELD_BATCHES_MAX * self._batch and self._mailbox.bytes_held < HELD_BYTES_MAX

    def _take(self, delivery: Delivery) -> None:
        try:
            metadata = ack_metadata(delivery.reply)
        except ValueError as error:
            log.error("%s.%s: %s", self._stream, self._consumer, error)
            return
        self._missing = False
        headers = dict(delivery.headers) if delivery.headers is not None else None
        message = Delivered(
            metadata.stream_seq, metadata.stamp_ns, delivery.subject, delivery.data, headers, metadata.delivered, delivery.reply
        )
        self._mailbox.put(message, len(delivery.data))

    async def _run(self) -> None:
        while not self._broker.is_closed:
            pull = self._pull = Pull(
                self._broker,
                self._stream,
                self._consumer,
                self._take,
                batch=self._batch,
                heartbeat_s=self._heartbeat_s,
                has_room=self._has_room,
            )
            try:
                await pull.open()
                while not await pull.ended(self._heartbeat_s / 4):
                    self._missing = self._missing and not pull.confirmed
            except BrokerError as error:
                pull.fail(str(error))
            finally:
                await pull.close()
            if pull.missing != self._missing:
                self._missing = pull.missing
                log.info("%s.%s: %s", self._stream, self._consumer, pull.trouble)
            elif not pull.missing:
                log.warning("%s.%s: %s; asking anew", self._stream, self._consumer, pull.trouble)
            if pull.trouble != "reconnected":
                await asyncio.sleep(RETRY_S)
        self._mailbox.fail(BrokerUnavailable("the connection is closed"))
