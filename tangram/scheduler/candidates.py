"""Step 1 of a pass: the candidates, each on its minimum of every resource it names, in arrival order; under a policy that shares
by task in that order within each task, and the task that holds least goes first.

One that does not fit holds back the later ones that need the same scarce resource on the hosts it could use, so that a wide
action is not starved by narrow ones; of cores, `reservation` has the exception. What only the end of a sandbox gives back is held
back from what opens one or runs without: the actions inside go on, because they bring that end.
Looks at what starts and at the heads of the queues, never at what waits behind them.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tangram import limits
from tangram.messages import Demand, Resident
from tangram.scheduler.cores import MILLI, CorePool, mask_of
from tangram.scheduler.policies import Policy, charge, could_run, curve_of, fits_part, prior_of, setting
from tangram.scheduler.quotas import QuotaGate
from tangram.scheduler.ready import Order
from tangram.scheduler.reservation import Release, Reservation, reserve
from tangram.scheduler.shares import Shares
from tangram.scheduler.state import Action, Host, HostKey, Incarnation, State

UNBOUNDED: Final = 1 << 40
"""Millicores: more than any host has."""


@dataclass(slots=True, eq=False)
class Decision:
    """One action of a window: where it runs and on what. claimed: a mask of whole cores that are kept for it, until `units` says
    which and how many it gets."""

    action: Action
    holder: Incarnation
    amounts: dict[str, int]
    cores: tuple[int, ...]
    units: int
    predicted_us: int
    claimed: int = 0
    gpus: tuple[int, ...] = ()
    evicts: tuple[Resident, ...] = ()


@dataclass(slots=True, eq=False)
class Room:
    """What one host has left in this pass."""

    host: Host
    pool: CorePool
    free: dict[str, int]
    started: dict[str, int]
    """Starts of this pass by incarnation."""
    sessions: int
    opened: dict[str, int] = field(default_factory=dict)
    """Openings of this pass by task."""
    decisions: list[Decision] = field(default_factory=list)
    blocked: dict[str, str] = field(default_factory=dict)
    """Labels of resources that an earlier candidate waits for, and its task."""
    reserved: dict[str, Reservation] = field(default_factory=dict)
    """Of those: who may go first all the same."""
    closed: dict[str, None] = field(default_factory=dict)
    """Resources that an earlier candidate waits for until a sandbox ends: nothing but the actions of open ones gets them."""
    kept: dict[str, int] = field(default_factory=dict)
    """Taken from `free` for such a candidate, so there for the actions of open sandboxes."""
    changes: int = 0
    """Starts of this pass, whoever has them: a score is good until the next."""


_Ranked = tuple[int, int, int, Incarnation, Room]
"""(score, index among the takers, its room's changes then, itself, its room)."""


class Candidates:
    """What a pass found so far. decisions: what starts, in arrival order, each on its minimum until its units are chosen."""

    def __init__(self, state: State, policy: Policy) -> None:
        self.state = state
        self.policy = policy
        self.shares = Shares(state, splits=policy.splits) if policy.by_task else None
        self.prior = prior_of(state)
        self.rooms: dict[HostKey, Room] = {}
        self.decisions: list[Decision] = []
        self._takers_of: dict[tuple[str, str], list[Incarnation]] = {}
        self._ranked: dict[tuple[str, str, bool, str], list[_Ranked]] = {}
        """Heaps by kind, service, whether for openings, and task if they share."""
        self.quotas = QuotaGate(state.quotas, state.now_ns)
        self._waiting: dict[tuple[object, ...], tuple[list[list[Reservation]], bool]] = {}
        """Of one-shot actions that wait, what one that asks for the same looks at in vain: reservations by host, and whether
        there are executors that the later ones could use and these could not."""
        self._backfilling = False
        self._patience_ns = setting(state, "patience_ms") * 1_000_000

    def gather(self, on_gpus: Callable[[Action], bool]) -> None:
        """Walks the queues. on_gpus: starts an action that needs GPUs or lets it wait; says whether to look at the next one of
        its queue."""
        state = self.state
        groups: dict[tuple[str, HostKey | None], list[tuple[Order, int, Action]]] = {}
        walks = [iter(queue) for queue in state.queues.values()]
        for index, (key, walk) in enumerate(zip(state.queues, walks, strict=True)):
            action = next(walk)
            groups.setdefault((key.task, key.host) if self.shares else ("", None), []).append((action.order, index, action))
        by_rank = []
        for number, group in enumerate(groups.values()):
            heapq.heapify(group)
            by_rank.append((self._rank(group[0][2]), group[0][0], number, group))
        heapq.heapify(by_rank)
        looked_at = 0
        while by_rank and looked_at < limits.CANDIDATES_MAX:
            rank, order, number, group = by_rank[0]
            _, index, action = group[0]
            if self.shares and (now := self._rank(action)) != rank:
                heapq.heapreplace(by_rank, (now, order, number, group))
                continue
            looked_at += 1
            is_beyond = bool(state.quotas) and self.quotas.is_beyond(charge(state, action))
            go_on = is_beyond or (on_gpus if "gpu" in action.spec.cost else self._try)(action)
            following = next(walks[index], None) if go_on else None
            if following is None:
                heapq.heappop(group)
            else:
                heapq.heapreplace(group, (following.order, index, following))
            if group:
                heapq.heapreplace(by_rank, (self._rank(group[0][2]), group[0][0], number, group))
            else:
                heapq.heappop(by_rank)

    def _rank(self, action: Action) -> float:
        return self.shares.rank(action.queue) if self.shares and not self.policy.splits and action.queue else 0.0

    def _try(self, action: Action) -> bool:
        """Starts a candidate on its minimum, or lets it hold back what it waits for. Returns whether the one behind it in its
        queue is a candidate too: it is unless this one waits for what both need, on every host that both could use."""
        cost = charge(self.state, action)
        session = action.session
        if session is not None:
            bound = self.state.incarnations[session.incarnation]
            if not self.could_run(bound, action, cost):
                return True
            if not self.has_quota(cost, lambda: [bound]):
                return False
            room = self.room(bound.host)
            if self._fits(room, bound, action, cost):
                self.start(action, bound, cost)
                return True
            self.quotas.take(cost)
            self._hold_back(room, bound, action, cost)
            return _may_pass(self._reservations(room, action, cost))
        if not self.has_quota(cost, lambda: self._able(action, cost)):
            return not self.quotas.is_closed(cost)
        if self._waiting and (known := self._waiting.get(self._alike(action, cost))) is not None:
            for reservations in known[0]:
                for each in reservations:
                    each.looked_at += 1
            return known[1] or any(map(_may_pass, known[0]))
        takers = self._takers(action)
        if action.avoid:
            holder = self._best_of(action, cost, self._preferred(action, cost, takers))
        else:
            holder = self._choose(action, cost, takers)
        if holder is not None:
            self.start(action, holder, cost)
            return True
        return self._wait(action, cost, takers)

    def _alike(self, action: Action, cost: dict[str, Demand]) -> tuple[object, ...]:
        """Actions with equal ones fit in the same places. Behind a reservation it matters how long they run, too."""
        whose = action.id.task if self.shares or self._backfilling else ""
        kind = (action.spec.kind, action.spec.hint) if self._backfilling else ()
        return action.key, action.spec.service, action.avoid, whose, kind, *((name, demand.low) for name, demand in cost.items())

    def could_run(self, holder: Incarnation, action: Action, cost: dict[str, Demand]) -> bool:
        """Whether it could start there if nothing else ran, within the part of its task."""
        return could_run(self.state, holder, action, cost) and fits_part(self.state, holder, action, cost)

    def _choose(self, action: Action, cost: dict[str, Demand], takers: list[Incarnation]) -> Incarnation | None:
        """The best of those that have room now; the earlier one between equals. A start only makes its own host worse, so of a
        heap by score what comes first, and has not become worse meanwhile, is the best."""
        key = (action.key, action.spec.service, action.opens is not None, action.id.task if self.shares else "")
        heap = self._ranked.get(key)
        if heap is None:
            heap = []
            for index, holder in enumerate(takers):
                room = self.room(holder.host)
                heap.append((self._score(action, room, holder), index, room.changes, holder, room))
            heapq.heapify(heap)
            self._ranked[key] = heap
        aside: list[_Ranked] = []
        chosen: Incarnation | None = None
        while heap and chosen is None:
            _, index, changes, holder, room = heap[0]
            if room.changes != changes:
                heapq.heapreplace(heap, (self._score(action, room, holder), index, room.changes, holder, room))
            elif self._fits(room, holder, action, cost):
                chosen = holder
            else:
                aside.append(heapq.heappop(heap))
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _best_of(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> Incarnation | None:
        fitting = [holder for holder in holders if self._fits(self.room(holder.host), holder, action, cost)]
        return min(fitting, key=lambda holder: self._score(action, self.room(holder.host), holder), default=None)

    def _wait(self, action: Action, cost: dict[str, Demand], takers: list[Incarnation]) -> bool:
        """Holds back what a one-shot action waits for, on the hosts that could ever have it."""
        holders = self._able(action, cost)
        rooms = self.hold_back(action, holders, cost)
        reservations = [self._reservations(room, action, cost) for room in rooms]
        self._waiting[self._alike(action, cost)] = reservations, len(holders) < len(takers)
        return len(holders) < len(takers) or any(map(_may_pass, reservations))

    def _able(self, action: Action, cost: dict[str, Demand]) -> list[Incarnation]:
        """Those for which an action that needs no GPUs can wait."""
        holders = [each for each in self._takers(action) if self.could_run(each, action, cost)]
        return self._preferred(action, cost, holders) if action.avoid else holders

    def hold_back(self, action: Action, holders: list[Incarnation], cost: dict[str, Demand]) -> list[Room]:
        """Of what an action waits for on these executors, those behind it get nothing; its quotas, which it has, are kept.
        Returns their rooms."""
        if holders:
            self.quotas.take(cost)
        rooms: dict[HostKey, Room] = {}
        for holder in holders:
            room = self.room(holder.host)
            self._hold_back(room, holder, action, cost, keep=holder.host not in rooms)
            rooms[holder.host] = room
        return list(rooms.values())

    def takers_of(self, action: Action) -> list[Incarnation]:
        """Live executors that take new actions of its kind and serve its service, on hosts that have not lost it if there are
        such."""
        takers = self._takers(action)
        return self._preferred(action, charge(self.state, action), takers) if action.avoid else takers

    def has_room(self, action: Action, holder: Incarnation, cost: dict[str, Demand]) -> bool:
        """Whether this could start there now, on its minimum of everything; its quotas apart."""
        return self._fits(self.room(holder.host), holder, action, cost)

    def has_quota(self, cost: dict[str, Demand], holders: Callable[[], list[Incarnation]]) -> bool:
        """Whether all quotas that are named let it through. If one does not, it lets nobody through behind it either, as long as
        there is anybody who could run it."""
        if self.quotas.lets_through(cost):
            return True
        if not self.quotas.is_closed(cost) and holders():
            self.quotas.close(cost)
        return False

    def _takers(self, action: Action) -> list[Incarnation]:
        """Incarnations that take new actions of its kind and serve its service, each host's in the order they joined."""
        key, service = action.key, action.spec.service
        found = self._takers_of.get((key, service))
        if found is None:
            live = (holder for host in self.state.hosts.values() for holder in host.live)
            found = self._takers_of[key, service] = [
                holder
                for holder in live
                if holder.key == key and not holder.draining and (not service or service in holder.services)
            ]
        return found

    def _preferred(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> list[Incarnation]:
        """Without the hosts that lost an attempt, as long as there is another that could ever run it."""
        fresh = [holder for holder in holders if holder.host not in action.avoid and self.could_run(holder, action, cost)]
        return fresh or holders

    def _score(self, action: Action, room: Room, holder: Incarnation) -> int:
        """Lower is better. New sessions spread by sessions per core, each task's if they share; one-shot actions go where most
        cores are free; between equals to who has least to do."""
        load = len(holder.grants) + room.started.get(holder.id, 0)
        if action.opens is None:
            free = room.pool.free(holder.cores_mask).bit_count()
            return load - ((free if self.shares is None else min(free, self.allowed(room, action) // MILLI)) << 32)
        cores = max(room.pool.all.bit_count(), 1)
        found = (room.sessions * 1_000_000 // cores << 32) + load
        if self.shares:
            part = room.host.parts.get(action.id.task)
            own = (part.sessions if part is not None else 0) + room.opened.get(action.id.task, 0)
            found += own * 1_000_000 // cores << 96
        return found

    def room(self, key: HostKey) -> Room:
        room = self.rooms.get(key)
        if room is None:
            host = self.state.hosts[key]
            free = {name: size - host.used.get(name, 0) for name, size in host.capacity.items()}
            room = self.rooms[key] = Room(host, host.pool.copy(), free, {}, host.sessions)
        return room

    # --- what fits, and what is held back ---

    def labels(self, name: str, task: str) -> tuple[str, ...]:
        """By which a task's actions that ask for this may be held back; by the last if its part lacks it, and not the host: who
        waits for cores of its own part holds back nobody else's."""
        return ("cpu", f"cpu of {task}") if name == "cpu" and self.shares else (name,)

    def allowed(self, room: Room, action: Action) -> int:
        """Millicores that the action's task may still take here, however many are free."""
        found = self.shares.allowed(room.host, action.id.task) if self.shares is not None else None
        return UNBOUNDED if found is None else found

    def _has(self, room: Room, holder: Incarnation, action: Action, name: str, low: int) -> bool:
        if name == "cpu":
            is_allowed = self.shares is None or low <= self.allowed(room, action)
            return is_allowed and room.pool.fits(low, holder.cores_mask)
        return low <= room.free.get(name, 0) + (room.kept.get(name, 0) if action.session is not None else 0)

    def _fits(self, room: Room, holder: Incarnation, action: Action, cost: dict[str, Demand]) -> bool:
        for name, demand in cost.items():
            low = demand.low
            if not low or name in self.state.quotas:
                continue
            for label in self.labels(name, action.id.task) if room.blocked or room.closed else ():
                if label in room.closed and action.session is None:
                    return False
                if label in room.blocked:
                    reserved = room.reserved.get(label)
                    if reserved is None or not reserved.admits(_cores(demand), self._duration_us(action, demand)):
                        return False
            if not self._has(room, holder, action, name, low):
                return False
        return True

    def _duration_us(self, action: Action, demand: Demand) -> float:
        return curve_of(self.state, action, self.prior).at(_cores(demand))

    def _hold_back(self, room: Room, holder: Incarnation, action: Action, cost: dict[str, Demand], *, keep: bool = True) -> None:
        """What it lacks goes to nobody behind it; of what it does not lack, its own share is kept for it. keep: false if that
        was done for another executor of this host, as all but the cores is the host's."""
        lacks = {
            name: demand.low
            for name, demand in cost.items()
            if demand.low and name not in self.state.quotas and not self._has(room, holder, action, name, demand.low)
        }
        for_sandboxes = any(
            name != "cpu" and low > room.free.get(name, 0) + self._coming_back(room, name) for name, low in lacks.items()
        )
        is_impatient = self.state.now_ns - action.ready_ns >= self._patience_ns
        for name, demand in cost.items():
            labels = self.labels(name, action.id.task)
            label = labels[-1] if demand.low > self.allowed(room, action) else labels[0]
            if is_impatient:
                for each in labels:
                    room.reserved.pop(each, None)
            taken = labels if label == labels[0] else labels[-1:]
            if not demand.low or name in self.state.quotas or any(each in room.blocked for each in taken):
                continue
            if label in room.closed and action.session is None:
                continue
            if name in lacks and for_sandboxes:
                room.closed[label] = None
            elif name in lacks:
                room.blocked[label] = action.id.task
                if name == "cpu" and demand.low > MILLI and self.policy.backfills and not is_impatient:
                    self._reserve(room, holder, action, label, demand)
            elif name != "cpu" and keep:
                room.free[name] -= demand.low
                if for_sandboxes:
                    room.kept[name] = room.kept.get(name, 0) + demand.low

    def _coming_back(self, room: Room, name: str) -> int:
        """How much of a resource is held by what ends by itself."""
        running = (grant for holder in room.host.live for grant in holder.grants.values())
        held = sum(grant.amounts.get(name, 0) for grant in running if not (grant.opens or grant.holds_session))
        return held + sum(each.amounts.get(name, 0) for each in room.decisions if each.action.opens is None)

    def _reserve(self, room: Room, holder: Incarnation, action: Action, label: str, demand: Demand) -> None:
        task, mask = action.id.task, holder.cores_mask
        grants = [
            (grant.left_us(self.state.now_ns), mask_of(grant.cores), grant.key.action.task)
            for other in room.host.live
            for grant in other.grants.values()
            if grant.amounts.get("cpu", 0) >= MILLI and not (grant.opens or grant.holds_session)
        ]
        starts = [
            (self._duration_us(each.action, Demand(low=each.amounts["cpu"])), each.claimed, each.action.id.task)
            for each in room.decisions
            if each.amounts.get("cpu", 0) >= MILLI and each.action.opens is None
        ]
        releases = [
            Release(at_us, (cores & mask).bit_count(), cores.bit_count() if whose == task else 0)
            for at_us, cores, whose in grants + starts
        ]
        free = room.pool.free(mask).bit_count()
        reserved = reserve(_cores(demand), free, self.allowed(room, action) // MILLI, releases)
        if reserved is not None:
            room.reserved[label] = reserved
            self._backfilling = True

    def _reservations(self, room: Room, action: Action, cost: dict[str, Demand]) -> list[Reservation]:
        """Behind which the next in the action's queue may start; none if it must not."""
        labels = self.labels("cpu", action.id.task) if "cpu" in cost else ()
        blocked = [label for label in labels if label in room.blocked]
        return [room.reserved[label] for label in blocked if all(each in room.reserved for each in blocked)]

    def start(self, action: Action, holder: Incarnation, cost: dict[str, Demand]) -> Decision:
        """Takes its minimum of everything that `cost` names."""
        room, quotas = self.room(holder.host), self.state.quotas
        amounts: dict[str, int] = {}
        cores: tuple[int, ...] = ()
        claimed = 0
        self.quotas.take(cost)
        for name, demand in cost.items():
            low = demand.low
            if name in quotas:
                amounts[name] = low
                continue
            if not low:
                continue
            if name != "cpu":
                room.free[name] -= low
            elif low >= MILLI:
                claimed = room.pool.claim(low // MILLI, holder.cores_mask)
            else:
                cores = room.pool.choose(low, holder.cores_mask)
                room.pool.take(cores, low)
            amounts[name] = low
            if room.reserved and name == "cpu":
                for reserved in self._reservations(room, action, cost):
                    reserved.take(_cores(demand), self._duration_us(action, demand))
        room.changes += 1
        room.started[holder.id] = room.started.get(holder.id, 0) + 1
        if self.shares is not None:
            self.shares.start(room.host, action.id.task, amounts)
        if action.opens is not None:
            room.sessions += 1
            room.opened[action.id.task] = room.opened.get(action.id.task, 0) + 1
        elif action.session is not None and action.session.cores and "cpu" in action.spec.cost:
            cores = action.session.cores
        decision = Decision(action, holder, amounts, cores, len(cores), 0, claimed)
        room.decisions.append(decision)
        self.decisions.append(decision)
        return decision


def _may_pass(reservations: list[Reservation]) -> bool:
    return bool(reservations) and all(each.is_open for each in reservations)


def _cores(demand: Demand) -> int:
    """Of its minimum; a part of one may take a whole one from the others."""
    return -(-demand.low // MILLI)
