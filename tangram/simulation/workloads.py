"""Workloads from a seed, after what is known of those of ARL-Tangram (arXiv 2603.13019).

"Paper": said there, or by who has read it. "Assumed": known of nobody; `tangram simulate --vary` shows what it decides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Final, Protocol

from tangram import limits
from tangram import messages as m
from tangram.errors import ConfigError
from tangram.rules import GPU_CHUNKS
from tangram.simulation.trace import SECOND_NS
from tangram.simulation.work import Model, Trajectory, Work


class Workload(Protocol):
    """services: what its GPUs serve; quotas: what it is limited by outside."""

    @property
    def services(self) -> dict[str, m.Service]: ...
    @property
    def quotas(self) -> dict[str, m.Quota]: ...
    def trajectories(self, count: int, seed: int) -> list[Trajectory]:
        """Each trajectory's draws depend on the seed and its number alone. All start at 0."""


@dataclass(frozen=True, slots=True)
class Class:
    """A kind of action. weight: how often it is drawn; relative_s: its mean on one core before all are scaled to `mean_run_s`;
    cv: coefficient of variation of its lognormal duration; scales: whether it can use more than one core."""

    kind: str
    weight: float
    relative_s: float
    cv: float
    scales: bool = False


@dataclass(frozen=True, slots=True)
class Coding:
    """AI coding as the paper has it, where what is known of the paper says, and a trace elsewhere.

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
    cv_factor: float = 1.0
    """On the variation of all classes."""
    serial: float = 0.2
    """Assumed: the part of tests, builds and rewards that does not scale; the trace was not taken on several sizes."""
    max_units: int = 8
    """Assumed: the cores that they can use."""
    classes: tuple[Class, ...] = (
        Class("inspect", 0.265, 0.350, 1.7),
        Class("edit", 0.325, 0.227, 1.9),
        Class("shell", 0.262, 1.024, 2.5),
        Class("test", 0.149, 2.602, 2.0, scales=True),
    )
    """Trace: weights, means and variation (inspect: search and git; edit: files; shell: all other commands; test: tests and
    builds)."""
    reward: Class = Class("reward", 1.0, 2.602, 2.0, scales=True)
    """Paper: the last action of a trajectory is a test that scores it. Assumed to take what a test takes."""

    @property
    def services(self) -> dict[str, m.Service]:
        return {}

    @property
    def quotas(self) -> dict[str, m.Quota]:
        return {}

    @property
    def mean_think_s(self) -> float:
        return self.mean_run_s * (1 - self.active_share) / self.active_share

    def _full_size_s(self, drawn: Class) -> float:
        return drawn.relative_s * (self.serial + (1 - self.serial) / self.max_units if drawn.scales else 1)

    @property
    def scale(self) -> float:
        """From `relative_s` to seconds."""
        weights = math.fsum(each.weight for each in self.classes)
        drawn_s = math.fsum(each.weight * self._full_size_s(each) for each in self.classes) / weights
        mean_s = (drawn_s * (self.actions - 1) + self._full_size_s(self.reward)) / self.actions
        return self.mean_run_s / mean_s

    def trajectories(self, count: int, seed: int) -> list[Trajectory]:
        weights, scale = [each.weight for each in self.classes], self.scale

        def draw(random: Random) -> list[Work]:
            drawn = [*random.choices(self.classes, weights, k=self.actions - 1), self.reward]
            return [self._work(random, each, scale) for each in drawn]

        return _drawn("coding", count, seed, draw)

    def _work(self, random: Random, drawn: Class, scale: float) -> Work:
        duration_ns = round(_lognormal(random, drawn.relative_s * scale, drawn.cv * self.cv_factor) * SECOND_NS)
        return Work(
            kind=drawn.kind,
            think_ns=round(_lognormal(random, self.mean_think_s, self.think_cv) * SECOND_NS),
            duration_ns=duration_ns,
            scalable_ns=round(duration_ns * (1 - self.serial)) if drawn.scales else 0,
            high=self.max_units if drawn.scales else 1,
        )


@dataclass(frozen=True, slots=True)
class Mopd:
    """Multi-teacher on-policy distillation: when a rollout has ended, the teacher of its domain computes log-probabilities."""

    teachers: int = 9
    """Paper. Assumed: rollouts are spread evenly over them."""
    mean_run_s: float = 0.621
    """Paper: mean execution at a batch of 2,048; read as that on `reference_gpus`."""
    reference_gpus: int = 4
    """Paper: of a statically served teacher."""
    run_cv: float = 0.5
    """Assumed; lognormal, as rollouts differ in length."""
    serial: float = 0.1
    """Assumed: the part that does not scale with GPUs."""
    mean_think_s: float = 180.0
    """Of a whole rollout. Assumed, from the paper's table: on 40 GPUs a batch of 2,048 hardly queues (0.081 s) and one of 3,072
    does (15 s), so the larger one's peak is about what ten chunks of four can do, 16 actions a second."""
    think_cv: float = 0.5
    """Assumed."""
    weights_gib: float = 64.0
    """Of a teacher. Assumed: fits on one GPU of 80 GB."""

    @property
    def services(self) -> dict[str, m.Service]:
        return {f"teacher-{number}": Model(self.weights_gib).service for number in range(1, self.teachers + 1)}

    @property
    def quotas(self) -> dict[str, m.Quota]:
        return {}

    def trajectories(self, count: int, seed: int) -> list[Trajectory]:
        one_gpu_s = self.mean_run_s / (self.serial + (1 - self.serial) / self.reference_gpus)

        def draw(random: Random) -> list[Work]:
            teacher = f"teacher-{random.randrange(self.teachers) + 1}"
            think_ns = round(_lognormal(random, self.mean_think_s, self.think_cv) * SECOND_NS)
            return [_scored(random, "logprobs", teacher, think_ns, one_gpu_s, self.run_cv, self.serial)]

        return _drawn("mopd", count, seed, draw)


