"""What queued up while the last publish was on its way is one message.

So a role that is alone publishes at once, and a busy one pays one fsync, one acknowledgement and one decode for many
items. Order: items of a key are stored in the order in which they were added, because a key has one message on its way.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from tangram.broker.connection import Broker
from tangram.broker.errors import BrokerError, BrokerTimeout, BrokerUnavailable, Busy, MessageTooLarge
from tangram.broker.wire import PubAck

log = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")

RETRY_S: Final = 0.02
SAY_S: Final = 5.0
"""Between two words about an outage."""
RETRY_MAX_S: Final = 1.0
ANSWER_S: Final = 2.0
"""A message without an answer is sent again after this: one that died says nothing, and another takes over after 4 s or more."""
ANSWER_MAX_S: Final = 8.0
"""Doubled up to this while there is none: a broker that is slow must not get everything twice, again and again."""


class _Queued(NamedTuple, Generic[T]):
    number: int
    item: T
    size: int


class _Message(Generic[K, T]):
    """One message on its way: what it carries and what became of it."""

    future: "asyncio.Future[PubAck]"

    def __init__(self, key: K, queued: "list[_Queued[T]]") -> None:
        self.key, self.queued = key, queued

    @property
    def items(self) -> list[T]:
        return [entry.item for entry in self.queued]


class GroupedPublisher(Generic[K, T]):
    """Publishes items in groups by key, for ever, until each is stored or refused.

    `encode(key, items)` returns (subject, payload). It is called when the message is about to be sent, in wire order, and
    again for a retry, with whatever the message then carries; so it may number messages. If it raises, or the connection
    is closed for good, the publisher stops and `failed` has the reason: nothing of what is queued is lost, `close` returns it.
    `on_stored(key, items, ack)` is called once per item, when it is known to be stored. At least once: after a time-out an
    item may be stored twice. `on_refused(key, items, error)` is called for what can never be stored: a single item that is
    too large, or a message that the stream refuses (but for Busy, which is tried again).
    Callbacks run in the loop's thread and must not block. The queue is not bounded here; `queued` is for those who add.
    """

    def __init__(
        self,
        broker: Broker,
        encode: Callable[[K, list[T]], tuple[str, bytes]],
        on_stored: Callable[[K, list[T], PubAck], None] | None = None,
        *,
        items_max: int,
        size: Callable[[T], int],
        bytes_max: int = 512 * 1024,
        on_refused: Callable[[K, list[T], BrokerError], None] | None = None,
        timeout_s: float = ANSWER_S,
        retry_s: float = RETRY_S,
        retry_max_s: float = RETRY_MAX_S,
    ) -> None:
        """`size(item)` is its share of the payload in bytes; one item over `bytes_max` is still sent, alone."""
        self._broker, self._encode, self._on_stored, self._on_refused = broker, encode, on_stored, on_refused
        self._items_max, self._bytes_max, self._size = items_max, bytes_max, size
        self._timeout_s, self._retry_s, self._retry_max_s = timeout_s, retry_s, retry_max_s
        self._patience_s = timeout_s
        self._queues: dict[K, deque[_Queued[T]]] = {}
        self._smaller: dict[K, int] = {}
        """Keys whose last message was too large, and how many items to try now."""
        self._in_flight: list[_Message[K, T]] = []
        self._added = 0
        self._queued = 0
        self._said_s = 0.0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._closing = False
        self.failed: BaseException | None = None
        self._reconnected = asyncio.Event()
        self._forget = broker.on_reconnect(self._reconnected.set)
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def queued(self) -> int:
        """Items that are neither stored nor refused, those on their way included."""
        return self._queued

    def add(self, key: K, item: T) -> None:
        """Queues `item`; it is sent with the next message of `key`. Raises BrokerUnavailable if closed or failed."""
        if self._closing or self.failed is not None:
            raise BrokerUnavailable(f"the publisher is closed{f': {self.failed}' if self.failed is not None else ''}")
        self._added += 1
        self._queued += 1
        self._queues.setdefault(key, deque()).append(_Queued(self._added, item, self._size(item)))
        self._wake.set()

    async def flush(self) -> None:
        """Returns when all that has been added by now is stored or refused. Raises what `failed` has, or BrokerUnavailable
        if closed meanwhile."""
        if self.failed is not None:
            raise self.failed
        if self._oldest() > self._added:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._added, waiter))
        await waiter

    async def wait_stored(self) -> None:
        """Returns when nothing is queued at all. Raises as `flush`."""
        while self._queued:
            await self.flush()

    async def close(self, timeout_s: float = 5.0) -> list[tuple[K, T]]:
        """Takes no more, tries for `timeout_s` to store what is left, and returns what is not known to be stored, in order.
        What was on its way at the end may be stored all the same."""
        self._closing = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_stored()
        except (TimeoutError, BrokerError):
            pass
        except Exception as error:
            log.debug("close: %s", error)
        self._forget()
        self._task.cancel()
        await asyncio.wait({self._task})
        self._requeue(self._in_flight)
        self._in_flight = []
        self._release(BrokerUnavailable("the publisher is closed"))
        left = sorted((entry.number, key, entry.item) for key, queue in self._queues.items() for entry in queue)
        return [(key, item) for _, key, item in left]

    # ---------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = self._retry_s
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queues:
                    progress, again = await self._round()
                    if self._broker.is_closed:
                        raise BrokerUnavailable("the connection is closed")
                    if not again:
                        pause_s = self._retry_s
                        continue
                    if progress:
                        pause_s = self._retry_s
                    await self._pause(pause_s)
                    pause_s = min(2 * pause_s, self._retry_max_s)
        except Exception as error:
            self.failed = error
            log.error("publisher stopped with %d items queued: %s", self._queued, error)
            self._requeue(self._in_flight)
            self._in_flight = []
            self._release(error)

    async def _pause(self, pause_s: float) -> None:
        """Waits, but not beyond a reconnect."""
        self._reconnected.clear()
        try:
            async with asyncio.timeout(pause_s):
                await self._reconnected.wait()
        except TimeoutError:
            pass

    async def _round(self) -> tuple[bool, bool]:
        """Sends one message per key and waits for all. Returns whether any was stored, and whether any is to be sent again."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        waiting = 0
        stored = False

        def answered(message: _Message[K, T], _: object) -> None:
            nonlocal waiting, stored
            waiting -= 1
            if finished.done():
                return  # the round is over: the time-out has settled this message
            stored = self._settle(message) or stored
            if waiting == 0:
                finished.set_result(None)

        timer = loop.call_later(self._patience_s, finished.cancel)
        try:
            for key in list(self._queues):
                message = _Message(key, self._take(key))
                self._in_flight.append(message)
                subject, data = self._encode(key, message.items)
                message.future = self._broker.publish_soon(subject, data)
                waiting += 1
                message.future.add_done_callback(partial(answered, message))
            await asyncio.wait({finished})
            if finished.cancelled():
                self._say(f"no answer in {self._patience_s:g} s")
                self._patience_s = min(2 * self._patience_s, ANSWER_MAX_S)
            else:
                self._patience_s = self._timeout_s
        finally:
            timer.cancel()
            finished.cancel()  # answers that come after this find it done
        retry = self._in_flight  # refused for now, or without an answer
        self._in_flight = []
        self._requeue(retry)
        self._tell_waiters()
        return stored, bool(retry)

    def _settle(self, message: _Message[K, T]) -> bool:
        """Deals with an answer. Returns False if the message is to be sent again: then it stays in flight to the round's end, so
        that nobody takes it for stored."""
        error = message.future.exception()
        if error is None:
            self._in_flight.remove(message)
            self._smaller.pop(message.key, None)
            self._queued -= len(message.queued)
            if self._on_stored is not None:
                self._call(self._on_stored, message, message.future.result())
            self._tell_waiters()
            return True
        assert isinstance(error, BrokerError)
        if isinstance(error, (BrokerTimeout, Busy, BrokerUnavailable)):
            self._say(error)
            return False
        if isinstance(error, MessageTooLarge) and len(message.queued) > 1:
            self._smaller[message.key] = len(message.queued) // 2
            return False
        self._in_flight.remove(message)
        self._smaller.pop(message.key, None)
        self._queued -= len(message.queued)
        if self._on_refused is None:
            log.error("%d items of %s dropped: %s", len(message.queued), message.key, error)
        else:
            self._call(self._on_refused, message, error)
        return True

    def _say(self, why: object) -> None:
        """Who waits has to learn why, but not at every try."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            log.warning("%d items wait, the broker does not take them: %s", self._queued, why)

    @staticmethod
    def _call(callback: "Callable[[K, list[T], R], None]", message: "_Message[K, T]", result: R) -> None:
        try:
            callback(message.key, message.items, result)
        except Exception:
            log.exception("a callback for %s failed", message.key)

    def _take(self, key: K) -> "list[_Queued[T]]":
        queue = self._queues[key]
        items_max = self._smaller.get(key, self._items_max)
        taken: list[_Queued[T]] = []
        total = 0
        while queue and len(taken) < items_max and (not taken or total + queue[0].size <= self._bytes_max):
            taken.append(queue.popleft())
            total += taken[-1].size
        if not queue:
            del self._queues[key]
        return taken

    def _requeue(self, messages: "list[_Message[K, T]]") -> None:
        """Back to the front of their queues, in order."""
        for message in messages:
            self._queues.setdefault(message.key, deque()).extendleft(reversed(message.queued))

    def _oldest(self) -> int:
        fronts = [queue[0].number for queue in self._queues.values()]
        fronts += [message.queued[0].number for message in self._in_flight]
        return min(fronts, default=self._added + 1)

    def _tell_waiters(self) -> None:
        if not self._waiters:
            return
        oldest = self._oldest()
        for number, waiter in self._waiters:
            if number < oldest and not waiter.done():
                waiter.set_result(None)
        self._waiters = [entry for entry in self._waiters if not entry[1].done()]

    def _release(self, error: BaseException) -> None:
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()
        self._waiters = []
