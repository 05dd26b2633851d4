"""Grants: what an attempt holds from its decision to its executor's answer. Called by `fold.step` alone."""

from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.outcomes import ErrorReason, Outcome, RejectReason
from tangram.scheduler import fold_keys, parts
from tangram.scheduler.cores import MILLI, mask_of
from tangram.scheduler.elasticity import Model, declared, learn
from tangram.scheduler.fold_actions import (
    advance,
    dequeue,
    end_session,
    enqueue,
    finish,
    move,
    owe,
    owe_cancel,
    release,
)
from tangram.scheduler.gpus import Copy
from tangram.scheduler.load import observe, observe_gpus, wanted
from tangram.scheduler.policies import model_key, prior_of, setting, weights_on_each
from tangram.scheduler.quotas import GUARD_NS
from tangram.scheduler.state import (
    Action,
    ActionId,
    Grant,
    GrantKey,
    Host,
    Incarnation,
    Phase,
    Session,
    SessionPhase,
    State,
    Use,
)

_REFUSALS_MAX: Final = 20


def started(state: State, holder: Incarnation, number: int, start: m.Start) -> None:
    """Applies a decision as written. If it was overtaken, its cancel is owed and its units return with the answer."""
    action_id = ActionId(start.task, start.client, start.n)
    key = GrantKey(action_id, start.attempt)
    grant = Grant(
        key,
        holder.id,
        holder.host,
        start.amounts,
        start.cores,
        number,
        finish_ns=state.now_ns + start.predicted_us * 1_000,
        started_ns=state.now_ns,
        opens=start.kind == "session.open",
        gpus=mask_of(start.gpus),
        service=start.service,
        quotas=tuple([name for name in start.amounts if name in state.quotas]) if state.quotas else (),
        until_ns=state.now_ns + _allowed_ms(start) * 1_000_000,
    )
    holder.grants[key] = grant
    host = state.hosts[holder.host]
    parts.took(state, host, start.task, start.amounts)
    for name, amount in start.amounts.items():
        if name == "cpu":
            observe(host, state.now_ns)
            host.pool.take(start.cores, amount)
        elif name == "gpu":
            _take_gpus(state, host, grant, start)
        elif name in grant.quotas:
            _take_quota(state, name, amount)
        else:
            host.used[name] = host.used.get(name, 0) + amount
    state.owed.dismissals.pop(holder.id, None)
    state.story.append(("granted", key, holder.id, start.cores))
    action = state.actions.get(action_id)
    if action is None or action.phase is not Phase.READY or action.attempt != start.attempt:
        owe_cancel(state, holder.id, key)
        if action is not None and action.attempt == start.attempt:
            action.incarnation = holder.id
        if start.session:
            _occupy(state, grant, state.sessions.get(ActionId(start.task, start.client, start.session)))
        return
    grant.session = action.session
    dequeue(state, action)
    state.timers.cancel(("deadline", action_id))
    move(action, Phase.DECIDED)
    action.incarnation = holder.id
    allowed_ms = action.spec.timeout_ms + limits.KILL_BUDGET_MS + limits.BACKSTOP_GRACE_MS
    state.timers.set(("backstop", action_id), state.now_ns + allowed_ms * 1_000_000)


def _allowed_ms(start: m.Start) -> int:
    """What an executor that works takes at most."""
    return start.timeout_ms + limits.KILL_BUDGET_MS + (limits.BLOB_MS_MAX if start.payload_blob else 0)


def _take_gpus(state: State, host: Host, grant: Grant, start: m.Start) -> None:
    observe_gpus(host, state.now_ns)
    holder = state.incarnations[grant.incarnation]
    mib = weights_on_each(holder, grant.service, len(start.gpus), host.gpus.memory_mib)
    copy = Copy(grant.service, grant.gpus, mib, holder.id, state.now_ns)
    grant.evicted = host.gpus.take(grant.gpus, copy, [(each.service, mask_of(each.gpus)) for each in start.evicts])
    if grant.service:
        use = state.uses.pop(grant.service, None) or Use()
        state.uses[grant.service] = use
        wanted(use, state.now_ns)
        if len(state.uses) > limits.SERVICES_MAX:
            del state.uses[next(iter(state.uses))]


