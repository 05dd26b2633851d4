"""Folds a log and keeps what a timeline shows of it. Pure: records in, a Timeline out."""

from dataclasses import replace

from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.replay.facts import RETURNED, RUNNING, SUPERSEDED, Attempt, Clock, Cores, ExecutorEvent, HostSeen, Queue, Timeline
from tangram.replay.reasons import lacks, why_gone
from tangram.scheduler.cores import cores_of
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import Action, ActionId, Grant, GrantKey, HostKey, Phase, State


class Collector:
    """`add` each record of a log, in order; `complete()` is the timeline up to the last one.

    state: at a checkpoint from which the log goes on, and which changes with it; without one the log is read from its start.
    """

    def __init__(self, state: State | None = None) -> None:
        self.timeline = Timeline()
        self._state = State() if state is None else state
        self._open: dict[ActionId, tuple[Action, Attempt]] = {}
        """Actions without an outcome, and what is known of the attempt that is next, or is on."""
        self._waiting: dict[ActionId, None] = {}
        """Of those, the ones that were not ready yet."""
        self._held: dict[str, dict[GrantKey, tuple[Grant, Attempt]]] = {}
        """By incarnation: attempts whose units are not back."""
        self._running = 0
        self._hosts: dict[HostKey, HostSeen] = {}
        self._live: dict[str, tuple[str, str]] = {}
        """Live incarnations: executor and host."""
        self._ready_seq: dict[ActionId, int] = {}
        """Of actions that had room when they became ready, but others before them."""
        self._window = self._through = self._before = 0
        """The last window, the last record that it considered, and that of the window before it."""
        if state is not None:
            self._begin()

    @property
    def seq(self) -> int:
        """Of the last record."""
        return self._state.seq

    def add(self, record: Record) -> None:
        """Raises NewerVersion, and ValueError if records do not come in rising order."""
        state, timeline = self._state, self.timeline
        folded = step(state, record)
        timeline.first_seq = timeline.first_seq or record.seq
        timeline.last_seq = record.seq
        timeline.end_ns = now = state.now_ns
        timeline.skipped = state.skipped
        last = timeline.clock[-1] if timeline.clock else None
        if last is None or last.stamp_ns - last.at_ns != state.stamp_ns - now:
            timeline.clock.append(Clock(now, state.stamp_ns))
        address, message = folded.address, folded.message
        if address is None or message is None:
            return
        match message:
            case m.ActionsSubmitted():
                for n in message.ids:
                    self._submitted(ActionId(address.second, message.client, n))
            case m.DecisionsMade():
                self._decided(message)
            case m.ActionsFinished():
                self._finished(address.first, address.second, message)
                self._freed(message.incarnation)
            case m.LeaderStarted():
                timeline.policies.append((now, message.policy))
            case m.ExecutorJoined() | m.ExecutorChanged() | m.ExecutorDraining() | m.ExecutorLeft() | m.ExecutorLost():
                self._executors(message)
                self._freed("")
            case m.ActionsReturned():
                self._returned(message)
                self._freed(message.incarnation)
        self._ready()
        self._queue()

    def _begin(self) -> None:
        """What is on at the checkpoint is shown from there on."""
        state, timeline = self._state, self.timeline
        now = timeline.begin_ns = state.now_ns
        timeline.policies.append((now, state.policy))
        self._live = {h.id: (h.executor, self._name(h.host)) for host in state.hosts.values() for h in host.live}
        self._offers()
        for action in state.actions.values():
            self._submitted(action.id)
        for holder in state.incarnations.values():
            held = self._held.setdefault(holder.id, {})
            for grant in holder.grants.values():
                attempt = self._granted(grant, holder.executor)
                held[grant.key] = (grant, attempt)
                timeline.attempts.append(attempt)
                if grant.holds_session:
                    attempt.finished_ns, attempt.outcome = now, Outcome.OK
                else:
                    self._running += 1

    def _granted(self, grant: Grant, executor: str) -> Attempt:
        known = self._open.get(grant.key.action)
        if known is not None and known[0].attempt == grant.key.attempt:
            attempt = known[1]
            self._waiting.pop(grant.key.action, None)
        else:  # the opening of a session that lives, or an attempt whose action has its outcome
            now, kind = self._state.now_ns, "session.open" if grant.opens else ""
            session = grant.key.action.n if grant.opens else 0
            attempt = Attempt(*grant.key.action, attempt=grant.key.attempt, kind=kind, session=session, submitted_ns=now)
        attempt.ready_ns = attempt.decided_ns = self._state.now_ns
        attempt.host, attempt.executor, attempt.incarnation = self._name(grant.host), executor, grant.incarnation
        attempt.cores, attempt.gpus, attempt.service = grant.cores, cores_of(grant.gpus), grant.service
        attempt.units = len(attempt.cores) or len(attempt.gpus)
        attempt.millicores, attempt.memory_mib = grant.amounts.get("cpu", 0), grant.amounts.get("memory", 0)
        return attempt

    # --- actions -------------------------------------------------------------------------------------------------

    def _submitted(self, action_id: ActionId) -> None:
        action = self._state.actions.get(action_id)
        if action is None or action_id in self._open:
            return
        self.timeline.actions += 1
        self._open[action_id] = (action, _attempt(action))
        self._waiting[action_id] = None

    def _ready(self) -> None:
        state = self._state
        fresh: list[tuple[ActionId, Action, Attempt]] = []
        for action_id in list(self._waiting):
            action, attempt = self._open[action_id]
            if action.phase is not Phase.WAITING:
                del self._waiting[action_id]
                if action.phase is Phase.READY:
                    fresh.append((action_id, action, attempt))
        if not fresh:
            return
        ahead = sum(len(queue) for queue in state.queues.values()) - len(fresh)
        for action_id, action, attempt in fresh:
            attempt.ready_ns = state.now_ns
            attempt.blocked = lacks(state, action)
            if not attempt.blocked and ahead:
                attempt.blocked = f"{ahead} that came before" if ahead > 1 else "one that came before"
                self._ready_seq[action_id] = state.seq
            ahead += 1

    def _decided(self, message: m.DecisionsMade) -> None:
        state = self._state
        holder = state.incarnations.get(message.incarnation)
        if holder is None or message.epoch != state.epoch:
            return
        if message.window != self._window:
            self._window, self._before, self._through = message.window, self._through, message.through_seq
        held = self._held.setdefault(holder.id, {})
        for item in message.items:
            if not isinstance(item, m.Start):
                continue
            action_id = ActionId(item.task, item.client, item.n)
            key = GrantKey(action_id, item.attempt)
            grant = holder.grants.get(key)
            if grant is None or grant.number != message.number or (key in held and held[key][0] is grant):
                continue
            attempt = self._next(action_id, item)
            attempt.attempt = item.attempt
            attempt.decided_ns = state.now_ns
            attempt.host, attempt.executor, attempt.incarnation = self._name(holder.host), holder.executor, holder.id
            attempt.cores, attempt.gpus, attempt.units, attempt.service = item.cores, item.gpus, item.units, item.service
            attempt.millicores, attempt.memory_mib = item.amounts.get("cpu", 0), item.amounts.get("memory", 0)
            attempt.predicted_us = item.predicted_us
            self._waiting.pop(action_id, None)
            if self._ready_seq.pop(action_id, 0) > self._before:  # the first window that saw it: it had room, and did not wait
                attempt.blocked = ""
            held[key] = (grant, attempt)
            self._running += 1
            self.timeline.attempts.append(attempt)

    def _next(self, action_id: ActionId, item: m.Start) -> Attempt:
        """The attempt that this decision starts: of its action, or one that was overtaken before it was stored."""
        known = self._open.get(action_id)
        if known is not None and known[1].decided_ns is None:
            return known[1]
        if known is not None:
            return _attempt(known[0])
        now = self._state.now_ns
        return Attempt(*action_id, attempt=item.attempt, kind=item.kind, session=item.session, submitted_ns=now)

    def _again(self, action_id: ActionId) -> None:
        """An attempt ended without an outcome: its action waits once more, if it has gone back to its queue."""
        known = self._open.get(action_id)
        if known is None or known[0].phase is not Phase.READY:
            return
        self._open[action_id] = (known[0], _attempt(known[0]))
        self._waiting[action_id] = None

    def _finished(self, task: str, client: str, message: m.ActionsFinished) -> None:
        state = self._state
        held = self._held.get(message.incarnation, {})
        for n, raw in zip(message.ids, message.results, strict=True):
            try:
                result = m.decode_result(raw)
            except m.MALFORMED:
                continue
            action_id = ActionId(task, client, n)
            key = GrantKey(action_id, result.attempt)
            if key in held and held[key][1].finished_ns is None:
                grant, attempt = held[key]
                holder = state.incarnations.get(message.incarnation)
                if grant.holds_session or holder is None or holder.grants.get(key) is not grant:
                    self._end(attempt, result)
            if action_id in self._open and action_id not in state.actions:
                _, attempt = self._open.pop(action_id)
                self._waiting.pop(action_id, None)
                self._ready_seq.pop(action_id, None)
                if attempt.decided_ns is None:  # it never started, or not again
                    attempt.finished_ns = state.now_ns
                    _take(attempt, result)
                    self.timeline.attempts.append(attempt)
                elif key in held and held[key][1] is not attempt:  # an attempt that was given up had it after all
                    _take(held[key][1], result)
                elif not message.incarnation or attempt.outcome in (RUNNING, RETURNED, SUPERSEDED):
                    # A ruling counts, whatever the executor may still say; so does whoever else knew the nonce.
                    attempt.outcome, attempt.reason = result.outcome, result.reason
                    attempt.detail = result.detail or attempt.detail

    def _end(self, attempt: Attempt, result: m.Result | None = None) -> None:
        if attempt.finished_ns is None:
            attempt.finished_ns = self._state.now_ns
            self._running -= 1
        if result is not None:
            ruled = attempt.outcome, attempt.reason, attempt.detail
            _take(attempt, result)
            if ruled[0]:
                attempt.outcome, attempt.reason, attempt.detail = ruled

    def _returned(self, message: m.ActionsReturned) -> None:
        holder = self._state.incarnations.get(message.incarnation)
        held = self._held.get(message.incarnation, {})
        for item in message.returned:
            action_id = ActionId(item.task, item.client, item.n)
            known = held.get(GrantKey(action_id, item.attempt))
            if known is None or holder is None or holder.grants.get(known[0].key) is known[0]:
                continue
            attempt = known[1]
            self._end(attempt)
            if not attempt.outcome:  # else it was ruled before
                attempt.outcome, attempt.detail = RETURNED, item.reason
            self._again(action_id)

    # --- units ---------------------------------------------------------------------------------------------------

    def _freed(self, incarnation: str) -> None:
        """Looks whose units came back: those of one incarnation, or of all ("") where a message may speak of several."""
        state = self._state
        for name in [incarnation] if incarnation else list(self._held):
            held = self._held.get(name)
            if not held:
                continue
            holder = state.incarnations.get(name)
            gone = [key for key, (grant, _) in held.items() if holder is None or holder.grants.get(key) is not grant]
            for key in gone:
                _, attempt = held.pop(key)
                attempt.freed_ns = state.now_ns
                if attempt.finished_ns is None:  # without an answer: its incarnation is dead
                    self._end(attempt)
                    attempt.outcome = attempt.outcome or Outcome.LOST

    # --- executors -----------------------------------------------------------------------------------------------

    def _executors(self, message: m.ExecutorMessage | m.ExecutorLost) -> None:
        state, now = self._state, self._state.now_ns
        live = {h.id: (h.executor, self._name(h.host)) for host in state.hosts.values() for h in host.live}
        events = self.timeline.executors
        for incarnation, (executor, host) in self._live.items():
            if incarnation not in live:
                what, why = why_gone(message, executor)
                events.append(ExecutorEvent(now, host, executor, incarnation, what, why))
                self._lost(incarnation, why)
        for incarnation, (executor, host) in live.items():
            if incarnation not in self._live:
                events.append(ExecutorEvent(now, host, executor, incarnation, "joined", ""))
        if isinstance(message, m.ExecutorDraining) and message.incarnation in live:
            executor, host = live[message.incarnation]
            events.append(ExecutorEvent(now, host, executor, message.incarnation, "draining", ""))
        self._live = live
        self._offers()

    def _offers(self) -> None:
        for key, seen in self._hosts.items():
            known = self._state.hosts.get(key)
            cores = cores_of(known.pool.all) if known is not None else ()
            if not seen.offers or seen.offers[-1].cores != cores:
                seen.offers.append(Cores(self._state.now_ns, cores))

    def _lost(self, incarnation: str, why: str) -> None:
        for key, (_, attempt) in self._held.get(incarnation, {}).items():
            if attempt.finished_ns is not None:
                continue
            self._end(attempt)
            if not attempt.outcome:
                attempt.outcome, attempt.detail = Outcome.LOST, why
            known = self._open.get(key.action)
            if known is not None and known[0].phase is Phase.READY:
                attempt.outcome = SUPERSEDED
                self._again(key.action)

    def _name(self, key: HostKey) -> str:
        seen = self._hosts.get(key)
        if seen is None:
            alike = sum(other.name == key.name for other in self._hosts)
            seen = self._hosts[key] = HostSeen(name=f"{key.name} ({key.machine_id[:8]})" if alike else key.name)
            self.timeline.hosts.append(seen)
        return seen.name

    def _queue(self) -> None:
        state, queue = self._state, self.timeline.queue
        ready = sum(len(each) for each in state.queues.values())
        now = Queue(state.now_ns, ready, len(self._waiting), self._running)
        if queue and queue[-1][1:] == now[1:]:
            return
        if queue and queue[-1].at_ns == now.at_ns:
            queue.pop()
        queue.append(now)

    def complete(self) -> Timeline:
        """The timeline up to the last record, with what is still queued."""
        queued = [attempt for _, attempt in self._open.values() if attempt.decided_ns is None]
        return replace(self.timeline, attempts=[*self.timeline.attempts, *queued])


def _attempt(action: Action) -> Attempt:
    return Attempt(
        *action.id,
        attempt=action.attempt,
        kind=action.spec.kind,
        session=action.id.n if action.opens is not None else action.spec.session,
        submitted_ns=action.submitted_ns,
    )


def _take(attempt: Attempt, result: m.Result) -> None:
    attempt.outcome, attempt.reason, attempt.detail = result.outcome, result.reason, result.detail
    attempt.exit_code = result.exit_code
    attempt.startup_ns, attempt.run_ns, attempt.cpu_ns = result.startup_ns, result.run_ns, result.cpu_ns
    attempt.memory_peak_bytes = result.memory_peak_bytes
