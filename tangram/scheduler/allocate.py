"""Spare units: who gets how many beyond its minimum.

Actions are of kinds, and of one kind the earlier ones never have less than the later ones. So a plan only counts: for each kind,
how many of it have each size. Only `each` and a tie look at single actions.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tangram.rules import GPU_CHUNKS

Plan = list[dict[int, int]]
"""By kind: size -> how many have it."""
Ladder = Callable[[int], tuple[float, int] | None]
"""From a size to (what each unit of the next step gains, the size after it); None where nothing gains any more. Gains must not
rise from one step to the next."""


def each(plan: Plan, members: Sequence[Sequence[int]]) -> list[int]:
    """The size of each action. members[kind] are the indices of its actions, rising; together they count from 0."""
    sizes = [0] * sum([sum(numbers.values()) for numbers in plan])
    for numbers, who in zip(plan, members, strict=True):
        first = 0
        for size in sorted(numbers, reverse=True):
            for index in who[first : first + numbers[size]]:
                sizes[index] = size
            first += numbers[size]
    return sizes


class _Step(NamedTuple):
    """The members of a kind from `first` to before `last` stand on `size` and could go on to `to`."""

    loss: float
    """Of a unit; the gain, negated."""
    kind: int
    size: int
    to: int
    first: int
    last: int


def by_marginal_gain(least: Sequence[int], ladders: Sequence[Ladder], members: Sequence[Sequence[int]], spare: int) -> Plan:
    """Hands out `spare` units one step at a time, each to the action whose duration falls most for each unit it takes.

    All of a kind begin at `least` and climb the same ladder, so a step is weighed once for all that stand before it. Exact for
    steps of one unit (Fox 1966, "Discrete optimization via marginal analysis"). Ties go to the earlier action; a step that does
    not fit leaves the room to smaller ones. members: as for `each`.
    """
    plan: Plan = [{size: len(who)} for size, who in zip(least, members, strict=True)]
    steps: list[_Step] = []

    def offer(kind: int, size: int, first: int, last: int) -> None:
        step = ladders[kind](size) if first < last else None
        if step is not None:
            heapq.heappush(steps, _Step(-step[0], kind, size, step[1], first, last))

    for kind, who in enumerate(members):
        offer(kind, least[kind], 0, len(who))
    while steps and spare:
        equal = [heapq.heappop(steps)]
        while steps and steps[0].loss == equal[0].loss:
            equal.append(heapq.heappop(steps))
        if sum([(to - size) * (last - first) for _, _, size, to, first, last in equal]) > spare:
            equal = _fitting(equal, members, spare)
        for _, kind, size, to, first, last in equal:
            spare -= (to - size) * (last - first)
            plan[kind][size] -= last - first
            plan[kind][to] = plan[kind].get(to, 0) + last - first
            offer(kind, to, first, last)
    return plan


def _fitting(equal: list[_Step], members: Sequence[Sequence[int]], spare: int) -> list[_Step]:
    """Of steps that gain the same, as much as fits when each action takes its own in turn."""
    if len(equal) == 1:
        only = equal[0]
        return [only._replace(last=only.first + spare // (only.to - only.size))]
    last = [step.first for step in equal]
    turns = [(index, at) for at, step in enumerate(equal) for index in members[step.kind][step.first : step.last]]
    for _, at in sorted(turns):
        units = equal[at].to - equal[at].size
        if units <= spare:
            spare -= units
            last[at] += 1
    return [step._replace(last=end) for step, end in zip(equal, last, strict=True)]


def exactly(sizes: Sequence[Sequence[int]], duration_us: Callable[[int, int], float], spare: int) -> list[int]:
    """For each action its amount, for any durations and any legal amounts: the least sum there is, with at most `spare` (>= 0)
    units beyond the minima. Takes time in proportion to the number of all legal amounts, times `spare`."""
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
