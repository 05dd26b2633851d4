"""Where an action of a service runs: on an idle copy of its weights, on a copy that is busy yet, or on a chunk of GPUs onto which
a copy is restored first.

For each candidate, in arrival order, the place that costs least is taken: when it can begin there, restoring, its run, what the
copies that make room are worth, and the price of the GPU-seconds that it holds. What is chosen may lie in the future: the action
then waits, and the GPUs count as taken until it would be done, so that not everybody waits for the same copy. Others may use
them until then, as long as it has not waited for `patience_ms`.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tangram import limits
from tangram import messages as m
from tangram.messages import Demand
from tangram.rules import GPU_CHUNKS
from tangram.scheduler.candidates import Candidates
from tangram.scheduler.chunk_sizes import in_chunks
from tangram.scheduler.cores import cores_of
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.gpu_rooms import NEVER_US, GpuRoom, restore_us
from tangram.scheduler.gpus import Copy, chunks
from tangram.scheduler.load import gpu_utilisation
from tangram.scheduler.policies import (
    POLICIES,
    GpuRule,
    Policy,
    charge,
    fitting_chunks,
    legal_chunks,
    setting,
    weights_on_each,
)
from tangram.scheduler.shares import fixed_gpus
from tangram.scheduler.sizing import Prices, View
from tangram.scheduler.state import Action, ActionId, HostKey, Incarnation, QueueKey, State

LOOKED_AT_MAX: Final = 64
"""Candidates of one pass that wait; those behind them are not looked at."""
CHUNK_FACTOR: Final = 3.0
"""On the price of a core of a pool that is as busy: whoever takes a chunk keeps others from the copies on it and from the larger
chunks around it. (Mean ACT of six simulated settings, beside 1: 0.88 in the geometric mean, at worst 1.05; at 0.3: 1.22.)"""
STAY_FACTOR: Final = 10.0
"""Who would evict a copy that others wait for lets them go first until it has waited for so many of its restores: a restore for
each action would take longer than what it is for."""
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


class Services:
    """The GPU side of one pass. evicted: candidates that wait though they could start somewhere."""

    def __init__(self, state: State, found: Candidates, policy: Policy, curve_of: Callable[[Action], Curve]) -> None:
        self.state = state
        self.found = found
        self.evicted: list[Action] = []
        self._rule = policy.gpus
        self._splits = POLICIES[state.policy].splits
        self._parts: dict[str, dict[HostKey, int]] = {}
        """Where they are split: GPUs by task and host."""
        self._curve_of = curve_of
        self._rooms: dict[HostKey, GpuRoom] = {}
        self._waiting: dict[tuple[object, ...], deque[Action]] = {}
        """Those that wait by choice, by all that makes two of them equal."""
        self._held: set[QueueKey | None] = set()
        """Queues of which somebody waits; only asked for membership."""
        self._stuck: set[tuple[object, ...]] = set()
        """By the same: those that wait for a chunk, or for what is beside it. An equal can do no better; only asked for
        membership."""
        self._able: dict[tuple[object, ...], list[Incarnation]] = {}
        """By the same: who could ever run them."""
        self._fitting_on: dict[tuple[object, ...], tuple[int, ...]] = {}
        """What `fitting_chunks` found, by what it depends on."""
        self._deferred: dict[tuple[object, ...], Action] = {}
        """By the same: the first of those that let others go first."""
        self._is_settling = False
        self._waits = 0
        self._prices: dict[tuple[str, str], float] = {}
        """By task, where GPUs are split (else one for all), and service."""
        self._has_free = True
        self._is_planned = policy.gpus in (GpuRule.PAPER, GpuRule.GAIN)
        self._fell_short = False
        """Nobody can start as planned, or not all can: what is free is not for the first ones, so those behind may have it."""
        self._planned: dict[ActionId, int] | None = None
        """GPUs of those that start now, where the policy decides about all of them together."""
        self._pins: dict[str, list[tuple[Incarnation, int]]] | None = None

    def try_(self, action: Action) -> bool:
        """Starts a candidate or lets it wait. Returns whether the one behind it in its queue is to be looked at."""
        spec = action.spec
        if len(spec.cost) == 1 and not self.any_free():
            return False
        equal = (action.queue, action.id.task, spec.kind, tuple(spec.cost.items()), spec.hint, action.avoid)
        if equal in self._stuck or (equal in self._deferred and not self._is_settling):
            return True
        if self._is_planned and action.id not in self._plan() and not self._fell_short:
            return not self._sizes_anywhere(action)  # one that fits nowhere holds up nobody
        cost = {name: demand for name, demand in charge(self.state, action).items() if name != "gpu"}
        able = self._able.get(equal)
        if able is None:
            whole = charge(self.state, action)
            takers = self.found.takers_of(action)
            able = self._able[equal] = [each for each in takers if self.found.could_run(each, action, whole)]
        if not self.found.has_quota(cost, lambda: able):
            return not self.found.quotas.is_closed(cost)
        static = self._rule is GpuRule.STATIC and spec.service
        places = self._static(action, cost) if static else self._places(action, cost, able)
        best = min(places, key=lambda place: place[:3], default=None)
        if best is None or best.begins > 0:
            self._fell_short = True
        if best is None:
            self._hold_back(action, cost, able)
            self._stuck.add(equal)
            self._waits += 1
            return self._waits < LOOKED_AT_MAX  # another size may do
        earlier = self._waiting.setdefault(equal, deque())
        if best.begins > 0:
            self._hold_back(action, cost, [best.holder])
            self._waits += 1
            earlier.append(action)
            if any(place.begins == 0 for place in places):
                self.evicted.append(action)
            self._reserve(action, best)
            if best.restores:
                self._stuck.add(equal)
            return self._waits < LOOKED_AT_MAX
        if self._lets_others_go_first(action, best):
            self._deferred[equal] = action
            return True
        if earlier:  # arrival order decides between equals: who came first starts, and this one waits in its stead
            first = earlier.popleft()
            earlier.append(action)
            self.evicted = [action if each is first else each for each in self.evicted]
            action = first
        self._start(action, best, cost)
        return True

    def settle(self) -> None:
        """Those that have let others go first, on what those have left."""
        self._is_settling = True
        for action in self._deferred.values():
            started = len(self.found.decisions)
            self.try_(action)
            if len(self.found.decisions) == started and action not in self.evicted:
                self.evicted.append(action)

    def _lets_others_go_first(self, action: Action, place: Place) -> bool:
        """Whether what it would evict is what others wait for, as long as it has not waited for long itself."""
        state = self.state
        if self._rule is not GpuRule.PRICED or self._is_settling or state.behaviour < 6 or not place.victims:
            return False
        offer = place.holder.services.get(action.spec.service, _NO_SERVICE)
        most_us = STAY_FACTOR * restore_us(offer, place.gpus.bit_count())
        if state.now_ns - action.ready_ns >= most_us * 1_000:
            return False
        gone = {victim.service for victim in place.victims}
        return any(key.service in gone and len(queue) > 0 for key, queue in state.queues.items())

    def own(self, holder: Incarnation, task: str) -> int:
        """The GPUs of an executor that a task may have."""
        if not self._splits:
            return holder.gpus
        if task not in self._parts:
            self._parts[task] = fixed_gpus(self.state, task)
        return holder.gpus & self._parts[task].get(holder.host, 0)

    def _hold_back(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> None:
        """The first of each queue that waits keeps its share of what it needs beside GPUs."""
        if action.queue not in self._held:
            self._held.add(action.queue)
            self.found.hold_back(action, holders, cost)

    # --- where it could run ---

    def sizes(self, action: Action, holder: Incarnation) -> tuple[int, ...]:
        sizes = self._fitting(action, holder, self.own(holder, action.id.task))
        if self._rule is GpuRule.FIXED and sizes:
            wanted = setting(self.state, "fixed_units")
            return (min(sizes, key=lambda size: (abs(size - wanted), size)),)
        if self._is_planned:
            most = self._plan().get(action.id, sizes[0] if sizes else 0)
            return tuple(size for size in sizes if size <= most)
        return sizes if self._rule is GpuRule.PRICED else sizes[:1]

    def _plan(self) -> dict[ActionId, int]:
        if self._planned is None:
            state = self.state
            rooms = [self.room(key) for key, host in state.hosts.items() if host.gpus.all]
            queues = [queue for key, queue in state.queues.items() if "gpu" in key.resources]
            evict = self._rule is GpuRule.PAPER
            self._planned = in_chunks(queues, rooms, self._sizes_anywhere, self._curve_of, evict=evict)
            self._fell_short = not self._planned
        return self._planned

    def _sizes_anywhere(self, action: Action) -> tuple[int, ...]:
        """Chunks on which it could start now as far as all else that it takes goes."""
        cost = {name: demand for name, demand in charge(self.state, action).items() if name != "gpu"}
        if not self.found.quotas.lets_through(cost):
            return ()
        takers = [holder for holder in self.found.takers_of(action) if self.found.has_room(action, holder, cost)]
        return tuple(sorted({size for holder in takers for size in self._fitting(action, holder, holder.gpus)}))

    def _fitting(self, action: Action, holder: Incarnation, gpus: int) -> tuple[int, ...]:
        key = (holder.id, gpus, action.spec.service, action.spec.cost["gpu"])
        found = self._fitting_on.get(key)
        if found is None:
            found = self._fitting_on[key] = fitting_chunks(self.state, holder, action, gpus)
        return found

    def _places(self, action: Action, cost: dict[str, Demand], takers: list[Incarnation]) -> list[Place]:
        curve, service = self._curve_of(action), action.spec.service
        price = self._price_now(action.id.task if self._splits else "", service) if self._rule is GpuRule.PRICED else 0.0
        counts = self._rule is GpuRule.PRICED and setting(self.state, "count_restore")
        waiting = len(self.state.queues[action.queue]) if action.queue is not None else 1
        found: list[Place] = []
        for holder in takers:
            if not holder.gpus or not self.found.has_room(action, holder, cost):
                continue
            room, sizes, gpus = self.room(holder.host), self.sizes(action, holder), self.own(holder, action.id.task)
            for copy in room.copies if service else ():
                size = copy.gpus.bit_count()
                if copy.service != service or copy.holder != holder.id or copy.gpus & ~gpus or size not in sizes:
                    continue
                run_us = curve.at(size)
                begins = room.begins(copy.gpus, run_us)
                if begins < NEVER_US:
                    cost_us = begins + run_us * (1 + price * size)
                    found.append(Place(cost_us, begins, begins + run_us, holder, copy.gpus, False, ()))
            offer = holder.services.get(service, _NO_SERVICE)
            for size in sizes:
                run_us, weights_us = curve.at(size), restore_us(offer, size)
                took_us = weights_us + run_us
                mib = weights_on_each(holder, service, size, room.host.gpus.memory_mib)
                spot = room.spot(holder, gpus, service, size, mib, took_us)
                if spot is not None:
                    begins = room.begins(spot.gpus, took_us)
                    cost_us = begins + run_us * (1 + price * size)
                    if counts:  # of the GPUs' time to restore, each of those that wait for this service bears its part
                        cost_us += spot.loss + weights_us * (1 + price * size / waiting)
                    found.append(Place(cost_us, begins, begins + took_us, holder, spot.gpus, True, spot.victims))
        if self._rule is not GpuRule.PRICED:  # nobody waits by choice
            found = [place for place in found if place.begins == 0] or found
        return found

    def any_free(self) -> bool:
        """Whether any GPU runs nothing: if none, nobody starts, so nobody is looked at."""
        self._has_free = self._has_free and any(self.room(key).free for key, host in self.state.hosts.items() if host.gpus.all)
        return self._has_free

    def _price_now(self, task: str, service: str) -> float:
        """Of a GPU-microsecond, in action-microseconds of waiting that it causes, over all hosts with GPUs: these actions are
        bound to none. task: over its part of them. Of those that wait count who wants this service, which these GPUs serve, and
        whose service is not being served: the others want a copy, not GPUs."""
        if (task, service) not in self._prices:
            state = self.state
            own = fixed_gpus(state, task) if task else {key: host.gpus.all for key, host in state.hosts.items() if host.gpus.all}
            rooms = [self.room(key) for key in own]
            gpus = sum(map(int.bit_count, own.values()))
            free = sum((own[room.host.key] & ~room.used).bit_count() for room in rooms)
            serving = {grant.service for room in rooms for each in room.host.live for grant in each.grants.values()}
            blocked = sum(
                len(queue)
                for key, queue in state.queues.items()
                if "gpu" in key.resources and task in ("", key.task) and (key.service == service or key.service not in serving)
            )
            busy = math.fsum(
                gpu_utilisation(room.host, state.now_ns) * own[room.host.key].bit_count() / max(gpus, 1) for room in rooms
            )
            view = View(
                cores=max(gpus, 1),
                free=free,
                behind=max(0, blocked - free),
                thinking=gpus,
                utilisation=busy,
                releases=[],
            )
            self._prices[task, service] = CHUNK_FACTOR * Prices(view, 0).at(0)
        return self._prices[task, service]

    # --- what is decided ---

    def _start(self, action: Action, place: Place, cost: dict[str, Demand]) -> None:
        room = self.room(place.holder.host)
        decision = self.found.start(action, place.holder, cost)
        size = place.gpus.bit_count()
        decision.gpus, decision.units = cores_of(place.gpus), size
        decision.amounts["gpu"] = size
        if self.found.shares is not None:
            self.found.shares.start(room.host, action.id.task, {"gpu": size})
        # Those that made room for another start of this pass are named again: that one may come later, or not at all.
        room.gone += place.victims
        gone = [copy for copy in room.gone if copy.gpus & place.gpus]
        decision.evicts = tuple(m.Resident(service=copy.service, gpus=cores_of(copy.gpus)) for copy in gone)
        most_us = (action.spec.timeout_ms + limits.STARTUP_MS_MAX) * 1_000
        decision.predicted_us = max(int(min(place.ends - place.begins, most_us)), 1)
        room.start(place.gpus, place.ends)
        if place.restores:
            mib = weights_on_each(place.holder, action.spec.service, size, room.host.gpus.memory_mib)
            room.restore(Copy(action.spec.service, place.gpus, mib, place.holder.id, self.state.now_ns), place.victims)

    def _reserve(self, action: Action, place: Place) -> None:
        patient = self.state.now_ns - action.ready_ns < setting(self.state, "patience_ms") * 1_000_000
        self.room(place.holder.host).wait(place.gpus, place.begins if patient else 0.0, place.ends)

    def room(self, key: HostKey) -> GpuRoom:
        room = self._rooms.get(key)
        if room is None:
            room = GpuRoom(self.state, self.state.hosts[key], oldest_first=self._rule is not GpuRule.PRICED)
            self._rooms[key] = room
        return room

    # --- GPUs that belong to a service ---

    def _static(self, action: Action, cost: dict[str, Demand]) -> list[Place]:
        """The GPUs of its service, as soon as nobody uses them."""
        if self._pins is None:
            self._pins = pinned(self.state)
        found: list[Place] = []
        for holder, gpus in self._pins.get(action.spec.service, ()):
            room = self.room(holder.host)
            offer, size = holder.services[action.spec.service], gpus.bit_count()
            able = holder.key == action.key and size in legal_chunks(action.spec.cost["gpu"])
            if not able or not self.found.has_room(action, holder, cost):
                continue
            mine = (action.spec.service, gpus, holder.id)
            restores = not any((copy.service, copy.gpus, copy.holder) == mine for copy in room.copies)
            took_us = self._curve_of(action).at(size) + (restore_us(offer, size) if restores else 0.0)
            mib = weights_on_each(holder, action.spec.service, size, room.host.gpus.memory_mib)
            room_for = room.victims(holder, gpus, mib) if restores else (0.0, ())
            begins = room.begins(gpus, took_us)
            if room_for is not None and begins < NEVER_US:
                found.append(Place(begins + took_us, begins, begins + took_us, holder, gpus, restores, room_for[1]))
        return [place for place in found if place.begins == 0] or found


def pinned(state: State) -> dict[str, list[tuple[Incarnation, int]]]:
    """Under `static-service`: `static_replicas` chunks of `static_units` GPUs, or of the next smaller size, for each service, by
    name, in the order of executors, as long as there are some; (executor, GPUs). With `static_shared`, services for which there
    are none share those of the others, in turn."""
    size = max(each for each in GPU_CHUNKS if each <= setting(state, "static_units"))
    free = [
        (holder, chunk)
        for host in state.hosts.values()
        for holder in host.live
        if not holder.draining
        for chunk in chunks(holder.gpus, size)
    ]
    services = sorted({name for holder, _ in free for name in holder.services})
    pins: dict[str, list[tuple[Incarnation, int]]] = {service: [] for service in services}
    for _ in range(setting(state, "static_replicas")):
        for service in services:
            index = next((index for index, (holder, _) in enumerate(free) if _serves(state, holder, service, size)), None)
            if index is not None:
                pins[service].append(free.pop(index))
    if setting(state, "static_shared"):
        taken = [pin for service in services for pin in pins[service]]
        for number, service in enumerate(service for service in services if not pins[service]):
            able = [pin for pin in taken if _serves(state, pin[0], service, size)]
            if able:
                pins[service].append(able[number % len(able)])
    return pins


def _serves(state: State, holder: Incarnation, service: str, size: int) -> bool:
    memory_mib = state.hosts[holder.host].gpus.memory_mib
    return service in holder.services and weights_on_each(holder, service, size, memory_mib) <= memory_mib
