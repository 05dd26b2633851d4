"""The connection itself: the only module that drives nats-py. It connects, writes, proves it is alive, comes back, ends.

Traps of nats-py 2.16 that it keeps from everybody else:
- what is published while disconnected is stored after the reconnect, when its sender has long given up: so buffering is
  off (`pending_size=-1`) and what was not yet written is thrown away at a disconnect;
- with a full buffer publish() swallows cancellation: without a buffer limit it never waits;
- a rtt() or flush() that times out or is cancelled ends the read loop when the pong comes late, and nobody is told;
- a message over max_payload, headers included, closes the client for good: `Broker` measures first.
"""

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from tangram.broker.errors import BrokerError, BrokerTimeout, BrokerUnavailable, from_nats
from tangram.broker.wire import Delivery

log = logging.getLogger(__name__)

RECONNECT_WAIT_S: Final = 0.1
"""Plus up to as much again, so that thousands of clients do not come back in step."""
PING_INTERVAL_S: Final = 10
WATCH_S: Final = 2.0
"""How often the watchdog proves that the read loop is alive: nats-py's can end without anybody being told."""
WATCH_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 2.0
DENIED_MAX: Final = 1_000
_DENIED: Final = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)
RESETS_MAX: Final = 3


def without_credentials(url: str) -> str:
    """The url(s) as they may be shown and logged."""
    return ",".join(_shown(part) for part in url.split(","))


def _shown(url: str) -> str:
    if "://" not in url:
        return url.rpartition("@")[2]
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class Subscription:
    """Interest in a subject, until `unsubscribe`. Kept over reconnects."""

    def __init__(self, inner: NatsSubscription) -> None:
        self._inner = inner

    async def unsubscribe(self) -> None:
        """Ends it; what has arrived but was not yet handed to the callback is dropped. Never raises."""
        try:
            await self._inner.unsubscribe()
        except Exception as error:  # closed, closing or done before: the interest is gone either way
            log.debug("unsubscribe: %s", from_nats(error))


