"""A model of nothing but completions: what it learns of a kind, and what cannot lead it far astray."""

from collections.abc import Callable
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.elasticity import Curve, Model, declared, learn, learnt, size_to_try
from tests.core.world import MS, World, cores

PRIOR = Curve(400_000, 600_000)
SIZES = (1, 2, 4, 8, 16)
PER_SIZE = 20


def slower_beyond_four(units: int) -> float:
    return 0.1 + 0.8 / units + 0.05 * units


KINDS: dict[str, Callable[[int, int], float]] = {
    "amdahl": lambda units, seen: 0.2 + 0.8 / units,
    "half": lambda units, seen: 0.5 + 0.5 / units,
    "rigid": lambda units, seen: 1.0,
    "slower beyond four": lambda units, seen: slower_beyond_four(units),
    "no more beyond four": lambda units, seen: 0.2 + 0.8 / min(units, 4) + 0.03 * max(0, units - 4),
    "drifts": lambda units, seen: 0.1 + 0.9 / units if seen < 60 else slower_beyond_four(units),
}


def chosen_beside_best(duration: Callable[[int, int], float], count: int, seed: int) -> float:
    """Expected duration at the size chosen after `count` completions, as a multiple of the best size's. Sizes are chosen as a
    pass does when capacity idles; durations are lognormal with sigma 0.5."""
    random, model = Random(seed), Model()
    for seen in range(count):
        units = size_to_try(model, SIZES, 16) or _best(model)
        learn(model, units, max(1, int(1e6 * duration(units, seen) * exp(random.gauss(0, 0.5)))), PRIOR)
    return duration(_best(model), count) / min(duration(units, count) for units in SIZES)


def _best(model: Model) -> int:
    curve = learnt(model) if model.count else PRIOR
    return min(SIZES, key=lambda units: (curve.at(units), units))


@pytest.mark.parametrize("kind", KINDS)
def test_from_no_knowledge_twenty_completions_a_size_choose_within_ten_percent(kind: str) -> None:
    before = 60 if kind == "drifts" else 0
    ratios = [chosen_beside_best(KINDS[kind], before + PER_SIZE * len(SIZES), seed) for seed in range(100)]
    assert sum(ratios) / len(ratios) <= 1.10


def tries(duration: Callable[[int, int], float], count: int, seed: int) -> list[int]:
    """Which of `count` completions were on another size than the best known, because it was to be tried."""
    random, model, found = Random(seed), Model(), []
    for seen in range(count):
        tried = size_to_try(model, SIZES, 16)
        if tried is not None and tried != _best(model):
            found.append(seen)
        learn(
            model,
            tried or _best(model),
            max(1, int(1e6 * duration(tried or _best(model), seen) * exp(random.gauss(0, 0.5)))),
            PRIOR,
        )
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "drifts"])
def test_tries_become_rarer_with_what_is_known(kind: str) -> None:
    found = [seen for seed in range(20) for seen in tries(KINDS[kind], 1_000, seed)]
    first, last = sum(seen < 100 for seen in found) / 2_000, sum(seen >= 500 for seen in found) / 10_000
    assert first > 0.05, "each size is tried"
    assert last < 0.035


def test_a_size_that_has_become_better_is_found_though_the_chosen_one_is_as_it_was() -> None:
    def duration(units: int, seen: int) -> float:
        return 1.0 + 0.01 * units if seen < 500 else 0.2 + 0.8 / units

    ratios = [chosen_beside_best(duration, 900, seed) for seed in range(20)]
    assert sum(ratios) / len(ratios) <= 1.10


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_the_spread_of_log_normal_durations_is_about_their_sigma(sigma: float) -> None:
    found = []
    for seed in range(20):
        random, model = Random(seed), Model()
        for _ in range(200):
            units = random.choice((1, 2, 4))
            learn(model, units, int(1e6 * KINDS["amdahl"](units, 0) * exp(random.gauss(0, sigma))), PRIOR)
        found.append(model.spread)
    assert sum(found) / len(found) == pytest.approx(sigma, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 10**12)), min_size=1, max_size=200))
def test_any_history_gives_a_curve_without_negative_parts(history: list[tuple[int, int]]) -> None:
    model = Model()
    for units, duration_us in history:
        learn(model, units, duration_us, PRIOR)
        curve = learnt(model)
        assert min(curve.serial, curve.parallel, curve.overhead) >= 0
        assert curve.at(1) > 0
        assert len(model.sizes) <= limits.MODEL_SIZES_MAX


def test_one_duration_a_thousand_times_too_long_moves_the_curve_little() -> None:
    model = Model()
    for _ in range(20):
        for units in (1, 2, 4):
            learn(model, units, int(1e6 * (0.2 + 0.8 / units)), PRIOR)
    before = learnt(model).at(2)
    learn(model, 2, 600_000_000, PRIOR)
    for units in (1, 2, 4) * 3:  # it is fitted anew within these
        learn(model, units, int(1e6 * (0.2 + 0.8 / units)), PRIOR)
    assert learnt(model).at(2) < 1.3 * before


def test_a_declared_table_has_the_entry_at_or_next_below() -> None:
    table = declared(m.Hint(table_us=((2, 50), (4, 30))), m.Hint(duration_us=7))
    assert [table.at(units) for units in (1, 2, 3, 4, 100)] == [50, 50, 50, 30, 30]


# --- in the fold ---------------------------------------------------------------------------------------------------


def run(world: World, seconds: float, outcome: Outcome = Outcome.OK, **spec: object) -> m.Start:
    """One action that has the host to itself."""
    (worker,) = world.workers.values()
    action = world.submit(**spec)  # type: ignore[arg-type]
    (start,) = world.decide()
    worker.read()
    worker.finish(action, outcome, run_ns=int(seconds * 1_000 * MS))
    world.after(int(seconds * 1_000))
    return start


def a_world(count: int = 8, **settings: int) -> World:
    world = World()
    world.lead("tangram", **settings)
    world.join(nodes=cores(count))
    return world


ELASTIC = m.Demand(low=1_000, high=8_000)


def test_what_does_not_scale_is_given_fewer_units_once_that_was_seen() -> None:
    world = a_world()
    first = run(world, 1.0, kind="test", cpu=ELASTIC)
    for _ in range(20):
        run(world, 1.0, kind="test", cpu=ELASTIC)
    later = [run(world, 1.0, kind="test", cpu=ELASTIC) for _ in range(40)]
    assert first.units == 8
    assert sum(start.units <= 4 for start in later) > 30, "now and then another size is tried"
    assert all(abs(start.predicted_us - 1_000_000) < 150_000 for start in later)


@pytest.mark.parametrize("count", [2, 8])
def test_the_first_one_on_an_idle_host_has_all_of_it(count: int) -> None:
    assert run(a_world(count), 1.0, kind="test", cpu=ELASTIC).units == count


def test_time_outs_and_cancels_teach_nothing() -> None:
    world = a_world()
    for outcome in (Outcome.TIMED_OUT, Outcome.CANCELLED, Outcome.OUT_OF_MEMORY, Outcome.ERROR):
        run(world, 1.0, outcome, kind="test", cpu=ELASTIC)
    assert world.state.models == {}
    run(world, 1.0, Outcome.FAILED, kind="test", cpu=ELASTIC)
    assert list(world.state.models) == [("t", "test")]


def test_learning_can_be_switched_off() -> None:
    world = a_world(learn=0)
    units = [run(world, 1.0, kind="test", cpu=ELASTIC).units for _ in range(20)]
    assert world.state.models == {}
    assert len(set(units)) == 1
