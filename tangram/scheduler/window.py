"""`plan(state) -> Window`: one pass over what waits. It reads the state and changes nothing.

1. Candidates: in arrival order, each on its minimum of every resource it names. One that does not fit holds back the later
   ones that need the same scarce resource on the hosts it could use, so that a wide action is not starved by narrow ones.
2. Spare units: on each host where nothing waits for cores, by marginal gain.
3. Placement: exact core ids, in one NUMA node where possible.

A pass looks at what it starts and at the heads of the queues, never at what waits behind them.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from tangram import limits
from tangram.messages import Demand, Hint
from tangram.scheduler.allocate import by_marginal_gain
from tangram.scheduler.cores import MILLI, CorePool
from tangram.scheduler.elasticity import duration_us
from tangram.scheduler.policies import POLICIES, charge, could_fit, setting
from tangram.scheduler.ready import Order
from tangram.scheduler.state import Action, Host, HostKey, Incarnation, State


@dataclass(slots=True, eq=False)
class Decision:
    """One action of a window: where it runs and on what."""

    action: Action
    holder: Incarnation
    amounts: dict[str, int]
    cores: tuple[int, ...]
    units: int
    predicted_us: int


class Window(NamedTuple):
    """The outcome of one pass. `through_seq` is the last event it considered."""

    number: int
    through_seq: int
    digest: bytes
    policy: str
    decisions: list[Decision]
    fallback: bool = False


@dataclass(slots=True, eq=False)
class _Room:
    """What one host has left in this pass."""

    host: Host
    pool: CorePool
    free: dict[str, int]
    started: dict[str, int]
    """Starts of this pass by incarnation."""
    blocked: set[str]
    """Resources that an earlier candidate waits for; only asked for membership."""
    sessions: int


def plan(state: State, policy: str | None = None) -> Window:
    """Decides what to start now. `policy` overrides the leader's, for the fallback after a failed pass."""
    chosen = POLICIES[policy or state.policy]
    pass_ = _Pass(state)
    pass_.candidates()
    if chosen.elastic:
        pass_.spare_units()
    return Window(
        number=state.window + 1,
        through_seq=state.seq,
        digest=state.digest,
        policy=chosen.name,
        decisions=pass_.decisions,
        fallback=policy is not None,
    )


