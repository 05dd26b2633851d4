"""Checkpoints in their stream: written in parts, and valid only with their last message."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, BrokerError, purge, read_log, state_of
from tangram.errors import TangramError
from tangram.scheduler.checkpoint import UnreadableCheckpoint, dump, load
from tangram.scheduler.payloads import Payloads
from tangram.scheduler.state import Action, ActionId, Phase, State
from tangram.version import __version__

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S: Final = 10.0
LAG_S: Final = 3.0
"""How long a replica of a cluster may lag behind."""
FETCH_ACTIONS: Final = 200
"""Payloads that are in memory at a time while a checkpoint is written."""


class ForeignCheckpoint(TangramError):
    """The checkpoints are those of another log."""


class Restored(NamedTuple):
    """A state as it was at a checkpoint. `ends` are the last messages of the checkpoints up to it, oldest first."""

    name: str
    state: State
    ends: list[m.CheckpointEnded]


async def restore(broker: Broker, *, oldest: bool = False, seq_max: int | None = None) -> Restored | None:
    """The newest checkpoint that can be read, or the oldest from which the log is still whole; None if there is none. seq_max: of
    those not behind it, if the log is whole from one.

    Raises ForeignCheckpoint, UnreadableCheckpoint (the log is trimmed, and there is none), BrokerError.
    """
    deadline_s = time.monotonic() + LAG_S
    while True:
        ends = await _ends(broker)  # before the log's state: what is taken meanwhile must not seem to be of another log
        info = await broker.api(f"STREAM.INFO.{subjects.STREAM}")
        created, stored = info["created"], state_of(info)
        if ends or stored.first_seq <= 1:
            break
        await _lagging(deadline_s, f"the log begins at {stored.first_seq}, and no checkpoint leads up to it")
    for _, end in ends:
        if end.log_created != created or end.seq > stored.last_seq:
            raise ForeignCheckpoint(
                f"the checkpoint at sequence {end.seq} is of a log made at {end.log_created}, but {subjects.STREAM} was made at"
                f" {created} and ends at {stored.last_seq}: put the log back, or purge {subjects.CHECKPOINTS} to start anew"
            )
    if not ends:
        return None
    usable = [index for index, (_, end) in enumerate(ends) if end.seq + 1 >= stored.first_seq]
    if seq_max is not None:
        usable = [index for index in usable if ends[index][1].seq <= seq_max] or usable[:1]
    for index in usable if oldest else reversed(usable):
        name, end = ends[index]
        try:
            state = load(await _state_bytes(broker, name, end))
            if state.digest != end.digest:
                raise UnreadableCheckpoint("its state has another digest than it should")
        except UnreadableCheckpoint as error:
            log.error("checkpoint %s is not used: %s", name, error)
            continue
        return Restored(name, state, [end for _, end in ends[: index + 1]])
    return None


async def read_payloads(broker: Broker, restored: Restored, payloads: Payloads) -> None:
    """Puts the checkpoint's payloads into the cache as far as they fit, and notes where the others are. Actions whose payload is
    not to be had end as `error` when their turn comes. Raises BrokerError."""
    places: dict[ActionId, int] = {}
    try:
        async for place, part in payload_parts(broker, restored):
            for each, payload in zip(part.ids, part.payloads, strict=True):
                places[ActionId(*each)] = place
                payloads.keep(ActionId(*each), payload)
    except UnreadableCheckpoint as error:
        log.error("checkpoint %s has lost payloads: %s", restored.name, error)
    payloads.checkpointed(places)


async def _ends(broker: Broker) -> list[tuple[str, m.CheckpointEnded]]:
    """Names and last messages of all complete checkpoints, oldest first."""
    found: list[tuple[str, m.CheckpointEnded]] = []
    seq = 1
    while stored := await read_log(broker, subjects.CHECKPOINTS, seq, subject=subjects.CHECKPOINT_ENDS):
        for each in stored:
            try:
                found.append((subjects.checkpoint_name(each.subject), m.decode_checkpoint_ended(each.data)))
            except m.MALFORMED as error:
                log.error("checkpoint on %s is not used: %s", each.subject, error)
        seq = stored[-1].seq + 1
    return sorted(found, key=lambda named: named[1].seq)


async def _state_bytes(broker: Broker, name: str, end: m.CheckpointEnded) -> bytes:
    parts: list[bytes] = []
    seq = end.first_seq
    deadline_s = time.monotonic() + LAG_S
    while len(parts) < end.parts:
        stored = await read_log(broker, subjects.CHECKPOINTS, seq, subject=subjects.checkpoint(name, "state"), batch=16)
        parts += [each.data for each in stored]
        if stored:
            seq = stored[-1].seq + 1
        else:
            await _lagging(deadline_s, f"it has {len(parts)} of {end.parts} parts")
    data = b"".join(parts[: end.parts])
    if hashlib.sha256(data).digest() != end.sha256:
        raise UnreadableCheckpoint("its checksum is wrong")
    return data


async def payload_parts(broker: Broker, restored: Restored) -> AsyncIterator[tuple[int, m.CheckpointPayloads]]:
    """All of a checkpoint, and where each part stands. Raises UnreadableCheckpoint if there are less than there should be."""
    name, end = restored.name, restored.ends[-1]
    seq, found = end.first_seq, 0
    deadline_s = time.monotonic() + LAG_S
    while found < end.payloads:
        stored = await read_log(broker, subjects.CHECKPOINTS, seq, subject=subjects.checkpoint(name, "payloads"), batch=16)
        for each in stored:
            try:
                part = m.decode_checkpoint_payloads(each.data)
            except m.MALFORMED as error:
                raise UnreadableCheckpoint(f"its payloads at {each.seq}: {error}") from None
            found += len(part.ids)
            seq = each.seq + 1
            yield each.seq, part
        if not stored:
            await _lagging(deadline_s, f"it has {found} of {end.payloads} payloads")


async def _lagging(deadline_s: float, what: str) -> None:
    """What a replica does not have, it may have in a moment. Raises UnreadableCheckpoint after the deadline."""
    if time.monotonic() > deadline_s:
        raise UnreadableCheckpoint(what)
    await asyncio.sleep(0.1)


async def write(
    broker: Broker, state: State, log_created: str, payloads: Payloads
) -> tuple[m.CheckpointEnded, dict[ActionId, int]]:
    """Writes a checkpoint of the state as it is now, and of the payloads of what is open then.

    `state` is read before the first await and may move on. Returns the last message and where each payload is. If that
    cannot be stored, takes back what was, and raises BrokerError.
    """
    waiting = [action for action in state.actions.values() if action.phase is not Phase.OWED]
    return await store(broker, state, log_created, _grouped(waiting, payloads, state))


async def store(
    broker: Broker, state: State, log_created: str, grouped: AsyncIterator[m.CheckpointPayloads]
) -> tuple[m.CheckpointEnded, dict[ActionId, int]]:
    """`write` with the payloads as they come."""
    name = f"{state.seq}-{secrets.token_hex(8)}"
    try:
        return await _store_all(broker, name, state, log_created, grouped)
    except BrokerError:
        await purge(broker, subjects.CHECKPOINTS, subject=subjects.checkpoint(name, ">"))
        raise


async def _store_all(
    broker: Broker, name: str, state: State, log_created: str, grouped: AsyncIterator[m.CheckpointPayloads]
) -> tuple[m.CheckpointEnded, dict[ActionId, int]]:
    seq, digest, data = state.seq, state.digest, dump(state)
    sha256 = hashlib.sha256(data).digest()
    first_seq = parts = 0
    for at in range(0, len(data), limits.ENVELOPE_BYTES_MAX):
        stored_seq = await _store(broker, name, "state", data[at : at + limits.ENVELOPE_BYTES_MAX])
        first_seq, parts = first_seq or stored_seq, parts + 1
    places: dict[ActionId, int] = {}
    payload_bytes = 0
    async for part in grouped:
        payload_bytes += sum(map(len, part.payloads))
        place = await _store(broker, name, "payloads", m.encode(part))
        places.update((ActionId(*each), place) for each in part.ids)
    end = m.CheckpointEnded(
        seq=seq,
        log_created=log_created,
        first_seq=first_seq,
        parts=parts,
        state_bytes=len(data),
        sha256=sha256,
        payloads=len(places),
        payload_bytes=payload_bytes,
        digest=digest,
        code_version=__version__,
    )
    await _store(broker, name, "end", m.encode(end))
    return end, places


async def _store(broker: Broker, name: str, part: str, data: bytes) -> int:
    return (await broker.publish(subjects.checkpoint(name, part), data, timeout_s=PUBLISH_TIMEOUT_S)).seq


async def _grouped(waiting: list[Action], payloads: Payloads, state: State) -> AsyncIterator[m.CheckpointPayloads]:
    """The payloads of what is still open when its turn comes (what has ended meanwhile never needs it again)."""
    part = m.CheckpointPayloads(ids=[], payloads=[])
    size = 0
    for at in range(0, len(waiting), FETCH_ACTIONS):
        wanted = [action for action in waiting[at : at + FETCH_ACTIONS] if action.id in state.actions]
        fetched = await payloads.fetch(wanted, state.actions, ahead=False)
        for action in wanted:
            payload = fetched.get(action.id)
            if payload is None:
                continue
            if part.ids and size + len(payload) > limits.ENVELOPE_BYTES_MAX:
                yield part
                part, size = m.CheckpointPayloads(ids=[], payloads=[]), 0
            part.ids.append(action.id)
            part.payloads.append(payload)
            size += len(payload) + 200
    if part.ids:
        yield part


async def sweep(broker: Broker) -> None:
    """Deletes the parts of checkpoints that were never ended, as a scheduler leaves that dies while it writes one: they would
    take the room of the next. Raises BrokerError."""
    complete = {name for name, _ in await _ends(broker)}
    info = await broker.api(f"STREAM.INFO.{subjects.CHECKPOINTS}", {"subjects_filter": "tangram.checkpoints.*.*"})
    names = dict.fromkeys(subjects.checkpoint_name(subject) for subject in sorted(info["state"].get("subjects") or {}))
    for name in names:
        if name not in complete:
            log.warning("checkpoint %s was never ended: its parts are deleted", name)
            await purge(broker, subjects.CHECKPOINTS, subject=subjects.checkpoint(name, ">"))


async def forget_before(broker: Broker, end: m.CheckpointEnded) -> None:
    """Deletes the checkpoints before this one. Raises BrokerError."""
    await purge(broker, subjects.CHECKPOINTS, before_seq=end.first_seq)
