"""What one log has learnt, seeded into another: decided as there, never over what was learnt here."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram import limits, subjects
from tangram import messages as m
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.elasticity import Curve, Model, learn, learnt, size_to_try
from tangram.scheduler.models import exported, seed
from tangram.scheduler.state import State
from tests.core.world import World, cores

ELASTIC = m.Demand(low=1_000, high=8_000)


def trained(duration_s: float = 1.0, parallel: float = 0.0, count: int = 60) -> Model:
    random, model = Random(1), Model()
    for _ in range(count):
        units = random.choice((1, 2, 4, 8))
        took_s = duration_s * (1 - parallel + parallel / units)
        learn(model, units, int(1e6 * took_s * random.uniform(0.9, 1.1)), Curve(400_000, 600_000))
    return model


def seeded(world: World, *models: m.LearntModel, epoch: int = 0) -> None:
    world.put(subjects.CLOCK, m.ModelsSeeded(epoch=epoch or world.state.epoch, models=list(models)))


def a_world() -> World:
    world = World()
    world.lead("tangram")
    world.join(nodes=cores(8))
    return world


def first_start(world: World) -> m.Start:
    world.submit(kind="test", cpu=ELASTIC)
    (start,) = world.decide()
    return start


def test_the_first_action_of_a_seeded_kind_is_decided_by_what_was_learnt_elsewhere() -> None:
    assert first_start(a_world()).units == 8, "by the prior"
    world = a_world()
    seeded(world, exported("t", "test", trained(3.0)))
    start = first_start(world)
    assert start.units <= 4
    assert start.predicted_us == pytest.approx(3_000_000, rel=0.1)


def test_what_was_learnt_here_stays() -> None:
    world = a_world()
    world.state.models[("t", "test")] = own = trained(1.0, count=5)
    seeded(world, exported("t", "test", trained(9.0)), exported("t", "other", trained(9.0)))
    assert world.state.models[("t", "test")] is own
    assert learnt(world.state.models[("t", "other")]).at(1) == pytest.approx(9e6, rel=0.1)


def test_a_leader_that_was_superseded_seeds_nothing() -> None:
    world = a_world()
    stale = world.state.epoch
    world.lead("tangram")
    seeded(world, exported("t", "test", trained()), epoch=stale)
    assert not world.state.models


def test_a_model_without_a_curve_is_not_taken() -> None:
    world = a_world()
    seeded(world, m.LearntModel(task="t", kind="test", count=1, sizes=[m.SizeSeen(units=1, duration_us=1, weight_ppm=0)]))
    assert not world.state.models


def test_seeds_do_not_push_out_what_was_learnt() -> None:
    state = State(models={("t", f"k{i}"): Model() for i in range(limits.MODELS_MAX)})
    seed(state, m.ModelsSeeded(epoch=0, models=[exported("t", "test", trained())]))
    assert ("t", "k0") in state.models
    assert len(state.models) == limits.MODELS_MAX


SEEDS = st.builds(
    m.LearntModel,
    task=st.just("t"),
    kind=st.just("test"),
    count=st.integers(1, limits.NUMBER_MAX),
    serial_us=st.integers(0, limits.NUMBER_MAX),
    parallel_us=st.integers(0, limits.NUMBER_MAX),
    overhead_us=st.integers(0, limits.NUMBER_MAX),
    spread_ppm=st.integers(0, limits.NUMBER_MAX),
    sizes=st.lists(
        st.builds(
            m.SizeSeen,
            units=st.integers(1, 64) | st.integers(1, limits.NUMBER_MAX),
            duration_us=st.integers(1, limits.NUMBER_MAX),
            weight_ppm=st.integers(0, limits.NUMBER_MAX),
            times=st.integers(0, limits.NUMBER_MAX),
        ),
        min_size=1,
        max_size=limits.MODEL_SIZES_MAX,
    ),
)


@given(SEEDS, st.lists(st.tuples(st.integers(1, 64), st.integers(1, 10**12)), max_size=30))
def test_whatever_is_seeded_can_be_decided_by_learnt_on_and_kept(
    given_model: m.LearntModel, history: list[tuple[int, int]]
) -> None:
    world = a_world()
    seeded(world, given_model)
    assert first_start(world).units in range(1, 9)
    model = world.state.models.setdefault(("t", "test"), Model())
    for units, duration_us in history:
        size_to_try(model, (1, 2, 4, 8), 8)
        learn(model, units, duration_us, Curve(400_000, 600_000))
        assert min(model.curve) >= 0
        assert sum(model.curve) > 0
    assert dump(load(dump(world.state))) == dump(world.state)
    if model.count:
        m.encode(exported("t", "test", model))


@given(st.lists(st.tuples(st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 10**9)), min_size=1, max_size=80))
def test_a_model_that_has_travelled_predicts_and_tries_what_it_did(history: list[tuple[int, int]]) -> None:
    model, state = Model(), State()
    for units, duration_us in history:
        learn(model, units, duration_us, Curve(400_000, 600_000))
    seed(state, m.ModelsSeeded(epoch=0, models=[exported("t", "test", model)]))
    there = state.models.get(("t", "test"))
    if there is None:
        assert sum(model.curve) < 1.5, "a curve that rounds to 0"
        return
    assert exported("t", "test", there) == exported("t", "test", model)
    for units in (1, 2, 4, 8, 16):
        assert learnt(there).at(units) == pytest.approx(learnt(model).at(units), abs=10)
