"""The exceptions of the package. What an action's program did is never one of them: that is an Outcome."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tangram.producers.result import Result


class TangramError(Exception):
    """Base of everything that the package raises on purpose."""


class InvalidRequest(TangramError, ValueError):
    """A request that breaks a rule, found before anything was sent.

    Attributes: field (dotted name of the offending part), rule (what it must be), value (its repr, at most 100 characters).
    """

    def __init__(self, field: str, rule: str, value: object = None) -> None:
        try:
            shown = repr(value)
        except Exception as error:  # an int of thousands of digits, an object with a broken repr
            shown = f"{type(value).__name__}, {type(error).__name__} when shown"
        self.field, self.rule, self.value = field, rule, shown[:100]
        super().__init__(f"{field}: {rule}" + ("" if value is None else f" (got {self.value})"))


class ConfigError(TangramError, ValueError):
    """A configuration file or option that cannot be used; the message names the file and the field."""


class UnreadableLog(ConfigError):
    """A file that is no exported log, or not a whole one. Attributes: path, what (is wrong with it)."""

    def __init__(self, path: object, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path}: {what}")


class SessionError(TangramError):
    """A session could not be opened. Attribute: result, the Result of the opening action."""

    def __init__(self, result: "Result") -> None:
        self.result = result
        super().__init__(f"session could not be opened: {result}")


class ScoreError(TangramError):
    """A batch was not scored. Attribute: result, the Result of the action; its outcome says why."""

    def __init__(self, result: "Result") -> None:
        self.result = result
        super().__init__(f"the batch was not scored: {result}")


class CallError(TangramError):
    """A call did not end well. Attribute: result, the Result of the action; its outcome says why, and its `response` is what was
    answered, if anything was."""

    def __init__(self, result: "Result") -> None:
        self.result = result
        super().__init__(f"the call failed: {result}")


class ClientClosed(TangramError):
    """The client was closed while the action was open; the action itself goes on and can be read by its id, unless the client
    was made with `cancel_on_disconnect`."""


class UnknownAction(TangramError):
    """No action of this id, or with this key, was ever accepted from a client of this task and name."""


class ResultGone(TangramError):
    """The action has ended, and its outcome is no longer in the log."""


class NewerVersion(TangramError):
    """The log holds what a newer version wrote. Nothing here may act on it half-understood: upgrade."""


# --- the broker ---------------------------------------------------------------------------------------------------


class BrokerError(TangramError):
    """Base of what can go wrong between us and the broker."""


class BrokerUnavailable(BrokerError):
    """Nobody to talk to: cannot connect, not connected now, closed, or no responder. What was asked did not happen."""


class BrokerTimeout(BrokerError):
    """No answer in time, or the connection was lost while waiting: what was asked may or may not have happened."""


class MessageTooLarge(BrokerError):
    """Payload and headers together exceed what the server or the stream takes; nothing was stored."""


class ApiError(BrokerError):
    """The JetStream API refused a request. `code` is the server's err_code, `description` its words."""

    def __init__(self, code: int, description: str, *, status: int = 0) -> None:
        self.code, self.description, self.status = code, description, status
        super().__init__(f"{description} ({code})")


class PublishRefused(BrokerError):
    """The stream did not store the message. `code` is the server's err_code, `description` its words."""

    def __init__(self, code: int, description: str) -> None:
        self.code, self.description = code, description
        super().__init__(f"{description} ({code})")


class NotLeader(PublishRefused):
    """Somebody stored a newer leader record (err_code 10071): stop writing as the leader."""


class Busy(PublishRefused):
    """Not now: the store is full (10077), another conditional write (10164) or the message's own first copy (10158) is in
    process, or the server fails (5xx: no stream listens, no meta leader). Send the same bytes again later."""


class LogGap(BrokerError):
    """Messages that a reader was to read are no longer in the stream. `first` to `last` are their sequences."""

    def __init__(self, stream: str, first: int, last: int) -> None:
        self.stream, self.first, self.last = stream, first, last
        super().__init__(f"{stream}: messages {first} to {last} are no longer stored")


class LogTruncated(BrokerError):
    """The stream ends before a message that a reader has already seen: the broker lost what it had acknowledged."""

    def __init__(self, stream: str, last: int, expected: int) -> None:
        self.stream, self.last, self.expected = stream, last, expected
        super().__init__(f"{stream} ends at {last}, but {expected - 1} had been seen")


class AccessDenied(BrokerError):
    """The server does not let this credential use the subject that the message names."""


class BlobError(BrokerError):
    """Base of what can be wrong with a payload or an output that is too large for the log."""


class BlobMissing(BlobError):
    """A piece of it is not stored: too old, or never stored under this task."""


class BlobCorrupt(BlobError):
    """What is stored is not what its name says, or the name is none."""


class BlobTooLarge(BlobError):
    """It is over `limits.BLOB_BYTES_MAX`; nothing was stored."""


class BlobsFull(BlobError):
    """The stream of blobs has reached its `max_bytes`. Blobs leave it by age alone."""
