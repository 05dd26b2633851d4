"""A log from a broker into a file, and from a file into an empty broker."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import (
    RECORDED_STAMP,
    Broker,
    PubAck,
    apply,
    begin_recorded,
    bytes_limit,
    stream_state,
)
from tangram.errors import ConfigError, TangramError
from tangram.replay.logfile import LogFile, LogWriter
from tangram.replay.redact import Redaction
from tangram.replay.sources import BrokerSource
from tangram.scheduler.checkpoints import store

_IN_FLIGHT_MAX: Final = 512
_IN_FLIGHT_BYTES_MAX: Final = 8 * 1024 * 1024
_STORED_OVERHEAD_BYTES: Final = 160
"""Of a message in the store, its stamp's header among it."""
_SECRET_BYTES: Final = 32


class Transferred(NamedTuple):
    """What a file has: first_seq is of the first message behind the checkpoint, if it starts from one (0: it does not)."""

    checkpoint_seq: int
    first_seq: int
    last_seq: int
    messages: int


async def export(source: BrokerSource, path: Path, *, without_payloads: bool = False) -> Transferred:
    """Writes a log, whole or not at all. Raises ConfigError (cannot be written), TangramError, BrokerError."""
    redaction = Redaction(secrets.token_bytes(_SECRET_BYTES)) if without_payloads else None
    with LogWriter(path, await source.state(), without_payloads=without_payloads) as writer:
        async for part in source.payloads():
            writer.payloads(part if redaction is None else redaction.payloads(part))
        async for batch in source.batches():
            for record in batch:
                writer.message(record if redaction is None else redaction.record(record))
        done = Transferred(source.after_seq, source.after_seq + 1, source.after_seq + writer.messages, writer.messages)
        if done.last_seq < source.last_seq:
            raise TangramError(f"the log ends at {done.last_seq}, but {source.last_seq} had been stored")
    return done


async def import_(broker: Broker, file: LogFile) -> Transferred:
    """Puts a file's log into a broker that has none: same sequences, stamps in headers. Reads the file twice, and writes nothing
    if it is not in order.

    Raises UnreadableLog, ConfigError (there is a log already), TangramError, BrokerError.
    """
    state, size, messages = file.state(), 0, 0
    last_seq = after_seq = 0 if state is None else state.seq
    for record in file.records():
        size += len(record.data) + len(record.subject) + _STORED_OVERHEAD_BYTES
        last_seq, messages = record.seq, messages + 1
    await apply(broker)
    for name in (subjects.STREAM, subjects.CHECKPOINTS):
        stored = await stream_state(broker, name)
        if stored.last_seq:
            raise ConfigError(f"{name} is not empty: it has messages up to {stored.last_seq}; import into a new broker")
    info = await broker.api(f"STREAM.INFO.{subjects.STREAM}")
    if bytes_limit(info) > 0 and size > limits.LOG_KEEP * bytes_limit(info):  # a scheduler would trim it
        await apply(broker, max_bytes={subjects.STREAM: int(size / limits.LOG_KEEP)})
    await begin_recorded(broker, subjects.STREAM, after_seq + 1, last_seq)
    if state is not None:
        await store(broker, state, info["created"], _payloads(file))
    on_way: deque[tuple[int, int, asyncio.Future[PubAck]]] = deque()
    waiting = 0
    for record in file.records():
        headers = {RECORDED_STAMP: str(record.stamp_ns)}
        on_way.append((record.seq, len(record.data), broker.publish_soon(record.subject, record.data, headers=headers)))
        waiting += len(record.data)
        while len(on_way) > _IN_FLIGHT_MAX or waiting > _IN_FLIGHT_BYTES_MAX:
            waiting -= await _stored(*on_way.popleft())
    while on_way:
        await _stored(*on_way.popleft())
    return Transferred(after_seq, after_seq + 1, last_seq, messages)


async def _payloads(file: LogFile) -> AsyncIterator[m.CheckpointPayloads]:
    for part in file.payloads():
        yield part


async def _stored(seq: int, size: int, future: "asyncio.Future[PubAck]") -> int:
    ack = await future
    if ack.seq != seq:
        raise TangramError(f"message {seq} was stored at {ack.seq}: somebody else writes to this broker")
    return size
