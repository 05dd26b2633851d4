"""How many GPUs each candidate gets under the rule of ARL-Tangram (arXiv 2603.13019) as it is known.

The longest prefix in arrival order that fits on its least; chunks with the least sum of durations, by dynamic programming over
what is free at each level; and the last one is left for later as long as the estimated sum of completion times falls.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tangram.scheduler.allocate import exactly_in_chunks
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.gpu_rooms import GpuRoom
from tangram.scheduler.gpus import free_in_chunks
from tangram.scheduler.sizing import completion_us
from tangram.scheduler.state import Action, ActionId

DEPTH: Final = 16
"""Candidates of one pass: the exact search takes some milliseconds for so many on 40 GPUs, and is made anew for each eviction."""


def in_chunks(
    queues: Iterable[Iterable[Action]],
    rooms: Sequence[GpuRoom],
    sizes_of: Callable[[Action], tuple[int, ...]],
    curve_of: Callable[[Action], Curve],
    *,
    evict: bool,
) -> dict[ActionId, int]:
    """GPUs for those that start now. queues: each in arrival order."""
    free: dict[int, int] = {}
    for room in rooms:
        for size, units in free_in_chunks(room.free).items():
            free[size] = free.get(size, 0) + units
    window: list[Action] = []
    sizes: list[tuple[int, ...]] = []
    left = dict(free)
    for action in heapq.merge(*queues, key=lambda action: action.order):
        legal = sizes_of(action)
        if not legal:
            continue
        for level in left:
            left[level] -= legal[0] if level <= legal[0] else 0
        if min(left.values(), default=-1) < 0 or len(window) == DEPTH:
            break
        window.append(action)
        sizes.append(legal)
    curves = [curve_of(action) for action in window]
    releases = [each for room in rooms for each in room.releases]
    best: list[int] = []
    least: float | None = None
    for count in range(len(window), 0, -1):
        chosen = exactly_in_chunks(sizes[:count], lambda index, size: curves[index].at(size), free)
        if chosen is None:
            continue
        started = [(curve.at(size), size, 1) for curve, size in zip(curves, chosen, strict=False)]
        following = [(curve.at(legal[0]), legal[0]) for curve, legal in zip(curves[count:], sizes[count:], strict=True)]
        objective = completion_us(releases, sum(room.free.bit_count() for room in rooms), started, following)
        if least is not None and objective >= least:
            break
        best, least = chosen, objective
        if not evict:
            break
    return {action.id: size for action, size in zip(window, best, strict=False)}
