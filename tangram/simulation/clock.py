"""Virtual time: nothing waits, the clock jumps to the next instant at which something happens."""

import heapq
from collections.abc import Callable


class Clock:
    """now_ns: nanoseconds since the start. What falls on one instant happens in the order in which it was set."""

    __slots__ = ("_heap", "_set", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._set = 0

    def at(self, when_ns: int, happen: Callable[[], None]) -> None:
        self._set += 1
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), self._set, happen))

    def next_ns(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def move(self, to_ns: int) -> None:
        """Goes there, and lets all happen that falls on that instant, also what is set for it meanwhile."""
        self.now_ns = to_ns
        while self._heap and self._heap[0][0] <= to_ns:
            heapq.heappop(self._heap)[2]()
