"""Plans: the same for the same seed, complete, and paced so that a trajectory acts for its share of its life."""

import math
from dataclasses import replace

import pytest

from tangram.demo.config import DemoConfig
from tangram.demo.plan import Costs, Kind, Plan, draw, pauses
from tangram.demo.problems import COUNT, load
from tangram.errors import ConfigError
from tangram.outcomes import Outcome

PROBLEMS = load()
COSTS = Costs(fixed_s={Kind.WRITE: 0.004, Kind.TEST: 0.011, Kind.SUITE: 0.07})


def runs(plans: tuple[Plan, ...], kind: Kind) -> int:
    return sum(step.kind is kind for plan in plans for step in plan.steps)


def test_a_seed_gives_one_plan() -> None:
    assert draw(DemoConfig(seed=7), PROBLEMS) == draw(DemoConfig(seed=7), PROBLEMS)
    assert draw(DemoConfig(seed=7), PROBLEMS) != draw(DemoConfig(seed=8), PROBLEMS)


@pytest.mark.parametrize("trajectories", [1, 2, 16, 100, 164, 200])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_problems_are_solved_and_ten_are_first_missed(seed: int, trajectories: int) -> None:
    plans = draw(DemoConfig(seed=seed, trajectories=trajectories), PROBLEMS)
    solved = [name for plan in plans for name in plan.solved]
    assert len(plans) == trajectories
    assert all(plan.solved for plan in plans)
    assert set(solved) == {problem.task_id for problem in PROBLEMS}
    assert len(solved) == max(COUNT, trajectories)
    failing = [step for plan in plans for step in plan.steps if step.expected is Outcome.FAILED]
    assert len(failing) == 10
    assert runs(plans, Kind.TEST) == len(solved) + 10
    assert runs(plans, Kind.WRITE) == runs(plans, Kind.TEST) + runs(plans, Kind.SUITE)


def test_a_wrong_attempt_is_followed_by_the_right_one() -> None:
    for plan in draw(DemoConfig(), PROBLEMS):
        tests = [step for step in plan.steps if step.kind is Kind.TEST]
        for wrong, after in zip(tests, tests[1:] + tests[:1], strict=True):
            if wrong.expected is Outcome.FAILED:
                assert after.expected is Outcome.OK
        assert tests[-1].expected is Outcome.OK


@pytest.mark.parametrize("share", [0.47, 0.2, 1.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_alone_on_one_core_a_trajectory_acts_for_its_share(seed: int, share: float) -> None:
    for plan in draw(DemoConfig(seed=seed), PROBLEMS):
        thinking = pauses(plan, COSTS, share)
        active_s = math.fsum(COSTS.active_s(step) for step in plan.steps)
        assert active_s / (active_s + math.fsum(thinking)) == pytest.approx(share)
        for pause, step in zip(thinking, plan.steps, strict=True):
            assert (pause > 0) is (step.kind is Kind.WRITE and share < 1)


def test_slower_actions_leave_the_work_as_it_is() -> None:
    plan = draw(DemoConfig(), PROBLEMS)[0]
    slow = Costs(fixed_s={kind: 10 * cost for kind, cost in COSTS.fixed_s.items()})
    ratios = {
        round(slower / faster, 9)
        for slower, faster in zip(pauses(plan, slow, 0.47), pauses(plan, COSTS, 0.47), strict=True)
        if faster
    }
    assert len(ratios) == 1
    assert ratios.pop() > 1


def test_elastic_actions_are_within_their_bounds() -> None:
    plans = draw(DemoConfig(suites_low=2, suites_high=4, suite_problems=5), PROBLEMS)
    for plan in plans:
        suites = [step for step in plan.steps if step.kind is Kind.SUITE]
        assert 2 <= len(suites) <= 4
        assert {step.programs for step in suites} == {5}
        assert all(5 * 0.3 * 0.12 <= step.work_s <= 5 * 3 * 0.12 for step in suites)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trajectories", 0),
        ("trajectories", 1_025),
        ("broken", 165),
        ("broken", -1),
        ("suites_high", -1),
        ("suite_problems", 0),
        ("suite_units", 0),
        ("work_s", -0.1),
        ("work_s", math.nan),
        ("active_share", 0.0),
        ("active_share", 1.1),
        ("static_units", 0),
        ("timeout_s", 0.0),
        ("limit_s", math.inf),
        ("python", ""),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"demo.{field}"):
        replace(DemoConfig(), **{field: value})  # type: ignore[arg-type]
