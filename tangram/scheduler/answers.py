"""Answers clients that ask for their ids: after a reconnect, at a gap, when something is overdue."""

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, StoredMessage, next_stored, read_log
from tangram.scheduler.fold_clients import has_seen, next_n
from tangram.scheduler.recall import find_outcomes
from tangram.scheduler.state import ActionId, State


async def answer(broker: Broker, state: State, task: str, client: str, ask: m.Ask) -> m.Answer:
    """Says which of the asked ids are open or were never seen, and reads the completions of the others from
    `ask.from_seq` on.

    Of ids of an earlier process it says where their outcomes stand instead. `state` must have folded `ask.stored_seq`. The
    answer holds at most ENVELOPE_BYTES_MAX of completions; if there are more, `through_seq` is where it stopped and the
    client asks again from there.
    """
    through_seq, epoch = state.seq, state.epoch
    known = state.clients.get((task, client))
    next_number = next_n(known) if known is not None else 0
    bound = {key: known.keys[key] for key in ask.keys if known is not None and key in known.keys}
    asked = dict.fromkeys([*ask.ids, *(each.n for each in bound.values())])
    open_ = {n: action.spec.nonce for n in asked if (action := state.actions.get(ActionId(task, client, n))) is not None}
    unseen = [n for n in asked if n not in open_ and (known is None or not has_seen(known, n))]
    outcomes: dict[int, int] = {}
    completions: list[tuple[int, bytes]] = []
    if ask.recall:
        outcomes = {each.n: each.seq for each in bound.values() if each.seq}
        if known is not None:
            outcomes |= {n: known.ended[n] for n in asked if n in known.ended}
        # Of a client that was forgotten nothing is known, but the log may still have outcomes.
        looked_for = set(asked).difference(open_, outcomes, unseen if known is not None else ())
        outcomes |= await find_outcomes(broker, task, client, looked_for, through_seq)
        unseen = [n for n in unseen if n not in outcomes]
    elif ask.at_seq:
        stored = await read_log(broker, subjects.STREAM, ask.at_seq, subject=subjects.completions(task, client), batch=1)
        completions = [(each.seq, each.data) for each in stored if each.seq == ask.at_seq]
    elif ask.from_seq and len(open_) + len(unseen) < len(asked):
        ended = set(asked).difference(open_, unseen)  # only asked for membership
        completions, through_seq = await _completions(broker, task, client, ended, ask.from_seq, through_seq)
    return m.Answer(
        through_seq=through_seq,
        epoch=epoch,
        open=list(open_),
        nonces=list(open_.values()),
        unseen=unseen,
        next_n=next_number,
        completions=completions,
        outcomes=list(outcomes.items()),
        keys=[(key, each.n) for key, each in bound.items()],
    )


async def _completions(
    broker: Broker, task: str, client: str, ids: set[int], from_seq: int, through_seq: int
) -> tuple[list[tuple[int, bytes]], int]:
    """Those that name any of `ids`, and up to where they are complete."""
    subject = subjects.completions(task, client)
    found: list[tuple[int, bytes]] = []
    total = 0
    seq = from_seq
    while seq <= through_seq:
        messages = await read_log(broker, subjects.STREAM, seq, subject=subject, batch=64, max_bytes=limits.ENVELOPE_BYTES_MAX)
        if not messages:
            # A replica that lags knows less than we have read: only the leader's word is the end.
            following = await next_stored(broker, subjects.STREAM, seq, subject=subject)
            if following is None:
                break
            messages = [following]
        for message in messages:
            if message.seq > through_seq:
                return found, through_seq
            if not _names_any(message, ids):
                continue
            if found and total + len(message.data) > limits.ENVELOPE_BYTES_MAX:
                return found, message.seq - 1
            found.append((message.seq, message.data))
            total += len(message.data)
        seq = messages[-1].seq + 1
    return found, through_seq


def _names_any(stored: StoredMessage, ids: set[int]) -> bool:
    try:
        _, message = m.decode(stored.subject, stored.data)
    except m.Malformed:
        return False
    return isinstance(message, m.ActionsFinished) and not ids.isdisjoint(message.ids)
