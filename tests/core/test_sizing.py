"""The rules that share a host's cores between its candidates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.scheduler import sizing
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.sizing import Candidate, Rule, View
from tests.core.gaps import amdahl, gaps

RULES: dict[str, Rule] = {
    "fixed": sizing.fixed, "marginal": sizing.marginal, "paper": sizing.paper, "priced": sizing.priced,
}  # fmt: skip


def view(cores: int, free: int | None = None, **given: object) -> View:
    facts: dict[str, object] = {
        "behind": 0, "thinking": 0, "utilisation": 0.0, "releases": [], "free": cores if free is None else free
    }  # fmt: skip
    return View(cores=cores, **{**facts, **given})  # type: ignore[arg-type]


@st.composite
def situations(draw: st.DrawFn) -> tuple[View, list[Candidate]]:
    """Candidates that fit at their minimum, on a host with anything going on."""
    cores = draw(st.integers(1, 64))
    free = draw(st.integers(1, cores))
    kinds = [
        Candidate(
            draw(
                st.one_of(
                    st.builds(Curve, st.floats(0, 1e7), st.floats(1, 1e8), st.floats(0, 1e5)),
                    st.just(Curve(0, 0, 0, ((1, 900), (2, 800), (4, 100), (8, 150)))),
                )
            ),
            tuple(sorted(draw(st.sets(st.integers(1, 16), min_size=1, max_size=5)))),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    candidates: list[Candidate] = []
    for candidate in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=20)):
        if sum(each.sizes[0] for each in candidates) + candidate.sizes[0] <= free:
            candidates.append(candidate)
    if not candidates:
        candidates, free = [kinds[0]], max(free, kinds[0].sizes[0])
        cores = max(cores, free)
    running = draw(st.lists(st.tuples(st.floats(0, 1e7), st.integers(1, 4)), max_size=5))
    given = view(
        cores,
        free,
        behind=draw(st.integers(0, 1_000)),
        thinking=draw(st.integers(0, 200)),
        utilisation=draw(st.floats(0, 1)),
        releases=sorted(running),
        fixed=draw(st.integers(1, 16)),
        wide_waits=draw(st.booleans()),
        waited_us=draw(st.floats(0, 1e9)),
    )
    return given, candidates


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=300, deadline=None)
@given(situations())
def test_every_rule_gives_legal_units_within_what_is_free_to_a_prefix(name: str, situation: tuple[View, list[Candidate]]) -> None:
    given, candidates = situation
    units = RULES[name](given, candidates)
    assert len(units) == len(candidates)
    assert sum(units) <= given.free
    started = [index for index, amount in enumerate(units) if amount]
    assert started == list(range(len(started))), "a later one started and an earlier one did not"
    for candidate, amount in zip(candidates, units, strict=True):
        assert amount == 0 or amount in candidate.sizes
    assert RULES[name](given, candidates) == units


@settings(max_examples=300, deadline=None)
@given(situations())
def test_on_an_idle_host_the_first_one_always_starts(situation: tuple[View, list[Candidate]]) -> None:
    given, candidates = situation
    idle = view(given.cores, behind=given.behind, thinking=given.thinking, utilisation=given.utilisation)
    for rule in (sizing.priced, sizing.paper, sizing.marginal):
        assert rule(idle, candidates)[0] > 0, rule


def test_alone_and_with_nobody_expected_it_gets_all_that_helps() -> None:
    assert sizing.priced(view(16), [amdahl(1, 0.9, range(1, 17))]) == [16]
    slower = Candidate(Curve(1e5, 8e5, 5e4), range(1, 17))
    assert sizing.priced(view(16), [slower]) == [4]


def test_the_busier_the_host_the_fewer_units() -> None:
    def units(busy: float) -> int:
        given = view(64, 32, utilisation=busy, thinking=64, releases=[(5e5, 32)])
        return sizing.priced(given, [amdahl(1, 0.8, range(1, 17))])[0]

    found = [units(busy) for busy in (0.0, 0.3, 0.5, 0.7, 0.9)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 16
    assert found[-1] < 8


def test_a_long_queue_makes_everybody_take_the_minimum() -> None:
    given = view(16, behind=10_000, thinking=0, utilisation=0.95)
    assert set(sizing.priced(given, [amdahl(1, 0.8, range(1, 9))] * 16)) == {1}


def test_one_that_would_run_far_longer_on_what_is_left_waits_for_what_comes_back_soon() -> None:
    given = view(16, 1, releases=[(1e4, 15)])
    candidate = amdahl(10, 0.99, range(1, 17))
    assert sizing.priced(given, [candidate]) == [0]
    waited = view(16, 1, releases=[(1e4, 15)], waited_us=11e6)
    assert sizing.priced(waited, [candidate]) == [1], "it never waits longer than it would have run"


def test_nobody_waits_for_what_comes_back_late() -> None:
    assert sizing.priced(view(16, 1, releases=[(60e6, 15)]), [amdahl(10, 0.99, range(1, 17))]) == [1]


def test_against_branch_and_bound_in_arrival_order() -> None:
    priced, published = gaps(sizing.priced, 60), gaps(sizing.paper, 60)
    assert sum(priced) / len(priced) <= 0.02
    assert sum(priced) < sum(published)
