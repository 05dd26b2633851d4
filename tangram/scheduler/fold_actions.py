"""The life of an action and of its session, as the log moves it. Called by `fold.step` alone."""

from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome, RejectReason
from tangram.rules import broken_rule
from tangram.scheduler.fold_clients import client_of, has_seen, see
from tangram.scheduler.policies import charge
from tangram.scheduler.ready import ReadyQueue
from tangram.scheduler.state import (
    Action,
    ActionId,
    Client,
    Grant,
    GrantKey,
    Incarnation,
    Phase,
    QueueKey,
    Session,
    SessionPhase,
    State,
)

TRANSITIONS: Final = frozenset(
    {
        (Phase.NEW, Phase.WAITING),
        (Phase.NEW, Phase.READY),
        (Phase.NEW, Phase.OWED),
        (Phase.WAITING, Phase.READY),
        (Phase.WAITING, Phase.OWED),
        (Phase.WAITING, Phase.GONE),
        (Phase.READY, Phase.WAITING),
        (Phase.READY, Phase.DECIDED),
        (Phase.READY, Phase.OWED),
        (Phase.READY, Phase.GONE),
        (Phase.DECIDED, Phase.READY),
        (Phase.DECIDED, Phase.OWED),
        (Phase.DECIDED, Phase.GONE),
        (Phase.OWED, Phase.GONE),
    }
)
"""Every step an action may take. WAITING, READY -> GONE: a late outcome of an earlier attempt, or of a squatter that knows
the nonce, is an outcome all the same. READY -> WAITING: an overtaken attempt came first in its session. DECIDED -> READY:
returned, or lost and retry-safe."""

_REFUSALS_MAX: Final = 20
_NO_NONCE: Final = bytes(limits.NONCE_BYTES)


def move(action: Action, phase: Phase) -> None:
    if (action.phase, phase) not in TRANSITIONS:
        raise AssertionError(f"{action.id}: {action.phase.name} -> {phase.name} is no step an action may take")
    action.phase = phase


# --- queues ------------------------------------------------------------------------------------------------------


def enqueue(state: State, action: Action) -> None:
    """Makes an action READY: a pass may decide it."""
    move(action, Phase.READY)
    host = action.session.host if action.session is not None else None
    resources = tuple(sorted(name for name, demand in charge(state, action).items() if demand.low))
    key = QueueKey(action.key, host, resources)
    queue = state.queues.get(key)
    if queue is None:
        queue = state.queues[key] = ReadyQueue()
    queue.add(action.order, action)
    action.queue = key


def dequeue(state: State, action: Action) -> None:
    if action.queue is not None:
        queue = state.queues[action.queue]
        queue.remove(action.order)
        if not queue:
            del state.queues[action.queue]
        action.queue = None


def advance(state: State, session: Session) -> None:
    """Lets the next action of an open session become READY, or starts its idle time."""
    if session.phase is not SessionPhase.OPEN or session.current is not None:
        return
    if session.waiting:
        state.timers.cancel(("idle", session.id))
        action = session.waiting.popleft()
        session.current = action.id
        enqueue(state, action)
    else:
        state.timers.set(("idle", session.id), state.now_ns + session.idle_ttl_ns)


# --- submissions and cancels -------------------------------------------------------------------------------------


def submitted(state: State, key: str, task: str, message: m.ActionsSubmitted) -> None:
    client = client_of(state, task, message)
    for index, n in enumerate(message.ids):
        action_id = ActionId(task, message.client, n)
        if action_id in state.actions:  # seen, or refused without being seen and its ruling is on its way
            state.story.append(f"duplicate {action_id}")
            continue
        if client is not None:
            if n < client.done_below or has_seen(client, n):
                state.story.append(f"duplicate {action_id}")
                continue
            if n - client.done_below >= limits.CLIENT_SEEN_WIDTH_MAX:
                _refuse(state, action_id, (state.seq, index), key, RejectReason.OVER_LIMIT, "too many ids above done_below")
                continue
            see(client, n)
        _submit(state, key, action_id, client, message, index)


