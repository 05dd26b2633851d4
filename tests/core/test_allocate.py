"""Marginal gain against trying everything, on small convex cases; and what it must keep on any."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tangram.scheduler.allocate import by_marginal_gain, each
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.sizing import Candidate

Table = dict[int, int]
"""A duration on each legal size."""


def shared(tables: list[Table], of: list[int], spare: int) -> list[int]:
    kinds = [Candidate(Curve(0, 0, 0, tuple(sorted(table.items()))), sorted(table)) for table in tables]
    members = [[index for index, its in enumerate(of) if its == kind] for kind in range(len(kinds))]
    return each(by_marginal_gain([kind.sizes[0] for kind in kinds], [kind.step for kind in kinds], members, spare), members)


@st.composite
def convex(draw: st.DrawFn) -> Table:
    """Durations on sizes one unit apart: falling by less and less."""
    falls = sorted(draw(st.lists(st.integers(0, 60), max_size=4)), reverse=True)
    low = draw(st.integers(1, 3))
    table = {low: 1 + sum(falls) + draw(st.integers(0, 20))}
    for more, fall in enumerate(falls, low + 1):
        table[more] = table[more - 1] - fall
    return table


@st.composite
def of_kinds(draw: st.DrawFn, kinds: st.SearchStrategy[Table], most: int) -> tuple[list[Table], list[int]]:
    tables = draw(st.lists(kinds, min_size=1, max_size=3))
    return tables, draw(st.lists(st.integers(0, len(tables) - 1), max_size=most))


@given(of_kinds(convex(), 4), st.integers(0, 10))
def test_it_is_as_good_as_trying_everything_when_curves_are_convex(case: tuple[list[Table], list[int]], spare: int) -> None:
    tables, of = case
    chosen = shared(tables, of, spare)
    more = [size - min(tables[kind]) for kind, size in zip(of, chosen, strict=True)]
    assert sum(more) <= spare
    best = min(
        sum(tables[kind][size] for kind, size in zip(of, sizes, strict=True))
        for sizes in product(*(tables[kind] for kind in of))
        if sum(size - min(tables[kind]) for kind, size in zip(of, sizes, strict=True)) <= spare
    )
    assert sum(tables[kind][size] for kind, size in zip(of, chosen, strict=True)) == best


@st.composite
def anything(draw: st.DrawFn) -> Table:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True))
    return {size: draw(st.integers(1, 100)) for size in sorted(sizes)}


@given(of_kinds(anything(), 8), st.integers(0, 20))
def test_it_keeps_to_legal_amounts_and_to_what_is_spare_and_never_makes_anything_slower(
    case: tuple[list[Table], list[int]], spare: int
) -> None:
    tables, of = case
    chosen = shared(tables, of, spare)
    assert len(chosen) == len(of)
    assert all(size in tables[kind] for kind, size in zip(of, chosen, strict=True))
    assert sum(size - min(tables[kind]) for kind, size in zip(of, chosen, strict=True)) <= spare
    for kind, size in zip(of, chosen, strict=True):
        assert tables[kind][size] <= tables[kind][min(tables[kind])]


@given(of_kinds(anything(), 8), st.integers(0, 20))
def test_of_equal_actions_the_earlier_has_at_least_what_the_later_has(case: tuple[list[Table], list[int]], spare: int) -> None:
    tables, of = case
    chosen = shared(tables, of, spare)
    for kind in range(len(tables)):
        alike = [size for its, size in zip(of, chosen, strict=True) if its == kind]
        assert alike == sorted(alike, reverse=True)


def test_the_earlier_action_gets_the_last_unit() -> None:
    assert shared([{1: 100, 2: 50}], [0, 0, 0], 2) == [2, 2, 1]
    assert shared([{1: 100, 2: 50}, {1: 90, 2: 40, 3: 35}], [0, 1, 0, 1], 3) == [2, 2, 2, 1]


def test_a_step_that_does_not_fit_leaves_the_room_to_a_smaller_one() -> None:
    assert shared([{1: 100, 8: 1}, {1: 10, 2: 9}], [0, 1], 3) == [1, 2]
    assert shared([{1: 9, 3: 5}, {1: 9, 2: 7}], [0, 0, 1, 1], 3) == [3, 1, 2, 1]


def test_nothing_is_given_to_what_would_not_gain() -> None:
    assert shared([{1: 5, 2: 5, 3: 5}], [0], 9) == [1]


def test_a_table_that_falls_late_is_climbed_all_the_same() -> None:
    assert shared([{1: 100, 2: 100, 4: 10}], [0, 0], 4) == [4, 1]
