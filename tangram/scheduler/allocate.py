"""Spare units: who gets how many beyond its minimum."""

import heapq
from collections.abc import Callable, Sequence

Ladder = Callable[[int], tuple[float, int] | None]
"""From a size to (what each unit of the next step gains, the size after it); None where nothing gains any more. Gains must not
rise from one step to the next."""


def by_marginal_gain(least: Sequence[int], ladders: Sequence[Ladder], of: Sequence[int], spare: int) -> list[int]:
    """Hands out `spare` units one step at a time, each to the action whose duration falls most for each unit it takes.

    of[i] is the kind of action i; all of one kind begin at `least` and climb the same ladder, so a step is weighed once for
    all that stand before it. Returns the amount for each action. Exact for steps of one unit (Fox 1966, "Discrete optimization
    via marginal analysis"). Ties go to the earlier action; a step that does not fit leaves the room to smaller ones.
    """
    members: list[list[int]] = [[] for _ in ladders]
    for index, kind in enumerate(of):
        members[kind].append(index)
    sizes = [least[kind] for kind in of]
    steps: list[tuple[float, int, int, list[int]]] = []
    """A heap of (-gain of a unit, kind, size after it, who stands before it)."""

    def offer(kind: int, size: int, who: list[int]) -> None:
        step = ladders[kind](size) if who else None
        if step is not None:
            heapq.heappush(steps, (-step[0], kind, step[1], who))

    for kind, who in enumerate(members):
        offer(kind, least[kind], who)
    while steps and spare:
        equal = [heapq.heappop(steps)]
        while steps and steps[0][0] == equal[0][0]:
            equal.append(heapq.heappop(steps))
        if sum((size - sizes[who[0]]) * len(who) for _, _, size, who in equal) > spare:
            equal = _first(equal, sizes, spare)
        for _, kind, size, who in equal:
            spare -= (size - sizes[who[0]]) * len(who)
            for index in who:
                sizes[index] = size
            offer(kind, size, who)
    return sizes


def _first(
    equal: list[tuple[float, int, int, list[int]]], sizes: list[int], spare: int
) -> list[tuple[float, int, int, list[int]]]:
    """Of steps that gain the same, those that fit when they are taken in order."""
    taken: list[list[int]] = [[] for _ in equal]
    for index, at in sorted((index, at) for at, (_, _, _, who) in enumerate(equal) for index in who):
        step = equal[at][2] - sizes[index]
        if step <= spare:
            spare -= step
            taken[at].append(index)
    return [(gain, kind, size, who) for (gain, kind, size, _), who in zip(equal, taken, strict=True) if who]
