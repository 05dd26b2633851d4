"""Bytes and subjects of the NATS and JetStream protocols that we read or measure ourselves. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

_HEADER_START_BYTES = len(b"NATS/1.0\r\n")
_HEADER_END_BYTES = len(b"\r\n")
_HEADER_LINE_BYTES = len(b": ") + len(b"\r\n")
_ACK_TOKENS_V1 = 9
_ACK_TOKENS_V2_MIN = 11


class PubAck(NamedTuple):
    """A message is stored: its sequence, and whether the same Nats-Msg-Id had been stored before (then `seq` is that one)."""

    seq: int
    duplicate: bool


class Delivery(NamedTuple):
    """A message as it came off the wire. `reply` is '' if no answer is wanted; names in `headers` are case-sensitive."""

    subject: str
    data: bytes
    headers: Mapping[str, str] | None
    reply: str

    @property
    def status(self) -> str:
        """The inline status ("404", "408", "503" ...) of a message without payload, else ''."""
        return self.headers.get("Status", "") if self.headers is not None and not self.data else ""


class _PubError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAnswer(msgspec.Struct):
    """What a stream answers to a publish; `error` excludes the rest."""

    seq: int = 0
    duplicate: bool = False
    error: _PubError | None = None


decode_pub_answer = msgspec.json.Decoder(PubAnswer).decode


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """Size of the header block as nats-py writes it; it counts against max_payload."""
    if headers is None:
        return 0
    lines = sum(len(name.strip().encode()) + len(value.strip().encode()) + _HEADER_LINE_BYTES for name, value in headers.items())
    return _HEADER_START_BYTES + lines + _HEADER_END_BYTES


class AckMetadata(NamedTuple):
    """Where a consumer's message stands, read from its reply subject. `stamp_ns` is the server's wall clock at storing."""

    delivered: int
    stream_seq: int
    consumer_seq: int
    stamp_ns: int
    pending: int


def ack_metadata(reply: str) -> AckMetadata:
    """Reads a reply subject of either form; raises ValueError for anything else.

    v1: $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<stamp>.<pending>
    v2: $JS.ACK.<domain>.<account hash>.<stream>.<consumer>.<delivered>.<...>.<pending>[.<random>]
    Server 2.15 sends v1 unless the feature flag js_ack_fc_v2 is on; reading both costs nothing and survives the flip.
    """
    tokens = reply.split(".")
    if tokens[:2] != ["$JS", "ACK"]:
        raise ValueError(f"not an acknowledgement subject: {reply!r}")
    if len(tokens) == _ACK_TOKENS_V1:
        numbers = tokens[4:9]
    elif len(tokens) >= _ACK_TOKENS_V2_MIN:
        numbers = tokens[6:11]
    else:
        raise ValueError(f"not an acknowledgement subject: {reply!r}")
    delivered, stream_seq, consumer_seq, stamp_ns, pending = map(int, numbers)
    return AckMetadata(delivered, stream_seq, consumer_seq, stamp_ns, pending)