def prefetched(state: State, holder: Incarnation, number: int, item: m.Prefetch) -> None:
    """A copy is brought onto idle GPUs."""
    pool = state.hosts[holder.host].gpus
    gpus = mask_of(item.gpus)
    if not gpus or gpus & ~holder.gpus or gpus & pool.used or item.service not in holder.services:
        state.story.append(f"void prefetch {holder.id} {item.service}")
        return
    mib = weights_on_each(holder, item.service, len(item.gpus), pool.memory_mib)
    copy = Copy(item.service, gpus, mib, holder.id, state.now_ns)
    evicts = [(each.service, mask_of(each.gpus)) for each in item.evicts]
    holder.fetch_evicted += pool.take(gpus, copy, evicts)
    pool.give(gpus)
    holder.fetched_at = number
    state.story.append(f"prefetch {holder.id} {item.service} {gpus}")


def _take_quota(state: State, name: str, tokens: int) -> None:
    quota = state.quotas[name]
    quota.take(tokens, state.now_ns)
    refill(state, name)


def refill(state: State, name: str) -> None:
    """Tokens whose interval is over come back. From behaviour 7 on every step does that; before, somebody had to look when the
    next were due."""
    quota = state.quotas.get(name)
    if quota is None:
        return
    if state.behaviour >= 7:
        quota.refill(state.now_ns, GUARD_NS)
    elif (due_ns := quota.refill(state.now_ns)) is not None:
        state.timers.set(("quota", (name,)), due_ns)


def _occupy(state: State, grant: Grant, session: Session | None) -> None:
    """An overtaken attempt may run, and has its session to itself: what was next waits again until its units are back."""
    if session is None or session.phase is not SessionPhase.OPEN:
        return
    following = state.actions.get(session.current) if session.current is not None else None
    if following is not None and following.phase is Phase.READY:
        dequeue(state, following)
        move(following, Phase.WAITING)
        session.waiting.appendleft(following)
    state.timers.cancel(("idle", session.id))
    session.current = grant.key.action
    grant.session = session


def completed(state: State, holder: Incarnation | None, action_id: ActionId, result: m.Result, spent: dict[str, int]) -> None:
    """One item of ActionsFinished: the answer of the incarnation that had the attempt, and the outcome if it is the first
    with the right nonce, whoever wrote it. The sandbox of a successful session.open keeps what was granted."""
    action = state.actions.get(action_id)
    accepted = action is not None and action.spec.nonce == result.nonce
    grant = holder.grants.get(GrantKey(action_id, result.attempt)) if holder is not None else None
    if holder is not None and grant is not None and not grant.holds_session:
        if grant.opens and result.outcome is Outcome.OK:
            grant.holds_session = True
            state.owed.cancels.pop((holder.id, grant.key), None)
            opens = action.opens if action is not None and accepted else None
            if not holder.live:
                pass  # its sandbox is there until somebody finds it dead
            elif opens is not None and opens.phase is SessionPhase.OPENING:
                _opened(state, opens, grant, holder)
            else:  # nobody wants this sandbox any more
                state.owed.ends[(holder.id, action_id)] = "its opening had ended otherwise"
        else:
            for name in grant.quotas:
                if name in spent:
                    state.quotas[name].correct(grant.started_ns, grant.amounts[name], spent[name], state.now_ns)
            release(state, grant)
    if action is not None and accepted:
        if grant is not None:
            _learn(state, action, grant, result)
        finish(state, action, result, holder.id if holder is not None else "")
        if action.spec.key:
            fold_keys.finished(state, action, result.outcome)
    elif grant is not None:
        units_back(state, grant)
    if state.owed.conflicts and state.owed.conflicts.pop((action_id, result.nonce), None) is not None:
        state.story.append(f"conflict told {action_id}")
    elif action is not None and not accepted:
        state.story.append(f"wrong nonce {action_id}")


