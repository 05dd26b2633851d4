"""What roles do with the broker: publish with acknowledgement, send, ask, subscribe, call the JetStream API."""

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import msgspec

from tangram.broker.errors import ApiError, BrokerError, BrokerTimeout, BrokerUnavailable, Busy, MessageTooLarge
from tangram.broker.link import Link, Subscription
from tangram.broker.replies import Inbox, Replies, Sink
from tangram.broker.wire import Delivery, PubAck, header_bytes

ACK_TIMEOUT_S: Final = 10.0
"""A publish without an answer (a denied subject never gets one) fails after this; callers usually give up earlier."""
SWEEP_S: Final = 0.5
OUTSTANDING_MAX: Final = 65_536
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Publishes without an answer, and bytes not yet handed to the socket: beyond either, publishing is refused as Busy."""
API_TIMEOUT_S: Final = 5.0
API_AGAIN_S: Final = 1.0
"""A question to JetStream that nobody has answered is asked again: who was to answer may have died with it, or not yet lead."""
_NO_LEADER: Final = frozenset({10008, 10118, 10119})
"""Of a cluster, of a stream, of a consumer: "temporarily unavailable", "offline". Passes with the election."""

Headers = Mapping[str, str]


class Broker:
    """A connection that comes back by itself. Use it from one event loop only.

    Calls of `publish_soon`, `send_soon` and `send` reach the wire in the order in which they were made. Nothing is buffered
    while disconnected: publishes fail at once, and those on their way fail when the connection is lost; callers retry.
    """

    def __init__(self, url: str, *, inbox_prefix: str, on_closed: Callable[[], None] | None) -> None:
        self._link = Link(url, on_lost=self._on_lost, on_closed=on_closed)
        self._loop = asyncio.get_running_loop()
        self._replies = Replies(f"{inbox_prefix}.{secrets.token_hex(12)}.")
        self._sweep_task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        connect_timeout_s: float = 5.0,
        on_closed: Callable[[], None] | None = None,
        inbox_prefix: str = "_INBOX",
        tls: ssl.SSLContext | None = None,
        nkey_seed_file: str | None = None,
    ) -> Self:
        """Connects to `url` (one, or several separated by commas), trying until `connect_timeout_s` is over.

        `on_closed` is called once if the server ends the connection in a way that the client does not come back from; the
        process should then end. `inbox_prefix` must match what the server lets this identity subscribe to.
        Raises BrokerUnavailable, with one line that names the url without its password.
        """
        self = cls(url, inbox_prefix=inbox_prefix, on_closed=on_closed)
        await self._link.connect(
            name=name, timeout_s=connect_timeout_s, inbox_prefix=inbox_prefix, tls=tls, nkey_seed_file=nkey_seed_file
        )
        await self._link.subscribe(self._replies.prefix + "*", self._replies.take)
        self._sweep_task = asyncio.create_task(self._sweep())
        return self

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Without its credential."""
        return self._link.url

    @property
    def max_payload(self) -> int:
        """Bytes that payload and header block may have together; the server says it at each connect."""
        return self._link.nc.max_payload

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    @property
    def is_closed(self) -> bool:
        """True after `close()`, or when the connection ended for good."""
        return self._link.is_closed

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and made again."""
        return self._link.reconnects

    def is_denied(self, subject: str) -> bool:
        """Whether the server has refused what was sent on this subject. It says so aside, and the sender only hears nothing."""
        return subject.lower() in self._link.denied

    def require_connected(self) -> None:
        """Raises BrokerUnavailable unless connected."""
        self._link.require_connected()

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` after each reconnect, subscriptions being in place. Returns what takes it off again."""
        return self._link.on_reconnect(callback)

    @property
    def backlog_bytes(self) -> int:
        """Handed over, and not yet written to the socket."""
        return int(self._link.nc.pending_data_size)

    # --- publish and send --------------------------------------------------------------------------------------

    def publish_soon(self, subject: str, data: bytes, *, headers: Headers | None = None) -> asyncio.Future[PubAck]:
        """Publishes to a stream without waiting; the future has the acknowledgement.

        Never raises. The future fails with MessageTooLarge or BrokerUnavailable (nothing was sent), PublishRefused
        (nothing was stored) or BrokerTimeout (connection lost, or ACK_TIMEOUT_S: may or may not be stored).
        """
        future: asyncio.Future[PubAck] = self._loop.create_future()
        reply = ""
        try:
            self._check_size(data, headers)
            if self._replies.acks_outstanding >= OUTSTANDING_MAX or self._link.nc.pending_data_size > PENDING_BYTES_MAX:
                raise Busy(0, "too much is on its way to the broker")
            reply = self._replies.expect_ack(future, self._loop.time() + ACK_TIMEOUT_S)
            self._link.write(subject, data, reply, headers)
        except BrokerError as error:
            self._replies.forget_ack(reply)
            future.set_exception(error)
            future.exception()  # the caller may look at it or not; asyncio shall not complain
        return future

    async def publish(self, subject: str, data: bytes, *, headers: Headers | None = None, timeout_s: float = 5.0) -> PubAck:
        """`publish_soon`, and waits. Raises as its future does, BrokerTimeout after `timeout_s`."""
        future = self.publish_soon(subject, data, headers=headers)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise BrokerTimeout(f"{subject}: no acknowledgement in {timeout_s:g} s; may or may not be stored") from None

    def send_soon(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Sends a message that nobody acknowledges; dropped if not connected. Raises MessageTooLarge, BrokerError
        (bad subject)."""
        self._check_size(data, headers)
        with contextlib.suppress(BrokerUnavailable):  # core NATS promises nothing; who needs to know asks or publishes
            self._link.write(subject, data, reply, headers)

    async def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """`send_soon`, for callers that want a coroutine."""
        self.send_soon(subject, data, reply=reply)

    # --- ask ---------------------------------------------------------------------------------------------------

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> bytes:
        """Asks and returns the first answer's payload.

        Raises BrokerUnavailable (nobody answers this subject, or not connected), BrokerTimeout, MessageTooLarge.
        """
        return (await self.ask(subject, data, timeout_s=timeout_s, headers=headers)).data

    async def ask(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None, again_s: float | None = None
    ) -> Delivery:
        """`request` that returns the whole answer, headers included. With `again_s` it is asked anew that often, and the first
        answer counts: for what may be done twice."""
        answer: asyncio.Future[Delivery] = self._loop.create_future()

        def sink(delivery: Delivery | BrokerError) -> None:
            if answer.done():
                return
            if isinstance(delivery, BrokerError):
                answer.set_exception(delivery)
            elif delivery.status == "503":
                answer.set_exception(BrokerUnavailable(f"nobody answers {subject}"))
            else:
                answer.set_result(delivery)

        self._check_size(data, headers)
        inbox = self._replies.open(sink)
        try:
            async with asyncio.timeout(timeout_s):
                while not answer.done():
                    self._link.write(subject, data, inbox.subject, headers)
                    await asyncio.wait({answer}, timeout=again_s)
                return answer.result()
        except TimeoutError:
            raise BrokerTimeout(f"{subject}: no answer in {timeout_s:g} s") from None
        finally:
            inbox.close()

    async def api(self, name: str, body: object = None, timeout_s: float = API_TIMEOUT_S) -> dict[str, Any]:
        """Calls `$JS.API.<name>`, again and again until it is answered: it may be done twice. Raises ApiError if refused,
        BrokerUnavailable also while a cluster has no leader for what is asked, else as `request` does."""
        data = b"" if body is None else msgspec.json.encode(body)
        delivery = await self.ask(f"$JS.API.{name}", data, timeout_s=timeout_s, again_s=API_AGAIN_S)
        answer = msgspec.json.decode(delivery.data, type=dict[str, Any])
        error = answer.get("error")
        if error is not None and error.get("err_code") in _NO_LEADER:
            raise BrokerUnavailable(f"{name}: {error.get('description')} ({error['err_code']})")
        if error is not None:
            raise ApiError(error.get("err_code", 0), error.get("description", "refused"), status=error.get("code", 0))
        return answer

    def open_inbox(self, sink: Sink) -> Inbox:
        """A subject on which several answers to one question arrive, for the modules of this package."""
        return self._replies.open(sink)

    # --- subscribe ---------------------------------------------------------------------------------------------

    async def subscribe(self, subject: str, callback: Callable[[Delivery], None], *, confirm: bool = True) -> Subscription:
        """Calls `callback` for each message on `subject`, in order, in the loop's thread. It must only enqueue.

        Returns when the server knows of it (when connected, unless `confirm` is False). Nothing is dropped for a slow
        callback. Raises BrokerError for a bad subject, BrokerUnavailable if closed, BrokerTimeout.
        """
        subscription = await self._link.subscribe(subject, callback)
        if confirm and self.is_connected:
            try:
                await self.flush()
            except BrokerUnavailable:
                pass  # lost just now: it is subscribed again when that is over
            except BaseException:
                await subscription.unsubscribe()
                raise
        return subscription

    def new_inbox(self) -> str:
        """A fresh subject for a subscription of its own (a consumer's messages do not keep the inbox in their subject)."""
        return self._link.nc.new_inbox()

    # --- life --------------------------------------------------------------------------------------------------

    async def rtt(self, timeout_s: float = API_TIMEOUT_S) -> float:
        """Seconds of one ping and pong. Raises BrokerTimeout, BrokerUnavailable."""
        return await self._link.rtt(timeout_s)

    async def flush(self, timeout_s: float = API_TIMEOUT_S) -> None:
        """Returns when the server has taken all that was sent before. Raises BrokerTimeout, BrokerUnavailable."""
        await self._link.flush(timeout_s)

    async def close(self) -> None:
        """Ends the connection; outstanding publishes fail. Takes two seconds at most, raises nothing."""
        if self._sweep_task is not None:
            self._sweep_task.cancel()
        await self._link.close()

    def _check_size(self, data: bytes, headers: Headers | None) -> None:
        # The server would close the connection, and nats-py then does not come back.
        size = len(data) + header_bytes(headers)
        if size > self._link.nc.max_payload:
            raise MessageTooLarge(f"{size} bytes with headers, the broker takes {self._link.nc.max_payload}")

    def _on_lost(self, error: BrokerError) -> None:
        self._replies.fail_all(error, BrokerUnavailable("connection lost"))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._replies.expire(self._loop.time(), BrokerTimeout("no acknowledgement; may or may not be stored"))
