"""How an action can end: one closed enumeration."""

from enum import StrEnum


class Outcome(StrEnum):
    """The end of an action. Each action has exactly one, the first in the log that names it."""

    OK = "ok"
    FAILED = "failed"
    """The program ended with a non-zero exit code or by a signal of its own."""
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    """Never started; `reason` is one of RejectReason."""
    EXPIRED = "expired"
    """Its deadline passed while it was queued."""
    ENVIRONMENT_LOST = "environment_lost"
    """Its session is gone."""
    LOST = "lost"
    """It may have run; nobody can say."""
    ERROR = "error"
    """The infrastructure failed; `reason` is one of ErrorReason."""

    @property
    def is_verdict(self) -> bool:
        """Whether a trainer may use this outcome as a signal about the action itself; all others are to be masked."""
        return self in _VERDICTS


_VERDICTS = frozenset({Outcome.OK, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY, Outcome.OUTPUT_LIMIT})


class RejectReason(StrEnum):
    INVALID = "invalid"
    NEVER_FITS = "never_fits"
    CONFLICT = "conflict"
    OVER_LIMIT = "over_limit"
    QUARANTINED = "quarantined"


class ErrorReason(StrEnum):
    IMAGE = "image"
    DISK = "disk"
    DAEMON = "daemon"
    UPSTREAM = "upstream"
    """Who was called did not do its part: no connection, a broken answer, 5xx."""
    INTERNAL = "internal"
