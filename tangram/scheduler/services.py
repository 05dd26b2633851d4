"""Where an action of a service runs: on an idle copy of its weights, on a copy that is busy yet, or on a chunk of GPUs onto which
a copy is restored first.

For each candidate, in arrival order, the place that costs least is taken: when it can begin there, restoring, its run, what the
copies that make room are worth, and the price of the GPU-seconds that it holds. What is chosen may lie in the future: the action
then waits, and the GPUs count as taken until it would be done, so that not everybody waits for the same copy. Others may use
them until then.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tangram import messages as m
from tangram.scheduler.candidates import Candidates
from tangram.scheduler.cores import cores_of
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.gpus import Copy, chunks
from tangram.scheduler.load import gpu_utilisation, rate
from tangram.scheduler.policies import GpuRule, Policy, charge, legal_chunks, setting
from tangram.scheduler.sizing import Prices, View
from tangram.scheduler.state import Action, Host, HostKey, Incarnation, State

LOOKED_AT_MAX: Final = 64
"""Candidates of one pass that wait; those behind them are not looked at."""
PATIENCE_NS: Final = 20_000_000_000
"""Beyond this nobody uses the GPUs that a waiting action needs, however short."""
REUSE_S: Final = 10.0
"""A copy is worth its restore time, times the chance that its service is wanted within about this long."""
NEVER_US: Final = 1e15


class _Spot(NamedTuple):
    """A chunk onto which a copy could be restored. loss: what its victims are worth, in microseconds."""

    gpus: int
    loss: float
    victims: tuple[Copy, ...]


class Place(NamedTuple):
    """Where a candidate could run. cost and times in microseconds from now; begins 0: at once."""

    cost: float
    begins: float
    ends: float
    holder: Incarnation
    gpus: int
    restores: bool
    victims: tuple[Copy, ...]


@dataclass(slots=True, eq=False)
class _Room:
    """The GPUs of one host in this pass."""

    host: Host
    used: int
    copies: list[Copy]
    until: dict[int, float]
    """GPU (a mask of one bit) -> when it will be free of all that runs or waits for it; those that are free now are not in it."""
    reserved: dict[int, float] = field(default_factory=dict)
    """GPU -> when somebody who waits begins on it."""
    spots: dict[tuple[str, int, int], "_Spot | None"] = field(default_factory=dict)
    """What `_spot` found, by holder, size and MiB."""

    def begins(self, gpus: int) -> float:
        return max((self.until.get(gpu, 0.0) for gpu in _each(gpus)), default=0.0)

    def lent_until(self, gpus: int) -> float:
        return min((self.reserved.get(gpu, NEVER_US) for gpu in _each(gpus)), default=NEVER_US)


def _each(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


class Services:
    """The GPU side of one pass. evicted: candidates that wait though they could start somewhere."""

    def __init__(self, state: State, found: Candidates, policy: Policy, curve_of: Callable[[Action], Curve]) -> None:
        self.state = state
        self.found = found
        self.evicted: list[Action] = []
        self._rule = policy.gpus
        self._curve_of = curve_of
        self._rooms: dict[HostKey, _Room] = {}
        self._waiting: dict[tuple[object, ...], deque[Action]] = {}
        """Those that wait by choice, by all that makes two of them equal."""
        self._waits = 0
        self._price: float | None = None
        self._pins: dict[str, tuple[Incarnation, int]] | None = None

    def try_(self, action: Action) -> bool:
        """Starts a candidate or lets it wait. Returns whether the one behind it in its queue is to be looked at."""
        places = self._static(action) if self._rule is GpuRule.STATIC else self._places(action)
        best = min(places, key=lambda place: place[:3], default=None)
        if best is None:
            return True  # nowhere now; its queue is one service's, and another size may do
        equal = (action.queue, action.id.task, action.spec.kind, action.spec.cost["gpu"], action.spec.hint, action.avoid)
        earlier = self._waiting.setdefault(equal, deque())
        if best.begins > 0:
            self._waits += 1
            earlier.append(action)
            if any(place.begins == 0 for place in places):
                self.evicted.append(action)
            self._reserve(action, best)
            # Behind one that waits for a chunk nothing of its service can do better.
            return not best.restores and self._waits < LOOKED_AT_MAX
        if earlier:  # arrival order decides between equals: who came first starts, and this one waits in its stead
            first = earlier.popleft()
            earlier.append(action)
            action = first
        self._start(action, best)
        return True

    # --- where it could run ---

    def _places(self, action: Action) -> list[Place]:
        curve, sizes = self._curve_of(action), legal_chunks(action.spec.cost["gpu"])
        if self._rule is GpuRule.MINIMUM:
            sizes = sizes[:1]
        elif self._rule is GpuRule.FIXED:
            wanted = setting(self.state, "fixed_units")
            sizes = (min(sizes, key=lambda size: (abs(size - wanted), size)),)
        cost = {name: demand for name, demand in charge(self.state, action).items() if name != "gpu"}
        service = action.spec.service
        price = self._price_now() if self._rule is GpuRule.PRICED else 0.0
        counts = setting(self.state, "count_restore") if self._rule is GpuRule.PRICED else 0
        found: list[Place] = []
        for holder in self.found.takers_of(action):
            if not holder.gpus or not self.found.has_room(holder, cost):
                continue
            room = self._room(holder.host)
            for copy in room.copies if service else ():
                size = copy.gpus.bit_count()
                if copy.service == service and copy.holder == holder.id and size in sizes:
                    run_us = curve.at(size)
                    begins = self._begins(room, copy.gpus, run_us)
                    found.append(
                        Place(begins + run_us * (1 + price * size), begins, begins + run_us, holder, copy.gpus, False, ())
                    )
            offer = holder.services.get(service, m.Service())
            for size in sizes:
                run_us = curve.at(size)
                restore_us = offer.restore_fixed_us + offer.restore_us / size
                took_us = restore_us + run_us
                mib = -(-offer.weights_mib // size) if service else room.host.gpus.memory_mib
                spot = self._spot(room, holder, size, mib)
                if spot is not None:
                    begins = self._begins(room, spot.gpus, took_us)
                    cost_us = begins + spot.loss + took_us * (1 + price * size) if counts else begins + run_us
                    found.append(Place(cost_us, begins, begins + took_us, holder, spot.gpus, True, spot.victims))
        if self._rule is not GpuRule.PRICED:  # nobody waits by choice
            found = [place for place in found if place.begins == 0] or found
        return found

    def _begins(self, room: _Room, gpus: int, took_us: float) -> float:
        """When somebody who needs so long can begin there: at once, if it is done before whoever waits for it begins."""
        if not gpus & room.used and took_us <= room.lent_until(gpus):
            return 0.0
        return room.begins(gpus)

    def _spot(self, room: _Room, holder: Incarnation, size: int, mib: int) -> _Spot | None:
        """The chunk that can be had soonest, what it costs others included; None if there is none with so much memory."""
        key = (holder.id, size, mib)
        if key in room.spots:
            return room.spots[key]
        best: _Spot | None = None
        least = math.inf
        for chunk in chunks(holder.gpus & room.host.gpus.all, size):
            victims = self._victims(room, holder, chunk, mib)
            if victims is not None:
                loss = math.fsum(self._worth(room, victim) for victim in victims)
                cost = room.begins(chunk) + loss
                if cost < least:
                    best, least = _Spot(chunk, loss, victims), cost
        room.spots[key] = best
        return best

    def _victims(self, room: _Room, holder: Incarnation, chunk: int, mib: int) -> tuple[Copy, ...] | None:
        """The copies that have to make room for so many MiB on each GPU of a chunk, the least worth first; None if that cannot
        be."""
        memory = room.host.gpus.memory_mib
        here = [copy for copy in room.copies if copy.gpus & chunk]
        full = {gpu: sum(copy.mib for copy in here if copy.gpus & gpu) for gpu in _each(chunk)}
        victims: list[Copy] = []
        if self._rule is GpuRule.PRICED:
            here.sort(key=lambda copy: (self._worth(room, copy), copy.used_ns))
        else:
            here.sort(key=lambda copy: copy.used_ns)
        for copy in here:
            if any(full[gpu] + mib > memory for gpu in _each(copy.gpus & chunk)):
                if copy.holder != holder.id:
                    return None
                victims.append(copy)
                for gpu in _each(copy.gpus & chunk):
                    full[gpu] -= copy.mib
        return tuple(victims) if all(used + mib <= memory for used in full.values()) else None

    def _worth(self, room: _Room, copy: Copy) -> float:
        """What evicting a copy costs those to come, in microseconds: its restore time, times the chance that it is wanted soon,
        shared with the other copies of its service."""
        use = self.state.uses.get(copy.service)
        holder = self.state.incarnations.get(copy.holder)
        offer = holder.services.get(copy.service) if holder is not None else None
        if offer is None or use is None:
            return 0.0
        soon = rate(use, self.state.now_ns) * REUSE_S
        copies = sum(1 for each in room.copies if each.service == copy.service)
        return (offer.restore_fixed_us + offer.restore_us / copy.gpus.bit_count()) * soon / (1 + soon) / copies

    def _price_now(self) -> float:
        """Of a GPU-microsecond, in action-microseconds of waiting that it causes, over all hosts with GPUs: these actions are
        bound to none. Only those count as waiting that have no copy anywhere: the others want a copy, not more GPUs."""
        if self._price is None:
            state = self.state
            rooms = [self._room(key) for key, host in state.hosts.items() if host.gpus.all]
            gpus = sum(room.host.gpus.all.bit_count() for room in rooms)
            free = sum((room.host.gpus.all & ~room.used).bit_count() for room in rooms)
            resident = {copy.service for room in rooms for copy in room.copies}  # only asked for membership
            blocked = sum(
                len(queue) for key, queue in state.queues.items() if "gpu" in key.resources and key.service not in resident
            )
            busy = math.fsum(
                gpu_utilisation(room.host, state.now_ns) * room.host.gpus.all.bit_count() / max(gpus, 1) for room in rooms
            )
            view = View(
                cores=max(gpus, 1),
                free=free,
                behind=max(0, blocked - free),
                thinking=gpus,
                utilisation=busy,
                releases=[],
            )
            self._price = Prices(view, 0).at(0)
        return self._price

    # --- what is decided ---

    def _start(self, action: Action, place: Place) -> None:
        room = self._room(place.holder.host)
        cost = {name: demand for name, demand in charge(self.state, action).items() if name != "gpu"}
        decision = self.found.start(action, place.holder, cost)
        size = place.gpus.bit_count()
        decision.gpus, decision.units = cores_of(place.gpus), size
        decision.amounts["gpu"] = size
        decision.evicts = tuple(m.Resident(service=copy.service, gpus=cores_of(copy.gpus)) for copy in place.victims)
        decision.predicted_us = max(int(place.ends - place.begins), 1)
        room.used |= place.gpus
        if place.restores:
            offer = place.holder.services.get(action.spec.service, m.Service())
            mib = -(-offer.weights_mib // size) if action.spec.service else room.host.gpus.memory_mib
            copy = Copy(action.spec.service, place.gpus, mib, place.holder.id, self.state.now_ns)
            room.copies = [each for each in room.copies if each not in place.victims]
            if not any(each.gpus == copy.gpus and each.service == copy.service for each in room.copies):
                room.copies.append(copy)
        for gpu in _each(place.gpus):
            room.until[gpu] = max(room.until.get(gpu, 0.0), place.ends)
        room.spots.clear()

    def _reserve(self, action: Action, place: Place) -> None:
        room = self._room(place.holder.host)
        patient = self.state.now_ns - action.ready_ns < PATIENCE_NS
        for gpu in _each(place.gpus):
            room.reserved[gpu] = min(room.reserved.get(gpu, NEVER_US), place.begins if patient else 0.0)
            room.until[gpu] = max(room.until.get(gpu, 0.0), place.ends)
        room.spots.clear()

    def _room(self, key: HostKey) -> _Room:
        room = self._rooms.get(key)
        if room is None:
            host, now_ns = self.state.hosts[key], self.state.now_ns
            until: dict[int, float] = {}
            for gpu in _each(host.gpus.used):
                until[gpu] = NEVER_US  # of somebody lost, until somebody finds it dead
            for holder in host.live:
                for grant in holder.grants.values():
                    if grant.gpus:
                        left_ns = grant.finish_ns - now_ns
                        # Overdue: as a heavy tail has it, for half as long again.
                        ends = (left_ns if left_ns > 0 else (now_ns - grant.started_ns) // 2) / 1_000
                        until.update(dict.fromkeys(_each(grant.gpus), max(ends, 1.0)))
            room = self._rooms[key] = _Room(host, host.gpus.used, list(host.gpus.copies), until)
        return room

    # --- GPUs that belong to a service ---

    def _static(self, action: Action) -> list[Place]:
        """Its service's own GPUs, if nobody uses them."""
        if self._pins is None:
            self._pins = self._pinned()
        pin = self._pins.get(action.spec.service)
        if pin is None:
            return []
        holder, gpus = pin
        room = self._room(holder.host)
        offer, size = holder.services[action.spec.service], gpus.bit_count()
        restores = not any(copy.service == action.spec.service and copy.gpus == gpus for copy in room.copies)
        took_us = self._curve_of(action).at(size)
        if restores:
            took_us += offer.restore_fixed_us + offer.restore_us / size
        begins = room.begins(gpus)
        mib = -(-offer.weights_mib // size)
        victims = self._victims(room, holder, gpus, mib) if restores else ()
        if victims is None:
            return []
        return [Place(begins + took_us, begins, begins + took_us, holder, gpus, True, victims)]

    def _pinned(self) -> dict[str, tuple[Incarnation, int]]:
        """`static_units` GPUs for each service, by name, in the order of executors, as long as there are some."""
        size = setting(self.state, "static_units")
        free = [
            (holder, chunk)
            for host in self.state.hosts.values()
            for holder in host.live
            if not holder.draining
            for chunk in chunks(holder.gpus, size)
        ]
        pins: dict[str, tuple[Incarnation, int]] = {}
        for service in sorted({name for holder, _ in free for name in holder.services}):
            for index, (holder, _) in enumerate(free):
                if service in holder.services:
                    pins[service] = free.pop(index)
                    break
        return pins
