"""A queue between a callback that only enqueues and one task that takes everything there is."""

import asyncio
from typing import Generic, TypeVar

from tangram.broker.errors import BrokerError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Holds items until `take`. One task may take at a time. `bytes_held` is the sum of the sizes given."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BrokerError | None = None
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, size: int) -> None:
        self._items.append(item)
        self.bytes_held += size
        self.wake()

    def fail(self, error: BrokerError) -> None:
        """What is held can still be taken; after that `take` raises `error`, again and again."""
        self._error = error
        self.wake()

    async def take(self, timeout_s: float | None = None) -> list[T]:
        """Returns all there is, waiting for the first item; [] after `timeout_s`. Cancelling or timing out loses nothing."""
        if not self._items and self._error is None:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self.wake) if timeout_s is not None else None
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        self.bytes_held = 0
        return items

    def wake(self) -> None:
        """Lets who waits return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
