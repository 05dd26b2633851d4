"""What a producer asks for: unknown fields are an error, so that a misspelt one is never ignored in silence."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tangram import limits
from tangram.messages.fields import Amount, Argument, Count, Kind, Name, Nonce, Number, Path, Variable


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something a user asked for. Unknown fields are an error."""


class Demand(Request, frozen=True, kw_only=True):
    """How much of one resource an action takes: `low` exactly, or any amount from `low` to `high`, or one of `legal`.

    `high` 0 means `low`. `legal`, when given, is rising, and starts at `low` and ends at `high`.
    """

    low: Amount
    high: Amount = 0
    legal: Annotated[tuple[Amount, ...], Meta(max_length=limits.LEGAL_AMOUNTS_MAX)] = ()


class Hint(Request, frozen=True, kw_only=True):
    """What the user knows about the duration: Amdahl's law with `duration_us` on one unit, of which `parallel_ppm`
    millionths scale; or a table of (units, duration), rising in units, which replaces the law."""

    duration_us: Count = 0
    parallel_ppm: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    table_us: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=limits.LEGAL_AMOUNTS_MAX)] = ()


class ActionSpec(Request, frozen=True, kw_only=True):
    """What the scheduler has to know about an action.

    cost: amounts by resource. "cpu" in millicores: whole cores, or a fixed fraction below one core; "memory" in MiB;
    "gpu": chunks of 1, 2, 4 or 8; a quota by its name, in tokens. service: the model that serves it, for key "gpu"; the endpoint,
    for key "api".
    session: the number `n` of the session.open action whose sandbox it runs in; 0 for a one-shot action.
    timeout_ms: run time, counted from its start. deadline_ms: from submission to its start, in log time.
    retry: "safe" allows another attempt after a loss. key: the caller's own idempotency key.
    payload_blob: names the task's blob that is the payload (`subjects.BlobName`); the payload beside it is then empty.
    """

    nonce: Nonce
    kind: Kind
    cost: Annotated[dict[Name, Demand], Meta(max_length=limits.RESOURCES_PER_ACTION_MAX)] = {}
    timeout_ms: Annotated[int, Meta(ge=1, le=limits.TIMEOUT_MS_MAX)] = limits.TIMEOUT_MS_DEFAULT
    deadline_ms: Annotated[int, Meta(ge=0, le=limits.DEADLINE_MS_MAX)] = limits.DEADLINE_MS_DEFAULT
    retry: Literal["never", "safe"] = "never"
    session: Count = 0
    idle_ttl_ms: Annotated[int, Meta(ge=1, le=limits.DEADLINE_MS_MAX)] = limits.SESSION_IDLE_MS_DEFAULT
    hint: Hint | None = None
    key: Annotated[str, Meta(max_length=limits.KEY_LENGTH_MAX)] = ""
    traceparent: Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f-]*\Z")] = ""
    payload_blob: Annotated[str, Meta(max_length=128)] = ""
    service: Name = ""


class Payload(Request, tag=True, frozen=True, kw_only=True):
    """What the executor has to know. Its type must suit the action's kind."""


class Run(Payload, frozen=True, kw_only=True):
    """Kind "run" (or any name of the user's own): a program. Environment names LD_* are refused by the executor.
    output_max: bytes that are kept of each of its streams, head and tail."""

    argv: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=limits.ARGUMENTS_COUNT_MAX)]
    stdin: bytes = b""
    env: Annotated[dict[Variable, Argument], Meta(max_length=limits.ENVIRONMENT_COUNT_MAX)] = {}
    cwd: Annotated[str, Meta(max_length=limits.PATH_BYTES_MAX, pattern=r"^[^\x00]*\Z")] = ""
    stream: bool = False
    output_max: Annotated[int, Meta(ge=0, le=limits.OUTPUT_KEPT_BYTES_MAX)] = limits.OUTPUT_BYTES_MAX


class FileWrite(Payload, frozen=True, kw_only=True):
    """Kind "file.write": `path` is relative to the session's folder; missing parents are made."""

    path: Path
    data: bytes
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644


class FileRead(Payload, frozen=True, kw_only=True):
    """Kind "file.read": a regular file of at most `size_max` bytes."""

    path: Path
    size_max: Annotated[int, Meta(ge=0, le=limits.FILE_BYTES_MAX)] = limits.ITEM_BYTES_MAX - 4_096


class SessionOpen(Payload, frozen=True, kw_only=True):
    """Kind "session.open": makes a sandbox that later actions name by this action's number."""

    image: Annotated[str, Meta(max_length=256, pattern=r"^[^\x00]*\Z")] = ""
    env: Annotated[dict[Variable, Argument], Meta(max_length=limits.ENVIRONMENT_COUNT_MAX)] = {}


class SessionClose(Payload, frozen=True, kw_only=True):
    """Kind "session.close": ends the session named by `ActionSpec.session`."""


class Noop(Payload, frozen=True, kw_only=True):
    """Kind "noop": takes the path of a real action through every part, but starts no program."""


class Score(Payload, frozen=True, kw_only=True):
    """For an action with a service: what its model is to score, a MessagePack array. The output's `data` is an array of as many
    numbers."""

    batch: bytes


class Call(Payload, frozen=True, kw_only=True):
    """For an action with a service: a request to the endpoint of that name. arguments: a MessagePack map of what fills its URL
    and query, or else its body. body: sent as it is, of `content_type`. The output's `data` is a `Response`."""

    arguments: bytes = b"\x80"
    body: bytes = b""
    content_type: Annotated[str, Meta(max_length=256, pattern=r"^[\x20-\x7e]*\Z")] = ""


AnyPayload = Run | Score | Call | FileWrite | FileRead | SessionOpen | SessionClose | Noop
