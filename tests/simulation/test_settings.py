"""What elasticity is for: less mean ACT than any one number of cores for every action, known only in hindsight, would give."""

import pytest

from tests.simulation.settings import FIXED, MADE, Setting, act_s, made


@pytest.mark.parametrize("hosts", [1, 4])
def test_shorter_than_the_best_fixed_size_at_middling_load(hosts: int) -> None:
    setting = Setting("cv 2, all", 64, 32, hosts)
    trajectories = made(MADE[setting.workload], setting.trajectories, 21)
    best = min(act_s(trajectories, setting, "fixed-units", units) for units in FIXED)
    assert act_s(trajectories, setting, "tangram", oracle=True) <= 0.92 * best
    assert act_s(trajectories, setting, "tangram") <= 0.94 * best, "learnt from nothing"


@pytest.mark.parametrize("workload", ["cv 1, half", "cv 2, all"])
def test_in_saturation_it_is_no_longer_than_at_the_least_units(workload: str) -> None:
    setting = Setting(workload, 64, 13, 1)
    trajectories = made(MADE[workload], setting.trajectories, 21)
    assert act_s(trajectories, setting, "tangram") <= 1.02 * act_s(trajectories, setting, "fcfs-minimum")
