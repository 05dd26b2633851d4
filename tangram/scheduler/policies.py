"""Policies: what is charged for an action, and by which rule units are handed out. Each is data; a pass reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol

from tangram import limits
from tangram.messages import ActionSpec, Demand, Hint
from tangram.rules import GPU_CHUNKS
from tangram.scheduler import sizing
from tangram.scheduler.cores import MILLI
from tangram.scheduler.elasticity import Curve, declared, learnt
from tangram.scheduler.gpus import chunks
from tangram.scheduler.shares import fixed_gpus, fixed_part
from tangram.scheduler.state import Action, ActionId, Incarnation, State


class GpuRule(Enum):
    """Where an action of a service runs, and on how many GPUs (`services`).

    PRICED: what costs least, the waiting of others included. PAPER: ARL-Tangram's rule (`chunk_sizes`); GAIN: the same, nobody
    evicted. MINIMUM, FIXED: on its least, or on `fixed_units`, GPUs. STATIC: on the `static_units` GPUs of its service. But for
    the first, nobody waits by choice, and the copy that was used longest ago makes room.
    """

    PRICED = "priced"
    MINIMUM = "minimum"
    FIXED = "fixed"
    STATIC = "static"
    PAPER = "paper"
    GAIN = "gain"


@dataclass(frozen=True, slots=True)
class Policy:
    """rule: how the candidates of a host share its cores; None: each has its minimum. reserves: a session holds `static_units`
    cores from open to close, and its actions run on them, as pods do. learns: sizes of which little is known are tried when
    cores idle. backfills: while a wide action has not waited for long, later ones may start that do not delay it (`reservation`).
    by_task: tasks share by weight (`shares`). splits: each task keeps to its part of each host's cores, and of GPUs. gpus: how
    actions of services are placed."""

    name: str
    rule: sizing.Rule | None = None
    reserves: bool = False
    learns: bool = False
    backfills: bool = False
    by_task: bool = False
    splits: bool = False
    gpus: GpuRule = GpuRule.MINIMUM


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("tangram", rule=sizing.priced, learns=True, backfills=True, gpus=GpuRule.PRICED),
        Policy("fair", rule=sizing.priced, learns=True, backfills=True, by_task=True, gpus=GpuRule.PRICED),
        Policy("split-by-task", rule=sizing.priced, learns=True, backfills=True, by_task=True, splits=True, gpus=GpuRule.PRICED),
        Policy("paper", rule=sizing.paper, gpus=GpuRule.PAPER),
        Policy("marginal-gain", rule=sizing.marginal, gpus=GpuRule.GAIN),
        Policy("fixed-units", rule=sizing.fixed, gpus=GpuRule.FIXED),
        Policy("static-trajectory", reserves=True),
        Policy("static-service", gpus=GpuRule.STATIC),
        Policy("fcfs-minimum"),
    )
}


class Setting(NamedTuple):
    default: int
    low: int
    high: int


SETTINGS: Final = {
    "static_units": Setting(1, 1, 4_096),
    "static_replicas": Setting(1, 1, 4_096),
    "static_shared": Setting(0, 0, 1),
    "fixed_units": Setting(4, 1, 4_096),
    "learn": Setting(1, 0, 1),
    "patience_ms": Setting(20_000, 0, limits.DEADLINE_MS_MAX),
    "count_restore": Setting(1, 0, 1),
    "prior_duration_us": Setting(1_000_000, 1, 24 * 3_600_000_000),
    "prior_parallel_ppm": Setting(600_000, 0, 1_000_000),
    "pending_max": Setting(limits.PENDING_MAX, 1, 10_000_000),
    "pending_mib_max": Setting(limits.PENDING_MIB_MAX, 1, 1 << 20),
}
"""What the core can be configured by; all integers, and all in the leader's record."""


def setting(state: State, name: str) -> int:
    """Its value, or its default where the record has none within the bounds."""
    default, low, high = SETTINGS[name]
    value = state.settings.get(name)
    return default if value is None or not low <= value <= high else value


def prior_of(state: State) -> Hint:
    """What a kind is taken to be like before anything is known of it."""
    return Hint(duration_us=setting(state, "prior_duration_us"), parallel_ppm=setting(state, "prior_parallel_ppm"))


class Asked(Protocol):
    """An action, as far as what it asks for goes."""

    @property
    def id(self) -> ActionId: ...

    @property
    def spec(self) -> ActionSpec: ...


def model_key(action: Asked) -> tuple[str, str]:
    """Which elasticity model an action belongs to: its task's, of its kind, and of the service that runs it."""
    spec = action.spec
    return action.id.task, f"{spec.kind}/{spec.service}" if spec.service else spec.kind


