"""The core against any order of anything: every invariant holds after every step, and once everybody answers all ends well.

`Chaos` has the events; hypothesis chooses among them and shrinks what it finds, a seeded `random.Random` goes further in
the same time. A failure of the second is repeated by its seed.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tangram import messages as m
from tangram.scheduler.policies import POLICIES
from tests.core import invariants
from tests.core.chaos import Chaos

SEED = st.integers(0, 1 << 32)
"""Of an event's own choices: uniform ones, where hypothesis would mostly choose the first of everything."""


class Core(RuleBasedStateMachine):
    """One rule an event, named after it. What hypothesis shrinks is which events there are, and their order."""

    chaos: Chaos

    @initialize(policy=st.sampled_from(sorted(POLICIES)), seed=SEED)
    def begin(self, policy: str, seed: int) -> None:
        self.chaos = Chaos(Random(seed), policy)
        self.chaos.join()

    @rule(seed=SEED, steps=st.integers(1, 12))
    def some(self, seed: int, steps: int) -> None:
        self.chaos.random = Random(seed)
        self.chaos.run(steps)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "chaos"):
            invariants.check(self.chaos.world)

    def teardown(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.heal()


def _rule(name: str) -> Any:
    @rule(seed=SEED)
    def event(self: Core, seed: int) -> None:
        self.chaos.random = Random(seed)
        getattr(self.chaos, name)()

    event.__name__ = name
    return event


# An event stands several times if it should be chosen more often: work has to flow for anything to be overtaken.
for _name, _weight in Chaos.EVENTS:
    for _copy in range(1 + (_weight >= 8) + (_weight >= 14)):
        setattr(Core, f"{_name}_{_copy}" if _copy else _name, _rule(_name))

TestAnyOrder = Core.TestCase
TestAnyOrder.settings = settings(
    max_examples=110,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_seeded_chaos_ends_well(first: int) -> None:
    for seed in range(first, first + 10):
        chaos = Chaos(Random(seed), sorted(POLICIES)[seed % len(POLICIES)])
        try:
            chaos.run(300, check_every=2)
            chaos.heal()
        except Exception as error:
            error.add_note(f"seed {seed}, step {chaos.steps}, record {len(chaos.world.log)}")
            raise


def test_chaos_gets_everywhere() -> None:
    """The events above are worth something only if they bring actions to every end by every way."""
    seen: set[str] = set()
    starts: list[m.Start] = []
    for seed in range(20):
        chaos = Chaos(Random(seed))
        chaos.run(250, check_every=250)
        chaos.heal()
        starts += chaos.world.starts.values()
        for line in chaos.world.stories:
            seen.update(line.split(" "))
    for word in (
        "ok", "failed", "lost", "environment_lost", "expired", "cancelled", "rejected", "error", "void", "stale", "late", "dead",
        "duplicate", "wrong", "opened", "ended", "idle", "draining", "joined", "released", "granted", "skipped", "duplicate",
        "conflict", "told", "instance", "bound", "follows", "free", "disconnect",
    ):  # fmt: skip
        assert word in seen, f"never seen: {word}"
    assert {len(start.gpus) for start in starts} == {0, 1, 2, 4, 8}
    assert {start.service for start in starts} >= {"", "s", "t", "u"}
    assert sum(1 for start in starts if start.evicts) > 10
    assert {"q", "r", "memory", "cpu"} <= {name for start in starts if start.gpus for name in start.amounts}