def _refuse(
    state: State, action_id: ActionId, order: tuple[int, int], key: str, reason: RejectReason, detail: str
) -> None:
    """An action that exists only until its rejection is in the log."""
    spec = m.ActionSpec(nonce=_NO_NONCE, kind="invalid")
    action = Action(id=action_id, order=order, key=key, spec=spec, payload_bytes=0, submitted_ns=state.now_ns)
    state.actions[action_id] = action
    client = state.clients.get(action_id[:2])
    if client is not None:
        client.open += 1
    owe(state, action, Outcome.REJECTED, reason, detail)


def _submit(
    state: State, key: str, action_id: ActionId, client: Client | None, message: m.ActionsSubmitted, index: int
) -> None:
    order = (state.seq, index)
    if client is None:
        _refuse(state, action_id, order, key, RejectReason.INVALID, "born: the client is older than what is remembered")
        return
    try:
        spec = m.decode_spec(message.specs[index])
        payload = m.decode_payload(message.payloads[index]) if not spec.payload_blob else None
    except m.MALFORMED as error:
        _refuse(state, action_id, order, key, RejectReason.INVALID, str(error))
        return
    action = Action(
        id=action_id,
        order=order,
        key=key,
        spec=spec,
        payload_bytes=len(message.payloads[index]),
        submitted_ns=state.now_ns,
    )
    if spec.kind == "session.open":
        action.opens = Session(id=action_id, idle_ttl_ns=spec.idle_ttl_ms * 1_000_000)
    state.actions[action_id] = action
    client.open += 1
    if client.open == 1:
        state.timers.cancel(("client", action_id[:2]))
    state.story.append(f"submitted {action_id}")
    wrong = broken_rule(key, spec, payload)
    if wrong:
        owe(state, action, Outcome.REJECTED, RejectReason.INVALID, wrong)
    elif action_id.n in client.cancelled_early:
        client.cancelled_early.discard(action_id.n)
        owe(state, action, Outcome.CANCELLED)
    elif too_big := never_fits(state, action):
        owe(state, action, Outcome.REJECTED, RejectReason.NEVER_FITS, too_big)
    elif spec.deadline_ms == 0:
        owe(state, action, Outcome.EXPIRED)
    else:
        state.timers.set(("deadline", action_id), state.now_ns + spec.deadline_ms * 1_000_000)
        _place(state, action)


def _place(state: State, action: Action) -> None:
    """Puts a valid new action where it waits: its session, or a queue."""
    if action.spec.session:
        session = state.sessions.get(ActionId(action.id.task, action.id.client, action.spec.session))
        if session is None or session.phase >= SessionPhase.ENDING:
            owe(state, action, Outcome.ENVIRONMENT_LOST, detail="there is no such session (any more)")
            return
        action.session = session
        move(action, Phase.WAITING)
        session.waiting.append(action)
        advance(state, session)
        return
    if action.opens is not None:
        state.sessions[action.id] = action.opens
    enqueue(state, action)


def never_fits(state: State, action: Action) -> str:
    """Why no live host could ever hold this action's minimum, or "". Without any live host there is nothing to compare."""
    hosts = [host for host in state.hosts.values() if any(i.key == action.key for i in host.live)]
    cost = charge(state, action)
    if not hosts or not cost:
        return ""
    largest: dict[str, int] = {}
    for host in hosts:
        sizes = {**host.capacity, "cpu": host.pool.all.bit_count() * 1000}
        if all(sizes.get(name, 0) >= demand.low for name, demand in cost.items()):
            return ""
        for name in cost:
            largest[name] = max(largest.get(name, 0), sizes.get(name, 0))
    return "at most " + ", ".join(f"{name} {amount}" for name, amount in sorted(largest.items())) + " on one host"


def cancel_requested(state: State, task: str, message: m.CancelsRequested) -> None:
    client = client_of(state, task, message)
    if client is None:
        return
    for n in message.ids:
        action_id = ActionId(task, message.client, n)
        action = state.actions.get(action_id)
        if action is not None:
            cancel(state, action)
        elif n >= client.done_below and not has_seen(client, n):
            if n - client.done_below < limits.CLIENT_SEEN_WIDTH_MAX:
                client.cancelled_early.add(n)
        else:
            state.story.append(f"cancel of finished {action_id}")


