"""Step 2 of a pass: on each host, how many units each candidate gets, and which of the last ones are left for later after all;
and step 3, exact core ids, in one NUMA node where possible."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from tangram.scheduler.candidates import Candidates, Decision, Room
from tangram.scheduler.cores import MILLI, mask_of
from tangram.scheduler.elasticity import Curve, size_to_try
from tangram.scheduler.load import utilisation
from tangram.scheduler.parts import mean_cores
from tangram.scheduler.policies import Policy, charge, curve_of, legal_units, model_key, prior_of, setting
from tangram.scheduler.sizing import Candidate, View
from tangram.scheduler.state import Action, HostKey, State

IDLE: Final = 0.5
"""Below this utilisation a size of which little is known may be tried."""
TRY_FROM: Final = 2
"""Such a size is at least this part of what the rule chose: far below that a try costs more than it tells. (Mean ACT beside the
best fixed size, learnt from nothing, on 30 settings: 0.941 so, 0.946 if any is tried, a quarter as often, 0.938 if none is.)"""


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
        self._waiting: dict[tuple[HostKey | None, str], int] | None = None
        self._prior = prior_of(state)

    def settle(self, chosen: Policy) -> None:
        """Exact cores for all that claimed whole ones, by the policy's rule, and for each how long it is taken to run (at most
        its time-out, whatever its user says), so that later passes know when its units come back."""
        groups: dict[tuple[HostKey, int, bool, str], list[Decision]] = {}
        for decision in self.found.decisions:
            if decision.claimed:
                task = decision.action.id.task if chosen.by_task else ""
                where = (decision.holder.host, decision.holder.cores_mask, bool(decision.gpus), task)
                groups.setdefault(where, []).append(decision)
            elif not decision.gpus:
                decision.predicted_us = self._predicted_us(decision, self._kind(decision.action))
        evicted = False
        for (host, mask, on_gpus, task), members in groups.items():
            room = self.found.rooms[host]
            if on_gpus:  # their units and times are those of the GPUs
                self._place(room, mask, members, [each.claimed.bit_count() for each in members])
            else:
                evicted |= self._share(room, mask, members, chosen, task)
        if evicted:
            self.evicted = [each.action for each in self.found.decisions if each.claimed and not each.units]
            self.found.decisions = [each for each in self.found.decisions if each.units or not each.claimed]

    def _share(self, room: Room, mask: int, members: list[Decision], chosen: Policy, task: str) -> bool:
        """How many units each of those that share one set of cores gets. Returns whether any is left for later after all."""
        kinds = [self._kind(each.action) for each in members]
        if chosen.rule is None or all(len(each.sizes) == 1 for each in dict.fromkeys(kinds)):
            units = [each.claimed.bit_count() for each in members]
        else:
            wide = self._wide_waits(room, members[0].action, mask)
            if self.found.shares is not None:
                self.found.shares.start(room.host, task, {"cpu": -sum(each.amounts["cpu"] for each in members)})
            view = self._view(room, members, mask, wide, task)
            units = chosen.rule(view, kinds)
            if chosen.learns and len(members) == 1 and not (view.behind or view.wide_waits) and view.utilisation < IDLE:
                units = [self._try_out(members[0].action, kinds[0], view.free, units[0]) or units[0]]
            if self.found.shares is not None:
                self.found.shares.start(room.host, task, {"cpu": sum(units) * MILLI})
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
        return curve_of(self.state, action, self._prior)

    def _try_out(self, action: Action, candidate: Candidate, free: int, chosen: int) -> int | None:
        """A size of which too little is known, at least half of what is chosen, when nobody else needs the units."""
        model = self.state.models.get(model_key(action))
        if model is None or candidate.curve.table or not setting(self.state, "learn"):
            return None
        sizes = candidate.sizes[bisect_left(candidate.sizes, chosen // TRY_FROM) :]
        return size_to_try(model, sizes, free)

    def _wide_waits(self, room: Room, action: Action, mask: int) -> bool:
        """Whether an action waits here for more cores than are left: extras would only make it wait longer. Under a policy that
        shares by task only another one of the task's own, because extras come out of the task's part."""
        task = action.id.task
        left = min(room.pool.free(mask).bit_count(), self.found.allowed(room, action) // MILLI)
        return any(
            label in room.blocked
            and (self.found.shares is None or room.blocked[label] == task)
            and (left > 0 or label in room.reserved)
            for label in self.found.labels("cpu", task)
        )

    def _view(self, room: Room, members: list[Decision], mask: int, wide: bool, task: str) -> View:
        """The host as the rule sees it; of a task's part of it, if there is a task."""
        state, host = self.state, room.host
        here, unbound = self._queued(host.key, task), self._queued(None, task)
        in_session = others = reserved = 0
        releases: list[tuple[float, int]] = []
        elsewhere: list[tuple[float, int]] = []
        for holder in host.live:
            for grant in holder.grants.values():
                if grant.holds_session:
                    reserved |= mask_of(grant.cores)  # since a static policy led; nobody can count on them
                    continue
                is_own = not task or grant.key.action.task == task
                in_session += is_own and grant.session is not None
                others += is_own and grant.session is None
                if grant.amounts.get("cpu", 0) >= MILLI:
                    (releases if is_own else elsewhere).append((grant.left_us(state.now_ns), len(grant.cores)))
        cores = (room.pool.all & mask & ~reserved).bit_count()
        free = room.pool.free(mask).bit_count() + sum(each.claimed.bit_count() for each in members)
        sessions, busy = host.sessions, 0.0
        if self.found.shares is None:
            busy = utilisation(host, state.now_ns)
        else:
            low = sum(each.amounts["cpu"] for each in members) // MILLI
            held = self.found.shares.held(host, task).get("cpu", 0) // MILLI
            entitled = self.found.shares.part(host, task)
            cores, free = max(1, min(cores, entitled)), min(free, max(entitled - held, low))
            if held < entitled and not self.found.policy.splits:
                releases += elsewhere  # whatever comes back is its own until it has its share
            if (part := host.parts.get(task)) is not None:
                sessions, busy = part.sessions, min(1.0, mean_cores(part, state.now_ns) / cores)
            else:
                sessions = 0
        releases.sort()
        behind = here + unbound // max(len(state.hosts), 1) - len(members)
        thinking = max(0, sessions - in_session - here)
        if others or unbound:  # of actions without a session nobody knows how many are to come
            thinking += cores
        return View(
            cores=cores,
            free=free,
            behind=max(0, behind),
            thinking=thinking,
            utilisation=busy,
            releases=releases,
            fixed=setting(state, "fixed_units"),
            wide_waits=wide,
            waited_us=(state.now_ns - members[0].action.ready_ns) / 1_000,
        )

    def _queued(self, host: HostKey | None, task: str) -> int:
        """How many READY actions need cores and are bound to this host (None: to none); of one task, or of all."""
        if self._waiting is None:
            self._waiting = {}
            for key, queue in self.state.queues.items():
                if "cpu" in key.resources:
                    for whose in {"": None, key.task: None}:
                        at = key.host, whose
                        self._waiting[at] = self._waiting.get(at, 0) + len(queue)
        return self._waiting.get((host, task), 0)
