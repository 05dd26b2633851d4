"""`plan(state) -> Window`: one pass over what waits. It reads the state and changes nothing.

1. Candidates (`candidates`): in arrival order, each on its minimum of every resource it names.
   Those that need GPUs are placed whole at their turn (`services`).
2. Units (`units`): on each host, by the policy's rule (`sizing`), and which of the last candidates are left for later after all.
3. Placement: exact core ids.
4. Weights for those that wait go onto GPUs that are idle (`prefetch`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tangram.scheduler.candidates import Candidates, Decision
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.prefetch import Prefetch, prefetches
from tangram.scheduler.services import Services
from tangram.scheduler.state import ActionId, State
from tangram.scheduler.units import Units


class Window(NamedTuple):
    """The outcome of one pass. `through_seq` is the last event it considered."""

    number: int
    through_seq: int
    digest: bytes
    policy: str
    decisions: list[Decision]
    evicted: list[ActionId]
    """Candidates that were left for later so that the others get more, or that wait by choice."""
    fallback: bool = False
    prefetches: Sequence[Prefetch] = ()


def plan(state: State, policy: str | None = None) -> Window:
    """Decides what to start now. `policy` overrides the leader's, for the fallback after a failed pass."""
    return consider(state, policy)[0]


def consider(state: State, policy: str | None = None) -> tuple[Window, Candidates]:
    """`plan`, and what it saw on its way: for who asks why."""
    chosen = POLICIES[policy or state.policy]
    found = Candidates(state, chosen)
    units = Units(state, found)
    services = Services(state, found, chosen, units.curve)
    found.gather(services.try_)
    services.settle()
    units.settle(chosen)
    window = Window(
        number=state.window + 1,
        through_seq=state.seq,
        digest=state.digest,
        policy=chosen.name,
        decisions=found.decisions,
        evicted=[action.id for action in (*units.evicted, *services.evicted)],
        fallback=policy is not None,
        prefetches=prefetches(state, services, chosen),
    )
    return window, found
