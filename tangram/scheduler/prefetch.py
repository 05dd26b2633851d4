"""Weights that are brought onto idle GPUs ahead of who waits for them: for a quota, or for what it needs beside.

Of each queue the first speaks for all. What makes room is what nobody waits for; nothing is fetched twice, and onto no GPU that
somebody waits to begin on.
"""

from typing import NamedTuple

from tangram.scheduler.gpus import Copy
from tangram.scheduler.policies import GpuRule, Policy, weights_on_each
from tangram.scheduler.services import Services
from tangram.scheduler.state import Action, Incarnation, State


class Prefetch(NamedTuple):
    """gpus: a mask. victims: the holder's copies that make room."""

    holder: Incarnation
    service: str
    gpus: int
    victims: tuple[Copy, ...]


def prefetches(state: State, services: Services, policy: Policy) -> list[Prefetch]:
    """What to bring after all that this pass starts."""
    if policy.gpus is not GpuRule.PRICED or state.behaviour < 7:
        return []
    wanted = {key.service for key in state.queues if key.service and "gpu" in key.resources}
    if not wanted or not services.any_free():
        return []
    started = {decision.action.id for decision in services.found.decisions}
    heads = [next(iter(queue)) for key, queue in state.queues.items() if key.service in wanted]
    found: list[Prefetch] = []
    for action in sorted(heads, key=lambda each: each.order):
        if action.id not in started and (fetched := _prefetch(state, services, action, wanted)) is not None:
            room = services.room(fetched.holder.host)
            mib = weights_on_each(fetched.holder, fetched.service, fetched.gpus.bit_count(), room.host.gpus.memory_mib)
            room.start(fetched.gpus, 1.0)
            room.restore(Copy(fetched.service, fetched.gpus, mib, fetched.holder.id, state.now_ns), fetched.victims)
            found.append(fetched)
    return found


def _prefetch(state: State, services: Services, action: Action, wanted: set[str]) -> Prefetch | None:
    service = action.spec.service
    takers = [holder for holder in services.found.takers_of(action) if holder.gpus]
    for holder in takers:
        if any(copy.service == service and copy.holder == holder.id for copy in services.room(holder.host).copies):
            return None
    for holder in takers:
        room = services.room(holder.host)
        for size in services.sizes(action, holder)[:1]:
            mib = weights_on_each(holder, service, size, room.host.gpus.memory_mib)
            spot = room.spot(holder, services.own(holder, action.id.task) & room.idle, service, size, mib, 0.0)
            if spot is not None and not any(victim.service in wanted for victim in spot.victims):
                return Prefetch(holder, service, spot.gpus, spot.victims)
    return None
