"""Spare units: who gets how many beyond its minimum."""

import heapq
from collections.abc import Callable, Sequence


def by_marginal_gain(
    sizes: Sequence[Sequence[int]], duration_us: Callable[[int, int], float], spare: Callable[[int], int]
) -> list[int]:
    """Hands out units one step at a time, each to the action whose duration falls most for each unit it takes.

    sizes[i] are the legal amounts of action i, rising from its minimum; duration_us(i, m) is its duration on m units;
    spare(i) is how many more units could go to i now. Returns the amount for each. Exact for convex durations and steps of
    one unit (Fox 1966, "Discrete optimization via marginal analysis"). Ties go to the earlier action.
    """
    chosen = [0] * len(sizes)
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        at = chosen[index]
        if at + 1 < len(sizes[index]):
            low, high = sizes[index][at], sizes[index][at + 1]
            gain = (duration_us(index, low) - duration_us(index, high)) / (high - low)
            if gain > 0:
                heapq.heappush(heap, (-gain, index))

    for index in range(len(sizes)):
        offer(index)
    total = 0
    while heap:
        _, index = heapq.heappop(heap)
        step = sizes[index][chosen[index] + 1] - sizes[index][chosen[index]]
        if step > spare(index) - total:
            continue  # its next size does not fit; a smaller step of another still may
        chosen[index] += 1
        total += step
        offer(index)
    return [sizes[index][chosen[index]] for index in range(len(sizes))]
