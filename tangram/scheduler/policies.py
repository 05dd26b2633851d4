"""Policies: what is charged for an action, and whether spare units are handed out. Each is data; a pass reads it."""

from dataclasses import dataclass
from typing import Final

from tangram.messages import Demand
from tangram.scheduler.cores import MILLI
from tangram.scheduler.state import Action, State

NOTHING: Final[dict[str, Demand]] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """elastic: spare units go to the actions of a window by marginal gain. reserves: a session holds `static_units` cores
    from open to close, and its actions run on them, as pods do."""

    name: str
    elastic: bool = False
    reserves: bool = False


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("tangram", elastic=True),
        Policy("static-trajectory", reserves=True),
        Policy("fcfs-minimum"),
    )
}

SETTINGS: Final = {"static_units": 1, "prior_duration_us": 1_000_000, "prior_parallel_ppm": 600_000}
"""Defaults of what the core can be configured by; all integers, and all in the leader's record."""


def setting(state: State, name: str) -> int:
    return state.settings.get(name, SETTINGS[name])


def charge(state: State, action: Action) -> dict[str, Demand]:
    """What starting this action would be charged, by resource: its cost, changed by reservations."""
    cost = action.spec.cost
    if action.session is not None and action.session.cores:
        return {name: demand for name, demand in cost.items() if name != "cpu"} if "cpu" in cost else cost
    if action.opens is not None and POLICIES[state.policy].reserves:
        return {**cost, "cpu": Demand(low=setting(state, "static_units") * MILLI)}
    return cost
