"""What a trajectory will do, drawn before anything runs, so that every policy gets exactly the same work.

A pause is the time in which the model thinks. Only its weight is drawn here; its seconds come from what the actions
cost on this machine (see `pauses`), because the share of its life in which a trajectory acts is what the demo fixes.
"""

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tangram.demo.config import DemoConfig
from tangram.demo.problems import Problem, broken, draw_fault, right, suite
from tangram.outcomes import Outcome


class Kind(StrEnum):
    """What an action is for. `OPEN` is the session's own action, which no plan lists."""

    OPEN = "session.open"
    WRITE = "file.write"
    TEST = "test"
    SUITE = "suite"
    SCORE = "score"
    CALL = "call"


TEST_PATH: Final = "solution_test.py"
SUITE_PATH: Final = "suite.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action. pause: weight of the thinking before it. path, text: what a write writes.
    programs: how many a run starts. work_s: CPU seconds that they will use in all."""

    kind: Kind
    pause: float = 0.0
    path: str = ""
    text: str = ""
    programs: int = 0
    work_s: float = 0.0
    expected: Outcome = Outcome.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One trajectory. solved: the problems whose right solution it runs."""

    trajectory: int
    solved: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that an action alone on one core takes beyond the CPU seconds of its programs, by kind."""

    fixed_s: dict[Kind, float]

    def active_s(self, step: Step) -> float:
        return self.fixed_s[step.kind] + step.work_s


def draw(config: DemoConfig, problems: tuple[Problem, ...]) -> tuple[Plan, ...]:
    """The plans of all trajectories. Each problem is solved by at least one of them, `config.broken` of them after a
    first attempt that is wrong."""
    rng = random.Random(f"tangram demo {config.seed}")
    order = rng.sample(problems, len(problems))
    faults = {problem.task_id: draw_fault(rng) for problem in order[: config.broken]}
    rng.shuffle(order)
    dealt: list[list[Problem]] = [[] for _ in range(config.trajectories)]
    # More trajectories than problems: some problems are solved twice, so that nobody has nothing to do.
    for index in range(max(len(order), config.trajectories)):
        dealt[index % config.trajectories].append(order[index % len(order)])
    plans = []
    for trajectory, own in enumerate(dealt):
        again = len(problems) <= trajectory
        plans.append(_draw_one(config, problems, trajectory, own, {} if again else faults))
    return tuple(plans)


def _draw_one(
    config: DemoConfig, problems: tuple[Problem, ...], trajectory: int, own: list[Problem], faults: dict[str, str]
) -> Plan:
    rng = random.Random(f"tangram demo {config.seed} {trajectory}")
    count = min(rng.randint(config.suites_low, config.suites_high), len(own))
    suites_after = set(rng.sample(range(len(own)), count))
    steps: list[Step] = []
    for index, problem in enumerate(own):
        if problem.task_id in faults:
            text = broken(problem, faults[problem.task_id])
            steps += _attempt(rng, Kind.TEST, TEST_PATH, text, 1, 0.0, Outcome.FAILED)
        work_s = _draw_work(rng, config)
        steps += _attempt(rng, Kind.TEST, TEST_PATH, right(problem, work_s), 1, work_s, Outcome.OK)
        if index in suites_after:
            works = [_draw_work(rng, config) for _ in range(config.suite_problems)]
            chosen = zip(rng.sample(problems, config.suite_problems), works, strict=True)
            text = suite([right(each, work) for each, work in chosen])
            steps += _attempt(rng, Kind.SUITE, SUITE_PATH, text, len(works), math.fsum(works), Outcome.OK)
    return Plan(trajectory=trajectory, solved=tuple(problem.task_id for problem in own), steps=tuple(steps))


def _attempt(rng: random.Random, kind: Kind, path: str, text: str, programs: int, work_s: float, expected: Outcome) -> list[Step]:
    """The model thinks, writes a file and runs it at once."""
    return [
        Step(kind=Kind.WRITE, pause=rng.lognormvariate(0.0, 0.5), path=path, text=text),
        Step(kind=kind, path=path, programs=programs, work_s=work_s, expected=expected),
    ]


def _draw_work(rng: random.Random, config: DemoConfig) -> float:
    """CPU seconds of one program: skewed as real ones are, mean `config.work_s` before the ends are cut off."""
    spread = 0.5
    drawn = config.work_s * rng.lognormvariate(-spread * spread / 2, spread)
    return round(min(max(drawn, 0.3 * config.work_s), 3.0 * config.work_s), 4)


def pauses(plan: Plan, costs: Costs, active_share: float) -> tuple[float, ...]:
    """Seconds of thinking before each step.

    active = sum over the steps of (fixed cost of the kind + CPU seconds), the trajectory's own time when it is alone on
    one core; thinking in all = active * (1 - active_share) / active_share, which for 0.47 is active * 53 / 47; each
    pause gets its weight's part of that. So active / (active + thinking) is active_share for every trajectory.
    """
    active_s = math.fsum(costs.active_s(step) for step in plan.steps)
    thinking_s = active_s * (1.0 - active_share) / active_share
    weights = math.fsum(step.pause for step in plan.steps)
    return tuple(thinking_s * step.pause / weights for step in plan.steps)