def cancel(state: State, action: Action) -> None:
    if action.phase in (Phase.WAITING, Phase.READY):
        owe(state, action, Outcome.CANCELLED)
    elif action.phase is Phase.DECIDED:
        action.cancelled = True
        owe_cancel(state, action.incarnation, GrantKey(action.id, action.attempt))


def owe_cancel(state: State, incarnation: str, key: GrantKey) -> None:
    """The executor has to be told to end this attempt; its answer gives the units back."""
    holder = state.incarnations.get(incarnation)
    grant = holder.grants.get(key) if holder is not None and holder.live else None
    if grant is not None and not grant.holds_session:  # else it has answered
        state.owed.cancels[(incarnation, key)] = None
        state.story.append(f"cancel owed {key.action}#{key.attempt}")


# --- endings -----------------------------------------------------------------------------------------------------


def owe(
    state: State, action: Action, outcome: Outcome, reason: str = "", detail: str = "", retry_after_ms: int = 0
) -> None:
    """The leader has to write this outcome. The action leaves its queue at once, and the state when the outcome is read."""
    _leave(state, action)
    move(action, Phase.OWED)
    state.owed.rulings[action.id] = m.Result(
        nonce=action.spec.nonce,
        attempt=action.attempt,
        outcome=outcome,
        reason=reason,
        detail=detail[: limits.DETAIL_LENGTH_MAX],
        queued_ns=state.now_ns - action.submitted_ns,
        retry_after_ms=retry_after_ms,
    )
    state.story.append(f"owed {action.id} {outcome}")
    session = action.session
    if session is not None and session.current == action.id and not _is_held(state, action):
        session.current = None
        advance(state, session)


def _is_held(state: State, action: Action) -> bool:
    """Whether an attempt of this action still runs somewhere, and holds units for that."""
    holder = state.incarnations.get(action.incarnation)
    grant = holder.grants.get(GrantKey(action.id, action.attempt)) if holder is not None else None
    return grant is not None and not grant.holds_session


def _leave(state: State, action: Action) -> None:
    """Takes an action out of whatever it waits in."""
    state.timers.cancel(("deadline", action.id))
    state.timers.cancel(("backstop", action.id))
    if action.phase is Phase.READY:
        dequeue(state, action)
    elif action.phase is Phase.WAITING and action.session is not None and action in action.session.waiting:
        action.session.waiting.remove(action)


def finish(state: State, action: Action, result: m.Result) -> None:
    """The first outcome in the log that names the action. What else was on its way for it is called off."""
    if action.phase is Phase.DECIDED and _is_held(state, action):
        # The outcome came from somebody else (an earlier attempt, a ruling): the attempt that runs now is cancelled.
        owe_cancel(state, action.incarnation, GrantKey(action.id, action.attempt))
    _leave(state, action)
    move(action, Phase.GONE)
    del state.actions[action.id]
    state.owed.rulings.pop(action.id, None)
    state.finished += 1
    state.story.append(f"finished {action.id} {result.outcome}")
    client = state.clients.get(action.id[:2])
    if client is not None and client.open:  # a refusal that came before the client was known is not counted
        client.open -= 1
        if not client.open:
            state.timers.set(("client", action.id[:2]), state.now_ns + limits.CLIENT_TTL_NS)
    session = action.session
    if action.id in state.sessions:
        # Still OPENING: a success of an attempt that was lost before. A sandbox ends with its incarnation.
        opened = state.sessions[action.id]
        if result.outcome is not Outcome.OK or opened.phase is SessionPhase.OPENING:
            end_session(state, opened)
    elif session is not None:
        ended = action.spec.kind == "session.close" and result.outcome is Outcome.OK
        if ended or result.outcome is Outcome.ENVIRONMENT_LOST:
            end_session(state, session)
        elif session.current == action.id and not _is_held(state, action):
            session.current = None
            advance(state, session)


