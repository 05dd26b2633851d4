"""`plan(state) -> Window`: one pass over what waits. It reads the state and changes nothing.

1. Candidates: in arrival order, each on its minimum of every resource it names. One that does not fit holds back the later
   ones that need the same scarce resource on the hosts it could use, so that a wide action is not starved by narrow ones.
2. Units: on each host, by the policy's rule (`sizing`): how many each candidate gets, and which of the last ones are left for
   later after all.
3. Placement: exact core ids, in one NUMA node where possible.

A pass looks at what it starts and at the heads of the queues, never at what waits behind them.
"""

import heapq
from dataclasses import dataclass
from typing import Final, NamedTuple

from tangram import limits
from tangram.messages import Demand
from tangram.scheduler.cores import MILLI, CorePool
from tangram.scheduler.elasticity import Curve, declared, learnt, size_to_try
from tangram.scheduler.load import utilisation
from tangram.scheduler.policies import POLICIES, Policy, charge, could_fit, legal_units, prior_of, setting
from tangram.scheduler.ready import Order
from tangram.scheduler.sizing import Candidate, Rule, View
from tangram.scheduler.state import Action, ActionId, Host, HostKey, Incarnation, State

IDLE: Final = 0.5
"""Below this utilisation a size of which little is known may be tried."""


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
    evicted: list[ActionId]
    """Candidates that were left for later so that the others get more, or that wait by choice."""
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
    if chosen.rule is not None:
        pass_.size(chosen, chosen.rule)
    pass_.predict()
    return Window(
        number=state.window + 1,
        through_seq=state.seq,
        digest=state.digest,
        policy=chosen.name,
        decisions=pass_.decisions,
        evicted=[action.id for action in pass_.evicted],
        fallback=policy is not None,
    )


