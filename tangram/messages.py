"""What travels on the log, byte for byte.

Every message is a msgspec Struct in msgpack, tagged by its name. The subject fixes which type may stand on it (see
`decode`). Integers only: wire times are nanoseconds (`_ns`), microseconds (`_us`) or milliseconds (`_ms`); cpu is in
millicores, memory in MiB. Unknown fields are tolerated in events, so that an older reader keeps working, and refused
in requests (`Demand`, `Hint`, `ActionSpec`, payloads), so that a misspelt field is never ignored in silence.
Fields added later need a default.

An envelope names who wrote it and the ids of its items; the items themselves are opaque bytes there and are decoded
one by one, so a bad item costs itself and not its neighbours. What only the executor or the client needs (payloads,
outputs) stands in a list of its own and is never decoded by the scheduler.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from tangram import limits, subjects
from tangram.outcomes import Outcome

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_.-]{0,63}\Z")]
Text = Annotated[str, Meta(max_length=limits.DETAIL_LENGTH_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Number = Annotated[int, Meta(ge=1, le=1 << 62)]
Amount = Annotated[int, Meta(ge=0, le=limits.AMOUNT_MAX)]
Nonce = Annotated[bytes, Meta(min_length=limits.NONCE_BYTES, max_length=limits.NONCE_BYTES)]


class Event(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A stored fact. Unknown fields are ignored."""


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something a user asked for. Unknown fields are an error."""


# --- what a producer asks for ------------------------------------------------------------------------------------


class Demand(Request, frozen=True, kw_only=True):
    """How much of one resource an action takes: `low` exactly, or any amount from `low` to `high`, or one of `legal`.

    `high` 0 means `low`. `legal`, when given, is rising, and starts at `low` and ends at `high`.
    """

    low: Amount
    high: Amount = 0
    legal: Annotated[tuple[Amount, ...], Meta(max_length=limits.LEGAL_AMOUNTS_MAX)] = ()


class Hint(Request, frozen=True, kw_only=True):
    """What the user knows about the duration: Amdahl's law with `duration_us` on one unit, of which `parallel_ppm`
    millionths scale; or a table of durations by units, which replaces the law."""

    duration_us: Count = 0
    parallel_ppm: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    table_us: Annotated[dict[Number, Number], Meta(max_length=limits.LEGAL_AMOUNTS_MAX)] = {}


class ActionSpec(Request, frozen=True, kw_only=True):
    """What the scheduler has to know about an action.

    cost: amounts by resource. "cpu" in millicores: whole cores, or a fixed fraction below one core; "memory" in MiB.
    session: the number `n` of the session.open action whose sandbox it runs in; 0 for a one-shot action.
    timeout_ms: run time, counted from its start. deadline_ms: from submission to its start, in log time.
    retry: "safe" allows another attempt after a loss. key: the caller's own idempotency key.
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
    key: Annotated[str, Meta(max_length=200)] = ""
    traceparent: Annotated[str, Meta(max_length=64)] = ""
    payload_blob: Annotated[str, Meta(max_length=128)] = ""


class Payload(Request, tag=True, frozen=True, kw_only=True):
    """What the executor has to know. Its type must suit the action's kind."""


Path = Annotated[str, Meta(min_length=1, max_length=limits.PATH_BYTES_MAX, pattern=r"^[^\x00]+\Z")]
Argument = Annotated[str, Meta(max_length=limits.ARGUMENT_BYTES_MAX, pattern=r"^[^\x00]*\Z")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")]


class Run(Payload, frozen=True, kw_only=True):
    """Kind "run" (or any name of the user's own): a program. Environment names LD_* are refused by the executor."""

    argv: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=4_096)]
    stdin: bytes = b""
    env: Annotated[dict[Variable, Argument], Meta(max_length=limits.ENVIRONMENT_COUNT_MAX)] = {}
    cwd: Annotated[str, Meta(max_length=limits.PATH_BYTES_MAX, pattern=r"^[^\x00]*\Z")] = ""
    stream: bool = False


