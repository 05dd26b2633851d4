"""The smallest pool that keeps a target."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tangram import limits
from tangram.simulation.driver import Setup
from tangram.simulation.work import Trajectory


class Sized(NamedTuple):
    """cores: of the smallest pool found, None if none is. tried: (cores, mean ACT in seconds), rising in cores."""

    cores: int | None
    tried: list[tuple[int, float]]


def bounds(trajectories: Sequence[Trajectory], setup: Setup) -> tuple[int, int]:
    """Cores of the smallest host that can run every action, and of one on which nothing ever waits for cores."""
    low = max(setup.units, *(work.low for trajectory in trajectories for work in trajectory.work))
    high = sum(max(setup.units, *(work.high for work in trajectory.work)) for trajectory in trajectories)
    return low, min(max(low, high), limits.CORE_ID_MAX + 1)


def smallest(low: int, high: int, target_act_s: float, mean_act_s: Callable[[int], float]) -> Sized:
    """Bisects between `low` and `high` cores. It takes the mean ACT to fall with the cores; where it does not quite, what is
    found still keeps the target and one core less does not."""
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
