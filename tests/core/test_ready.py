"""`ReadyQueue` against a sorted list."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tangram.scheduler.ready import Order, ReadyQueue

ORDERS = st.tuples(st.integers(0, 60), st.integers(0, 3))


class Twin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: ReadyQueue[str] = ReadyQueue()
        self.orders: list[Order] = []

    def _add(self, order: Order) -> None:
        self.queue.add(order, f"item {order}")
        self.orders = sorted([*self.orders, order])

    @rule(order=ORDERS)
    def add_anywhere(self, order: Order) -> None:
        if order not in self.orders:
            self._add(order)

    @rule(count=st.integers(1, 700))
    def add_at_the_end(self, count: int) -> None:
        last = self.orders[-1][0] if self.orders else 0
        for index in range(count):
            self._add((last + 1 + index, 0))

    @precondition(lambda self: self.orders)
    @rule(count=st.integers(1, 700))
    def take_from_the_front(self, count: int) -> None:
        for order in self.orders[:count]:
            self.queue.remove(order)
        del self.orders[:count]

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def take_from_anywhere(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.orders))
        self.queue.remove(order)
        self.orders.remove(order)

    @rule(order=ORDERS)
    def take_what_is_not_there(self, order: Order) -> None:
        if order not in self.orders:
            with pytest.raises(KeyError):
                self.queue.remove(order)

    @rule()
    def read_without_changing(self) -> None:
        walk = iter(self.queue)
        assert [next(walk, None) for _ in self.orders[:3]] == [f"item {order}" for order in self.orders[:3]]

    @invariant()
    def is_sorted(self) -> None:
        assert len(self.queue) == len(self.orders)
        assert bool(self.queue) == bool(self.orders)
        assert list(self.queue) == [f"item {order}" for order in self.orders]


TestTwin: Any = Twin.TestCase
TestTwin.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
