"""`CorePool` against a dict from core to what is held of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram.scheduler.cores import MILLI, CorePool, cores_of, mask_of

NODES = st.sampled_from([[[0, 1], [2, 3]], [[0], [1, 2, 3, 4]], [[0, 1, 2, 3, 4, 5]], [[3, 64, 200], [5]], []])
AMOUNTS = st.one_of(st.integers(1, 5).map(lambda cores: cores * MILLI), st.sampled_from([0, 10, 250, 400, 500, 600, 999]))
WITHIN = st.one_of(st.just(-1), st.sets(st.integers(0, 5)).map(mask_of))


class Pool(RuleBasedStateMachine):
    """The naive twin: `held` says how many millicores of each core are taken, `whole` which were taken whole."""

    @initialize(nodes=NODES)
    def begin(self, nodes: list[list[int]]) -> None:
        self.nodes = nodes
        self.pool = CorePool(tuple(mask_of(node) for node in nodes))
        self.held: dict[int, int] = {}
        self.grants: list[tuple[tuple[int, ...], int]] = []

    def naive_free(self, within: int) -> list[int]:
        return [core for node in self.nodes for core in node if not self.held.get(core) and within >> core & 1]

    def naive_fits(self, amount: int, within: int) -> bool:
        free = self.naive_free(within)
        if amount >= MILLI:
            return len(free) * MILLI >= amount
        shared = [c for n in self.nodes for c in n if within >> c & 1 and 0 < self.held.get(c, 0) <= MILLI - amount]
        return amount == 0 or bool(free) or any(self.held[core] < MILLI for core in shared)

    @rule(amount=AMOUNTS, within=WITHIN)
    def take(self, amount: int, within: int) -> None:
        assert self.pool.fits(amount, within) == self.naive_fits(amount, within)
        if not self.naive_fits(amount, within):
            with pytest.raises(ValueError, match="short"):
                self.pool.choose(amount, within)
            return
        cores = self.pool.choose(amount, within)
        assert self.pool.choose(amount, within) == cores, "choosing twice gives the same"
        offered = {core for node in self.nodes for core in node if within >> core & 1}
        assert list(cores) == sorted(set(cores))
        assert set(cores) <= offered
        if amount >= MILLI:
            assert len(cores) * MILLI == amount
            assert not any(self.held.get(core) for core in cores)
            fitting = [n for n in self.nodes if len([c for c in n if c in self.naive_free(within)]) >= len(cores)]
            if fitting:
                assert any(set(cores) <= set(node) for node in fitting), "split over nodes without need"
        elif amount:
            assert len(cores) == 1
            before = self.held.get(cores[0], 0)
            assert before + amount <= MILLI
            shareable = [self.held[c] for c in offered if 0 < self.held.get(c, 0) <= MILLI - amount]
            assert before == max(shareable, default=0), "a fraction fills the fullest shared core"
        else:
            assert cores == ()
        self.pool.take(cores, amount)
        self.grants.append((cores, amount))
        for core in cores:
            self.held[core] = self.held.get(core, 0) + min(amount, MILLI)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        cores, amount = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        self.pool.give(cores, amount)
        for core in cores:
            self.held[core] -= min(amount, MILLI)

    @rule(nodes=NODES)
    def announce(self, nodes: list[list[int]]) -> None:
        """The offered set changes; what is granted stays granted."""
        self.nodes = nodes
        self.pool.announce(tuple(mask_of(node) for node in nodes))

    @rule(more=st.integers(0, 4), within=WITHIN)
    def extend(self, more: int, within: int) -> None:
        whole = [cores for cores, amount in self.grants if amount >= MILLI]
        before = whole[0] if whole else ()
        free = [core for core in self.naive_free(within) if core not in before]
        if len(free) < more:
            with pytest.raises(ValueError, match="short"):
                self.pool.extend(before, more, within)
            return
        cores = self.pool.extend(before, more, within)
        assert set(before) <= set(cores)
        assert len(cores) == len(before) + more
        assert set(cores) - set(before) <= set(free)
        near = [core for node in self.nodes if set(node) & set(before) for core in node if core in free]
        if before and len(near) >= more:
            assert set(cores) - set(before) <= set(near), "went to another node without need"

    @rule()
    def copy(self) -> None:
        """What happens to a copy does not happen to the pool."""
        twin = self.pool.copy()
        if twin.fits(300):
            twin.take(twin.choose(300), 300)
        if twin.fits(MILLI):
            twin.take(twin.choose(MILLI), MILLI)

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        if hasattr(self, "pool"):
            assert list(cores_of(self.pool.free())) == sorted(self.naive_free(-1))
            assert self.pool.all == mask_of(core for node in self.nodes for core in node)
            assert all(self.pool.shared.values())


TestPool: Any = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


@given(
    NODES,
    WITHIN,
    st.lists(st.tuples(st.integers(0, 5), st.integers(10, 999)), max_size=2),
    st.lists(st.integers(1, 4), max_size=6),
    st.integers(0, 3),
)
def test_choosing_for_many_is_choosing_for_one_after_the_other(
    nodes: list[list[int]], within: int, shared: list[tuple[int, int]], counts: list[int], more: int
) -> None:
    masks = tuple(mask_of(node) for node in nodes)
    pool = CorePool(masks)
    for core, millicores in dict(shared).items():
        pool.take((core,), millicores)
    one_by_one = pool.copy()
    claimed, fitting = 0, []
    for count in counts:
        if pool.fits(count * MILLI, within):
            claimed |= pool.claim(count, within)
            fitting.append(count)
        else:
            with pytest.raises(ValueError, match="short"):
                pool.claim(count, within)
    assert claimed.bit_count() == sum(fitting)
    assert pool.free() & claimed == 0
    spare = one_by_one.free(within).bit_count() - sum(fitting)
    fitting = [count + (more if index == 0 and more <= spare else 0) for index, count in enumerate(fitting)]
    expected = []
    for count in fitting:
        expected.append(one_by_one.choose(count * MILLI, within))
        one_by_one.take(expected[-1], count * MILLI)
    assert pool.choose_each(fitting, claimed, within) == expected
    assert pool.used == one_by_one.used
    with pytest.raises(ValueError, match="short"):
        pool.choose_each([pool.free(within).bit_count() + 1, 1], 0, within)


@given(st.sets(st.integers(0, 300)))
def test_a_mask_is_a_set(cores: set[int]) -> None:
    assert cores_of(mask_of(cores)) == tuple(sorted(cores))


def test_giving_back_what_was_not_taken_is_an_error() -> None:
    pool = CorePool((0b1111,))
    with pytest.raises(AssertionError, match="not taken"):
        pool.give((0,), MILLI)
    pool.take((0,), 400)
    with pytest.raises(AssertionError, match="more than was taken"):
        pool.give((0,), 500)


def test_two_half_free_cores_hold_no_whole_one() -> None:
    pool = CorePool((0b11,))
    pool.take((0,), 500)
    pool.take((1,), 500)
    assert not pool.fits(MILLI)
    assert not pool.fits(600)
    assert pool.fits(500)
