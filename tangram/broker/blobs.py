"""Payloads and outputs that are too large for the log: in pieces in a stream of their own, named by their content.

A piece's subject has the task, the sha256 of the whole and the piece's index. So equal content is there once, what is read
is checked against its name, and a server's permissions on subjects keep one task from another's.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from tangram import limits, subjects
from tangram.broker.connection import Broker
from tangram.broker.errors import (
    AccessDenied,
    ApiError,
    BlobCorrupt,
    BlobMissing,
    BlobsFull,
    BlobTooLarge,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
)
from tangram.broker.log import stamp_ns
from tangram.broker.wire import Delivery
from tangram.subjects import BLOBS, BlobName

T = TypeVar("T")

TRY_S: Final = 5.0
RETRY_S: Final = 0.1
MISSING_S: Final = 1.0
"""On a cluster a replica that lags may answer: what is missing is asked for again for so long."""
_STORE_FULL: Final = 10077


class Blobs:
    """Of one connection, which may go and come back. Whatever number of blobs is put or got at a time, at most
    BLOB_PIECES_IN_FLIGHT pieces are on their way in either direction."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._puts = asyncio.Semaphore(limits.BLOB_PIECES_IN_FLIGHT)
        self._gets = asyncio.Semaphore(limits.BLOB_PIECES_IN_FLIGHT)

    async def put(self, task: str, data: bytes) -> str:
        """Stores `data`, 1 to BLOB_BYTES_MAX bytes, and returns its name. What is there already, and young, is not sent again.

        Raises BlobTooLarge, BlobsFull, AccessDenied, BrokerTimeout (nothing was stored for BLOB_STALL_S), BrokerUnavailable
        (closed), PublishRefused. Cancelled or failed it may leave pieces, which nobody reads and which leave by age.
        """
        if not 1 <= len(data) <= limits.BLOB_BYTES_MAX:
            raise BlobTooLarge(f"{len(data)} bytes: a blob has 1 to {limits.BLOB_BYTES_MAX}")
        sha256 = await asyncio.to_thread(_sha256, data)
        name = BlobName(sha256, len(data), -(-len(data) // limits.BLOB_PIECE_BYTES))
        last = name.pieces - 1
        # The last piece is stored when all others are, so where it is young they are there.
        if not await self._is_young(subjects.blob(task, sha256, last), _piece(data, last)):
            await _all(self._puts, last, lambda index: self._put_piece(subjects.blob(task, sha256, index), _piece(data, index)))
            async with self._puts:
                await self._put_piece(subjects.blob(task, sha256, last), _piece(data, last))
        return str(name)

    async def get(self, task: str, text: str) -> bytes:
        """The content of the blob of that name and task, whole and checked.

        Raises BlobMissing, BlobCorrupt, AccessDenied, BrokerTimeout (nothing was read for BLOB_STALL_S), BrokerUnavailable
        (closed), ApiError.
        """
        name = subjects.parse_blob(text)
        if name is None:
            raise BlobCorrupt(f"not the name of a blob: {text[:150]!r}")
        left = name.size

        async def get_piece(index: int) -> bytes:
            nonlocal left
            piece = await self._get_piece(subjects.blob(task, name.sha256, index))
            left -= len(piece)
            if left < 0:
                raise BlobCorrupt(f"blob {text}: there is more of it than {name.size} bytes")
            return piece

        data = b"".join(await _all(self._gets, name.pieces, get_piece))
        if len(data) != name.size or await asyncio.to_thread(_sha256, data) != name.sha256:
            raise BlobCorrupt(f"blob {text}: what is stored is not what its name says")
        return data

    # --- pieces --------------------------------------------------------------------------------------------------

    async def _put_piece(self, subject: str, data: bytes) -> None:
        async def once() -> None:
            try:
                await self._broker.publish(subject, data, timeout_s=TRY_S)
            except Busy as error:
                if error.code == _STORE_FULL:
                    raise BlobsFull(f"stream {BLOBS} is full: raise its max_bytes, or wait until blobs leave by age") from None
                raise

        await self._patiently(subject, once)

    async def _get_piece(self, subject: str) -> bytes:
        until_s = time.monotonic() + MISSING_S
        while True:
            delivery = await self._ask(subject)
            if delivery.status != "404":
                return delivery.data
            if time.monotonic() > until_s:
                raise BlobMissing(f"{subject} is not stored: too old, or not this task's")
            await asyncio.sleep(RETRY_S)

    async def _is_young(self, subject: str, data: bytes) -> bool:
        delivery = await self._ask(subject)
        if delivery.status == "404" or delivery.data != data or delivery.headers is None:
            return False
        age_s = time.time() - stamp_ns(delivery.headers["Nats-Time-Stamp"]) / 1e9
        return abs(age_s) < limits.BLOB_YOUNG_S  # on the server's clock; one that is far off costs another store, at worst

    async def _ask(self, subject: str) -> Delivery:
        """The stored piece, or an answer with status 404. The subject is part of the question's, so permissions can name it."""
        question = f"$JS.API.DIRECT.GET.{BLOBS}.{subject}"
        delivery = await self._patiently(question, lambda: self._broker.ask(question, b"", timeout_s=TRY_S))
        if delivery.status not in ("", "404"):
            headers = delivery.headers or {}
            raise ApiError(0, f"{subject}: {delivery.status} {headers.get('Description', 'refused')}")
        return delivery

    async def _patiently(self, subject: str, once: Callable[[], Awaitable[T]]) -> T:
        """`once`, again and again while the broker does not answer; time without a connection does not count."""
        since_s = time.monotonic()
        while True:
            try:
                return await once()
            except (BrokerTimeout, BrokerUnavailable, Busy) as error:
                if self._broker.is_closed:
                    raise
                if self._broker.is_denied(subject):
                    raise AccessDenied(f"the server does not let this credential use {subject}") from None
                if not self._broker.is_connected:
                    since_s = time.monotonic()
                elif time.monotonic() - since_s > limits.BLOB_STALL_S:
                    raise BrokerTimeout(f"{subject}: {error}; given up after {limits.BLOB_STALL_S:g} s") from None
            await asyncio.sleep(RETRY_S)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _piece(data: bytes, index: int) -> bytes:
    return data[index * limits.BLOB_PIECE_BYTES : (index + 1) * limits.BLOB_PIECE_BYTES]


async def _all(turns: asyncio.Semaphore, count: int, one: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
    """one(0) to one(count - 1), each when it has a turn. Raises the first error; nothing goes on after it."""
    tasks: list[asyncio.Task[T]] = []
    try:
        for index in range(count):
            await turns.acquire()
            task = asyncio.create_task(one(index))
            task.add_done_callback(lambda _: turns.release())
            tasks.append(task)
            if any(each.done() and each.exception() is not None for each in tasks):
                break
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