def legal_units(demand: Demand) -> Sequence[int]:
    """The whole cores that a demand may have, rising; empty for a fraction of one."""
    if demand.legal:
        return tuple(amount // MILLI for amount in demand.legal)
    return range(demand.low // MILLI, max(demand.low, demand.high) // MILLI + 1) if demand.low >= MILLI else ()


def legal_chunks(demand: Demand) -> tuple[int, ...]:
    """The chunks of GPUs that a demand may have, rising."""
    return demand.legal or tuple(size for size in GPU_CHUNKS if demand.low <= size <= max(demand.low, demand.high))


def charge(state: State, action: Action) -> dict[str, Demand]:
    """What starting this action would be charged, by resource: its cost, changed by reservations, and with what its service takes
    besides."""
    cost = action.spec.cost
    if action.session is not None and action.session.cores:
        return {name: demand for name, demand in cost.items() if name != "cpu"} if "cpu" in cost else cost
    if action.opens is not None and POLICIES[state.policy].reserves:
        return {**cost, "cpu": Demand(low=setting(state, "static_units") * MILLI)}
    service = action.spec.service
    return state.service_costs[service] | cost if service and service in state.service_costs else cost


def curve_of(state: State, action: Action, prior: Hint) -> Curve:
    """How long it is taken to run: what its user declared in full, or what its kind was seen to take, or the prior."""
    hint = action.spec.hint
    model = state.models.get(model_key(action)) if setting(state, "learn") else None
    if model is None or (hint is not None and hint.table_us):
        return declared(hint if hint is not None else prior, prior)
    return learnt(model)


def size_of(state: State, holder: Incarnation, name: str) -> int:
    """How much of a resource one executor has when nothing runs: of cpu its own cores in millicores, of gpu its largest chunk,
    of a quota what it ever lets through at once, else what its host has; -1 of what nobody knows."""
    if name == "cpu":
        return holder.cores_mask.bit_count() * MILLI
    if name == "gpu":
        return _largest_chunk(holder.gpus)
    quota = state.quotas.get(name)
    if quota is not None:
        return quota.limit.tokens or limits.AMOUNT_MAX
    return state.hosts[holder.host].capacity.get(name, 0 if name == "memory" else -1)


def _largest_chunk(gpus: int) -> int:
    return max((size for size in GPU_CHUNKS if any(chunks(gpus, size))), default=0)


def weights_on_each(holder: Incarnation, service: str, size: int, memory_mib: int) -> int:
    """MiB that an action takes on each of `size` GPUs: of one without a service all there is."""
    if not service:
        return memory_mib
    offer = holder.services.get(service)
    if offer is None:
        return 0
    return offer.weights_mib if offer.is_replicated else -(-offer.weights_mib // max(size, 1))


def fitting_chunks(state: State, holder: Incarnation, action: Action, gpus: int) -> tuple[int, ...]:
    """The legal chunks on which an executor could ever run an action, of these of its GPUs, rising: it has one, the service can
    be served on so many, and the weights have room."""
    service = action.spec.service
    if service and service not in holder.services:
        return ()
    served = holder.services[service].units if service else ()
    most, memory_mib = _largest_chunk(gpus), state.hosts[holder.host].gpus.memory_mib
    return tuple(
        size
        for size in legal_chunks(action.spec.cost["gpu"])
        if size <= most and (not served or size in served) and weights_on_each(holder, service, size, memory_mib) <= memory_mib
    )


def could_run(state: State, holder: Incarnation, action: Action, cost: dict[str, Demand]) -> bool:
    """Whether an executor could run an action that is charged so, if nothing else ran there."""
    return could_fit(state, holder, cost) and ("gpu" not in cost or bool(fitting_chunks(state, holder, action, holder.gpus)))


def could_fit(state: State, holder: Incarnation, cost: dict[str, Demand]) -> bool:
    """Whether an executor could run what is charged so, if nothing else ran there."""
    return all(size_of(state, holder, name) >= demand.low for name, demand in cost.items())


def fits_part(state: State, holder: Incarnation, action: Action, cost: dict[str, Demand]) -> bool:
    """Whether the part that an action's task has of an executor's host has room for what is charged so, if nothing else of the
    task ran there."""
    if not POLICIES[state.policy].splits:
        return True
    host, task = state.hosts[holder.host], action.id.task
    low = cost["cpu"].low if "cpu" in cost else 0
    if low and fixed_part(state, host.pool.all.bit_count(), task) * MILLI < low:
        return False
    return "gpu" not in cost or bool(
        fitting_chunks(state, holder, action, holder.gpus & fixed_gpus(state, task).get(host.key, 0))
    )
