"""Messages to bytes and back. The subject decides which type may stand on it."""

import re
from typing import Final, get_args

import msgspec

from tangram import limits, subjects
from tangram.messages.beside import Answer, Ask, Control, Controlled, Heartbeat, OutputChunk, Response
from tangram.messages.events import (
    ActionsFinished,
    ActionsReturned,
    ActionsSubmitted,
    CancelsRequested,
    CheckpointEnded,
    CheckpointPayloads,
    DecisionsMade,
    Event,
    ExecutorChanged,
    ExecutorDraining,
    ExecutorJoined,
    ExecutorLeft,
    ExecutorLost,
    Item,
    LeaderStarted,
    ModelsSeeded,
    Output,
    Result,
    Settings,
    Ticked,
)
from tangram.messages.fields import Nonce
from tangram.messages.requests import ActionSpec, AnyPayload, Payload
from tangram.outcomes import Outcome

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
encode = _ENCODER.encode
"""encode(message) -> bytes. Deterministic: equal messages give equal bytes."""

ExecutorMessage = ExecutorJoined | ExecutorChanged | ExecutorDraining | ActionsReturned | ExecutorLeft
ClockMessage = Ticked | ExecutorLost | Settings | ModelsSeeded
LogMessage = (
    ActionsSubmitted | CancelsRequested | ExecutorMessage | ActionsFinished | DecisionsMade | LeaderStarted | ClockMessage
)

_actions = msgspec.msgpack.Decoder(ActionsSubmitted).decode
_cancels = msgspec.msgpack.Decoder(CancelsRequested).decode
_executors = msgspec.msgpack.Decoder(ExecutorMessage).decode
_completions = msgspec.msgpack.Decoder(ActionsFinished).decode
_decisions = msgspec.msgpack.Decoder(DecisionsMade).decode
_leader = msgspec.msgpack.Decoder(LeaderStarted).decode
_clock = msgspec.msgpack.Decoder(ClockMessage).decode
decode_spec = msgspec.msgpack.Decoder(ActionSpec).decode
decode_payload = msgspec.msgpack.Decoder(AnyPayload).decode
decode_scores = msgspec.msgpack.Decoder(list[float]).decode
decode_response = msgspec.msgpack.Decoder(Response).decode
decode_control = msgspec.msgpack.Decoder(Control).decode
decode_controlled = msgspec.msgpack.Decoder(Controlled).decode
decode_result = msgspec.msgpack.Decoder(Result).decode
decode_output = msgspec.msgpack.Decoder(Output).decode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
decode_chunk = msgspec.msgpack.Decoder(OutputChunk).decode
decode_checkpoint_ended = msgspec.msgpack.Decoder(CheckpointEnded).decode
decode_checkpoint_payloads = msgspec.msgpack.Decoder(CheckpointPayloads).decode


class _OnlyNonce(msgspec.Struct):
    nonce: Nonce


_only_nonce = msgspec.msgpack.Decoder(_OnlyNonce).decode

MALFORMED: Final = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError)
"""What a decoder raises on bad bytes. A depth bomb is a RecursionError, which is not a DecodeError."""


class Malformed(ValueError):
    """Stored bytes that are not what their subject promises. Attribute: unknown_type, true if a newer version wrote it."""

    def __init__(self, reason: str, *, unknown_type: bool = False) -> None:
        self.unknown_type = unknown_type
        super().__init__(reason[: limits.DETAIL_LENGTH_MAX])


def decode(subject: str, data: bytes) -> tuple[subjects.Address, LogMessage]:
    """Decodes a stored message; the subject decides which type it may have.

    Raises Malformed for bytes that do not decode, for lists that should run in parallel and do not, and for a subject
    that is not part of the log.
    """
    address = subjects.parse(subject)
    if address is None:
        raise Malformed("not a subject of the log")
    message: LogMessage
    parallel = True
    try:
        match address.role:
            case "actions":
                message = submitted = _actions(data)
                parallel = len(submitted.ids) == len(submitted.specs) == len(submitted.payloads)
            case "completions":
                message = finished = _completions(data)
                parallel = len(finished.ids) == len(finished.results) == len(finished.outputs)
            case "decisions" if address.second:
                message = _decisions(data)
            case "decisions" if address.first == "leader":
                message = _leader(data)
            case "decisions" if address.first == "clock":
                message = _clock(data)
            case "decisions":
                raise Malformed("not a subject of the log")
            case "executors":
                message = _executors(data)
            case _:
                message = _cancels(data)
    except MALFORMED as error:
        # Only what the leader and executors write can come from a newer version; a producer must not stop every fold.
        trusted = address.role in ("decisions", "executors")
        raise Malformed(str(error), unknown_type=trusted and _is_unknown_type(data)) from None
    if not parallel:
        raise Malformed("ids and items differ in number")
    return address, message


def nonce_of(spec: bytes) -> bytes:
    """The nonce of a spec of which nothing else may be in order; zeros if there is none."""
    try:
        return _only_nonce(spec).nonce
    except MALFORMED:
        return bytes(limits.NONCE_BYTES)


_KNOWN_TYPES: Final = frozenset(kind.__name__ for kind in (*Event.__subclasses__(), *Payload.__subclasses__(), *get_args(Item)))
"""Also those that have no place in the log: an answer that was sent there is no newer version's."""
_KNOWN_OUTCOMES: Final = frozenset(Outcome)
_OUTCOME_NAME: Final = re.compile(r"[a-z]+(_[a-z]+)*")
"""What any version would call one: damaged bytes are no newer version."""


def _is_unknown_type(data: bytes) -> bool:
    """Whether this is a well-formed message of a type, or with an item of a type, that this version does not know."""
    raw = _plain(data)
    if not isinstance(raw, dict):
        return False
    items = raw.get("items")
    tagged = [raw, *(items if isinstance(items, list) else [])]
    types = [each.get("type") for each in tagged if isinstance(each, dict)]
    return any(isinstance(name, str) and name not in _KNOWN_TYPES for name in types)


def is_newer_result(data: bytes) -> bool:
    """Whether these bytes, which `decode_result` refused, are a result with an outcome that a newer version knows."""
    raw = _plain(data)
    outcome = raw.get("outcome") if isinstance(raw, dict) else None
    return isinstance(outcome, str) and outcome not in _KNOWN_OUTCOMES and _OUTCOME_NAME.fullmatch(outcome) is not None


def _plain(data: bytes) -> object:
    try:
        return msgspec.msgpack.decode(data)
    except MALFORMED:
        return None