class Link:
    """One nats-py client. `on_lost(error)` is called when whatever was outstanding will not be answered."""

    def __init__(self, url: str, *, on_lost: Callable[[BrokerError], None], on_closed: Callable[[], None] | None) -> None:
        self.url: Final = without_credentials(url)
        self.nc: Final = Client()
        self.reconnects = 0
        self.denied: dict[str, None] = {}
        """Subjects, in small letters as nats-py gives them, on which the server took nothing from us; the latest ones."""
        self._servers = url.split(",")
        self._on_lost, self._on_closed = on_lost, on_closed
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._pings: set[asyncio.Task[float]] = set()
        self._watch_task: asyncio.Task[None] | None = None
        self._refused = asyncio.Event()
        self._resets = 0
        self._closed = False
        self._reported = False
        self._last_error = ""

    @property
    def is_connected(self) -> bool:
        return self.nc.is_connected and not self._closed

    @property
    def is_closed(self) -> bool:
        return self._closed or self.nc.is_closed

    async def connect(
        self, *, name: str, timeout_s: float, inbox_prefix: str, tls: ssl.SSLContext | None, nkey_seed_file: str | None
    ) -> None:
        """Raises BrokerUnavailable when not connected after `timeout_s`, or at once when the credential is refused."""
        options: dict[str, Any] = {"tls": tls, "nkeys_seed": nkey_seed_file}
        connecting = asyncio.create_task(
            self.nc.connect(
                servers=self._servers,
                name=name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_nats_closed,
                connect_timeout=max(1, int(min(timeout_s, 2.0))),
                reconnect_time_wait=RECONNECT_WAIT_S * (1.0 + random.random()),  # type: ignore[arg-type]  # any number works
                max_reconnect_attempts=-1,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=2,
                inbox_prefix=inbox_prefix,
                pending_size=-1,
                **{option: value for option, value in options.items() if value is not None},
            )
        )
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait({connecting, refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise BrokerUnavailable(f"cannot connect to {self.url}: {self._last_error or f'no answer in {timeout_s:g} s'}")
            error = connecting.exception()
            if error is not None:
                raise BrokerUnavailable(f"cannot connect to {self.url}: {from_nats(error)}") from error
        except BaseException:
            connecting.cancel()
            await self.close()
            raise
        finally:
            refused.cancel()
        self._last_error = ""
        self._watch_task = asyncio.create_task(self._watch())

    def require_connected(self) -> None:
        if not self.is_connected:
            raise BrokerUnavailable("not connected to the broker")

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._reconnect_callbacks.append(callback)

        def forget() -> None:
            if callback in self._reconnect_callbacks:
                self._reconnect_callbacks.remove(callback)

        return forget

    def write(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Puts one message into nats-py's buffer, now. Raises BrokerUnavailable, BrokerError (bad subject or header).

        Its publish() is a coroutine, but with pending_size=-1 it does nothing after the command is in the buffer that
        could suspend (the flusher's queue is only put to when empty; the inline flush of a dead flusher may wait for
        the socket, with the bytes written). So it is stepped once: no task, no swallowed cancellation, wire order.
        """
        if self._closed:
            raise BrokerUnavailable("closed")
        coroutine = self.nc.publish(subject, data, reply=reply, headers=dict(headers) if headers is not None else None)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        except Exception as error:
            raise from_nats(error) from error
        coroutine.close()

    async def subscribe(self, subject: str, callback: Callable[[Delivery], None]) -> Subscription:
        """No limits on what waits for the callback: nats-py would drop what is over."""

        async def on_message(message: Msg) -> None:
            callback(Delivery(message.subject, message.data, message.headers, message.reply))

        try:
            return Subscription(await self.nc.subscribe(subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0))
        except Exception as error:
            raise from_nats(error) from error

    async def rtt(self, timeout_s: float = WATCH_TIMEOUT_S) -> float:
        """Seconds of one ping and pong. Raises BrokerTimeout, BrokerUnavailable."""
        self.require_connected()
        begin_s = time.perf_counter()
        # In a task that is waited for and never cancelled while connected: see the top of this module.
        ping: asyncio.Task[float] = asyncio.create_task(self.nc.rtt(timeout=86_400))
        self._pings.add(ping)
        ping.add_done_callback(self._ping_done)
        await asyncio.wait({ping}, timeout=timeout_s)
        if not ping.done():
            raise BrokerTimeout(f"no pong in {timeout_s:g} s")
        if ping.cancelled():
            raise BrokerUnavailable("connection lost")
        error = ping.exception()
        if error is not None:
            raise from_nats(error) from error
        return time.perf_counter() - begin_s

    def _ping_done(self, ping: "asyncio.Task[float]") -> None:
        self._pings.discard(ping)
        if not ping.cancelled():
            ping.exception()  # seen, whoever waited

    async def flush(self, timeout_s: float = WATCH_TIMEOUT_S) -> None:
        """Returns when the server has taken all that was written before. Raises BrokerTimeout, BrokerUnavailable."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = 0.0
        # nats-py writes a ping past its own buffer, so the buffer has to be empty first.
        while self.is_connected and self.nc.pending_data_size > 0:
            if time.monotonic() > deadline_s:
                raise BrokerTimeout(f"the broker has not read what was sent for {timeout_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = 0.001
        await self.rtt(max(0.001, deadline_s - time.monotonic()))

    async def close(self) -> None:
        """Takes CLOSE_TIMEOUT_S at most. nats-py's drain() may block for 30 s, and its close() for as long as the peer
        does not read; so what is left is flushed within a bound and then dropped."""
        if self._closed:
            return
        if self.nc.is_connected:
            try:
                await self.flush(CLOSE_TIMEOUT_S / 2)
            except BrokerError as error:
                log.debug("close: %s", error)
        self._closed = True
        if self._watch_task is not None:
            self._watch_task.cancel()
        closing = asyncio.create_task(self.nc.close())
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S / 2)
        closing.cancel()
        self._lost(BrokerTimeout("closed; may or may not be stored"))

    def _lost(self, error: BrokerError) -> None:
        self._on_lost(error)
        for ping in list(self._pings):
            ping.cancel()

    async def _on_disconnected(self) -> None:
        # Subscriptions are replayed from elsewhere, so nothing in this buffer is needed. (No public call empties it.)
        self.nc._pending.clear()
        self.nc._pending_data_size = 0
        self._lost(BrokerTimeout("connection lost; may or may not be stored"))

    async def _on_reconnected(self) -> None:
        self.reconnects += 1
        self._last_error = ""
        log.warning("connected to %s again", self.url)
        for callback in list(self._reconnect_callbacks):
            try:
                callback()
            except Exception:
                log.exception("a reconnect callback failed")

    async def _on_error(self, error: Exception) -> None:
        words = str(from_nats(error))
        if (denied := _DENIED.search(words)) is not None:
            while len(self.denied) >= DENIED_MAX:
                del self.denied[next(iter(self.denied))]
            self.denied[denied[1].lower()] = None
        connecting = self._watch_task is None
        if connecting and isinstance(error, ConnectionResetError) and self.nc._server_info.get("auth_required"):
            # The server's refusal is lost when it closes with our ping unread; one that is going down does not do this
            # again and again.
            words = f"{words} (authorization refused?)"
            self._resets += 1
        if "authorization violation" in words.lower() or self._resets >= RESETS_MAX:
            self._refused.set()
        if words != self._last_error:  # a server that is away fails ten times a second with the same words
            self._last_error = words
            if not connecting:
                log.warning("%s: %s", self.url, words)

    async def _on_nats_closed(self) -> None:
        if self._closed or self._reported or self._watch_task is None:
            return
        self._reported = True
        self._lost(BrokerTimeout("connection closed; may or may not be stored"))
        log.error("%s closed the connection for good: %s", self.url, self.nc.last_error or self._last_error)
        if self._on_closed is not None:
            self._on_closed()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self.nc.is_closed:
                await self._on_nats_closed()
            if not self.is_connected:
                reconnecting = self.nc._reconnection_task
                if reconnecting is None or reconnecting.done():
                    await self.nc.close()  # it has given up, on an error it did not foresee; this calls _on_nats_closed
                continue
            try:
                await self.rtt()
            except BrokerTimeout as error:
                log.warning("%s: %s; connecting anew", self.url, error)
                await self.nc.force_reconnect()
            except BrokerUnavailable:
                pass
