"""Wide actions, and what may start before them; sandboxes that wait for memory, and what may not."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram import limits
from tangram import messages as m
from tangram.scheduler.reservation import Release, reserve
from tangram.scheduler.state import ActionId
from tests.core.world import Worker, World, cores

WHOLE = 1_000
PATIENCE_S = 20


def takes(seconds: float) -> m.Hint:
    return m.Hint(duration_us=int(seconds * 1e6), parallel_ppm=0)


def busy(policy: str = "tangram", count: int = 8, **settings: int) -> tuple[World, Worker]:
    """A host on which all cores but two are taken for 10 s, and one that needs all of them but one waits."""
    world = World()
    world.lead(policy, learn=0, **settings)
    worker = world.join(nodes=cores(count), memory=1_000)
    world.submit(cpu=(count - 2) * WHOLE, client="running", hint=takes(10))
    world.decide()
    world.submit(cpu=(count - 1) * WHOLE, client="wide", hint=takes(1))
    assert world.decide() == []
    return world, worker


def started(world: World) -> list[str]:
    return [start.client for start in world.decide()]


# --- who may pass --------------------------------------------------------------------------------------------------


def test_what_ends_before_the_wide_one_can_start_goes_first() -> None:
    world, _ = busy()
    world.submit(cpu=WHOLE, client="short", hint=takes(9))
    assert started(world) == ["short"]


def test_what_needs_only_what_the_wide_one_leaves_over_goes_first_once() -> None:
    world, _ = busy()
    for client in ("long", "second"):
        world.submit(cpu=WHOLE, client=client, hint=takes(1_000))
    assert started(world) == ["long"], "a second one would make the wide one wait for it"


def test_what_would_delay_it_waits() -> None:
    world, worker = busy()
    world.submit(cpu=2 * WHOLE, client="long", hint=takes(11))
    assert started(world) == []
    worker.answer_all()
    assert started(world) == ["wide"]


def test_what_a_backfilled_one_takes_is_taken_only_once() -> None:
    world, _ = busy()
    for client in ("short", "long"):
        world.submit(cpu=2 * WHOLE, client=client, hint=takes(9))
    assert started(world) == ["short"]


def test_an_elastic_one_that_goes_first_takes_no_extra_cores() -> None:
    world, worker = busy()
    elastic = m.Hint(duration_us=5_000_000, parallel_ppm=990_000)
    world.submit(cpu=m.Demand(low=WHOLE, high=8 * WHOLE), client="elastic", hint=elastic)
    assert started(world) == ["elastic"]
    worker.read()
    assert [len(each.start.cores) for each in worker.running.values() if each.start.client == "elastic"] == [1]


def test_after_its_patience_nobody_passes() -> None:
    world, worker = busy()
    world.pass_time(PATIENCE_S - 1)  # what runs is overdue: it is taken to run for half as long again
    world.submit(cpu=WHOLE, client="short", hint=takes(2))
    assert started(world) == ["short"]
    worker.finish(ActionId("t", "short", 1))
    world.pass_time(1)
    world.submit(cpu=WHOLE, client="late", hint=takes(0.1))
    assert started(world) == []
    worker.answer_all()
    assert started(world) == ["wide", "late"]


def test_patience_of_zero_is_strict_and_baselines_are() -> None:
    for world, _ in (busy(patience_ms=0), busy("fcfs-minimum"), busy("paper")):
        world.submit(cpu=WHOLE, client="short", hint=takes(1))
        assert started(world) == []


def test_behind_one_that_needs_one_core_nobody_passes() -> None:
    world = World()
    world.lead()
    worker = world.join(nodes=cores(1))
    world.submit(cpu=600, client="running", hint=takes(10))
    world.decide()
    world.submit(cpu=WHOLE, client="first")
    world.submit(cpu=400, client="fraction", hint=takes(1))
    assert started(world) == []
    worker.answer_all()
    assert started(world) == ["first"]


def test_a_sessions_wide_action_is_passed_on_its_host_alone_by_the_same_rule() -> None:
    world = World()
    world.lead(learn=0)
    worker = world.join(nodes=cores(8))
    session = world.submit(kind="session.open")
    world.decide()
    worker.finish(session)
    world.submit(cpu=6 * WHOLE, client="running", hint=takes(10))
    world.decide()
    world.submit(cpu=8 * WHOLE, session=session.n, hint=takes(1))
    world.submit(cpu=WHOLE, client="short", hint=takes(5))
    world.submit(cpu=WHOLE, client="long", hint=takes(50))
    assert started(world) == ["short"]


def test_no_more_than_so_many_are_looked_at_behind_a_wide_one() -> None:
    world, _ = busy()
    for _ in range(limits.BACKFILL_MAX):
        world.submit(cpu=2 * WHOLE, client="long", hint=takes(100))
    world.submit(cpu=WHOLE, client="short", hint=takes(1))
    assert started(world) == []


def test_nobody_passes_one_whose_cores_nothing_that_runs_gives_back() -> None:
    """They are reserved by a sandbox: when that ends is anybody's guess."""
    world = World()
    world.lead("static-trajectory", static_units=4)
    worker = world.join(nodes=cores(8))
    session = world.submit(kind="session.open")
    world.decide()
    worker.finish(session)
    world.lead(learn=0)
    world.submit(cpu=8 * WHOLE, client="wide")
    world.submit(cpu=WHOLE, client="short", hint=takes(0.1))
    assert started(world) == []


