"""Where the outcomes of actions stand whose nonces the asker does not know: it is a later process of their client's name."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, read_log
from tangram.outcomes import Outcome, RejectReason


class _Ended(NamedTuple):
    """The first outcome that the log has under one nonce. refused: because of a conflict, so that it may not be of the id."""

    seq: int
    refused: bool


async def find_outcomes(broker: Broker, task: str, client: str, ids: set[int], through_seq: int) -> dict[int, int]:
    """For each of `ids`, which have ended, the sequence of the stored message with its outcome; without those that the log
    does not have any more.

    The outcome is the first that carries the nonce of the submission. If all that the log says of an id carries one nonce,
    it is that one, because the true outcome is among it. Only if there is another (somebody forged one, or sent something
    under an id or a name in use) are the submissions read, too: an outcome whose nonce nobody submitted is none.
    """
    found: dict[int, dict[bytes, _Ended]] = {n: {} for n in sorted(ids)}
    if not found:
        return {}
    async for seq, message in _stored(broker, subjects.completions(task, client), through_seq):
        if isinstance(message, m.ActionsFinished) and not ids.isdisjoint(message.ids):
            for n, raw in zip(message.ids, message.results, strict=True):
                result = _result(raw) if n in found else None
                if result is not None:
                    refused = result.outcome is Outcome.REJECTED and result.reason == RejectReason.CONFLICT
                    found[n].setdefault(result.nonce, _Ended(seq, refused))
    doubtful = {n for n, by_nonce in found.items() if len(by_nonce) > 1}
    submitted = await _submitted(broker, task, client, doubtful, through_seq) if doubtful else {}
    outcomes: dict[int, int] = {}
    for n, by_nonce in found.items():
        nonces = submitted[n] if n in doubtful else by_nonce
        ended = [by_nonce[nonce] for nonce in nonces if nonce in by_nonce]
        if ended:
            outcomes[n] = min(ended, key=lambda each: each.refused).seq
    return outcomes


async def _submitted(broker: Broker, task: str, client: str, ids: set[int], through_seq: int) -> dict[int, dict[bytes, None]]:
    """The nonces under which ids were submitted, in order, as far as the log has them."""
    found: dict[int, dict[bytes, None]] = {n: {} for n in ids}
    async for _, message in _stored(broker, subjects.actions_of(task), through_seq):
        if isinstance(message, m.ActionsSubmitted) and message.client == client:
            for n, spec in zip(message.ids, message.specs, strict=True):
                if n in found:
                    found[n][m.nonce_of(spec)] = None
    return found


def _result(raw: bytes) -> m.Result | None:
    try:
        return m.decode_result(raw)
    except m.MALFORMED:
        return None


async def _stored(broker: Broker, subject: str, through_seq: int) -> AsyncIterator[tuple[int, m.LogMessage]]:
    """What the log has on a subject (may have wildcards), as far as it can be decoded."""
    seq = 1
    while messages := await read_log(
        broker, subjects.STREAM, seq, subject=subject, batch=64, max_bytes=limits.ENVELOPE_BYTES_MAX
    ):
        for stored in messages:
            if stored.seq > through_seq:
                return
            try:
                yield stored.seq, m.decode(stored.subject, stored.data)[1]
            except m.Malformed:
                continue
        seq = messages[-1].seq + 1