class _Pass:
    def __init__(self, state: State) -> None:
        self.state = state
        self.rooms: dict[HostKey, _Room] = {}
        self.decisions: list[Decision] = []
        self.evicted: list[Action] = []
        self.kinds: dict[tuple[object, ...], Candidate] = {}
        self.queued: tuple[dict[HostKey, int], int] | None = None
        self.takers: dict[str, list[Incarnation]] = {}
        self.ranked: dict[tuple[str, bool], list[tuple[tuple[int, ...], int]]] = {}
        """Heaps of (score, index among the takers) by kind, and whether for openings."""
        self.waiting: dict[tuple[object, ...], bool] = {}
        """What `_try` returned for one-shot actions that wait; one that asks for the same cannot have it either."""
        self.prior = prior_of(state)

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
        if action.avoid:
            holder = self._best_of(action, cost, self._preferred(action, cost, takers))
        else:
            holder = self._choose(action, cost, takers)
        if holder is not None:
            self._start(action, holder, cost)
            return True
        return self._wait(action, cost, takers)

    def _choose(self, action: Action, cost: dict[str, Demand], takers: list[Incarnation]) -> Incarnation | None:
        """The best of those that have room now; the earlier one between equals. A start only makes its own host worse, so of a
        heap by score what comes first, and has not become worse meanwhile, is the best."""
        key = (action.key, action.opens is not None)
        heap = self.ranked.get(key)
        if heap is None:
            heap = [(self._score(action, self._room(each.host), each), index) for index, each in enumerate(takers)]
            heapq.heapify(heap)
            self.ranked[key] = heap
        aside: list[tuple[tuple[int, ...], int]] = []
        chosen: Incarnation | None = None
        while heap and chosen is None:
            score, index = heap[0]
            holder = takers[index]
            room = self._room(holder.host)
            now = self._score(action, room, holder)
            if now != score:
                heapq.heapreplace(heap, (now, index))
            elif self._fits(room, holder, cost):
                chosen = holder
            else:
                aside.append(heapq.heappop(heap))
        for entry in aside:
            heapq.heappush(heap, entry)
        return chosen

    def _best_of(self, action: Action, cost: dict[str, Demand], holders: list[Incarnation]) -> Incarnation | None:
        fitting = [holder for holder in holders if self._fits(self._room(holder.host), holder, cost)]
        return min(fitting, key=lambda holder: self._score(action, self._room(holder.host), holder), default=None)

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
            else:
                room.free[name] -= demand.low
        room.started[holder.id] = room.started.get(holder.id, 0) + 1
        if action.opens is not None:
            room.sessions += 1
        elif action.session is not None and action.session.cores and "cpu" in action.spec.cost:
            cores = action.session.cores
        self.decisions.append(Decision(action, holder, amounts, cores, len(cores), 0))

    def predict(self) -> None:
        """Each decision says how long it is taken to run, so that later ones know when its units come back."""
        for decision in self.decisions:
            decision.predicted_us = int(self._curve(decision.action).at(max(decision.units, 1)))

    # --- step 2 ---

    def size(self, chosen: Policy, rule: Rule) -> None:
        """On each host: how many units each candidate gets, and which of the last ones are left for later after all."""
        groups: dict[tuple[HostKey, int], list[int]] = {}
        for index, decision in enumerate(self.decisions):
            if decision.amounts.get("cpu", 0) >= MILLI:
                groups.setdefault((decision.holder.host, decision.holder.cores_mask), []).append(index)
        evicted: set[int] = set()  # only asked for membership
        for (key, mask), group in groups.items():
            members = [self.decisions[index] for index in group]
            candidates = [self._candidate(each.action) for each in members]
            if not any(len(each.sizes) > 1 for each in candidates):
                continue
            room = self.rooms[key]
            wide = "cpu" in room.blocked and room.pool.free(mask) > 0
            for each in members:  # all anew, so that each has its cores together
                room.pool.give(each.cores, each.amounts["cpu"])
            view = self._view(room, members, mask, wide)
            units = rule(view, candidates)
            if chosen.learns and len(members) == 1 and not (view.behind or wide) and view.utilisation < IDLE:
                units = [self._try_out(members[0].action, candidates[0], view.free) or units[0]]
            for index, decision, amount in zip(group, members, units, strict=True):
                if amount:
                    self._place(room, decision, amount)
                else:
                    evicted.add(index)
        if evicted:
            self.evicted = [self.decisions[index].action for index in sorted(evicted)]
            self.decisions = [decision for index, decision in enumerate(self.decisions) if index not in evicted]

    def _candidate(self, action: Action) -> Candidate:
        demand, hint = action.spec.cost["cpu"], action.spec.hint
        key = (action.id.task, action.spec.kind, demand, hint)
        found = self.kinds.get(key)
        if found is None:
            sizes = legal_units(charge(self.state, action)["cpu"])
            found = self.kinds[key] = Candidate(self._curve(action), sizes)
        return found

    def _curve(self, action: Action) -> Curve:
        hint = action.spec.hint
        model = self.state.models.get((action.id.task, action.spec.kind)) if setting(self.state, "learn") else None
        if model is None or (hint is not None and hint.table_us):
            return declared(hint if hint is not None else self.prior, self.prior)
        return learnt(model)

    def _try_out(self, action: Action, candidate: Candidate, free: int) -> int | None:
        """A size of which too little is known, when nobody else needs the units."""
        model = self.state.models.get((action.id.task, action.spec.kind))
        if model is None or candidate.curve.table or not setting(self.state, "learn"):
            return None
        return size_to_try(model, candidate.sizes, free)

    def _view(self, room: _Room, members: list[Decision], mask: int, wide: bool) -> View:
        state, host = self.state, room.host
        bound, unbound = self._queued()
        in_session = others = 0
        releases: list[tuple[float, int]] = []
        for holder in host.live:
            for grant in holder.grants.values():
                if grant.holds_session:
                    continue
                in_session += grant.session is not None
                others += grant.session is None
                if grant.amounts.get("cpu", 0) >= MILLI:
                    left_ns = grant.finish_ns - state.now_ns
                    # Overdue: as a heavy tail has it, for half as long again.
                    at_ns = left_ns if left_ns > 0 else (state.now_ns - grant.started_ns) / 2
                    releases.append((at_ns / 1_000, len(grant.cores)))
        releases.sort()
        here = bound.get(host.key, 0)
        behind = here + unbound // max(len(state.hosts), 1) - len(members)
        thinking = max(0, host.sessions - in_session - here)
        if others or unbound:  # of actions without a session nobody knows how many are to come
            thinking += room.pool.all.bit_count()
        return View(
            cores=(room.pool.all & mask).bit_count(),
            free=room.pool.free(mask).bit_count(),
            behind=max(0, behind),
            thinking=thinking,
            utilisation=utilisation(host, state.now_ns),
            releases=releases,
            fixed=setting(state, "fixed_units"),
            wide_waits=wide,
            waited_us=(state.now_ns - members[0].action.ready_ns) / 1_000,
        )

    def _queued(self) -> tuple[dict[HostKey, int], int]:
        """READY actions that need cores: by the host that they are bound to, and those that are not."""
        if self.queued is None:
            bound: dict[HostKey, int] = {}
            unbound = 0
            for key, queue in self.state.queues.items():
                if "cpu" in key.resources:
                    if key.host is None:
                        unbound += len(queue)
                    else:
                        bound[key.host] = bound.get(key.host, 0) + len(queue)
            self.queued = bound, unbound
        return self.queued

    def _place(self, room: _Room, decision: Decision, units: int) -> None:
        """Exact cores. Executors whose cores overlap in part may have taken some: then it has its minimum, which is free."""
        mask = decision.holder.cores_mask
        if room.pool.free(mask).bit_count() < units:
            units = decision.units
        decision.cores = room.pool.choose(units * MILLI, mask)
        room.pool.take(decision.cores, units * MILLI)
        decision.units = units
        decision.amounts["cpu"] = units * MILLI
