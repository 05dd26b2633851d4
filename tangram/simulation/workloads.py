"""Workloads from a seed."""

import math
from dataclasses import dataclass
from random import Random
from typing import Final

from tangram.simulation.trace import SECOND_NS
from tangram.simulation.work import Trajectory, Work


@dataclass(frozen=True, slots=True)
class Class:
    """A kind of action. weight: how often it is drawn; relative_s: its mean on one core before all are scaled to `mean_run_s`;
    cv: coefficient of variation of its lognormal duration; parallel: the part that scales, on at most max_units cores."""

    kind: str
    weight: float
    relative_s: float
    cv: float
    parallel: float = 0.0
    max_units: int = 1

    @property
    def full_size_s(self) -> float:
        return self.relative_s * (1 - self.parallel + self.parallel / self.max_units)


@dataclass(frozen=True, slots=True)
class Coding:
    """AI coding as ARL-Tangram (arXiv 2603.13019) has it, where what is known of the paper says, and a trace elsewhere.

    "Trace" is the public data set behind arXiv 2602.09345: 1,134 calls of a coding agent, sub-agents left out; figures without
    those of 114 s and more, which are time-outs.
    """

    actions: int = 30
    """Of a trajectory, the reward included. Not known of the paper; the trace has 25 on average."""
    mean_run_s: float = 0.975
    """Paper: mean execution of an action at a batch of 1,280. Hardly any queued there (0.015 s), so it is read as the mean when
    every action gets all the cores it can use; on one core each it is longer."""
    active_share: float = 0.47
    """Paper: an environment is active for 47 % of its trajectory's life. Thinking takes the rest: mean_run_s * 53 / 47."""
    think_cv: float = 0.8
    """Trace; lognormal is our choice."""
    classes: tuple[Class, ...] = (
        Class("inspect", 0.265, 0.350, 1.7),
        Class("edit", 0.325, 0.227, 1.9),
        Class("shell", 0.262, 1.024, 2.5),
        Class("test", 0.149, 2.602, 2.0, parallel=0.8, max_units=8),
    )
    """Trace: weights, means and variation (inspect: search and git; edit: files; shell: all other commands; test: tests and
    builds). Assumed: tests scale by 0.8 up to 8 cores, nothing else scales; the trace was not taken on several sizes."""
    reward: Class = Class("reward", 1.0, 2.602, 2.0, parallel=0.8, max_units=8)
    """Paper: the last action of a trajectory is a test that scores it. Assumed to take what a test takes."""

    @property
    def mean_think_s(self) -> float:
        return self.mean_run_s * (1 - self.active_share) / self.active_share

    @property
    def scale(self) -> float:
        """From `relative_s` to seconds."""
        weights = math.fsum(each.weight for each in self.classes)
        drawn_s = math.fsum(each.weight * each.full_size_s for each in self.classes) / weights
        mean_s = (drawn_s * (self.actions - 1) + self.reward.full_size_s) / self.actions
        return self.mean_run_s / mean_s

    def trajectories(self, count: int, seed: int) -> list[Trajectory]:
        """Each trajectory's draws depend on the seed and its number alone. All start at 0."""
        weights, scale = [each.weight for each in self.classes], self.scale
        found = []
        for number in range(count):
            random = Random(f"{seed}/{number}")
            drawn = [*random.choices(self.classes, weights, k=self.actions - 1), self.reward]
            found.append(Trajectory(number, "coding", 0, [self._work(random, each, scale) for each in drawn]))
        return found

    def _work(self, random: Random, drawn: Class, scale: float) -> Work:
        duration_ns = round(_lognormal(random, drawn.relative_s * scale, drawn.cv) * SECOND_NS)
        return Work(
            kind=drawn.kind,
            think_ns=round(_lognormal(random, self.mean_think_s, self.think_cv) * SECOND_NS),
            duration_ns=duration_ns,
            scalable_ns=round(duration_ns * drawn.parallel),
            high=drawn.max_units,
        )


def _lognormal(random: Random, mean: float, cv: float) -> float:
    variance = math.log(1 + cv * cv)
    return random.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


WORKLOADS: Final = {"coding": Coding()}
