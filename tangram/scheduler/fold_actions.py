"""The life of an action and of its session, as the log moves it. Called by `fold.step` alone."""

from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler import parts
from tangram.scheduler.load import observe, observe_gpus
from tangram.scheduler.policies import POLICIES, charge
from tangram.scheduler.ready import ReadyQueue
from tangram.scheduler.state import Action, Grant, GrantKey, Phase, QueueKey, Session, SessionPhase, State

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
        (Phase.DECIDED, Phase.WAITING),
        (Phase.DECIDED, Phase.OWED),
        (Phase.DECIDED, Phase.GONE),
        (Phase.OWED, Phase.GONE),
    }
)
"""Every step an action may take. WAITING, READY -> GONE: a late outcome of an earlier attempt, or of a squatter that knows
the nonce, is an outcome all the same. READY -> WAITING: an overtaken attempt came first in its session. DECIDED -> READY:
returned, or lost and retry-safe; -> WAITING: returned by a provider that refuses for some time."""


def move(action: Action, phase: Phase) -> None:
    if (action.phase, phase) not in TRANSITIONS:
        raise AssertionError(f"{action.id}: {action.phase.name} -> {phase.name} is no step an action may take")
    action.phase = phase


# --- queues ------------------------------------------------------------------------------------------------------


def enqueue(state: State, action: Action) -> None:
    """Makes an action READY: a pass may decide it."""
    move(action, Phase.READY)
    action.ready_ns = state.now_ns
    host = action.session.host if action.session is not None else None
    # A quota may be named with no tokens, and somebody who waits for it must not stand before those who do not name it.
    resources = sorted([name for name, demand in charge(state, action).items() if demand.low or name != "cpu"])
    task = action.id.task if POLICIES[state.policy].by_task else ""
    key = QueueKey(action.key, host, tuple(resources), action.spec.service, task)
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


def cancel(state: State, action: Action) -> None:
    if action.phase in (Phase.WAITING, Phase.READY):
        owe(state, action, Outcome.CANCELLED)
    elif action.phase is Phase.DECIDED:
        action.cancelled = True
        owe_cancel(state, action.incarnation, GrantKey(action.id, action.attempt))


def ask_to_end(state: State, session: Session, reason: str) -> None:
    """The executor of an open session has to be told to end it. What waits in it will not start any more."""
    session.phase = SessionPhase.ENDING
    state.timers.cancel(("idle", session.id))
    state.owed.ends[(session.incarnation, session.id)] = reason
    state.story.append(f"{reason} {session.id}")
    _start_no_more(state, session)


def owe_cancel(state: State, incarnation: str, key: GrantKey) -> None:
    """The executor has to be told to end this attempt; its answer gives the units back."""
    holder = state.incarnations.get(incarnation)
    grant = holder.grants.get(key) if holder is not None and holder.live else None
    if grant is not None and not grant.holds_session:  # else it has answered
        state.owed.cancels[(incarnation, key)] = None
        state.story.append(f"cancel owed {key.action}#{key.attempt}")


# --- endings -----------------------------------------------------------------------------------------------------


def owe(state: State, action: Action, outcome: Outcome, reason: str = "", detail: str = "", *, retry_after_ms: int = 0) -> None:
    """The leader has to write this outcome. The action leaves its queue at once, and the state when the outcome is read."""
    leave(state, action)
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
    if session is not None and session.current == action.id and not is_held(state, action):
        session.current = None
        advance(state, session)


def is_held(state: State, action: Action) -> bool:
    """Whether an attempt of this action still runs somewhere, and holds units for that."""
    holder = state.incarnations.get(action.incarnation)
    grant = holder.grants.get(GrantKey(action.id, action.attempt)) if holder is not None else None
    return grant is not None and not grant.holds_session


