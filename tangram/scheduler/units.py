"""Step 2 of a pass: on each host, how many units each candidate gets, and which of the last ones are left for later after all;
and step 3, exact core ids, in one NUMA node where possible."""

from typing import Final

from tangram.scheduler.candidates import Candidates, Decision, Room
from tangram.scheduler.cores import MILLI, mask_of
from tangram.scheduler.elasticity import Curve, size_to_try
from tangram.scheduler.load import utilisation
from tangram.scheduler.parts import mean_cores
from tangram.scheduler.policies import Policy, charge, curve_of, legal_units, model_key, prior_of, setting
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
        self._waiting: dict[tuple[HostKey | None, str], int] | None = None
        self._prior = prior_of(state)

    def share(self, chosen: Policy, rule: Rule) -> None:
        """On each host: how many units each candidate gets, and which of the last ones are left for later after all."""
        groups: dict[tuple[HostKey, int, str], list[int]] = {}
        for index, decision in enumerate(self.found.decisions):
            if decision.amounts.get("cpu", 0) >= MILLI and not decision.gpus:
                task = decision.action.id.task if chosen.by_task else ""
                groups.setdefault((decision.holder.host, decision.holder.cores_mask, task), []).append(index)
        evicted: set[int] = set()  # only asked for membership
        for (key, mask, task), group in groups.items():
            members = [self.found.decisions[index] for index in group]
            candidates = [self._candidate(each.action) for each in members]
            if not any(len(each.sizes) > 1 for each in candidates):
                continue
            room = self.found.rooms[key]
            wide = self._wide_waits(room, members[0].action, mask)
            for each in members:  # all anew, so that each has its cores together
                room.pool.give(each.cores, each.amounts["cpu"])
            if self.found.shares is not None:
                self.found.shares.start(room.host, task, {"cpu": -sum(each.amounts["cpu"] for each in members)})
            view = self._view(room, members, mask, wide, task)
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

    def _candidate(self, action: Action) -> Candidate:
        demand, hint = action.spec.cost["cpu"], action.spec.hint
        key = (action.id.task, action.spec.kind, demand, hint)
        found = self._kinds.get(key)
        if found is None:
            sizes = legal_units(charge(self.state, action)["cpu"])
            found = self._kinds[key] = Candidate(self.curve(action), sizes)
        return found

    def curve(self, action: Action) -> Curve:
        return curve_of(self.state, action, self._prior)

    def _try_out(self, action: Action, candidate: Candidate, free: int) -> int | None:
        """A size of which too little is known, when nobody else needs the units."""
        model = self.state.models.get(model_key(action))
        if model is None or candidate.curve.table or not setting(self.state, "learn"):
            return None
        return size_to_try(model, candidate.sizes, free)

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
        cores, free = (room.pool.all & mask & ~reserved).bit_count(), room.pool.free(mask).bit_count()
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

    def _place(self, room: Room, decision: Decision, units: int) -> None:
        """Exact cores. Executors whose cores overlap in part may have taken some: then it has its minimum, which is free."""
        mask = decision.holder.cores_mask
        if room.pool.free(mask).bit_count() < units:
            units = decision.units
        decision.cores = room.pool.choose(units * MILLI, mask)
        room.pool.take(decision.cores, units * MILLI)
        decision.units = units
        decision.amounts["cpu"] = units * MILLI
        if self.found.shares is not None:
            self.found.shares.start(room.host, decision.action.id.task, {"cpu": units * MILLI})

    def predict(self) -> None:
        """Each decision says how long it is taken to run, so that later ones know when its units come back; at most its
        time-out, whatever its user says."""
        for decision in self.found.decisions:
            if decision.gpus:
                continue  # it counts the restore as well
            taken_us = self.curve(decision.action).at(max(decision.units, 1))
            decision.predicted_us = int(min(taken_us, decision.action.spec.timeout_ms * 1_000))
