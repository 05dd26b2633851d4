"""Spare units: who gets how many beyond its minimum."""

import heapq
import math
from collections.abc import Callable, Sequence

from tangram.rules import GPU_CHUNKS


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


def exactly(sizes: Sequence[Sequence[int]], duration_us: Callable[[int, int], float], spare: int) -> list[int]:
    """The same for any durations and any legal amounts: the least sum there is, with at most `spare` (>= 0) units beyond the
    minima. Takes time in proportion to the number of all legal amounts, times `spare`."""
    least = [0.0] * (spare + 1)
    """By spare units: the least sum of the actions looked at so far, from the last one on."""
    picks: list[list[int]] = []
    for index in reversed(range(len(sizes))):
        choices = [(size - sizes[index][0], duration_us(index, size)) for size in sizes[index]]
        sums, picked = [], []
        for units in range(spare + 1):
            best, choice = math.inf, 0
            for at, (more, took) in enumerate(choices):
                if more > units:
                    break
                if took + least[units - more] < best:
                    best, choice = took + least[units - more], at
            sums.append(best)
            picked.append(choice)
        least = sums
        picks.append(picked)
    chosen = []
    for legal, picked in zip(sizes, reversed(picks), strict=True):
        amount = legal[picked[spare]]
        spare -= amount - legal[0]
        chosen.append(amount)
    return chosen


def exactly_in_chunks(
    sizes: Sequence[Sequence[int]], duration_us: Callable[[int, int], float], free: dict[int, int]
) -> list[int] | None:
    """The least sum of durations on GPUs in aligned chunks of 1, 2, 4 or 8; None if the actions do not fit at all.

    free: `gpus.free_in_chunks`, added up over hosts. Chunks can be placed exactly if for each size z the GPUs asked for in chunks
    of at least z are no more than free[z], so what is left by z is all that a choice leaves behind.
    """
    start = tuple(free[z] for z in GPU_CHUNKS)
    reached: list[dict[tuple[int, ...], tuple[float, tuple[int, ...], int]]] = [{start: (0.0, (), 0)}]
    """After each action: what is left -> (the least sum, what was left before, the chunk)."""
    for index, legal in enumerate(sizes):
        following: dict[tuple[int, ...], tuple[float, tuple[int, ...], int]] = {}
        for size in legal:
            took = duration_us(index, size)
            for left, (total, _, _) in reached[-1].items():
                rest = tuple(units - size if z <= size else units for z, units in zip(GPU_CHUNKS, left, strict=True))
                known = following.get(rest)
                if min(rest) >= 0 and (known is None or total + took < known[0]):
                    following[rest] = (total + took, left, size)
        reached.append(following)
    if not reached[-1]:
        return None
    at = min(reached[-1], key=lambda rest: (reached[-1][rest][0], rest))
    chosen: list[int] = []
    for states in reversed(reached[1:]):
        _, at, size = states[at]
        chosen.append(size)
    return chosen[::-1]