def leave(state: State, action: Action) -> None:
    """Takes an action out of whatever it waits in."""
    state.timers.cancel(("backstop" if action.phase is Phase.DECIDED else "deadline", action.id))
    if action.phase is Phase.READY:
        dequeue(state, action)
    elif action.phase is Phase.WAITING and action.session is not None and action in action.session.waiting:
        action.session.waiting.remove(action)
    elif action.phase is Phase.WAITING:
        state.timers.cancel(("again", action.id))


def finish(state: State, action: Action, result: m.Result, incarnation: str) -> None:
    """The first outcome in the log that names the action, from this incarnation or from somebody else (""). What else was on
    its way for it is called off."""
    if action.phase is Phase.DECIDED and is_held(state, action):
        # The outcome came from somebody else (an earlier attempt, a ruling): the attempt that runs now is cancelled.
        owe_cancel(state, action.incarnation, GrantKey(action.id, action.attempt))
    leave(state, action)
    move(action, Phase.GONE)
    del state.actions[action.id]
    state.payload_bytes -= action.payload_bytes
    state.owed.rulings.pop(action.id, None)
    state.finished += 1
    state.story.append(("finished", action.id, result.outcome))
    who = action.id[:2]
    client = state.clients.get(who)
    if client is not None and client.open:  # a refusal that came before the client was known is not counted
        client.open -= 1
        if action.id.n >= client.done_below or action.id.n < client.others_below:
            client.ended[action.id.n] = state.seq
            if len(client.ended) > limits.CLIENT_SEEN_WIDTH_MAX:
                del client.ended[next(iter(client.ended))]
        if not client.open:
            state.timers.set(("client", who), state.now_ns + limits.CLIENT_TTL_NS)
    session = action.session
    if action.id in state.sessions:
        # Still OPENING: a success of an attempt that was lost before. A sandbox ends with its incarnation.
        opened = state.sessions[action.id]
        if result.outcome is not Outcome.OK or opened.phase is SessionPhase.OPENING:
            end_session(state, opened)
    elif session is not None:
        ended = action.spec.kind == "session.close" and result.outcome is Outcome.OK
        knows = incarnation != "" and incarnation == session.incarnation
        if knows and (ended or result.outcome is Outcome.ENVIRONMENT_LOST):
            end_session(state, session)
        elif session.current == action.id and not is_held(state, action):
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
        host = state.hosts[holder.host]
        host.sessions -= 1
        parts.closed(state, host, session.id.task)
        state.owed.ends.pop((holder.id, session.id), None)
        grant = holder.grants.get(session.grant) if session.grant is not None else None
        if grant is not None and holder.live:
            release(state, grant)
    _start_no_more(state, session)


def _start_no_more(state: State, session: Session) -> None:
    """What waits in a session that ends is lost with it, and its key is free: there is nothing to share any more."""
    client = state.clients.get(session.id[:2]) if session.key else None
    bound = client.keys.get(session.key) if client is not None else None
    if client is not None and bound is not None and bound.n == session.id.n and bound.seq:
        del client.keys[session.key]
        state.story.append(f"key free {session.id}")
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
    parts.gave(state, host, grant.key.action.task, grant.amounts)
    for name, amount in grant.amounts.items():
        if name == "cpu":
            observe(host, state.now_ns)
            host.pool.give(grant.cores, amount)
        elif name == "gpu":
            observe_gpus(host, state.now_ns)
            host.gpus.give(grant.gpus)
            # A program's own memory ends with it; so do weights on GPUs that its executor has no more.
            if not grant.service or grant.gpus & ~holder.gpus_announced:
                host.gpus.drop(grant.service, grant.gpus, holder.id)
        elif name in grant.quotas:
            state.quotas[name].give()
        else:
            host.used[name] -= amount
            assert host.used[name] >= 0, f"{name} of {grant.host.name} given back twice"
    if holder.fetch_evicted and grant.number >= holder.fetched_at:
        holder.fetch_evicted = []  # whoever answers this has read those
    state.owed.cancels.pop((holder.id, grant.key), None)
    state.story.append(("released", grant.key))
    if holder.draining and holder.live and not holder.grants:
        state.owed.dismissals[holder.id] = "drained"
