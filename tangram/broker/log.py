"""Reading a stream without a consumer: by batched direct get, and the few questions one asks about a stream."""

import asyncio
import base64
import calendar
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from tangram.broker.connection import Broker
from tangram.broker.errors import ApiError, BrokerError, BrokerTimeout, BrokerUnavailable
from tangram.broker.wire import Delivery

READ_BYTES_MAX: Final = 8 * 1024 * 1024
RECORDED_STAMP: Final = "Tangram-Recorded-Stamp"
"""Header of a message that was recorded elsewhere: its stamp there, in nanoseconds."""
_NO_MESSAGE = 10037
_ADDED_BY_DIRECT_GET = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
)


class StoredMessage(NamedTuple):
    """A message of a stream. `stamp_ns` is the server's wall clock when it was stored; it may fall along the sequence."""

    seq: int
    stamp_ns: int
    subject: str
    data: bytes
    headers: Mapping[str, str] | None

    def recorded_ns(self, through_seq: int) -> int:
        """The stamp that it had where it was recorded, if it is one of those (`streams.recorded_through`), else its own. Later
        ones are not asked: anybody may send a header, and stamps make log time."""
        recorded = (self.headers or {}).get(RECORDED_STAMP) if self.seq <= through_seq else None
        return self.stamp_ns if recorded is None else int(recorded)


class StreamState(NamedTuple):
    """`first_seq` is last_seq + 1 when nothing is stored. `bytes` is what the messages take in the store."""

    first_seq: int
    last_seq: int
    messages: int
    bytes: int


async def read_log(
    broker: Broker,
    stream: str,
    seq: int,
    *,
    subject: str | None = None,
    batch: int = 512,
    max_bytes: int = READ_BYTES_MAX,
    timeout_s: float = 10.0,
) -> list[StoredMessage]:
    """Returns up to `batch` messages from `seq` on, in order, those on `subject` (may have wildcards) if given; [] at the end.

    Stops early at about `max_bytes`; go on at the last one's sequence + 1. Needs allow_direct on the stream. On a cluster
    a replica that lags may answer, so [] means "not there yet", no more.
    Raises BrokerUnavailable (no such stream, not connected), BrokerTimeout, ApiError (bad request).
    """
    messages: list[StoredMessage] = []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sink(delivery: Delivery | BrokerError) -> None:
        if done.done():
            return
        if isinstance(delivery, BrokerError):
            done.set_exception(delivery)
            return
        headers = delivery.headers or {}
        status = headers.get("Status", "")
        if not status:
            messages.append(_direct(delivery))
        elif status in ("204", "404"):
            done.set_result(None)
        elif status == "503":
            done.set_exception(BrokerUnavailable(f"{stream} does not exist or does not allow direct get"))
        else:
            done.set_exception(ApiError(int(status), headers.get("Description", "direct get refused")))

    body = {"seq": max(1, seq), "batch": batch, "max_bytes": max_bytes, "next_by_subj": subject or ">"}
    inbox = broker.open_inbox(sink)
    try:
        broker.require_connected()
        broker.send_soon(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(body), reply=inbox.subject)
        async with asyncio.timeout(timeout_s):
            await done
    except TimeoutError:
        raise BrokerTimeout(f"{stream}: no end of the batch from {seq} in {timeout_s:g} s") from None
    finally:
        inbox.close()
    return messages


async def last_for(broker: Broker, stream: str, subject: str, *, timeout_s: float = 5.0) -> StoredMessage | None:
    """The last message on `subject`, asked of the stream's leader (a replica may lag). None if there is none.

    Raises ApiError (no such stream), BrokerUnavailable, BrokerTimeout.
    """
    return await _get(broker, stream, {"last_by_subj": subject}, timeout_s)


async def next_stored(
    broker: Broker, stream: str, seq: int, *, subject: str = ">", timeout_s: float = 5.0
) -> StoredMessage | None:
    """The first message at or after `seq` on `subject` (may have wildcards), asked of the stream's leader. None if there
    is none. Raises as `last_for`."""
    return await _get(broker, stream, {"seq": seq, "next_by_subj": subject}, timeout_s)


async def stream_state(broker: Broker, stream: str) -> StreamState:
    """What the stream holds now. Raises ApiError (no such stream), BrokerUnavailable, BrokerTimeout."""
    return state_of(await broker.api(f"STREAM.INFO.{stream}"))


def state_of(info: Mapping[str, Any]) -> StreamState:
    """The state in an answer to STREAM.INFO."""
    state = info["state"]
    return StreamState(state["first_seq"], state["last_seq"], state["messages"], state["bytes"])


async def _get(broker: Broker, stream: str, body: dict[str, object], timeout_s: float) -> StoredMessage | None:
    try:
        message = (await broker.api(f"STREAM.MSG.GET.{stream}", body, timeout_s))["message"]
    except ApiError as error:
        if error.code == _NO_MESSAGE:
            return None
        raise
    headers = _header_block(base64.b64decode(message["hdrs"])) if message.get("hdrs") else None
    data = base64.b64decode(message.get("data", ""))
    return StoredMessage(message["seq"], stamp_ns(message["time"]), message["subject"], data, headers)


def _direct(delivery: Delivery) -> StoredMessage:
    headers = delivery.headers or {}
    own = {name: value for name, value in headers.items() if name not in _ADDED_BY_DIRECT_GET}
    return StoredMessage(
        int(headers["Nats-Sequence"]), stamp_ns(headers["Nats-Time-Stamp"]), headers["Nats-Subject"], delivery.data, own or None
    )


def _header_block(block: bytes) -> dict[str, str]:
    lines = (line.partition(b":") for line in block.split(b"\r\n")[1:] if line)
    return {name.decode().strip(): value.decode(errors="replace").strip() for name, _, value in lines}


def stamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of the server's RFC 3339 times (UTC, up to nine decimals), without a float on the way."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return _seconds(whole) * 1_000_000_000 + int(fraction.ljust(9, "0"))


@lru_cache(maxsize=64)
def _seconds(text: str) -> int:
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
