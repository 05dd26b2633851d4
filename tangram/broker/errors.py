"""What can go wrong between us and the broker, and the one place where nats-py's exceptions become ours.

A caller has to tell four cases apart, so there are four kinds: it cannot be reached, it did not answer in time (the
message may or may not be stored), it said no, and we did not even send because the message cannot fit.
"""

import asyncio

from nats import errors as nats_errors

from tangram.errors import (
    AccessDenied,
    ApiError,
    BlobCorrupt,
    BlobError,
    BlobMissing,
    BlobsFull,
    BlobTooLarge,
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
    LogGap,
    LogTruncated,
    MessageTooLarge,
    NotLeader,
    PublishRefused,
)

__all__ = [
    "AccessDenied",
    "ApiError",
    "BlobCorrupt",
    "BlobError",
    "BlobMissing",
    "BlobTooLarge",
    "BlobsFull",
    "BrokerError",
    "BrokerTimeout",
    "BrokerUnavailable",
    "Busy",
    "LogGap",
    "LogTruncated",
    "MessageTooLarge",
    "NotLeader",
    "PublishRefused",
    "from_nats",
    "refusal",
]


WRONG_LAST_SEQUENCE = 10071
"""JSStreamWrongLastSequenceErrF: the expected last sequence (of the subject) is not the last."""
_MESSAGE_TOO_LARGE = 10054
"""JSStreamMessageExceedsMaximumErr: over the stream's max_msg_size."""
IN_PROCESS = 10164
"""A conditional write is in process: what a replicated stream says to the next one."""
_ID_IN_PROCESS = 10158
"""The message's own first copy is in process: what a replicated stream says to a second one, above all one without a majority."""
_BUSY = frozenset({10077, IN_PROCESS, _ID_IN_PROCESS, 10167})
"""Store full (discard new); in process (transient); too many requests."""
_STATUS_SERVER, _STATUS_TOO_MANY = 500, 429


def refusal(status: int, code: int, description: str) -> BrokerError:
    """The exception for an error answer to a publish. `status` is HTTP-like, `code` the server's err_code."""
    if code == WRONG_LAST_SEQUENCE:
        return NotLeader(code, description)
    if code == _MESSAGE_TOO_LARGE:
        return MessageTooLarge(description)
    if code in _BUSY or status >= _STATUS_SERVER or status == _STATUS_TOO_MANY:  # it is the server that cannot, not the message
        return Busy(code or status, description)
    return PublishRefused(code, description)


def from_nats(error: BaseException) -> BrokerError:
    """The exception of ours for one that nats-py, asyncio or the socket raised."""
    match error:
        case BrokerError():
            return error
        case nats_errors.MaxPayloadError():
            return MessageTooLarge(str(error))
        case nats_errors.TimeoutError() | asyncio.TimeoutError():
            return BrokerTimeout(_words(error))
        case nats_errors.OutboundBufferLimitError():
            # With buffering off this is how nats-py says that there is no connection.
            return BrokerUnavailable("not connected to the broker")
        case nats_errors.BadSubjectError() | nats_errors.BadHeaderError():
            return BrokerError(_words(error))
        case _:
            return BrokerUnavailable(_words(error))


def _words(error: BaseException) -> str:
    return str(error).removeprefix("nats: ") or type(error).__name__