def end_session(state: State, session: Session) -> None:
    """The sandbox is gone, or never came to be: what waits in it is lost with it, and what it reserved is given back."""
    if session.phase is SessionPhase.ENDED:
        return
    session.phase = SessionPhase.ENDED
    state.timers.cancel(("idle", session.id))
    del state.sessions[session.id]
    state.story.append(f"session ended {session.id}")
    holder = state.incarnations.get(session.incarnation)
    if holder is not None and holder.sessions.pop(session.id, None) is not None:
        state.hosts[holder.host].sessions -= 1
        state.owed.ends.pop((holder.id, session.id), None)
        grant = holder.grants.get(session.grant) if session.grant is not None else None
        if grant is not None and holder.live:
            release(state, grant)
    while session.waiting:
        action = session.waiting[0]
        owe(state, action, Outcome.ENVIRONMENT_LOST, detail="the session ended before the action started")
    if session.current is not None:
        current = state.actions.get(session.current)
        if current is not None and current.phase is Phase.READY:
            owe(state, current, Outcome.ENVIRONMENT_LOST, detail="the session ended before the action started")


# --- grants ------------------------------------------------------------------------------------------------------


def release(state: State, grant: Grant) -> None:
    """Gives units back. A draining incarnation that holds nothing any more may leave."""
    holder = state.incarnations[grant.incarnation]
    del holder.grants[grant.key]
    host = state.hosts[grant.host]
    for name, amount in grant.amounts.items():
        if name == "cpu":
            host.pool.give(grant.cores, amount)
        else:
            host.used[name] -= amount
            assert host.used[name] >= 0, f"{name} of {grant.host.name} given back twice"
    state.owed.cancels.pop((holder.id, grant.key), None)
    state.story.append(f"released {grant.key.action}#{grant.key.attempt}")
    if holder.draining and holder.live and not holder.grants:
        state.owed.dismissals[holder.id] = "drained"


def started(state: State, holder: Incarnation, number: int, start: m.Start) -> None:
    """Applies a decision as written. If it was overtaken, its cancel is owed and its units return with the answer."""
    action_id = ActionId(start.task, start.client, start.n)
    key = GrantKey(action_id, start.attempt)
    grant = Grant(key, holder.id, holder.host, start.amounts, start.cores, number, opens=start.kind == "session.open")
    holder.grants[key] = grant
    host = state.hosts[holder.host]
    for name, amount in start.amounts.items():
        if name == "cpu":
            host.pool.take(start.cores, amount)
        else:
            host.used[name] = host.used.get(name, 0) + amount
    state.owed.dismissals.pop(holder.id, None)
    state.story.append(f"granted {action_id}#{start.attempt} {holder.id} {start.cores}")
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
    startup_ms = limits.STARTUP_MS_MAX if action.opens is not None else 0
    allowed_ms = action.spec.timeout_ms + startup_ms + limits.KILL_BUDGET_MS + limits.BACKSTOP_GRACE_MS
    state.timers.set(("backstop", action_id), state.now_ns + allowed_ms * 1_000_000)


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


def completed(state: State, holder: Incarnation | None, action_id: ActionId, result: m.Result) -> None:
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
            release(state, grant)
    if action is not None and accepted:
        finish(state, action, result)
    elif grant is not None:
        units_back(state, grant)
    if action is not None and not accepted:
        state.story.append(f"wrong nonce {action_id}")


def _opened(state: State, session: Session, grant: Grant, holder: Incarnation) -> None:
    session.phase = SessionPhase.OPEN
    session.incarnation, session.host, session.grant = holder.id, holder.host, grant.key
    session.cores = grant.cores
    holder.sessions[session.id] = session
    state.hosts[holder.host].sessions += 1
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
    release(state, grant)
    units_back(state, grant)
    if action is None or not current:
        return
    state.timers.cancel(("backstop", action_id))
    action.refusals += 1
    if action.cancelled:
        owe(state, action, Outcome.CANCELLED)
    elif action.session is not None and action.session.phase >= SessionPhase.ENDING:
        owe(state, action, Outcome.ENVIRONMENT_LOST, detail="the session ended before the action started")
    elif action.refusals >= _REFUSALS_MAX:
        owe(state, action, Outcome.ERROR, "internal", f"refused {action.refusals} times, last: {item.reason}")
    else:
        again(state, action)


def again(state: State, action: Action) -> None:
    """Puts a decided action back into its queue."""
    action.incarnation = ""
    state.timers.set(("deadline", action.id), action.submitted_ns + action.spec.deadline_ms * 1_000_000)
    enqueue(state, action)
