"""Submissions and cancels, as the log brings them. Called by `fold.step` alone."""

from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome, RejectReason
from tangram.rules import broken_rule
from tangram.scheduler import fold_keys
from tangram.scheduler.cores import MILLI
from tangram.scheduler.fold_actions import advance, ask_to_end, cancel, enqueue, move, owe
from tangram.scheduler.fold_clients import client_of, has_seen, is_replaced, see
from tangram.scheduler.policies import charge, could_fit, could_run, fits_part, setting, size_of
from tangram.scheduler.shares import fixed_gpus, fixed_part
from tangram.scheduler.state import Action, ActionId, Client, Phase, Session, SessionPhase, State


def submitted(state: State, key: str, task: str, message: m.ActionsSubmitted) -> None:
    client = client_of(state, task, message)
    replaced = client is not None and is_replaced(client, message)
    if client is not None and not replaced and client.cancel_on_disconnect != message.cancel_on_disconnect:
        client.cancel_on_disconnect = message.cancel_on_disconnect
        state.story.append(f"cancel on disconnect {task}/{message.client} {message.cancel_on_disconnect}")
    for index, n in enumerate(message.ids):
        action_id = ActionId(task, message.client, n)
        action = state.actions.get(action_id)
        if action is not None:  # seen, or refused without being seen and its ruling is on its way
            # The nonce stands for the body: who sends another body under it cannot be answered apart from the first.
            if m.nonce_of(message.specs[index]) == action.spec.nonce:
                state.story.append(f"duplicate {action_id}")
            else:
                _conflict(state, action_id, message, index)
            continue
        if replaced:
            _conflict(state, action_id, message, index)
            continue
        if client is not None:
            if n < client.done_below or has_seen(client, n):
                if message.instance and n < client.others_below:
                    _conflict(state, action_id, message, index)
                else:
                    state.story.append(f"duplicate {action_id}")
                continue
            if n - client.done_below >= limits.CLIENT_SEEN_WIDTH_MAX:
                _refuse(state, key, action_id, message, index, RejectReason.OVER_LIMIT, "too many ids above done_below")
                continue
            see(client, n)
        _submit(state, key, action_id, client, message, index)


def _conflict(state: State, action_id: ActionId, message: m.ActionsSubmitted, index: int) -> None:
    """The id is that of another action, or the client's name another process's: whoever sent this is told, nobody else. (If
    it is a repetition of something that has ended, its outcome stands before this in the log, and counts.)"""
    nonce = m.nonce_of(message.specs[index])
    state.owed.conflicts[(action_id, nonce)] = m.Result(
        nonce=nonce, outcome=Outcome.REJECTED, reason=RejectReason.CONFLICT, detail=_NAME_IN_USE.format(*action_id)
    )
    state.story.append(f"conflict {action_id}")


_NAME_IN_USE: Final = "name: another client of task {0} uses the name {1}, or has used its number {2}; give each its own"


def _refuse(
    state: State,
    key: str,
    action_id: ActionId,
    message: m.ActionsSubmitted,
    index: int,
    reason: RejectReason,
    detail: str,
) -> None:
    """An action that exists only until its rejection is in the log."""
    spec = m.ActionSpec(nonce=m.nonce_of(message.specs[index]), kind="invalid")
    order = (state.seq, index)
    action = Action(id=action_id, order=order, key=key, spec=spec, submitted_ns=state.now_ns)
    state.actions[action_id] = action
    client = state.clients.get(action_id[:2])
    if client is not None:
        client.open += 1
        client.ended.pop(action_id.n, None)  # it was refused before, without being seen
    owe(state, action, Outcome.REJECTED, reason, detail)


