"""Marginal gain against trying everything, on small convex cases; and what it must keep on any. The exact ones on any."""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.rules import GPU_CHUNKS
from tangram.scheduler.allocate import by_marginal_gain, each, exactly, exactly_in_chunks
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.gpus import chunks, free_in_chunks
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


# --- exactly -------------------------------------------------------------------------------------------------------


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


@st.composite
def any_sizes(draw: st.DrawFn) -> list[dict[int, int]]:
    """For each action its legal amounts, with any duration on each."""
    durations = st.integers(0, 100)
    amounts = st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True)
    return [{units: draw(durations) for units in sorted(draw(amounts))} for _ in range(draw(st.integers(0, 5)))]


def all_choices(sizes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    return product(*sizes)


def lasts(durations: Sequence[dict[int, int]], chosen: Sequence[int]) -> int:
    return sum(table[units] for table, units in zip(durations, chosen, strict=True))


@given(any_sizes(), st.integers(0, 30))
def test_exactly_is_the_best_of_all_choices_whatever_the_durations(durations: list[dict[int, int]], spare: int) -> None:
    sizes = [list(table) for table in durations]
    lows = sum(legal[0] for legal in sizes)
    chosen = exactly(sizes, lambda i, units: durations[i][units], spare)
    assert sum(chosen) - lows <= spare
    best = min(lasts(durations, each) for each in all_choices(sizes) if sum(each) - lows <= spare)
    assert lasts(durations, chosen) == best


@given(convex_tables(), st.integers(0, 20))
def test_on_convex_durations_marginal_gain_is_exact(tables: list[list[int]], spare: int) -> None:
    sizes = unit_sizes(tables, 1)
    durations = [{size: 1 + took for size, took in enumerate(table, start=1)} for table in tables]
    by_gain = shared(durations, list(range(len(durations))), spare)
    assert lasts(durations, by_gain) == lasts(durations, exactly(sizes, lambda i, units: durations[i][units], spare))


@st.composite
def on_gpus(draw: st.DrawFn) -> list[dict[int, int]]:
    chunks_ = st.sets(st.sampled_from(GPU_CHUNKS), min_size=1)
    return [{size: draw(st.integers(0, 100)) for size in sorted(draw(chunks_))} for _ in range(draw(st.integers(1, 5)))]


def can_be_placed(free: int, asked: list[int]) -> bool:
    """Tries every aligned place for every chunk, the largest first."""
    if not asked:
        return True
    largest, *rest = asked
    return any(can_be_placed(free & ~chunk, rest) for chunk in chunks(free, largest))


@settings(max_examples=200, deadline=None)
@given(on_gpus(), st.integers(0, 255))
def test_in_chunks_it_is_the_best_of_all_that_can_really_be_placed(durations: list[dict[int, int]], free: int) -> None:
    sizes = [list(table) for table in durations]
    chosen = exactly_in_chunks(sizes, lambda i, units: durations[i][units], free_in_chunks(free))
    possible = [each for each in all_choices(sizes) if can_be_placed(free, sorted(each, reverse=True))]
    if chosen is None:
        assert not possible
    else:
        assert can_be_placed(free, sorted(chosen, reverse=True))
        assert lasts(durations, chosen) == min(lasts(durations, each) for each in possible)


@given(on_gpus(), st.integers(0, 16))
def test_in_chunks_and_over_units_are_the_same_where_the_topology_does_not_bind(
    durations: list[dict[int, int]], spare: int
) -> None:
    """As many whole groups of 8 as there are actions, but only so many GPUs in all."""
    sizes = [list(table) for table in durations]
    total = sum(legal[0] for legal in sizes) + spare
    free = {size: total if size == 1 else 8 * len(sizes) + total for size in GPU_CHUNKS}
    in_chunks = exactly_in_chunks(sizes, lambda i, units: durations[i][units], free)
    assert in_chunks is not None
    assert lasts(durations, in_chunks) == lasts(durations, exactly(sizes, lambda i, units: durations[i][units], spare))


def doubling(durations: list[dict[int, float]], free: dict[int, int]) -> list[int] | None:
    """From the smallest chunks up, the doubling that gains most for each GPU, while it can be placed."""

    def fits(sizes: list[int]) -> bool:
        return all(sum(size for size in sizes if size >= level) <= units for level, units in free.items())

    chosen = [min(table) for table in durations]
    if not fits(chosen):
        return None
    while True:
        steps = [
            ((table[size] - table[2 * size]) / size, -index)
            for index, (table, size) in enumerate(zip(durations, chosen, strict=True))
            if 2 * size in table and fits([*chosen[:index], 2 * size, *chosen[index + 1 :]])
        ]
        if not steps or max(steps)[0] <= 0:
            return chosen
        chosen[-max(steps)[1]] *= 2


def chunk_gaps(count: int) -> list[float]:
    """How much longer than the least sum the doubling greedy's is, on five hosts of eight with anything in use."""
    found = []
    for seed in range(count):
        random = Random(seed)
        masks = [random.getrandbits(8) | random.getrandbits(8) for _ in range(5)]
        free = {size: sum(free_in_chunks(mask)[size] for mask in masks) for size in GPU_CHUNKS}
        durations: list[dict[int, float]] = []
        for _ in range(random.randint(3, 20)):
            one, parallel = random.uniform(0.2, 5), random.uniform(0.3, 1)
            durations.append({size: one * (1 - parallel + parallel / size) for size in GPU_CHUNKS})
        best = exactly_in_chunks([GPU_CHUNKS] * len(durations), lambda i, size, d=durations: d[i][size], free)  # type: ignore[misc]
        greedy = doubling(durations, free)
        assert (best is None) == (greedy is None)
        if best is not None and greedy is not None:
            least = sum(table[size] for table, size in zip(durations, best, strict=True))
            found.append(sum(table[size] for table, size in zip(durations, greedy, strict=True)) / least - 1)
    return found


def test_a_doubling_greedy_for_chunks_is_near() -> None:
    found = chunk_gaps(60)
    assert min(found) >= -1e-9
    assert sum(found) / len(found) <= 0.01
    assert max(found) <= 0.1