class _Pass:
    def __init__(self, state: State) -> None:
        self.state = state
        self.rooms: dict[HostKey, _Room] = {}
        self.decisions: list[Decision] = []
        self.elastic: list[tuple[int, _Room, Demand]] = []
        self.takers: dict[str, list[Incarnation]] = {}
        self.waiting: dict[tuple[object, ...], bool] = {}
        """What `_try` returned for one-shot actions that wait; one that asks for the same cannot have it either."""
        self.prior = Hint(duration_us=setting(state, "prior_duration_us"), parallel_ppm=setting(state, "prior_parallel_ppm"))

    # --- step 1 ---

    def candidates(self) -> None:
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
            following = next(walks[index], None) if self._try(action) else None
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
            if not could_fit(self.state.hosts[bound.host], bound, cost):
                return True
            if self._fits(self._room(bound.host), bound, cost):
                self._start(action, bound, cost)
                return True
            self._hold_back(self._room(bound.host), bound, cost)
            return False
        alike = (action.key, action.avoid, *((name, demand.low) for name, demand in cost.items())) if self.waiting else ()
        if alike in self.waiting:
            return self.waiting[alike]
        takers = self._takers(action.key)
        holder = self._choose(action, cost, self._preferred(action, cost, takers) if action.avoid else takers)
        if holder is not None:
            self._start(action, holder, cost)
            return True
        return self._wait(action, cost, takers)

    def _choose(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> Incarnation | None:
        """The best of those that have room now; the earlier one between equals."""
        best: tuple[int, ...] | None = None
        chosen: Incarnation | None = None
        for holder in holders:
            room = self._room(holder.host)
            if self._fits(room, holder, cost):
                if len(holders) == 1:
                    return holder
                score = self._score(action, room, holder)
                if best is None or score < best:
                    best, chosen = score, holder
        return chosen

    def _wait(self, action: Action, cost: dict[str, Demand], takers: list[Incarnation]) -> bool:
        """Holds back what a one-shot action waits for, on the hosts that could ever have it."""
        holders = [holder for holder in takers if could_fit(self.state.hosts[holder.host], holder, cost)]
        holders = self._preferred(action, cost, holders) if action.avoid else holders
        kept: set[HostKey] = set()  # only asked for membership
        for holder in holders:
            self._hold_back(self._room(holder.host), holder, cost, keep=holder.host not in kept)
            kept.add(holder.host)
        alike = (action.key, action.avoid, *((name, demand.low) for name, demand in cost.items()))
        self.waiting[alike] = len(holders) < len(takers)
        return self.waiting[alike]

    def _takers(self, key: str) -> list[Incarnation]:
        """Incarnations that take new actions of this kind, each host's in the order they joined."""
        found = self.takers.get(key)
        if found is None:
            live = (holder for host in self.state.hosts.values() for holder in host.live)
            found = self.takers[key] = [holder for holder in live if holder.key == key and not holder.draining]
        return found

    def _preferred(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> list[Incarnation]:
        """Without the hosts that lost an attempt, as long as there is another that could ever run it."""
        fresh = [
            holder
            for holder in holders
            if holder.host not in action.avoid and could_fit(self.state.hosts[holder.host], holder, cost)
        ]
        return fresh or holders

    @staticmethod
    def _score(action: Action, room: _Room, holder: Incarnation) -> tuple[int, ...]:
        """Lower is better. New sessions spread by sessions per core; one-shot actions go where most cores are free."""
        cores = max(room.pool.all.bit_count(), 1)
        load = len(holder.grants) + room.started.get(holder.id, 0)
        if action.opens is not None:
            return (room.sessions * 1_000_000 // cores, load)
        return (-room.pool.free(holder.cores_mask).bit_count(), load)

    def _room(self, key: HostKey) -> _Room:
        room = self.rooms.get(key)
        if room is None:
            host = self.state.hosts[key]
            free = {name: size - host.used.get(name, 0) for name, size in host.capacity.items()}
            room = self.rooms[key] = _Room(host, host.pool.copy(), free, {}, set(), host.sessions)
        return room

    @staticmethod
    def _fits(room: _Room, holder: Incarnation, cost: dict[str, Demand]) -> bool:
        for name, demand in cost.items():
            if not demand.low:
                continue
            if name in room.blocked:
                return False
            if name == "cpu":
                if not room.pool.fits(demand.low, holder.cores_mask):
                    return False
            elif room.free.get(name, 0) < demand.low:
                return False
        return True

    @staticmethod
    def _hold_back(room: _Room, holder: Incarnation, cost: dict[str, Demand], *, keep: bool = True) -> None:
        """What it lacks goes to nobody behind it; of what it does not lack, its own share is kept for it. keep: false if that
        was done for another executor of this host, as all but the cores is the host's."""
        for name, demand in cost.items():
            if not demand.low or name in room.blocked:
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

    def _start(self, action: Action, holder: Incarnation, cost: dict[str, Demand]) -> None:
        room = self._room(holder.host)
        amounts: dict[str, int] = {}
        cores: tuple[int, ...] = ()
        for name, demand in cost.items():
            if not demand.low:
                continue
            amounts[name] = demand.low
            if name == "cpu":
                cores = room.pool.choose(demand.low, holder.cores_mask)
                room.pool.take(cores, demand.low)
                if demand.high > demand.low:
                    self.elastic.append((len(self.decisions), room, demand))
            else:
                room.free[name] -= demand.low
        room.started[holder.id] = room.started.get(holder.id, 0) + 1
        if action.opens is not None:
            room.sessions += 1
        elif action.session is not None and action.session.cores and "cpu" in action.spec.cost:
            cores = action.session.cores
        units = len(cores)
        predicted = duration_us(action.spec.hint, max(units, 1), self.prior)
        self.decisions.append(Decision(action, holder, amounts, cores, units, predicted))

    # --- steps 2 and 3 ---

    def spare_units(self) -> None:
        """Gives the free cores of each host where nothing waits for cores to the elastic actions started there."""
        by_room: dict[HostKey, list[tuple[int, Demand]]] = {}
        for index, room, demand in self.elastic:
            if "cpu" not in room.blocked:
                by_room.setdefault(room.host.key, []).append((index, demand))
        for key, group in by_room.items():
            room = self.rooms[key]
            decided = [self.decisions[index] for index, _ in group]
            sizes = [
                tuple(amount // MILLI for amount in demand.legal)
                if demand.legal
                else range(demand.low // MILLI, demand.high // MILLI + 1)
                for _, demand in group
            ]
            spare = [room.pool.free(decision.holder.cores_mask).bit_count() for decision in decided]
            units = by_marginal_gain(
                sizes,
                lambda i, m, decided=decided: duration_us(decided[i].action.spec.hint, m, self.prior),  # type: ignore[misc]
                lambda i, spare=spare: spare[i],  # type: ignore[misc]
            )
            for decision, amount in zip(decided, units, strict=True):
                more = amount - decision.units
                if more and room.pool.free(decision.holder.cores_mask).bit_count() >= more:
                    room.pool.give(decision.cores, decision.units * MILLI)
                    decision.cores = room.pool.extend((), amount, decision.holder.cores_mask)
                    room.pool.take(decision.cores, amount * MILLI)
                    decision.units = amount
                    decision.amounts["cpu"] = amount * MILLI
                    decision.predicted_us = duration_us(decision.action.spec.hint, amount, self.prior)
