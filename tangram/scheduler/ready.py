"""Queues of actions that could start now, in arrival order."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

Order = tuple[int, int]
"""(sequence in the log, index in the message): arrival order, and no two actions share it."""

T = TypeVar("T")


class ReadyQueue(Generic[T]):
    """Sorted by order. Nearly everything arrives at the end and leaves at the front; both are O(1).

    It can be read from the front without being changed, which a pass needs.
    """

    __slots__ = ("_head", "_items", "_orders")

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._items: list[T] = []
        self._head = 0

    def add(self, order: Order, item: T) -> None:
        if not self._orders or order > self._orders[-1]:
            self._orders.append(order)
            self._items.append(item)
            return
        at = bisect_left(self._orders, order, self._head)
        self._orders.insert(at, order)
        self._items.insert(at, item)

    def remove(self, order: Order) -> None:
        """Raises KeyError if it is not there."""
        at = bisect_left(self._orders, order, self._head)
        if at == len(self._orders) or self._orders[at] != order:
            raise KeyError(order)
        if at == self._head:
            self._head += 1
            if self._head > 512 and 2 * self._head > len(self._orders):
                del self._orders[: self._head], self._items[: self._head]
                self._head = 0
        else:
            del self._orders[at], self._items[at]

    def __len__(self) -> int:
        return len(self._orders) - self._head

    def __iter__(self) -> Iterator[T]:
        for at in range(self._head, len(self._items)):
            yield self._items[at]
