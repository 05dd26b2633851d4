"""`step(state, record)`: the one door through which the scheduler's state changes.

It is total: a message that does not decode, or on which it would raise, is skipped by every fold in the same way and
reported. Only a message type that a newer version wrote stops it (`NewerVersion`), because skipping that would make two
folds differ.
"""

import hashlib
from typing import Any, NamedTuple

from tangram import limits
from tangram import messages as m
from tangram.errors import NewerVersion
from tangram.outcomes import Outcome
from tangram.scheduler import fold_actions, fold_clients, fold_executors, fold_grants, fold_keys, fold_submissions, models
from tangram.scheduler.fold_actions import owe, owe_cancel
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.quotas import FULL, GUARD_NS, QuotaPool
from tangram.scheduler.state import ActionId, GrantKey, Phase, State
from tangram.subjects import Address


class Record(NamedTuple):
    """A stored message as the core sees it. stamp_ns: the server's, in nanoseconds since the epoch."""

    seq: int
    stamp_ns: int
    subject: str
    data: bytes


class Folded(NamedTuple):
    """What `step` made of a record. `skipped` is why it was not applied (or, for a bug of ours, not wholly), '' if it was."""

    address: Address | None
    message: m.LogMessage | None
    skipped: str = ""


def step(state: State, record: Record) -> Folded:
    """Applies one message. Raises NewerVersion, and ValueError if records do not come in rising order."""
    if record.seq <= state.seq:
        raise ValueError(f"record {record.seq} after {state.seq}")
    state.seq = record.seq
    state.story.clear()
    _advance_time(state, record.stamp_ns)
    if state.quotas and state.behaviour >= 7:
        for pool in state.quotas.values():
            pool.refill(state.now_ns, GUARD_NS)
    skipped = ""
    address: Address | None = None
    message: m.LogMessage | None = None
    try:
        address, message = m.decode(record.subject, record.data)
        _apply(state, address, message)
    except NewerVersion:
        raise
    except m.Malformed as error:
        if error.unknown_type:
            raise NewerVersion(f"sequence {record.seq} on {record.subject}: {error}") from None
        skipped = f"malformed: {error}"
    except Exception as error:  # every fold meets the same record in the same state, and so skips it alike
        skipped = _broken(error)
    skipped = _fire(state) or skipped
    if skipped:
        state.skipped += 1
        state.story.append("skipped")
    hasher = hashlib.blake2b(state.digest, digest_size=8)
    hasher.update(b"%d %d %d\n" % (record.seq, state.now_ns, len(state.actions)))
    hasher.update(m.encode(state.story))
    state.digest = hasher.digest()
    return Folded(address, message, skipped)


def _broken(error: Exception) -> str:
    """A bug of ours, told apart from bad bytes by its prefix."""
    return f"broken: {type(error).__name__}: {error}"


def _advance_time(state: State, stamp_ns: int) -> None:
    if state.stamp_ns:
        ahead = stamp_ns - state.stamp_ns
        if ahead > 0:
            state.now_ns += min(ahead, limits.LOG_TIME_STEP_NS_MAX)
    state.stamp_ns = max(state.stamp_ns, stamp_ns)


def _apply(state: State, address: Address, message: m.LogMessage) -> None:
    match message:
        case m.ActionsSubmitted():
            fold_submissions.submitted(state, address.first, address.second, message)
        case m.DecisionsMade():
            _decisions(state, address.second, message)
        case m.ActionsFinished():
            _finished(state, address, message)
        case m.CancelsRequested():
            fold_submissions.cancel_requested(state, address.first, message)
        case m.Ticked():
            pass
        case m.ExecutorLost():
            _lost(state, message)
        case m.LeaderStarted():
            _leader(state, message)
        case m.ModelsSeeded():
            if message.epoch == state.epoch:
                models.seed(state, message)
        case m.Settings():
            if message.epoch == state.epoch:
                state.settings.update(message.settings)
                state.shares.update(message.shares)
                if message.quotas is not None:
                    _quotas(state, message.quotas)
                if message.admission_closed is not None:
                    state.admission_closed = message.admission_closed
                    state.story.append(f"admission {'closed' if message.admission_closed else 'open'}")
        case _:
            fold_executors.event(state, address.first, message)


def _leader(state: State, message: m.LeaderStarted) -> None:
    if message.policy not in POLICIES:
        raise NewerVersion(f"sequence {state.seq}: policy {message.policy!r} is not known")
    state.epoch = state.seq
    state.behaviour = message.behaviour
    state.settings = dict(message.settings)
    state.shares = dict(message.shares)
    if message.quotas:  # a forgotten option must not let all that waits go at once
        _quotas(state, message.quotas)
    state.story.append(f"leader {message.leader} {message.policy}")
    if message.policy != state.policy:
        state.policy = message.policy
        ready = [action for queue in state.queues.values() for action in queue]
        for action in ready:  # what an action is charged for may differ now
            fold_actions.dequeue(state, action)
            action.phase = Phase.WAITING
            fold_actions.enqueue(state, action)


