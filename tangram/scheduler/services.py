"""Where an action of a service runs: on an idle copy of its weights, on a copy that is busy yet, or on a chunk of GPUs onto which
a copy is restored first.

For each candidate, in arrival order, the place that costs least is taken: when it can begin there, restoring, its run, what the
copies that make room are worth, and the price of the GPU-seconds that it holds. What is chosen may lie in the future: the action
then waits, and the GPUs count as taken until it would be done, so that not everybody waits for the same copy. Others may use
them until then.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tangram import messages as m
from tangram.rules import GPU_CHUNKS
from tangram.scheduler.candidates import Candidates
from tangram.scheduler.cores import cores_of
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.gpu_rooms import GpuRoom, restore_us
from tangram.scheduler.gpus import Copy, chunks
from tangram.scheduler.load import gpu_utilisation
from tangram.scheduler.policies import GpuRule, Policy, charge, legal_chunks, setting
from tangram.scheduler.sizing import Prices, View
from tangram.scheduler.state import Action, HostKey, Incarnation, State

LOOKED_AT_MAX: Final = 64
"""Candidates of one pass that wait; those behind them are not looked at."""
PATIENCE_NS: Final = 20_000_000_000
"""Beyond this nobody uses the GPUs that a waiting action needs, however short."""
_NO_SERVICE: Final = m.Service()


class Place(NamedTuple):
    """Where a candidate could run. cost and times in microseconds from now; begins 0: at once."""

    cost: float
    begins: float
    ends: float
    holder: Incarnation
    gpus: int
    restores: bool
    victims: tuple[Copy, ...]


def _mib(offer: m.Service, size: int) -> int:
    """Of a copy's weights, on each of its GPUs."""
    return -(-offer.weights_mib // size)


class Services:
    """The GPU side of one pass. evicted: candidates that wait though they could start somewhere."""

    def __init__(self, state: State, found: Candidates, policy: Policy, curve_of: Callable[[Action], Curve]) -> None:
        self.state = state
        self.found = found
        self.evicted: list[Action] = []
        self._rule = policy.gpus
        self._curve_of = curve_of
        self._rooms: dict[HostKey, GpuRoom] = {}
        self._waiting: dict[tuple[object, ...], deque[Action]] = {}
        """Those that wait by choice, by all that makes two of them equal."""
        self._waits = 0
        self._price: float | None = None
        self._has_free = True
        self._pins: dict[str, list[tuple[Incarnation, int]]] | None = None

    def try_(self, action: Action) -> bool:
        """Starts a candidate or lets it wait. Returns whether the one behind it in its queue is to be looked at."""
        if not self._any_free():
            return False
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
        runs = [(size, curve.at(size)) for size in sizes]
        cost = {name: demand for name, demand in charge(self.state, action).items() if name != "gpu"}
        service = action.spec.service
        price = self._price_now() if self._rule is GpuRule.PRICED else 0.0
        counts = self._rule is GpuRule.PRICED and setting(self.state, "count_restore")
        uses = max(1, len(self.state.queues[action.queue])) if action.queue is not None else 1
        found: list[Place] = []
        for holder in self.found.takers_of(action):
            if not holder.gpus or not self.found.has_room(holder, cost):
                continue
            room = self._room(holder.host)
            for copy in room.copies if service else ():
                size = copy.gpus.bit_count()
                if copy.service == service and copy.holder == holder.id and size in sizes:
                    run_us = curve.at(size)
                    begins = room.begins(copy.gpus, run_us)
                    found.append(
                        Place(begins + run_us * (1 + price * size), begins, begins + run_us, holder, copy.gpus, False, ())
                    )
            offer = holder.services.get(service, _NO_SERVICE)
            for size, run_us in runs:
                spot = room.spot(holder, size, _mib(offer, size) if service else room.host.gpus.memory_mib)
                if spot is not None:
                    weights_us = restore_us(offer, size)
                    took_us = weights_us + run_us
                    begins = room.begins(spot.gpus, took_us)
                    cost_us = begins + run_us * (1 + price * size)
                    if counts:  # of the GPUs' time to restore, each of those that wait for this service bears its part
                        cost_us += spot.loss + weights_us * (1 + price * size / uses)
                    found.append(Place(cost_us, begins, begins + took_us, holder, spot.gpus, True, spot.victims))
        if self._rule is not GpuRule.PRICED:  # nobody waits by choice
            found = [place for place in found if place.begins == 0] or found
        return found

    def _any_free(self) -> bool:
        """Whether any GPU runs nothing: if none, nobody starts, so nobody is looked at."""
        self._has_free = self._has_free and any(self._room(key).free for key, host in self.state.hosts.items() if host.gpus.all)
        return self._has_free

    def _price_now(self) -> float:
        """Of a GPU-microsecond, in action-microseconds of waiting that it causes, over all hosts with GPUs: these actions are
        bound to none. Only those count as waiting whose service is not being served: the others want a copy, not GPUs."""
        if self._price is None:
            state = self.state
            rooms = [self._room(key) for key, host in state.hosts.items() if host.gpus.all]
            gpus = sum(room.host.gpus.all.bit_count() for room in rooms)
            free = sum((room.host.gpus.all & ~room.used).bit_count() for room in rooms)
            serving = {grant.service for room in rooms for each in room.host.live for grant in each.grants.values()}
            blocked = sum(
                len(queue) for key, queue in state.queues.items() if "gpu" in key.resources and key.service not in serving
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
        room.start(place.gpus, place.ends)
        if place.restores:
            offer = place.holder.services.get(action.spec.service, _NO_SERVICE)
            mib = _mib(offer, size) if action.spec.service else room.host.gpus.memory_mib
            room.restore(Copy(action.spec.service, place.gpus, mib, place.holder.id, self.state.now_ns), place.victims)

    def _reserve(self, action: Action, place: Place) -> None:
        patient = self.state.now_ns - action.ready_ns < PATIENCE_NS
        self._room(place.holder.host).wait(place.gpus, place.begins if patient else 0.0, place.ends)

    def _room(self, key: HostKey) -> GpuRoom:
        room = self._rooms.get(key)
        if room is None:
            room = GpuRoom(self.state, self.state.hosts[key], oldest_first=self._rule is not GpuRule.PRICED)
            self._rooms[key] = room
        return room

    # --- GPUs that belong to a service ---

    def _static(self, action: Action) -> list[Place]:
        """The GPUs of its service."""
        if self._pins is None:
            self._pins = pinned(self.state)
        found: list[Place] = []
        for holder, gpus in self._pins.get(action.spec.service, ()):
            room = self._room(holder.host)
            offer, size = holder.services[action.spec.service], gpus.bit_count()
            restores = not any(copy.service == action.spec.service and copy.gpus == gpus for copy in room.copies)
            took_us = self._curve_of(action).at(size) + (restore_us(offer, size) if restores else 0.0)
            room_for = room.victims(holder, gpus, _mib(offer, size)) if restores else (0.0, ())
            if room_for is not None:
                begins = room.begins(gpus, took_us)
                found.append(Place(begins + took_us, begins, begins + took_us, holder, gpus, restores, room_for[1]))
        return [place for place in found if place.begins == 0] or found


def pinned(state: State) -> dict[str, list[tuple[Incarnation, int]]]:
    """Under `static-service`: `static_replicas` chunks of `static_units` GPUs for each service, by name, in the order of executors,
    as long as there are some; (executor, GPUs)."""
    size = setting(state, "static_units")
    free = [
        (holder, chunk)
        for host in state.hosts.values()
        for holder in host.live
        if not holder.draining and size in GPU_CHUNKS
        for chunk in chunks(holder.gpus, size)
    ]
    services = sorted({name for holder, _ in free for name in holder.services})
    pins: dict[str, list[tuple[Incarnation, int]]] = {service: [] for service in services}
    for _ in range(setting(state, "static_replicas")):
        for service in services:
            index = next((index for index, (holder, _) in enumerate(free) if service in holder.services), None)
            if index is not None:
                pins[service].append(free.pop(index))
    return pins
