"""The GPUs of one host in one pass: when each will be free, and on which chunk a copy of a service can be restored."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from tangram import messages as m
from tangram.scheduler.cores import cores_of
from tangram.scheduler.gpus import Copy, around, chunks
from tangram.scheduler.load import rate
from tangram.scheduler.state import Host, Incarnation, State

NEVER_US: Final = 1e15
REUSE_S: Final = 10.0
"""A copy is worth its restore time, times the chance that its service is wanted within about this long."""


class Spot(NamedTuple):
    """A chunk onto which a copy could be restored. loss: what its victims are worth, in microseconds."""

    gpus: int
    loss: float
    victims: tuple[Copy, ...]


@lru_cache(4_096)
def ids_of(gpus: int) -> tuple[int, ...]:
    return cores_of(gpus)


@lru_cache(4_096)
def _chunks(mask: int, size: int) -> tuple[int, ...]:
    return tuple(chunks(mask, size))


class GpuRoom:
    """used: GPUs that run something; copies: whose weights lie where. Times in microseconds from now."""

    def __init__(self, state: State, host: Host, *, oldest_first: bool) -> None:
        """oldest_first: copies make room in the order of their last use, not of their worth."""
        self.host = host
        self.used = host.gpus.used
        self.copies = list(host.gpus.copies)
        self.gone: list[Copy] = []
        """Copies that made room in this pass."""
        self._state = state
        self._oldest_first = oldest_first
        self.releases: list[tuple[float, int]] = []
        """(when, how many GPUs) of what runs."""
        self._until = [0.0] * host.gpus.all.bit_length()
        """When each GPU will be free of all that runs or waits for it."""
        self._reserved = [NEVER_US] * len(self._until)
        """When somebody who waits begins on it."""
        self._has_reserved = False
        self._spots: dict[tuple[str, int, str, int, float], Spot | None] = {}
        self._victims_on: dict[tuple[str, int, int], tuple[float, tuple[Copy, ...]] | None] = {}
        self._ranked: list[tuple[float, Copy]] | None = None
        self._occupy()

    def _occupy(self) -> None:
        now_ns = self._state.now_ns
        for gpu in ids_of(self.used & self.host.gpus.all):
            self._until[gpu] = NEVER_US  # as of somebody lost, until somebody finds it dead
        for holder in self.host.live:
            for grant in holder.grants.values():
                if grant.gpus and not grant.holds_session:  # nobody knows when a sandbox ends
                    ends = max(grant.left_us(now_ns), 1.0)
                    self.releases.append((ends, grant.gpus.bit_count()))
                    for gpu in ids_of(grant.gpus & self.host.gpus.all):
                        self._until[gpu] = ends

    @property
    def free(self) -> int:
        return self.host.gpus.all & ~self.used

    @property
    def idle(self) -> int:
        """Free, and nobody waits to begin there."""
        waited_for = sum(1 << gpu for gpu, begins_us in enumerate(self._reserved) if begins_us < NEVER_US)
        return self.free & ~waited_for

    def begins(self, gpus: int, took_us: float) -> float:
        """When somebody who needs so long can begin there: at once, if it is done before whoever waits for it begins."""
        ids = ids_of(gpus)
        if not gpus & self.used and (not self._has_reserved or took_us <= min([self._reserved[gpu] for gpu in ids])):
            return 0.0
        return max([self._until[gpu] for gpu in ids])

    def spot(self, holder: Incarnation, gpus: int, service: str, size: int, mib: int, took_us: float) -> Spot | None:
        """The chunk of these GPUs of its without a copy of this service that somebody who needs so long can have soonest, what it
        costs others included, and that breaks the smallest free chunk; None if there is none with so much memory."""
        key = (holder.id, gpus, service, size, took_us)
        if key in self._spots:
            return self._spots[key]
        best: Spot | None = None
        least = (math.inf, 0, 0)
        mine = [copy.gpus for copy in self.copies if copy.service == service and copy.holder == holder.id]
        for chunk in _chunks(gpus, size):
            if service and chunk in mine:
                continue
            found = self.victims(holder, chunk, mib)
            begins = self.begins(chunk, took_us)
            if found is not None and begins < NEVER_US:
                cost = (begins + found[0], 0, around(self.free, chunk))
                if self._oldest_first:
                    cost = (begins, max((victim.used_ns for victim in found[1]), default=-1), around(self.free, chunk))
                if cost < least:
                    best, least = Spot(chunk, *found), cost
        self._spots[key] = best
        return best

    def victims(self, holder: Incarnation, chunk: int, mib: int) -> tuple[float, tuple[Copy, ...]] | None:
        """The holder's copies that have to make room for so many MiB on each GPU of a chunk, the least worth first, and what they
        are worth together; None if that is not enough."""
        key = (holder.id, chunk, mib)
        if key not in self._victims_on:
            self._victims_on[key] = self._find_victims(holder, chunk, mib)
        return self._victims_on[key]

    def _find_victims(self, holder: Incarnation, chunk: int, mib: int) -> tuple[float, tuple[Copy, ...]] | None:
        memory = self.host.gpus.memory_mib
        here = [(worth, copy) for worth, copy in self._by_worth() if copy.gpus & chunk]
        full = dict.fromkeys(ids_of(chunk), 0)
        for _, copy in here:
            for gpu in ids_of(copy.gpus & chunk):
                full[gpu] += copy.mib
        victims: list[Copy] = []
        loss = 0.0
        for worth, copy in here:
            ids = ids_of(copy.gpus & chunk)
            if copy.holder == holder.id and any(full[gpu] + mib > memory for gpu in ids):
                victims.append(copy)
                loss += worth
                for gpu in ids:
                    full[gpu] -= copy.mib
        return (loss, tuple(victims)) if all(used + mib <= memory for used in full.values()) else None

    def _by_worth(self) -> Sequence[tuple[float, Copy]]:
        if self._ranked is None:
            worth = [(self._worth(copy), copy) for copy in self.copies]
            worth.sort(key=lambda each: (0.0 if self._oldest_first else each[0], each[1].used_ns))
            self._ranked = worth
        return self._ranked

    def _worth(self, copy: Copy) -> float:
        """What evicting a copy costs those to come, in microseconds: its restore time, times the chance that it is wanted soon,
        shared with the other copies of its service."""
        use = self._state.uses.get(copy.service)
        holder = self._state.incarnations.get(copy.holder)
        offer = holder.services.get(copy.service) if holder is not None else None
        if offer is None or use is None:
            return 0.0
        soon = rate(use, self._state.now_ns) * REUSE_S
        copies = sum(1 for each in self.copies if each.service == copy.service)
        worth = restore_us(offer, copy.gpus.bit_count()) * soon / (1 + soon) / copies
        return worth if offer.idle_value_ppm == 1_000_000 else worth * offer.idle_value_ppm / 1_000_000

    # --- what the pass has decided ---

    def start(self, gpus: int, ends_us: float) -> None:
        self.used |= gpus
        self._taken(gpus, max(ends_us, 1.0))

    def wait(self, gpus: int, begins_us: float, ends_us: float) -> None:
        """Somebody will begin there then. begins_us 0: nobody may use it until then."""
        self._has_reserved = True
        for gpu in ids_of(gpus):
            self._reserved[gpu] = min(self._reserved[gpu], begins_us)
        self._taken(gpus, ends_us)

    def _taken(self, gpus: int, ends_us: float) -> None:
        for gpu in ids_of(gpus):
            self._until[gpu] = max(self._until[gpu], ends_us)
        self._spots.clear()

    def restore(self, copy: Copy, victims: Sequence[Copy]) -> None:
        self.copies = [*(each for each in self.copies if each not in victims), copy]
        self._ranked = None
        self._victims_on.clear()
        self._spots.clear()


def restore_us(offer: m.Service, size: int) -> float:
    """Bringing the weights of a service onto so many GPUs."""
    for units, seen_us in offer.restored_us:
        if units == size:
            return seen_us
    return offer.restore_fixed_us + (offer.restore_us if offer.is_replicated else offer.restore_us / size)
