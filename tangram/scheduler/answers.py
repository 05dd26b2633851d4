"""Answers clients that ask for their ids: after a reconnect, at a gap, when something is overdue."""

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, StoredMessage, next_stored, read_log
from tangram.scheduler.fold_clients import has_seen, next_n
from tangram.scheduler.state import ActionId, State


async def answer(broker: Broker, state: State, task: str, client: str, ask: m.Ask) -> m.Answer:
    """Says which of the asked ids are open or were never seen, and reads the completions of the others from
    `ask.from_seq` on.

    `state` must have folded `ask.stored_seq`. The answer holds at most ENVELOPE_BYTES_MAX of completions; if there are
    more, `through_seq` is where it stopped and the client asks again from there.
    """
    through_seq, epoch = state.seq, state.epoch
    open_: list[int] = []
    unseen: list[int] = []
    known = state.clients.get((task, client))
    for n in ask.ids:
        if ActionId(task, client, n) in state.actions:
            open_.append(n)
        elif known is None or not has_seen(known, n):
            unseen.append(n)
    completions: list[tuple[int, bytes]] = []
    if ask.from_seq and len(open_) + len(unseen) < len(ask.ids):
        ended = set(ask.ids).difference(open_, unseen)  # only asked for membership
        completions, through_seq = await _completions(broker, task, client, ended, ask.from_seq, through_seq)
    return m.Answer(
        through_seq=through_seq,
        epoch=epoch,
        open=open_,
        unseen=unseen,
        next_n=next_n(known) if known is not None else 0,
        completions=completions,
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
