"""Step 1 of a pass: the candidates, in arrival order, each on its minimum of every resource it names.

One that does not fit holds back the later ones that need the same scarce resource on the hosts it could use, so that a wide
action is not starved by narrow ones. Looks at what starts and at the heads of the queues, never at what waits behind them.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from tangram import limits
from tangram.messages import Demand, Resident
from tangram.scheduler.cores import MILLI, CorePool
from tangram.scheduler.policies import charge, could_fit, could_run
from tangram.scheduler.ready import Order
from tangram.scheduler.state import Action, Host, HostKey, Incarnation, State


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
    blocked: set[str]
    """Resources that an earlier candidate waits for; only asked for membership."""
    sessions: int
    changes: int = 0
    """Starts of this pass, whoever has them: a score is good until the next."""


_Ranked = tuple[int, int, int, Incarnation, Room]
"""(score, index among the takers, its room's changes then, itself, its room)."""


class Candidates:
    """What a pass found so far. decisions: what starts, in arrival order, each on its minimum until its units are chosen."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.rooms: dict[HostKey, Room] = {}
        self.decisions: list[Decision] = []
        self._takers_of: dict[str, list[Incarnation]] = {}
        self._ranked: dict[tuple[str, bool], list[_Ranked]] = {}
        """Heaps by kind, and whether for openings."""
        self._let_through: dict[str, tuple[int, int]] = {}
        """By quota: starts of this pass, and their tokens; (-1, 0) once one waits for it."""
        self._waiting: dict[tuple[object, ...], bool] = {}
        """What `_try` returned for one-shot actions that wait; one that asks for the same cannot have it either."""

    def gather(self, on_gpus: Callable[[Action], bool]) -> None:
        """Walks the queues. on_gpus: starts an action that needs GPUs or lets it wait; says whether to look at the next one of
        its queue."""
        heads: list[tuple[Order, int, Action]] = []
        queues = list(self.state.queues.values())
        walks = [iter(queue) for queue in queues]
        for index, walk in enumerate(walks):
            action = next(walk)
            heads.append((action.order, index, action))
        heapq.heapify(heads)
        looked_at = 0
        while heads and looked_at < limits.CANDIDATES_MAX:
            _, index, action = heads[0]
            looked_at += 1
            go_on = self._is_beyond_quota(action) or (on_gpus if "gpu" in action.spec.cost else self._try)(action)
            following = next(walks[index], None) if go_on else None
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following.order, index, following))

    def _try(self, action: Action) -> bool:
        """Starts a candidate on its minimum, or lets it hold back what it waits for. Returns whether the one behind it in its
        queue is a candidate too: it is unless this one waits for what both need, on every host that both could use."""
        cost = charge(self.state, action)
        session = action.session
        if session is not None:
            bound = self.state.incarnations[session.incarnation]
            if not could_fit(self.state, bound, cost):
                return True
            if self.state.quotas and not self.has_quota(cost, lambda: [bound]):
                return False
            if self._fits(self.room(bound.host), bound, cost):
                self.start(action, bound, cost)
                return True
            self._take_quotas(cost)
            self._hold_back(self.room(bound.host), bound, cost)
            return False
        if self.state.quotas and not self.has_quota(cost, lambda: self._able(action, cost)):
            return not self.is_closed(cost)
        alike = (action.key, action.avoid, *((name, demand.low) for name, demand in cost.items())) if self._waiting else ()
        if alike in self._waiting:
            return self._waiting[alike]
        takers = self._takers(action.key)
        if action.avoid:
            holder = self._best_of(action, cost, self._preferred(action, cost, takers))
        else:
            holder = self._choose(action, cost, takers)
        if holder is not None:
            self.start(action, holder, cost)
            return True
        holders = self._able(action, cost)
        self.hold_back(holders, cost)
        alike = (action.key, action.avoid, *((name, demand.low) for name, demand in cost.items()))
        self._waiting[alike] = len(holders) < len(takers)
        return self._waiting[alike]

    def _choose(self, action: Action, cost: dict[str, Demand], takers: list[Incarnation]) -> Incarnation | None:
        """The best of those that have room now; the earlier one between equals. A start only makes its own host worse, so of a
        heap by score what comes first, and has not become worse meanwhile, is the best."""
        key = (action.key, action.opens is not None)
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
            elif self._fits(room, holder, cost):
                chosen = holder
            else:
                aside.append(heapq.heappop(heap))
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _best_of(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> Incarnation | None:
        fitting = [holder for holder in holders if self._fits(self.room(holder.host), holder, cost)]
        return min(fitting, key=lambda holder: self._score(action, self.room(holder.host), holder), default=None)

    def _able(self, action: Action, cost: dict[str, Demand]) -> list[Incarnation]:
        """Those for which an action that needs no GPUs can wait."""
        holders = [each for each in self._takers(action.key) if could_fit(self.state, each, cost)]
        return self._preferred(action, cost, holders) if action.avoid else holders

    def hold_back(self, holders: list[Incarnation], cost: dict[str, Demand]) -> None:
        """Of what an action waits for on these executors, those behind it get nothing; its quotas, which it has, are kept."""
        if holders:
            self._take_quotas(cost)
        kept: set[HostKey] = set()  # only asked for membership
        for holder in holders:
            self._hold_back(self.room(holder.host), holder, cost, keep=holder.host not in kept)
            kept.add(holder.host)

    def takers_of(self, action: Action) -> list[Incarnation]:
        """Live executors that take new actions of its kind and serve its service, on hosts that have not lost it if there are
        such."""
        service = action.spec.service
        takers = [holder for holder in self._takers(action.key) if not service or service in holder.services]
        return self._preferred(action, charge(self.state, action), takers) if action.avoid else takers

    def has_room(self, holder: Incarnation, cost: dict[str, Demand]) -> bool:
        """Whether this could start there now, on its minimum of everything; its quotas apart."""
        return self._fits(self.room(holder.host), holder, cost)

    def _is_beyond_quota(self, action: Action) -> bool:
        """Whether a quota was made smaller than what it takes: it waits for another change, and holds nobody up."""
        pools = self.state.quotas
        return bool(pools) and any(
            0 < pools[name].limit.tokens < demand.low for name, demand in action.spec.cost.items() if name in pools
        )

    def has_quota(self, cost: dict[str, Demand], holders: Callable[[], list[Incarnation]]) -> bool:
        """Whether all quotas that are named let it through. If one does not, it lets nobody through behind it either, as long as
        there is anybody who could run it."""
        lacks = [name for name, demand in cost.items() if name in self.state.quotas and not self._lets_through(name, demand)]
        if lacks and not self.is_closed(cost) and holders():
            self._let_through.update(dict.fromkeys(lacks, (-1, 0)))
        return not lacks

    def is_closed(self, cost: dict[str, Demand]) -> bool:
        """Whether somebody waits for one of its quotas, and so all others of its queue do."""
        return any(self._let_through.get(name, (0, 0))[0] < 0 for name in cost)

    def _lets_through(self, name: str, demand: Demand) -> bool:
        count, tokens = self._let_through.get(name, (0, 0))
        return count >= 0 and self.state.quotas[name].fits(tokens + demand.low, count + 1)

    def _take_quotas(self, cost: dict[str, Demand]) -> None:
        for name, demand in cost.items():
            if name in self.state.quotas:
                count, tokens = self._let_through.get(name, (0, 0))
                self._let_through[name] = (count + 1, tokens + demand.low)

    def _takers(self, key: str) -> list[Incarnation]:
        """Incarnations that take new actions of this kind, each host's in the order they joined."""
        found = self._takers_of.get(key)
        if found is None:
            live = (holder for host in self.state.hosts.values() for holder in host.live)
            found = self._takers_of[key] = [holder for holder in live if holder.key == key and not holder.draining]
        return found

    def _preferred(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> list[Incarnation]:
        """Without the hosts that lost an attempt, as long as there is another that could ever run it."""
        fresh = [holder for holder in holders if holder.host not in action.avoid and could_run(self.state, holder, action, cost)]
        return fresh or holders

    @staticmethod
    def _score(action: Action, room: Room, holder: Incarnation) -> int:
        """Lower is better. New sessions spread by sessions per core; one-shot actions go where most cores are free; between
        equals to who has least to do."""
        load = len(holder.grants) + room.started.get(holder.id, 0)
        if action.opens is not None:
            return (room.sessions * 1_000_000 // max(room.pool.all.bit_count(), 1) << 32) + load
        return load - (room.pool.free(holder.cores_mask).bit_count() << 32)

    def room(self, key: HostKey) -> Room:
        room = self.rooms.get(key)
        if room is None:
            host = self.state.hosts[key]
            free = {name: size - host.used.get(name, 0) for name, size in host.capacity.items()}
            room = self.rooms[key] = Room(host, host.pool.copy(), free, {}, set(), host.sessions)
        return room

    def _fits(self, room: Room, holder: Incarnation, cost: dict[str, Demand]) -> bool:
        quotas = self.state.quotas
        for name, demand in cost.items():
            low = demand.low
            if not low or (quotas and name in quotas):
                continue
            if room.blocked and name in room.blocked:
                return False
            if not room.pool.fits(low, holder.cores_mask) if name == "cpu" else room.free.get(name, 0) < low:
                return False
        return True

    def _hold_back(self, room: Room, holder: Incarnation, cost: dict[str, Demand], *, keep: bool = True) -> None:
        """What it lacks goes to nobody behind it; of what it does not lack, its own share is kept for it. keep: false if that
        was done for another executor of this host, as all but the cores is the host's."""
        for name, demand in cost.items():
            if not demand.low or name in room.blocked or name in self.state.quotas:
                continue
            if name == "cpu":
                if not room.pool.fits(demand.low, holder.cores_mask):
                    room.blocked.add(name)
            elif not keep:
                continue
            elif room.free.get(name, 0) < demand.low:
                room.blocked.add(name)
            else:
                room.free[name] -= demand.low

    def start(self, action: Action, holder: Incarnation, cost: dict[str, Demand]) -> Decision:
        """Takes its minimum of everything that `cost` names."""
        room, quotas = self.room(holder.host), self.state.quotas
        amounts: dict[str, int] = {}
        cores: tuple[int, ...] = ()
        claimed = 0
        if quotas:
            self._take_quotas(cost)
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
        room.changes += 1
        room.started[holder.id] = room.started.get(holder.id, 0) + 1
        if action.opens is not None:
            room.sessions += 1
        elif action.session is not None and action.session.cores and "cpu" in action.spec.cost:
            cores = action.session.cores
        decision = Decision(action, holder, amounts, cores, len(cores), 0, claimed)
        self.decisions.append(decision)
        return decision
