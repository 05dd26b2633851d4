"""Several tasks on one pool, and actions of very different widths, on the virtual clock."""

from random import Random
from statistics import fmean

import pytest

from tangram.simulation.client import Done
from tangram.simulation.driver import Setup, Simulation
from tangram.simulation.pool import Machine
from tangram.simulation.report import figures
from tangram.simulation.work import Trajectory, Work
from tangram.simulation.workloads import Coding

SECOND = 1_000_000_000
CORES = 32
ACTIONS = 15


def coding(task: str, count: int, actions: int, seed: int, first: int) -> list[Trajectory]:
    made = Coding(actions=actions).trajectories(count, seed)
    return [each._replace(task=task, number=first + each.number) for each in made]


def act_s(done: list[Done]) -> float:
    return fmean((each.finished_ns - each.arrived_ns) / SECOND for each in done)


def ran(trajectories: list[Trajectory], cores: int, setup: Setup, until: str) -> list[Done]:
    """What had ended when all of one task had."""
    simulation = Simulation(trajectories, [Machine((cores,))], setup)
    left = sum(len(each.work) for each in trajectories if each.task == until)
    seen = 0
    while left and simulation.advance():
        left -= sum(each.trajectory.task == until for each in simulation.done[seen:])
        seen = len(simulation.done)
    assert not left
    return simulation.done


def beside_a_flood(policy: str, one_shot: bool, seeds: range) -> tuple[float, float]:
    """The mean ACT of a task beside one that asks for ten times its share, by that of the task alone on its half of the pool;
    and how much of the pool was in use."""
    alone: list[Done] = []
    beside: list[Done] = []
    busy: list[float] = []
    for seed in seeds:
        mine = coding("b", 20, ACTIONS, 100 + seed, 0)
        flood = coding("a", 200, 100, 200 + seed, 1_000)
        alone += ran(mine, CORES // 2, Setup(policy, one_shot=one_shot), "b")
        done = ran([*mine, *flood], CORES, Setup(policy, one_shot=one_shot), "b")
        beside += [each for each in done if each.trajectory.task == "b"]
        # Of the middle: at the end much runs that is not in `done`.
        from_ns, to_ns = 5 * SECOND, done[-1].finished_ns // 2
        used = sum(each.units * max(0, min(each.finished_ns, to_ns) - max(each.started_ns, from_ns)) for each in done)
        busy.append(used / (CORES * (to_ns - from_ns)))
    return act_s(beside) / act_s(alone), fmean(busy)


@pytest.mark.parametrize("one_shot", [False, True], ids=["sessions", "one-shot"])
def test_a_flood_of_another_task_costs_a_task_within_its_share_next_to_nothing(one_shot: bool) -> None:
    ratio, busy = beside_a_flood("fair", one_shot, range(3))
    assert ratio <= 1.1
    assert busy >= 0.8, "what one task does not use, the other may"


def test_without_shares_a_flood_costs_the_others_dearly() -> None:
    assert beside_a_flood("tangram", False, range(1))[0] > 3, "else the test above shows nothing"


def test_parts_keep_a_flood_away_altogether_and_what_is_not_used_is_lost() -> None:
    mine = coding("b", 20, ACTIONS, 100, 0)
    flood = coding("a", 200, 100, 200, 1_000)
    alone = ran(mine, CORES // 2, Setup("tangram"), "b")
    setup = Setup("split-by-task", shares={"a": 1, "b": 1})
    done = ran([*mine, *flood], CORES, setup, "b")
    assert act_s([each for each in done if each.trajectory.task == "b"]) == pytest.approx(act_s(alone), rel=0.05)
    changes = sorted(
        (at_ns, units)
        for each in done
        if each.trajectory.task == "a"
        for at_ns, units in ((each.started_ns, each.units), (each.finished_ns, -each.units))
    )
    held = 0
    for _, units in changes:
        held += units
        assert held <= CORES // 2


def with_wide_ones(seed: int) -> list[Trajectory]:
    """One in ten needs half the pool, and none is elastic."""
    random = Random(seed)

    def work() -> Work:
        wide = random.random() < 0.1
        low = CORES // 2 if wide else 1
        duration_ns, think_ns = round(random.expovariate(0.5) * SECOND), round(random.expovariate(0.25) * SECOND)
        return Work("wide" if wide else "narrow", think_ns, duration_ns, 0, low, low)

    return [Trajectory(number, "t", 0, [work() for _ in range(20)]) for number in range(44)]


def test_passing_a_wide_action_pays_and_its_patience_bounds_its_wait() -> None:
    def waits_s(done: list[Done]) -> list[float]:
        return [(each.started_ns - each.arrived_ns) / SECOND for each in done if each.work.kind == "wide"]

    strict: list[Done] = []
    patient: list[Done] = []
    for seed in range(3):
        trajectories = with_wide_ones(seed)
        strict += ran(trajectories, CORES, Setup(settings={"patience_ms": 0}, one_shot=True), "t")
        patient += ran(trajectories, CORES, Setup(settings={"patience_ms": 20_000}, one_shot=True), "t")
    assert act_s(patient) < 0.9 * act_s(strict)
    assert fmean(waits_s(strict)) < fmean(waits_s(patient))
    # Beyond its patience it waits for those before it in the queue, and for what runs.
    assert max(waits_s(patient)) < 3 * max(waits_s(strict))


def test_a_task_that_has_gone_leaves_its_part_though_nobody_ticked() -> None:
    """While nothing is open log time stands still: the minute is one of the server's clock, too."""
    first = [Trajectory(n, "a", 0, [_half_a_second()]) for n in range(40)]
    after = [Trajectory(100 + n, "b", 210 * SECOND, [_half_a_second()]) for n in range(30)]
    simulation = Simulation([*first, *after], [Machine((2,))], Setup("fair", one_shot=True, round_trip_ns=0))
    simulation.run()
    assert figures(simulation, "b").makespan_s == pytest.approx(30 * 0.5 / 2, rel=0.1)


def _half_a_second() -> Work:
    return Work("run", 0, SECOND // 2)