def _learn(state: State, action: Action, grant: Grant, result: m.Result) -> None:
    """What a program that came to its own end took on its whole cores. A time-out says nothing about how a kind scales."""
    units = grant.gpus.bit_count() or len(grant.cores)
    ran = result.outcome in (Outcome.OK, Outcome.FAILED) and result.run_ns >= 1_000
    whole = grant.gpus or grant.amounts.get("cpu", 0) >= MILLI
    if not ran or grant.opens or not whole or not setting(state, "learn"):
        return
    key = model_key(action)
    model = state.models.pop(key, None) or Model()
    state.models[key] = model
    if len(state.models) > limits.MODELS_MAX:
        del state.models[next(iter(state.models))]
    prior = prior_of(state)
    learn(model, units, result.run_ns // 1_000, declared(action.spec.hint or prior, prior))


def _opened(state: State, session: Session, grant: Grant, holder: Incarnation) -> None:
    session.phase = SessionPhase.OPEN
    session.incarnation, session.host, session.grant = holder.id, holder.host, grant.key
    session.cores = grant.cores
    holder.sessions[session.id] = session
    host = state.hosts[holder.host]
    host.sessions += 1
    parts.opened(state, host, session.id.task)
    state.story.append(f"session opened {session.id} {holder.id}")
    advance(state, session)


def units_back(state: State, grant: Grant) -> None:
    """The units of an attempt whose action had its outcome before: its session can go on now."""
    session = grant.session
    if session is not None and session.current == grant.key.action:
        action = state.actions.get(grant.key.action)
        if action is None or action.phase is Phase.OWED:
            session.current = None
            advance(state, session)


def session_ended(state: State, holder: Incarnation, session_id: ActionId) -> None:
    """An executor says that a sandbox is gone."""
    state.owed.ends.pop((holder.id, session_id), None)
    session = state.sessions.get(session_id)
    if session is not None and session.incarnation == holder.id:
        end_session(state, session)
    for attempt in range(1, limits.ATTEMPTS_MAX + 1):  # a sandbox that no session owned
        grant = holder.grants.get(GrantKey(session_id, attempt))
        if grant is not None and grant.holds_session:
            release(state, grant)


def returned(state: State, holder: Incarnation, item: m.Returned) -> None:
    """A start that was never begun is decided again, with its attempt unused, a bounded number of times."""
    action_id = ActionId(item.task, item.client, item.n)
    key = GrantKey(action_id, item.attempt)
    grant = holder.grants.get(key)
    if grant is None or grant.number != item.number or grant.holds_session:
        return
    action = state.actions.get(action_id)
    current = action is not None and action.phase is Phase.DECIDED and action.attempt == item.attempt
    retry_after_ms = min(item.retry_after_ms, limits.REFUSED_MS_MAX)
    if retry_after_ms:
        for name in grant.quotas:
            state.quotas[name].refuse(grant.started_ns, state.now_ns, retry_after_ms * 1_000_000)
    release(state, grant)
    units_back(state, grant)
    if action is None or not current:
        return
    state.timers.cancel(("backstop", action_id))
    if not item.failed:
        action.refusals += 1
    if action.cancelled:
        owe(state, action, Outcome.CANCELLED)
    elif action.session is not None and action.session.phase >= SessionPhase.ENDING:
        owe(state, action, Outcome.ENVIRONMENT_LOST, detail="the session ended before the action started")
    elif item.failed and (action.spec.retry != "safe" or action.attempt >= limits.ATTEMPTS_MAX):
        owe(state, action, Outcome.ERROR, ErrorReason.UPSTREAM, item.reason)
    elif action.refusals >= _REFUSALS_MAX:
        why = f"refused {action.refusals} times, last: {item.reason}"
        if retry_after_ms:
            owe(state, action, Outcome.REJECTED, RejectReason.OVER_LIMIT, why, retry_after_ms=retry_after_ms)
        else:
            owe(state, action, Outcome.ERROR, ErrorReason.UPSTREAM if action.key == "api" else ErrorReason.INTERNAL, why)
    else:
        action.attempt += item.failed
        again(state, action, retry_after_ms)


def again(state: State, action: Action, after_ms: int = 0) -> None:
    """Puts a decided action back into its queue, at once or after some time."""
    action.incarnation = ""
    state.timers.set(("deadline", action.id), action.submitted_ns + action.spec.deadline_ms * 1_000_000)
    if after_ms and action.session is None:
        move(action, Phase.WAITING)
        state.timers.set(("again", action.id), state.now_ns + after_ms * 1_000_000)
    else:
        enqueue(state, action)
