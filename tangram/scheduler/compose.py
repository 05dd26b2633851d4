"""Turns a window and what is owed into the messages a leader writes. Pure: the same state gives the same bytes."""

from collections.abc import Callable
from typing import Final, NamedTuple

from tangram import limits, subjects
from tangram import messages as m
from tangram.outcomes import ErrorReason, Outcome
from tangram.scheduler.candidates import Decision
from tangram.scheduler.cores import cores_of
from tangram.scheduler.state import Action, ActionId, Incarnation, Phase, SessionPhase, State
from tangram.scheduler.window import Window

_ITEM_OVERHEAD_BYTES = 512
"""Of a Start besides its payload; generous, as the bound is on the sum."""
_EVICTED_MAX: Final = 100
"""Named in a window's note, which is for people."""
PAYLOAD_GONE: Final = "its payload is not in the log any more"


class Outgoing(NamedTuple):
    subject: str
    message: m.LogMessage


def compose(state: State, window: Window, payload_of: Callable[[Action], bytes | None]) -> list[Outgoing]:
    """The messages for one window: decisions, cancels and the like for each incarnation, and rulings for each client.

    payload_of(action) returns the stored payload, or None if it is gone: its action is then ruled `error`.
    """
    rulings = list(state.owed.rulings.items())
    items: dict[str, list[m.Item]] = {}
    sizes: dict[str, list[int]] = {}

    def add(incarnation: str, item: m.Item, size: int = _ITEM_OVERHEAD_BYTES) -> None:
        items.setdefault(incarnation, []).append(item)
        sizes.setdefault(incarnation, []).append(size)

    for incarnation, key in state.owed.cancels:
        action = key.action
        add(incarnation, m.Cancel(task=action.task, client=action.client, n=action.n, attempt=key.attempt))
    for (incarnation, session), reason in state.owed.ends.items():
        add(incarnation, m.EndSession(task=session.task, client=session.client, session=session.n, reason=reason))
    for decision in window.decisions:
        payload = payload_of(decision.action)
        if payload is None:
            gone = m.Result(
                nonce=decision.action.spec.nonce,
                attempt=decision.action.attempt,
                outcome=Outcome.ERROR,
                reason=ErrorReason.INTERNAL,
                detail=PAYLOAD_GONE,
            )
            rulings.append((decision.action.id, gone))
            continue
        add(decision.holder.id, _start(state, decision, payload), len(payload) + _ITEM_OVERHEAD_BYTES)
    for each in window.prefetches:
        evicts = tuple(m.Resident(service=victim.service, gpus=cores_of(victim.gpus)) for victim in each.victims)
        add(each.holder.id, m.Prefetch(service=each.service, gpus=cores_of(each.gpus), evicts=evicts))
    for incarnation, reason in state.owed.dismissals.items():
        add(incarnation, m.Dismiss(reason=reason))

    outgoing = _losses(state)
    outgoing += _decisions(state, window, items, sizes)
    # Last: in one message the first result that names an id is its own.
    rulings += [(action_id, result) for (action_id, _), result in state.owed.conflicts.items()]
    outgoing += _rulings(state, rulings)
    return outgoing


def _start(state: State, decision: Decision, payload: bytes) -> m.Start:
    action, spec = decision.action, decision.action.spec
    return m.Start(
        task=action.id.task,
        client=action.id.client,
        n=action.id.n,
        attempt=action.attempt,
        nonce=spec.nonce,
        kind=spec.kind,
        session=spec.session,
        amounts=decision.amounts,
        cores=decision.cores,
        units=decision.units,
        timeout_ms=spec.timeout_ms,
        queued_ns=state.now_ns - action.submitted_ns,
        predicted_us=decision.predicted_us,
        traceparent=spec.traceparent,
        payload=payload,
        payload_blob=spec.payload_blob,
        gpus=decision.gpus,
        service=spec.service,
        evicts=decision.evicts,
    )


def _losses(state: State) -> list[Outgoing]:
    return [
        Outgoing(
            subjects.CLOCK,
            m.ExecutorLost(epoch=state.epoch, executor=executor, incarnation=incarnation, reason=reason),
        )
        for incarnation, (executor, reason) in state.owed.losses.items()
    ]


def _decisions(state: State, window: Window, items: dict[str, list[m.Item]], sizes: dict[str, list[int]]) -> list[Outgoing]:
    chunks: list[tuple[Incarnation, int, list[m.Item]]] = []
    for incarnation, of_incarnation in items.items():
        holder = state.incarnations[incarnation]
        number = holder.next_number
        start, total = 0, 0
        for index, size in enumerate(sizes[incarnation]):
            full = total + size > limits.ENVELOPE_BYTES_MAX or index - start >= limits.ENVELOPE_ITEMS_MAX
            if full and index > start:
                chunks.append((holder, number, of_incarnation[start:index]))
                number, start, total = number + 1, index, 0
            total += size
        chunks.append((holder, number, of_incarnation[start:]))
    chunks += [(state.incarnations[incarnation], number, []) for incarnation, number in state.owed.fillers]
    evicted: list[tuple[str, str, int]] = [(a.task, a.client, a.n) for a in window.evicted[:_EVICTED_MAX]]
    note = m.WindowNote(policy=window.policy, count=len(chunks), evicted=evicted, fallback=window.fallback)
    return [
        Outgoing(
            subjects.decisions(holder.key, holder.executor),
            m.DecisionsMade(
                epoch=state.epoch,
                incarnation=holder.id,
                number=number,
                window=window.number,
                through_seq=window.through_seq,
                digest=window.digest,
                items=chunk,
                note=note if index == 0 else None,
            ),
        )
        for index, (holder, number, chunk) in enumerate(chunks)
    ]


def _rulings(state: State, rulings: list[tuple[ActionId, m.Result]]) -> list[Outgoing]:
    by_client: dict[tuple[str, str], m.ActionsFinished] = {}
    outgoing: list[Outgoing] = []
    for action_id, result in rulings:
        key = (action_id.task, action_id.client)
        message = by_client.get(key)
        if message is None or len(message.ids) >= limits.ENVELOPE_ITEMS_MAX // 2:
            message = by_client[key] = m.ActionsFinished(epoch=state.epoch, ids=[], results=[], outputs=[])
            outgoing.append(Outgoing(subjects.completions(*key), message))
        message.ids.append(action_id.n)
        message.results.append(m.encode(result))
        message.outputs.append(b"")
    return outgoing


def cancels_for(state: State, task: str, name: str) -> list[Outgoing]:
    """The end of all that a client has open and nobody has asked to end yet: its actions first, then its sandboxes."""
    who = (task, name)
    ids = [
        action.id.n
        for action in state.actions.values()
        if action.id[:2] == who and action.phase is not Phase.OWED and not action.cancelled
    ]
    ids += [each.id.n for each in state.sessions.values() if each.id[:2] == who and each.phase is SessionPhase.OPEN]
    born = state.clients[who].born
    return [
        Outgoing(subjects.cancels(task), m.CancelsRequested(client=name, born=born, ids=ids[at : at + limits.ENVELOPE_ITEMS_MAX]))
        for at in range(0, len(ids), limits.ENVELOPE_ITEMS_MAX)
    ]