class FileWrite(Payload, frozen=True, kw_only=True):
    """Kind "file.write": `path` is relative to the session's folder; missing parents are made."""

    path: Path
    data: bytes
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644


class FileRead(Payload, frozen=True, kw_only=True):
    """Kind "file.read": a regular file of at most `size_max` bytes."""

    path: Path
    size_max: Annotated[int, Meta(ge=0, le=limits.ITEM_BYTES_MAX)] = limits.ITEM_BYTES_MAX - 4_096


class SessionOpen(Payload, frozen=True, kw_only=True):
    """Kind "session.open": makes a sandbox that later actions name by this action's number."""

    image: Annotated[str, Meta(max_length=256, pattern=r"^[^\x00]*\Z")] = ""
    env: Annotated[dict[Variable, Argument], Meta(max_length=limits.ENVIRONMENT_COUNT_MAX)] = {}


class SessionClose(Payload, frozen=True, kw_only=True):
    """Kind "session.close": ends the session named by `ActionSpec.session`."""


class Noop(Payload, frozen=True, kw_only=True):
    """Kind "noop": takes the path of a real action through every part, but starts no program."""


AnyPayload = Run | FileWrite | FileRead | SessionOpen | SessionClose | Noop


# --- producers' envelopes ----------------------------------------------------------------------------------------


class ActionsSubmitted(Event, frozen=True, kw_only=True):
    """One to many actions of one client. `ids`, `specs` and `payloads` run in parallel.

    done_below: no lower id will ever be sent (again). born: a sequence of the log learnt when the client connected.
    """

    client: Name
    born: Count = 0
    done_below: Count = 0
    ids: list[Count]
    specs: list[bytes]
    payloads: list[bytes]
    cancel_on_disconnect: bool = False


class CancelsRequested(Event, frozen=True, kw_only=True):
    client: Name
    born: Count = 0
    done_below: Count = 0
    ids: list[Count]


# --- executors ---------------------------------------------------------------------------------------------------


class ExecutorJoined(Event, frozen=True, kw_only=True):
    """A start of an executor process (an incarnation) offers its host's capacity.

    cores: ids by NUMA node. capacity: other resources of the host ("memory" in MiB). dead: incarnations on this host
    whose process is proven dead and whose process groups are empty. One host is one (host, machine_id); another boot_id
    there means that everything before it is dead.
    """

    incarnation: Name
    k: Number = 1
    key: Name
    host: Name
    machine_id: Name
    boot_id: Name
    cores: list[list[Count]] = []
    capacity: dict[Name, Amount] = {}
    dead: list[Name] = []
    lease_ms: Count = 0
    version: str = ""
    features: list[str] = []


class ExecutorChanged(Event, frozen=True, kw_only=True):
    """New facts about a live incarnation's host; None means unchanged."""

    incarnation: Name
    k: Number
    cores: list[list[Count]] | None = None
    capacity: dict[Name, Amount] | None = None
    residency: dict[Name, Amount] | None = None
    dead: list[Name] = []


class ExecutorDraining(Event, frozen=True, kw_only=True):
    incarnation: Name
    k: Number


class Returned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A start that was never begun, or was refused; the action is decided again. `number` names the decision's message."""

    task: Name
    client: Name
    n: Count
    attempt: Number
    number: Number
    reason: Text = ""
    retry_after_ms: Count = 0


