"""`Timers` against a dict that is searched."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tangram.limits import TIMER_GRAIN_NS
from tangram.scheduler.timers import Key, Timers

KEYS = st.tuples(st.sampled_from(["deadline", "idle"]), st.integers(0, 5))
STEPS_NS = st.one_of(st.integers(0, 4 * TIMER_GRAIN_NS), st.sampled_from([0, 1, TIMER_GRAIN_NS, TIMER_GRAIN_NS - 1, 1 << 50]))


class Twin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.timers = Timers()
        self.now_ns = 0
        self.due: dict[Key, int] = {}
        """Key -> the grain it falls due at, in the order of setting."""

    @rule(key=KEYS, in_ns=STEPS_NS)
    def set(self, key: Key, in_ns: int) -> None:
        self.timers.set(key, self.now_ns + in_ns)
        self.due.pop(key, None)
        self.due[key] = -(-(self.now_ns + in_ns) // TIMER_GRAIN_NS)

    @rule(key=KEYS)
    def set_in_the_past(self, key: Key) -> None:
        self.timers.set(key, self.now_ns // 2)
        self.due.pop(key, None)
        self.due[key] = -(-(self.now_ns // 2) // TIMER_GRAIN_NS)

    @rule(key=KEYS)
    def cancel(self, key: Key) -> None:
        self.timers.cancel(key)
        self.due.pop(key, None)

    @rule(step_ns=STEPS_NS)
    def pass_time(self, step_ns: int) -> None:
        self.now_ns += step_ns
        expected = sorted((k for k, grain in self.due.items() if grain * TIMER_GRAIN_NS <= self.now_ns), key=self.due.__getitem__)
        assert self.timers.pop_due(self.now_ns) == expected
        for key in expected:
            del self.due[key]

    @rule(count=st.integers(60, 300))
    def churn(self, count: int) -> None:
        """Many are set and called off, as deadlines mostly are; nothing of them stays."""
        for index in range(count):
            self.timers.set(("churn", index), self.now_ns + index * TIMER_GRAIN_NS)
        for index in range(count):
            self.timers.cancel(("churn", index))

    @invariant()
    def next_is_the_earliest(self) -> None:
        assert len(self.timers) == len(self.due)
        expected = min(self.due.values()) * TIMER_GRAIN_NS if self.due else None
        assert self.timers.next_due_ns() == expected


TestTwin: Any = Twin.TestCase
TestTwin.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_timer_is_never_early_and_less_than_a_grain_late() -> None:
    for due_ns in (0, 1, TIMER_GRAIN_NS - 1, TIMER_GRAIN_NS, TIMER_GRAIN_NS + 1):
        timers = Timers()
        timers.set(("deadline", 0), due_ns)
        when = timers.next_due_ns()
        assert when is not None
        assert due_ns <= when < due_ns + TIMER_GRAIN_NS
        assert timers.pop_due(when - 1) == []
        assert timers.pop_due(when) == [("deadline", 0)]