def _quotas(state: State, quotas: dict[str, m.Quota]) -> None:
    """The limits from now on. One that is no more stays, without a limit, as long as somebody holds a place or tokens of it, so
    that they count when it is set again. Cores and GPUs are counted by host and can be none."""
    for name, quota in quotas.items():
        if name in ("cpu", "gpu"):
            continue
        pool = state.quotas.get(name)
        if pool is None:
            state.quotas[name] = QuotaPool(quota)
        elif pool.limit != quota:
            pool.limit, pool.share_ppm = quota, FULL
    for name, pool in list(state.quotas.items()):
        if name not in quotas:
            pool.limit = m.Quota(interval_ms=pool.limit.interval_ms)
        fold_grants.refill(state, name)
        if name not in quotas and not pool.in_use and not pool.is_out(state.now_ns):
            del state.quotas[name]
    state.story.append(f"quotas {sorted(state.quotas)}")


def _decisions(state: State, executor: str, message: m.DecisionsMade) -> None:
    if message.epoch != state.epoch:
        state.story.append(f"stale epoch {message.epoch}")
        return
    if message.note is not None:
        state.window = message.window
    holder = state.incarnations.get(message.incarnation)
    if holder is None or not holder.live or holder.executor != executor:
        state.story.append(f"void {message.incarnation} {message.number}")
        return
    missed = min(message.number - holder.next_number, limits.ENVELOPE_ITEMS_MAX)
    for number in range(holder.next_number, holder.next_number + missed):
        state.owed.fillers[(holder.id, number)] = None
    state.owed.fillers.pop((holder.id, message.number), None)
    holder.next_number = max(holder.next_number, message.number + 1)
    for item in message.items:
        match item:
            case m.Start():
                fold_grants.started(state, holder, message.number, item)
            case m.Cancel():
                key = GrantKey(ActionId(item.task, item.client, item.n), item.attempt)
                state.owed.cancels.pop((holder.id, key), None)
            case m.EndSession():
                state.owed.ends.pop((holder.id, ActionId(item.task, item.client, item.session)), None)
            case m.Prefetch():
                fold_grants.prefetched(state, holder, message.number, item)
            case m.Dismiss():
                state.owed.dismissals.pop(holder.id, None)


def _finished(state: State, address: Address, message: m.ActionsFinished) -> None:
    holder = None
    if message.incarnation:
        holder = state.incarnations.get(message.incarnation)
        if holder is not None:
            if message.k <= holder.k:
                state.story.append(f"stale {holder.id} {message.k}")
                return
            holder.k = message.k
    elif message.epoch != state.epoch:
        state.story.append(f"stale epoch {message.epoch}")
        return
    spent = dict(message.spent)
    for n, raw in zip(message.ids, message.results, strict=True):
        try:
            result = m.decode_result(raw)
        except m.MALFORMED as error:
            if m.is_newer_result(raw):
                raise NewerVersion(f"sequence {state.seq}: {error}") from None
            state.story.append(f"malformed result {n}")
            continue
        fold_grants.completed(state, holder, ActionId(address.first, address.second, n), result, spent.get(n, {}))


def _lost(state: State, message: m.ExecutorLost) -> None:
    if message.epoch != state.epoch:
        return
    state.owed.losses.pop(message.incarnation, None)
    holder = state.incarnations.get(message.incarnation)
    if holder is not None and holder.executor == message.executor:
        fold_executors.lose(state, holder, message.reason or "lost")


def _fire(state: State) -> str:
    """Fires the timers that are due. Returns what broke, ''  if nothing did: one that does must not cost the others."""
    broken = ""
    for timer in state.timers.pop_due(state.now_ns):
        try:
            _fire_one(state, *timer)
        except Exception as error:
            broken = _broken(error)
    return broken


def _fire_one(state: State, kind: str, key: Any) -> None:
    match kind:
        case "deadline":
            owe(state, state.actions[key], Outcome.EXPIRED)
        case "backstop":
            action = state.actions[key]
            owe_cancel(state, action.incarnation, GrantKey(action.id, action.attempt))
            owe(state, action, Outcome.LOST, detail="no answer within its time-out and grace")
        case "idle":
            fold_actions.ask_to_end(state, state.sessions[key], "idle")
        case "client":
            if not state.clients[key].open:
                fold_clients.forget(state, key)
        case "quota":
            fold_grants.refill(state, *key)
        case "again":
            if state.actions[key].phase is Phase.WAITING:  # else its deadline came with this
                fold_actions.enqueue(state, state.actions[key])
        case "permit":
            fold_executors.give_up_quotas(state, *key)
        case "key":
            fold_keys.expired(state, *key)
        case _:
            raise AssertionError(f"no timer is called {kind!r}")