class SessionEnded(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sandbox that is gone for another reason than its session.close: idle TTL, loss, refusal."""

    task: Name
    client: Name
    session: Count
    reason: Text = ""


class ActionsReturned(Event, frozen=True, kw_only=True):
    incarnation: Name
    k: Number
    returned: list[Returned] = []
    ended: list[SessionEnded] = []


class ExecutorLeft(Event, frozen=True, kw_only=True):
    """The last word of an incarnation: it runs nothing any more."""

    incarnation: Name
    k: Number


# --- completions -------------------------------------------------------------------------------------------------


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one attempt ended. Times are measured by the executor on a monotonic clock, `queued_ns` in log time.

    exit_code: of the program; -N if signal N ended it; None where there was no program.
    """

    nonce: Nonce
    attempt: Number = 1
    outcome: Outcome
    reason: Text = ""
    detail: Text = ""
    exit_code: int | None = None
    units: Count = 0
    queued_ns: Count = 0
    startup_ns: Count = 0
    run_ns: Count = 0
    cpu_ns: Count = 0
    memory_peak_bytes: Count = 0
    retry_after_ms: Count = 0


class Output(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a program wrote, or what a file held. If a stream was longer than what is kept, its head and tail are kept and
    `*_bytes` says how long it was."""

    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: Count = 0
    stderr_bytes: Count = 0
    data: bytes = b""
    blob: str = ""


class ActionsFinished(Event, frozen=True, kw_only=True):
    """Outcomes for one client (the subject says whose). `ids`, `results` and `outputs` run in parallel; an output may be
    empty. Written by an executor (`incarnation`, `k`) or, as a ruling, by the leader (`epoch`)."""

    executor: str = ""
    incarnation: str = ""
    k: Count = 0
    epoch: Count = 0
    ids: list[Count]
    results: list[bytes]
    outputs: list[bytes]


# --- the leader --------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Run one attempt. amounts: what it is charged for while it runs, or for session.open until the session ends.
    cores: the ids it may use, which may be a reservation of its session that is charged already."""

    task: Name
    client: Name
    n: Count
    attempt: Number = 1
    nonce: Nonce
    kind: Kind
    session: Count = 0
    amounts: dict[Name, Amount] = {}
    cores: tuple[Count, ...] = ()
    units: Count = 0
    timeout_ms: Count
    queued_ns: Count = 0
    predicted_us: Count = 0
    traceparent: str = ""
    payload: bytes = b""
    payload_blob: str = ""


class Cancel(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """End this attempt if it has not ended. It is answered by the attempt's outcome."""

    task: Name
    client: Name
    n: Count
    attempt: Number = 1


class Resize(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    task: Name
    client: Name
    n: Count
    attempt: Number = 1
    cores: tuple[Count, ...] = ()


class Interrupt(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    task: Name
    client: Name
    n: Count
    attempt: Number = 1


class EndSession(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Close a session nobody closes; answered by SessionEnded."""

    task: Name
    client: Name
    session: Count
    reason: Text = ""


class Prefetch(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    service: Name
    units: tuple[Count, ...] = ()


class Evict(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    service: Name
    units: tuple[Count, ...] = ()


class Probe(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Answer on the heartbeat subject, to prove that decisions still arrive."""

    number: Count = 0


class Dismiss(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The executor holds nothing and may leave."""

    reason: Text = ""


Item = Start | Cancel | Resize | Interrupt | EndSession | Prefetch | Evict | Probe | Dismiss


class WindowNote(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one pass leaves besides decisions. `count` is how many messages the window has."""

    policy: str
    count: Count
    evicted: list[tuple[str, str, int]] = []
    fallback: bool = False


class DecisionsMade(Event, frozen=True, kw_only=True):
    """Items for one incarnation, numbered per incarnation from 1. The first message of a window carries its `note`.

    through_seq: the last event the window considered; digest: of the state after that event.
    """

    epoch: Count
    incarnation: Name
    number: Number
    window: Number
    through_seq: Count
    digest: bytes
    items: list[Item]
    note: WindowNote | None = None


class LeaderStarted(Event, frozen=True, kw_only=True):
    """A scheduler leads from here on; the record's own sequence is its epoch. Everything the core is configured by stands
    here or in Settings."""

    leader: Name
    behaviour: Number
    policy: str
    settings: dict[str, int] = {}
    code_version: str = ""
    python_version: str = ""
    checkpoint_seq: Count = 0


class Ticked(Event, frozen=True, kw_only=True):
    """Log time goes on."""

    epoch: Count


class ExecutorLost(Event, frozen=True, kw_only=True):
    epoch: Count
    executor: Name
    incarnation: Name
    reason: Text = ""


class Settings(Event, frozen=True, kw_only=True):
    """Live changes: settings by name; admission closed or open."""

    epoch: Count
    settings: dict[str, int] = {}
    admission_closed: bool | None = None


class DeadLetter(Event, frozen=True, kw_only=True):
    """What could not be decoded, or on which the core would have raised, with where it stood in the log."""

    origin_seq: Count
    subject: str
    reason: Text
    data: bytes


# --- not stored --------------------------------------------------------------------------------------------------


class Heartbeat(Event, frozen=True, kw_only=True):
    incarnation: Name
    number: Count
    probe: Count = 0
    running: Count = 0


class Ask(Event, frozen=True, kw_only=True):
    """A client asks for ids: from which sequence to read its completions, and its last PubAck's sequence, which whoever
    answers must have folded."""

    ids: list[Count] = []
    from_seq: Count = 0
    stored_seq: Count = 0


class Answer(Event, frozen=True, kw_only=True):
    """open, unseen: those of the asked ids that are. completions: (sequence, stored bytes) of the client's subject after
    `from_seq`, complete up to `through_seq`."""

    through_seq: Count
    epoch: Count = 0
    open: list[Count] = []
    unseen: list[Count] = []
    completions: list[tuple[int, bytes]] = []


class OutputChunk(Event, frozen=True, kw_only=True):
    """Live output, best effort: the outcome carries the output that counts."""

    n: Count
    stream: Literal["stdout", "stderr"]
    data: bytes


# --- bytes -------------------------------------------------------------------------------------------------------

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
encode = _ENCODER.encode
"""encode(message) -> bytes. Deterministic: equal messages give equal bytes."""

ExecutorMessage = ExecutorJoined | ExecutorChanged | ExecutorDraining | ActionsReturned | ExecutorLeft
ClockMessage = Ticked | ExecutorLost | Settings
LogMessage = ActionsSubmitted | CancelsRequested | ExecutorMessage | ActionsFinished | DecisionsMade | LeaderStarted | ClockMessage

_actions = msgspec.msgpack.Decoder(ActionsSubmitted).decode
_cancels = msgspec.msgpack.Decoder(CancelsRequested).decode
_executors = msgspec.msgpack.Decoder(ExecutorMessage).decode
_completions = msgspec.msgpack.Decoder(ActionsFinished).decode
_decisions = msgspec.msgpack.Decoder(DecisionsMade).decode
_leader = msgspec.msgpack.Decoder(LeaderStarted).decode
_clock = msgspec.msgpack.Decoder(ClockMessage).decode
decode_spec = msgspec.msgpack.Decoder(ActionSpec).decode
decode_payload = msgspec.msgpack.Decoder(AnyPayload).decode
decode_result = msgspec.msgpack.Decoder(Result).decode
decode_output = msgspec.msgpack.Decoder(Output).decode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
decode_chunk = msgspec.msgpack.Decoder(OutputChunk).decode

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
            case "decisions":
                message = _leader(data) if address.first == "leader" else _clock(data)
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


_KNOWN_TYPES: Final = frozenset(
    kind.__name__
    for kind in (
        ActionsSubmitted, CancelsRequested, ExecutorJoined, ExecutorChanged, ExecutorDraining, ActionsReturned,
        ExecutorLeft, ActionsFinished, DecisionsMade, LeaderStarted, Ticked, ExecutorLost, Settings,
    )
)  # fmt: skip


def _is_unknown_type(data: bytes) -> bool:
    """Whether this is a well-formed message whose type this version does not know."""
    try:
        raw = msgspec.msgpack.decode(data)
    except MALFORMED:
        return False
    return isinstance(raw, dict) and isinstance(raw.get("type"), str) and raw["type"] not in _KNOWN_TYPES
