"""Step 2 of a pass: on each host, how many units each candidate gets, and which of the last ones are left for later after all;
and step 3, exact core ids, in one NUMA node where possible."""

from typing import Final

from tangram.scheduler.candidates import Candidates, Decision, Room
from tangram.scheduler.cores import MILLI
from tangram.scheduler.elasticity import Curve, declared, learnt, size_to_try
from tangram.scheduler.load import utilisation
from tangram.scheduler.policies import Policy, charge, legal_units, model_key, prior_of, setting
from tangram.scheduler.sizing import Candidate, Rule, View
from tangram.scheduler.state import Action, HostKey, State

IDLE: Final = 0.5
"""Below this utilisation a size of which little is known may be tried."""


class Units:
    """The units of one pass's candidates. evicted: those that were left for later so that the others get more, or that wait by
    choice."""

    def __init__(self, state: State, found: Candidates) -> None:
        self.state = state
        self.found = found
        self.evicted: list[Action] = []
        self._kinds: dict[tuple[object, ...], Candidate] = {}
        self._waiting: tuple[dict[HostKey, int], int] | None = None
        self._prior = prior_of(state)

    def share(self, chosen: Policy, rule: Rule) -> None:
        """On each host: how many units each candidate gets, and which of the last ones are left for later after all."""
        groups: dict[tuple[HostKey, int], list[int]] = {}
        for index, decision in enumerate(self.found.decisions):
            if decision.amounts.get("cpu", 0) >= MILLI:
                groups.setdefault((decision.holder.host, decision.holder.cores_mask), []).append(index)
        evicted: set[int] = set()  # only asked for membership
        for (key, mask), group in groups.items():
            members = [self.found.decisions[index] for index in group]
            candidates = [self._candidate(each.action) for each in members]
            if not any(len(each.sizes) > 1 for each in candidates):
                continue
            room = self.found.rooms[key]
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
            self.evicted = [self.found.decisions[index].action for index in sorted(evicted)]
            self.found.decisions = [decision for index, decision in enumerate(self.found.decisions) if index not in evicted]

    def _candidate(self, action: Action) -> Candidate:
        demand, hint = action.spec.cost["cpu"], action.spec.hint
        key = (action.id.task, action.spec.kind, demand, hint)
        found = self._kinds.get(key)
        if found is None:
            sizes = legal_units(charge(self.state, action)["cpu"])
            found = self._kinds[key] = Candidate(self.curve(action), sizes)
        return found

    def curve(self, action: Action) -> Curve:
        hint = action.spec.hint
        model = self.state.models.get(model_key(action)) if setting(self.state, "learn") else None
        if model is None or (hint is not None and hint.table_us):
            return declared(hint if hint is not None else self._prior, self._prior)
        return learnt(model)

    def _try_out(self, action: Action, candidate: Candidate, free: int) -> int | None:
        """A size of which too little is known, when nobody else needs the units."""
        model = self.state.models.get(model_key(action))
        if model is None or candidate.curve.table or not setting(self.state, "learn"):
            return None
        return size_to_try(model, candidate.sizes, free)

    def _view(self, room: Room, members: list[Decision], mask: int, wide: bool) -> View:
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
        if self._waiting is None:
            bound: dict[HostKey, int] = {}
            unbound = 0
            for key, queue in self.state.queues.items():
                if "cpu" in key.resources:
                    if key.host is None:
                        unbound += len(queue)
                    else:
                        bound[key.host] = bound.get(key.host, 0) + len(queue)
            self._waiting = bound, unbound
        return self._waiting

    def _place(self, room: Room, decision: Decision, units: int) -> None:
        """Exact cores. Executors whose cores overlap in part may have taken some: then it has its minimum, which is free."""
        mask = decision.holder.cores_mask
        if room.pool.free(mask).bit_count() < units:
            units = decision.units
        decision.cores = room.pool.choose(units * MILLI, mask)
        room.pool.take(decision.cores, units * MILLI)
        decision.units = units
        decision.amounts["cpu"] = units * MILLI

    def predict(self) -> None:
        """Each decision says how long it is taken to run, so that later ones know when its units come back."""
        for decision in self.found.decisions:
            if decision.gpus:
                continue  # it counts the restore as well
            decision.predicted_us = int(self.curve(decision.action).at(max(decision.units, 1)))
