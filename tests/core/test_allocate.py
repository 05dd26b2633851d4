"""Marginal gain against trying everything, on small convex cases; and what it must keep on any."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tangram.scheduler.allocate import by_marginal_gain


@st.composite
def convex_tables(draw: st.DrawFn) -> list[list[int]]:
    """For each action its duration on its 1st, 2nd ... size, one unit apart: falling by less and less."""
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        falls = sorted(draw(st.lists(st.integers(0, 60), max_size=4)), reverse=True)
        duration = sum(falls) + draw(st.integers(0, 20))
        table = [duration]
        for fall in falls:
            table.append(table[-1] - fall)
        tables.append(table)
    return tables


def unit_sizes(tables: list[list[int]], low: int) -> list[list[int]]:
    return [list(range(low, low + len(table))) for table in tables]


@given(convex_tables(), st.integers(1, 3), st.integers(0, 10))
def test_it_is_as_good_as_trying_everything_when_curves_are_convex(tables: list[list[int]], low: int, spare: int) -> None:
    sizes = unit_sizes(tables, low)
    chosen = by_marginal_gain(sizes, lambda i, units: tables[i][units - low], lambda _: spare)
    assert sum(units - low for units in chosen) <= spare
    total = sum(table[units - low] for table, units in zip(tables, chosen, strict=True))
    best = min(
        sum(table[more] for table, more in zip(tables, mores, strict=True))
        for mores in product(*(range(len(table)) for table in tables))
        if sum(mores) <= spare
    )
    assert total == best


@st.composite
def any_sizes(draw: st.DrawFn) -> list[dict[int, int]]:
    """For each action its legal amounts, with any duration on each."""
    durations = st.integers(0, 100)
    amounts = st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True)
    return [{units: draw(durations) for units in sorted(draw(amounts))} for _ in range(draw(st.integers(0, 5)))]


@given(any_sizes(), st.lists(st.integers(0, 20), min_size=5, max_size=5))
def test_it_keeps_to_legal_amounts_and_to_what_is_spare_and_never_makes_anything_slower(
    durations: list[dict[int, int]], spare: list[int]
) -> None:
    sizes = [list(table) for table in durations]
    chosen = by_marginal_gain(sizes, lambda i, units: durations[i][units], lambda i: spare[i])
    assert all(units in legal for units, legal in zip(chosen, sizes, strict=True))
    more = [units - legal[0] for units, legal in zip(chosen, sizes, strict=True)]
    assert all(taken <= spare[i] for i, taken in enumerate(more))
    assert sum(more) <= max(spare)
    for table, legal, units in zip(durations, sizes, chosen, strict=True):
        assert table[units] <= table[legal[0]]


def test_the_earlier_action_gets_the_last_unit() -> None:
    table = {1: 100, 2: 50}
    assert by_marginal_gain([[1, 2], [1, 2], [1, 2]], lambda _, units: table[units], lambda _: 2) == [2, 2, 1]


def test_a_step_that_does_not_fit_leaves_the_room_to_a_smaller_one() -> None:
    durations = [{1: 100, 8: 1}, {1: 10, 2: 9}]
    assert by_marginal_gain([[1, 8], [1, 2]], lambda i, units: durations[i][units], lambda _: 3) == [1, 2]


def test_nothing_is_given_to_what_would_not_gain() -> None:
    assert by_marginal_gain([[1, 2, 3]], lambda _, __: 5, lambda _: 9) == [1]
