"""Timers on log time, in buckets, so that setting and cancelling cost the same however many are pending."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from tangram.limits import TIMER_GRAIN_NS

Key = tuple[str, Any]
"""What kind of timer, and whose; the second part is hashable."""


class Timers:
    """At most one timer a key. A timer falls due at the first grain (50 ms) not before its time."""

    __slots__ = ("_bucket_of", "_buckets", "_heap")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Key, None]] = {}
        self._bucket_of: dict[Key, int] = {}
        self._heap: list[int] = []

    def set(self, key: Key, due_ns: int) -> None:
        self.cancel(key)
        bucket = -(-due_ns // TIMER_GRAIN_NS)
        keys = self._buckets.get(bucket)
        if keys is None:
            keys = self._buckets[bucket] = {}
            heapq.heappush(self._heap, bucket)
            if len(self._heap) > 2 * len(self._buckets) + 64:  # mostly buckets that were emptied by cancels
                self._heap = sorted(self._buckets)
        keys[key] = None
        self._bucket_of[key] = bucket

    def cancel(self, key: Key) -> None:
        bucket = self._bucket_of.pop(key, None)
        if bucket is not None:
            keys = self._buckets[bucket]
            del keys[key]
            if not keys:
                del self._buckets[bucket]  # its entry in the heap is dropped when it comes up

    def next_due_ns(self) -> int | None:
        while self._heap and self._heap[0] not in self._buckets:
            heapq.heappop(self._heap)
        return self._heap[0] * TIMER_GRAIN_NS if self._heap else None

    def pop_due(self, now_ns: int) -> list[Key]:
        """Removes and returns the keys that are due, in order of their time, then of their setting."""
        due: list[Key] = []
        while (when := self.next_due_ns()) is not None and when <= now_ns:
            keys = self._buckets.pop(heapq.heappop(self._heap))
            for key in keys:
                del self._bucket_of[key]
                due.append(key)
        return due

    def pending(self) -> Iterator[tuple[int, list[Key]]]:
        """What has not fired, by grain; the keys of one in the order in which they will fire."""
        return ((bucket, list(keys)) for bucket, keys in self._buckets.items())

    @classmethod
    def restored(cls, pending: Iterable[tuple[int, list[Key]]]) -> "Timers":
        """As they were when `pending` was called."""
        self = cls()
        for bucket, keys in pending:
            self._buckets[bucket] = dict.fromkeys(keys)
            self._bucket_of.update(dict.fromkeys(keys, bucket))
        self._heap = sorted(self._buckets)
        return self

    def __len__(self) -> int:
        return len(self._bucket_of)