def _submit(state: State, key: str, action_id: ActionId, client: Client | None, message: m.ActionsSubmitted, index: int) -> None:
    wrong = ""
    if client is None:
        wrong = "born: the client is older than what is remembered"
    elif len(message.specs[index]) > limits.SPEC_BYTES_MAX:
        wrong = f"spec: must be at most {limits.SPEC_BYTES_MAX} bytes"
    elif len(message.payloads[index]) > limits.ITEM_BYTES_MAX:
        wrong = f"payload: must be at most {limits.ITEM_BYTES_MAX} bytes"
    else:
        try:
            spec = m.decode_spec(message.specs[index])
            payload = m.decode_payload(message.payloads[index]) if not spec.payload_blob else None
            if spec.payload_blob and message.payloads[index]:
                wrong = "payload_blob: the payload beside it must be empty"
        except m.MALFORMED as error:
            wrong = str(error)
    if client is None or wrong:
        _refuse(state, key, action_id, message, index, RejectReason.INVALID, wrong)
        return
    action = Action(
        id=action_id,
        order=(state.seq, index),
        key=key,
        spec=spec,
        submitted_ns=state.now_ns,
        payload_bytes=len(message.payloads[index]),
    )
    state.payload_bytes += action.payload_bytes
    if spec.kind == "session.open":
        action.opens = Session(id=action_id, idle_ttl_ns=spec.idle_ttl_ms * 1_000_000, key=spec.key)
    state.actions[action_id] = action
    client.open += 1
    client.ended.pop(action_id.n, None)
    if client.open == 1:
        state.timers.cancel(("client", action_id[:2]))
    state.story.append(("submitted", action_id))
    wrong = broken_rule(key, spec, payload)
    if action.opens is not None and not action_id.n:
        wrong = "id: 0 stands for no session, so it cannot open one"
    early = action_id.n in client.cancelled_early
    client.cancelled_early.discard(action_id.n)
    first = client.keys.get(spec.key) if spec.key and not wrong else None
    if wrong:
        owe(state, action, Outcome.REJECTED, RejectReason.INVALID, wrong)
    elif first is not None and first.body != fold_keys.body_of(action, payload):
        owe(state, action, Outcome.REJECTED, RejectReason.CONFLICT, f"key: it stands for another request, number {first.n}")
    elif early:
        owe(state, action, Outcome.CANCELLED)
    elif first is None and (too_big := never_fits(state, action)):
        owe(state, action, Outcome.REJECTED, RejectReason.NEVER_FITS, too_big)
    elif too_much := _over_limit(state, action):
        over = RejectReason.OVER_LIMIT
        owe(state, action, Outcome.REJECTED, over, too_much, retry_after_ms=limits.RETRY_AFTER_MS)
    elif first is not None:
        fold_keys.follow(state, action, first)
    elif spec.key and not fold_keys.bind(state, client, action, payload):
        rule = f"key: at most {limits.KEYS_PER_CLIENT_MAX} of one client may be in use"
        owe(state, action, Outcome.REJECTED, RejectReason.OVER_LIMIT, rule)
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


def _over_limit(state: State, action: Action) -> str:
    """Why no more is taken in, or "". A session that is open can go on: only that way it ends and gives back what it holds."""
    if action.spec.session:
        return ""
    if state.admission_closed:
        return "the log is nearly full"
    most = setting(state, "pending_max")
    if len(state.actions) > most:
        return f"{most} actions are open already"
    most_mib = setting(state, "pending_mib_max")
    return f"actions with {most_mib} MiB of payloads are open already" if state.payload_bytes > most_mib << 20 else ""


def never_fits(state: State, action: Action) -> str:
    """Why no live executor could ever run this action's minimum, or "". Without any there is nothing to compare. A task's part
    counts if it is by named weights; else it grows when other tasks go."""
    cost, task = charge(state, action), action.id.task
    service = action.spec.service
    places, able = [], []
    any_of_its_kind = False
    for host in state.hosts.values():
        for holder in host.live:
            if holder.key == action.key:
                any_of_its_kind = True
                if not service or service in holder.services:
                    places.append(holder)
                    if not cost or could_run(state, holder, action, cost):
                        if not cost or not state.shares or fits_part(state, holder, action, cost):
                            return ""
                        able.append(host)
    if not any_of_its_kind:
        return ""
    if not places:
        return f"no executor serves {service}"
    if able:
        if "gpu" in cost:
            return f"the part of task {task} are {sum(map(int.bit_count, fixed_gpus(state, task).values()))} of the GPUs"
        most = max(fixed_part(state, host.pool.all.bit_count(), task) for host in able)
        return f"at most cpu {most * MILLI} of one host are the part of task {task}"
    if service and any(could_fit(state, holder, cost) for holder in places):
        return f"no executor has the memory for {service} on so many GPUs"
    unknown = sorted(name for name in cost if all(size_of(state, holder, name) < 0 for holder in places))
    if unknown:
        return f"there is no quota {', '.join(unknown)}, and no host has any"
    largest = {name: max(size_of(state, holder, name) for holder in places) for name in cost}
    return "at most " + ", ".join(f"{name} {amount}" for name, amount in sorted(largest.items())) + " on one executor"


def cancel_requested(state: State, task: str, message: m.CancelsRequested) -> None:
    client = client_of(state, task, message)
    if client is None:
        return
    replaced = is_replaced(client, message)
    for n in message.ids:
        action_id = ActionId(task, message.client, n)
        if replaced and n >= client.others_below:
            state.story.append(f"cancel of another's {action_id}")
            continue
        action = state.actions.get(action_id)
        if action is not None:
            cancel(state, action)
        elif (session := state.sessions.get(action_id)) is not None:
            if session.phase is SessionPhase.OPEN:
                ask_to_end(state, session, "cancelled")
        elif n >= client.done_below and not has_seen(client, n):
            if n - client.done_below < limits.CLIENT_SEEN_WIDTH_MAX:
                client.cancelled_early.add(n)
        else:
            state.story.append(f"cancel of finished {action_id}")
