"""Policies: what is charged for an action, and whether spare units are handed out. Each is data; a pass reads it."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from tangram import limits
from tangram.messages import Demand
from tangram.scheduler.cores import MILLI
from tangram.scheduler.state import Action, Host, Incarnation, State


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


class Setting(NamedTuple):
    default: int
    low: int
    high: int


SETTINGS: Final = {
    "static_units": Setting(1, 1, 4_096),
    "prior_duration_us": Setting(1_000_000, 1, 24 * 3_600_000_000),
    "prior_parallel_ppm": Setting(600_000, 0, 1_000_000),
    "pending_max": Setting(limits.PENDING_MAX, 1, 10_000_000),
    "pending_mib_max": Setting(limits.PENDING_MIB_MAX, 1, 1 << 20),
}
"""What the core can be configured by; all integers, and all in the leader's record."""


def setting(state: State, name: str) -> int:
    """Its value, or its default where the record has none within the bounds."""
    default, low, high = SETTINGS[name]
    value = state.settings.get(name, default)
    return value if low <= value <= high else default


def charge(state: State, action: Action) -> dict[str, Demand]:
    """What starting this action would be charged, by resource: its cost, changed by reservations."""
    cost = action.spec.cost
    if action.session is not None and action.session.cores:
        return {name: demand for name, demand in cost.items() if name != "cpu"} if "cpu" in cost else cost
    if action.opens is not None and POLICIES[state.policy].reserves:
        return {**cost, "cpu": Demand(low=setting(state, "static_units") * MILLI)}
    return cost


def size_of(host: Host, holder: Incarnation, name: str) -> int:
    """How much of a resource one executor has when nothing runs: of cpu its own cores in millicores, else the host's."""
    return holder.cores_mask.bit_count() * MILLI if name == "cpu" else host.capacity.get(name, 0)


def could_fit(host: Host, holder: Incarnation, cost: dict[str, Demand]) -> bool:
    """Whether an executor could run what is charged so, if nothing else ran there."""
    return all(size_of(host, holder, name) >= demand.low for name, demand in cost.items())