def test_a_fixed_size_is_not_waited_for_on_cores_that_a_sandbox_reserves() -> None:
    world = World()
    world.lead("static-trajectory", static_units=1)
    worker = world.join(nodes=cores(4))
    session = world.submit(kind="session.open")
    world.decide()
    worker.finish(session)
    world.lead("fixed-units", fixed_units=4)
    world.submit(cpu=m.Demand(low=WHOLE, high=4 * WHOLE), client="other")
    assert [len(start.cores) for start in world.decide()] == [3]


@given(
    st.integers(1, 64),
    st.integers(0, 64),
    st.lists(st.tuples(st.floats(0, 1e9), st.integers(1, 16)), max_size=20),
)
def test_the_predicted_start_is_the_first_time_at_which_it_fits(need: int, free: int, releases: list[tuple[float, int]]) -> None:
    found = reserve(need, free, 1 << 40, [Release(at_us, count, 0) for at_us, count in releases])

    def free_at(at_us: float) -> int:
        return free + sum(count for when, count in releases if when <= at_us)

    times = sorted({when for when, _ in releases if free_at(when) >= need})
    assert (found is None) == (not times)
    if found is not None:
        assert found.start_us == times[0]
        assert 0 <= found.spare <= free_at(times[0]) - need


# --- nobody waits for ever -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["tangram", "fair", "split-by-task"])
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1 << 32), st.sampled_from([0.01, 1.0, 30.0]))
def test_a_wide_action_starts_under_any_stream_of_narrow_ones(policy: str, seed: int, said_s: float) -> None:
    """Whatever they say they take: they take 1 to 10 s. From the end of its patience it waits for those that run, and no more."""
    random = Random(seed)
    world = World()
    world.lead(policy, learn=0)
    worker = world.join(nodes=cores(8))
    ends: dict[int, int] = {}
    for second in range(PATIENCE_S + 12):
        for _ in range(8):
            world.submit(client="narrow", cpu=WHOLE, hint=takes(said_s))
        starts = world.decide()
        if any(start.client == "wide" for start in starts):
            return
        ends.update((start.n, second + random.randint(1, 10)) for start in starts)
        if second == 0:
            world.submit(client="wide", cpu=8 * WHOLE)
        world.pass_time(1)
        worker.read()
        for key in [key for key in worker.running if ends[key.action.n] <= second + 1]:
            worker.end(key)
        worker.send()
    raise AssertionError("it has not started")


def test_a_sandbox_that_needs_much_memory_is_not_starved_by_those_that_need_little() -> None:
    world = World()
    world.lead()
    worker = world.join(memory=1_000)
    small = [world.submit(kind="session.open", client="small", memory=100) for _ in range(10)]
    world.decide()
    for each in small:
        worker.finish(each)
    large = world.submit(kind="session.open", client="large", memory=900)
    for number, each in enumerate(small[:9]):
        world.submit(kind="session.open", client="small", memory=100)
        assert world.decide() == [], f"with {number} closed"
        close = world.submit(kind="session.close", client="small", session=each.n)
        world.decide()
        worker.finish(close)
    assert [(start.client, start.n) for start in world.decide()] == [("large", large.n)]


@pytest.mark.parametrize("kind", ["session.open", "run"])
@pytest.mark.parametrize("policy", ["tangram", "fair", "fcfs-minimum"])
def test_what_waits_for_a_sandbox_to_end_does_not_hold_back_what_runs_in_it(kind: str, policy: str) -> None:
    """Else both would wait for ever: the memory comes back when the sandbox ends, and it ends after its actions."""
    world = World()
    world.lead(policy)
    worker = world.join(memory=1_000)
    session = world.submit(kind="session.open", memory=500)
    world.decide()
    worker.finish(session)
    world.submit(kind=kind, client="waits", memory=800)
    assert world.decide() == []
    inside = world.submit(cpu=WHOLE, memory=300, session=session.n)
    world.submit(kind="session.open", client="later", memory=100)
    assert [(start.client, start.n) for start in world.decide()] == [("c", inside.n)]
    worker.finish(inside)
    close = world.submit(kind="session.close", session=session.n)
    world.decide()
    worker.finish(close)
    assert [start.client for start in world.decide()] == ["waits", "later"]


def test_an_action_that_waits_by_choice_is_left_for_later_a_bounded_number_of_times() -> None:
    """Two that would both like the whole host: neither makes the other wait for ever, though what runs never ends."""
    for policy in ("tangram", "fair"):
        world = World()
        world.lead(policy, learn=0)
        world.join(nodes=cores(8))
        world.submit(task="a", cpu=7 * WHOLE, hint=takes(1))
        world.decide()
        hint = m.Hint(duration_us=4_000_000, parallel_ppm=990_000)
        for task in ("a", "b"):
            world.submit(task=task, cpu=m.Demand(low=WHOLE, high=8 * WHOLE), hint=hint)
        passes = 0
        while not world.decide():
            passes += 1
            assert passes < 100, "it never waits longer than it would run on what is free"
            world.pass_time(0.1)
