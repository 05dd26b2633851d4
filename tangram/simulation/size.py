"""The smallest pool that keeps a target."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tangram import limits
from tangram.simulation.driver import Setup
from tangram.simulation.pool import Machine
from tangram.simulation.work import Trajectory

GPUS_PER_HOST: Final = 8
GPUS_MAX: Final = 1_024
"""Sought up to here: 128 hosts."""


class Sized(NamedTuple):
    """units: cores or GPUs of the smallest pool found, None if none is. tried: (units, mean ACT in seconds), rising in units."""

    units: int | None
    tried: list[tuple[int, float]]


def key_of(trajectories: Sequence[Trajectory]) -> str:
    """What is sized: GPUs if nothing needs cores, else cores."""
    return "cpu" if any(work.key == "cpu" for trajectory in trajectories for work in trajectory.work) else "gpu"


def pool(key: str, units: int) -> list[Machine]:
    """One host of so many cores, or hosts of 8 GPUs and one of the rest."""
    if key == "cpu":
        return [Machine((units,))]
    hosts, rest = divmod(units, GPUS_PER_HOST)
    return [Machine(gpus=GPUS_PER_HOST)] * hosts + [Machine(gpus=rest)] * (rest > 0)


def bounds(trajectories: Sequence[Trajectory], setup: Setup) -> tuple[int, int]:
    """Units of the smallest pool that can run every action, and of one on which nothing ever waits for units (of GPUs: at most
    GPUS_MAX)."""
    if key_of(trajectories) == "gpu":
        works = [work for trajectory in trajectories for work in trajectory.work if work.key == "gpu"]
        return max(work.low for work in works), min(GPUS_MAX, sum(work.high for work in works))
    low = max(setup.units, *(work.low for trajectory in trajectories for work in trajectory.work))
    high = sum(max(setup.units, *(work.high for work in trajectory.work)) for trajectory in trajectories)
    return low, min(max(low, high), limits.CORE_ID_MAX + 1)


def smallest(low: int, high: int, target_act_s: float, mean_act_s: Callable[[int], float]) -> Sized:
    """Bisects between `low` and `high` units. It takes the mean ACT to fall with the units; where it does not quite, what is
    found still keeps the target and one unit less does not."""
    tried = {high: mean_act_s(high)}
    if tried[high] > target_act_s:
        return Sized(None, list(tried.items()))
    below, enough = low - 1, high
    while enough - below > 1:
        middle = (below + enough) // 2
        tried[middle] = mean_act_s(middle)
        if tried[middle] <= target_act_s:
            enough = middle
        else:
            below = middle
    return Sized(enough, sorted(tried.items()))