@dataclass(frozen=True, slots=True)
class DeepSearch:
    """An agent that searches the web, and a judge model that scores its answer."""

    searches: int = 10
    """Of a rollout. Assumed."""
    mean_search_s: float = 1.0
    """Assumed; lognormal."""
    search_cv: float = 1.0
    mean_think_s: float = 15.0
    """Before each search and before the answer is judged: 165 s a rollout, about that of `Mopd`. Assumed."""
    think_cv: float = 0.8
    """As `Coding`."""
    search_concurrency: int = 256
    """Assumed: calls that the search provider takes at a time."""
    mean_judge_s: float = 0.621
    """On four GPUs. Not known; the paper's for another model that reads a whole rollout."""
    judge_cv: float = 0.5
    serial: float = 0.1
    weights_gib: float = 60.0
    """GPT-OSS-120B in MXFP4, the judge of the paper (its size there is not said)."""

    @property
    def services(self) -> dict[str, m.Service]:
        return {"judge": Model(self.weights_gib).service}

    @property
    def quotas(self) -> dict[str, m.Quota]:
        return {"search": m.Quota(concurrency=self.search_concurrency)}

    def trajectories(self, count: int, seed: int) -> list[Trajectory]:
        one_gpu_s = self.mean_judge_s / (self.serial + (1 - self.serial) / 4)

        def think_ns(random: Random) -> int:
            return round(_lognormal(random, self.mean_think_s, self.think_cv) * SECOND_NS)

        def draw(random: Random) -> list[Work]:
            found = []
            for _ in range(self.searches):
                thought_ns = think_ns(random)
                took_ns = round(_lognormal(random, self.mean_search_s, self.search_cv) * SECOND_NS)
                found.append(Work("search", thought_ns, took_ns, key="api", tokens=(("search", 1),)))
            found.append(_scored(random, "judge", "judge", think_ns(random), one_gpu_s, self.judge_cv, self.serial))
            return found

        return _drawn("deepsearch", count, seed, draw)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Jobs that share one pool: as many trajectories of each."""

    jobs: tuple[Workload, ...]

    @property
    def services(self) -> dict[str, m.Service]:
        return {name: service for job in self.jobs for name, service in job.services.items()}

    @property
    def quotas(self) -> dict[str, m.Quota]:
        return {name: quota for job in self.jobs for name, quota in job.quotas.items()}

    def trajectories(self, count: int, seed: int) -> list[Trajectory]:
        return [trajectory for job in self.jobs for trajectory in job.trajectories(count, seed)]


def varied(workload: Workload, factors: dict[str, float]) -> Workload:
    """With some of its numbers multiplied, in a pool those of every job that has them. Raises ConfigError for an unknown one."""
    jobs: tuple[Any, ...] = workload.jobs if isinstance(workload, Pooled) else (workload,)
    known = {each.name for job in jobs for each in fields(job) if isinstance(getattr(job, each.name), int | float)}
    for name in factors:
        if name not in known:
            raise ConfigError(f"--vary {name}: the workload has {', '.join(sorted(known))}")
    changed = tuple(_varied(job, factors) for job in jobs)
    return Pooled(changed) if isinstance(workload, Pooled) else changed[0]


def _varied(job: Any, factors: dict[str, float]) -> Any:
    new = {}
    for each in fields(job):
        if each.name in factors:
            value = getattr(job, each.name)
            product = value * factors[each.name]
            if each.name in _SHARES and product > 1:
                raise ConfigError(f"--vary {each.name}: would be {product:g}, and is a part of 1")
            if each.name == "teachers" and product > limits.SERVICES_MAX:
                raise ConfigError(
                    f"--vary {each.name}: would be {product:g}, and an executor serves at most {limits.SERVICES_MAX}"
                )
            new[each.name] = max(1, round(product)) if isinstance(value, int) else product
    return replace(job, **new)


_SHARES: Final = ("active_share", "serial")


def _scored(random: Random, kind: str, service: str, think_ns: int, mean_s: float, cv: float, serial: float) -> Work:
    duration_ns = round(_lognormal(random, mean_s, cv) * SECOND_NS)
    return Work(
        kind=kind,
        think_ns=think_ns,
        duration_ns=duration_ns,
        scalable_ns=round(duration_ns * (1 - serial)),
        high=GPU_CHUNKS[-1],
        legal=GPU_CHUNKS,
        key="gpu",
        service=service,
    )


def _drawn(task: str, count: int, seed: int, draw: Callable[[Random], list[Work]]) -> list[Trajectory]:
    return [Trajectory(number, task, 0, draw(Random(f"{seed}/{number}"))) for number in range(count)]


def _lognormal(random: Random, mean: float, cv: float) -> float:
    variance = math.log(1 + cv * cv)
    return random.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


WORKLOADS: Final[dict[str, Workload]] = {
    "coding": Coding(),
    "deepsearch": DeepSearch(),
    "mopd": Mopd(),
    "mopd+deepsearch": Pooled((Mopd(), DeepSearch())),
}
