"""Step 2 of a pass: on each host, how many units each candidate gets, and which of the last ones are left for later after all;
and step 3, exact core ids, in one NUMA node where possible."""

from collections.abc import Sequence
from typing import Final

from tangram.scheduler.candidates import Candidates, Decision, Room
from tangram.scheduler.cores import MILLI
from tangram.scheduler.elasticity import Curve, declared, learnt, size_to_try
from tangram.scheduler.load import utilisation
from tangram.scheduler.policies import Policy, charge, legal_units, model_key, prior_of, setting
from tangram.scheduler.sizing import Candidate, View
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
        self._alike: dict[tuple[Curve, Sequence[int]], Candidate] = {}
        self._predicted: dict[tuple[Candidate, int], int] = {}
        self._waiting: tuple[dict[HostKey, int], int] | None = None
        self._prior = prior_of(state)

    def settle(self, chosen: Policy) -> None:
        """Exact cores for all that claimed whole ones, by the policy's rule, and for each how long it is taken to run (at most
        its time-out, whatever its user says), so that later passes know when its units come back."""
        groups: dict[tuple[HostKey, int, bool], list[Decision]] = {}
        for decision in self.found.decisions:
            if decision.claimed:
                where = (decision.holder.host, decision.holder.cores_mask, bool(decision.gpus))
                groups.setdefault(where, []).append(decision)
            elif not decision.gpus:
                decision.predicted_us = self._predicted_us(decision, self._kind(decision.action))
        evicted = False
        for (host, mask, on_gpus), members in groups.items():
            room = self.found.rooms[host]
            if on_gpus:  # their units and times are those of the GPUs
                self._place(room, mask, members, [each.claimed.bit_count() for each in members])
            else:
                evicted |= self._share(room, mask, members, chosen)
        if evicted:
            self.evicted = [each.action for each in self.found.decisions if each.claimed and not each.units]
            self.found.decisions = [each for each in self.found.decisions if each.units or not each.claimed]

    def _share(self, room: Room, mask: int, members: list[Decision], chosen: Policy) -> bool:
        """How many units each of those that share one set of cores gets. Returns whether any is left for later after all."""
        kinds = [self._kind(each.action) for each in members]
        if chosen.rule is None or all(len(each.sizes) == 1 for each in dict.fromkeys(kinds)):
            units = [each.claimed.bit_count() for each in members]
        else:
            view = self._view(room, members, mask)
            units = chosen.rule(view, kinds)
            if chosen.learns and len(members) == 1 and not (view.behind or view.wide_waits) and view.utilisation < IDLE:
                units = [self._try_out(members[0].action, kinds[0], view.free) or units[0]]
        self._place(room, mask, members, units)
        for decision, kind, amount in zip(members, kinds, units, strict=True):
            decision.units = amount
            decision.amounts["cpu"] = amount * MILLI
            decision.predicted_us = self._predicted_us(decision, kind)
        return 0 in units

    @staticmethod
    def _place(room: Room, mask: int, members: list[Decision], units: list[int]) -> None:
        """All anew, so that each has its cores together."""
        claimed = 0
        for each in members:
            claimed |= each.claimed
        for decision, cores in zip(members, room.pool.choose_each(units, claimed, mask), strict=True):
            decision.cores = cores

    def _kind(self, action: Action) -> Candidate:
        """The same for all that are alike."""
        spec = action.spec
        demand = charge(self.state, action).get("cpu")
        key = (action.id.task, spec.kind, spec.service, demand, spec.hint)
        found = self._kinds.get(key)
        if found is None:
            curve, sizes = self.curve(action), legal_units(demand) if demand is not None else ()
            found = self._kinds[key] = self._alike.setdefault((curve, sizes), Candidate(curve, sizes))
        return found

    def _predicted_us(self, decision: Decision, kind: Candidate) -> int:
        found = self._predicted.get((kind, decision.units))
        if found is None:
            found = self._predicted[(kind, decision.units)] = int(kind.curve.at(max(decision.units, 1)))
        return min(found, decision.action.spec.timeout_ms * 1_000)

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

    def _view(self, room: Room, members: list[Decision], mask: int) -> View:
        state, host = self.state, room.host
        bound, unbound = self._queued()
        left = room.pool.free(mask).bit_count()
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
            free=left + sum(each.claimed.bit_count() for each in members),
            behind=max(0, behind),
            thinking=thinking,
            utilisation=utilisation(host, state.now_ns),
            releases=releases,
            fixed=setting(state, "fixed_units"),
            wide_waits="cpu" in room.blocked and left > 0,
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
