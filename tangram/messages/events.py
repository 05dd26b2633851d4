"""What is stored, and what is said aside: unknown fields are ignored, so that an older reader keeps working."""

from typing import Annotated

from msgspec import Meta, Struct

from tangram import limits
from tangram.messages.fields import Amount, CoreId, Count, GpuId, Ids, Items, Kind, Name, Nonce, Number, Setting, Shares, Text
from tangram.outcomes import Outcome


class Event(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A stored fact. Unknown fields are ignored."""


# --- producers' envelopes ----------------------------------------------------------------------------------------


class ActionsSubmitted(Event, frozen=True, kw_only=True):
    """One to many actions of one client. `ids`, `specs` and `payloads` run in parallel.

    done_below: no lower id will ever be sent (again). born: a sequence of the log learnt when the client connected.
    cancel_on_disconnect: this client sends heartbeats; what it has open is cancelled when they stop. instance: which process
    of this name it is; that of one that connected later is higher. 0: it does not say.
    """

    client: Name
    born: Count = 0
    done_below: Count = 0
    ids: Ids
    specs: Items
    payloads: Items
    cancel_on_disconnect: bool = False
    instance: Count = 0


class CancelsRequested(Event, frozen=True, kw_only=True):
    """Actions that are to end; or sessions, by the id of the action that has opened them."""

    client: Name
    born: Count = 0
    done_below: Count = 0
    ids: Ids
    instance: Count = 0


# --- executors ---------------------------------------------------------------------------------------------------


class Service(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that an executor can serve. weights_mib: of one copy, which is split evenly over the GPUs it lies on.
    restore_us: of bringing it from host memory onto one GPU; on z of them it is restore_fixed_us + restore_us / z.
    restored_us: what it was seen to take on some numbers of GPUs, which replaces that. is_replicated: each GPU holds all of the
    weights. units: on how many GPUs it can serve; none: on any. idle_value_ppm: what a copy that is idle is worth, in millionths
    of what it would be by its restore time and use. Of an endpoint there is only its cost: what an action on it takes by
    resource, beside what it names itself."""

    weights_mib: Count = 0
    restore_us: Count = 0
    restore_fixed_us: Count = 0
    restored_us: Annotated[tuple[tuple[Number, Count], ...], Meta(max_length=limits.LEGAL_AMOUNTS_MAX)] = ()
    is_replicated: bool = False
    units: Annotated[tuple[Number, ...], Meta(max_length=limits.LEGAL_AMOUNTS_MAX)] = ()
    idle_value_ppm: Count = 1_000_000
    cost: Annotated[dict[Name, Amount], Meta(max_length=limits.RESOURCES_PER_ACTION_MAX)] = {}


class Resident(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A copy of a service's weights on some GPUs of a host."""

    service: Name
    gpus: tuple[GpuId, ...]


class ExecutorJoined(Event, frozen=True, kw_only=True):
    """A start of an executor process (an incarnation) offers its host's capacity.

    cores: ids by NUMA node. capacity: other resources of the host ("memory" in MiB). dead: incarnations on this host
    whose process is proven dead and whose process groups are empty. One host is one (host, machine_id); another boot_id
    there means that everything before it is dead.
    gpus: ids of which aligned groups of 2, 4 and 8 (id // 2, ...) are the best linked; capacity then has
    "gpu_memory", of each in MiB, for weights.
    services: what it can serve, on any of its GPUs.
    """

    incarnation: Name
    k: Number = 1
    key: Name
    host: Name
    machine_id: Name
    boot_id: Name
    cores: Annotated[list[list[CoreId]], Meta(max_length=limits.NUMA_NODES_MAX)] = []
    capacity: dict[Name, Amount] = {}
    dead: list[Name] = []
    lease_ms: Count = 0
    version: str = ""
    features: list[str] = []
    gpus: Annotated[list[GpuId], Meta(max_length=limits.GPU_ID_MAX + 1)] = []
    services: Annotated[dict[Name, Service], Meta(max_length=limits.SERVICES_MAX)] = {}


class ExecutorChanged(Event, frozen=True, kw_only=True):
    """New facts about a live incarnation's host; None means unchanged."""

    incarnation: Name
    k: Number
    cores: Annotated[list[list[CoreId]], Meta(max_length=limits.NUMA_NODES_MAX)] | None = None
    capacity: dict[Name, Amount] | None = None
    residency: dict[Name, Amount] | None = None
    dead: list[Name] = []
    gpus: Annotated[list[GpuId], Meta(max_length=limits.GPU_ID_MAX + 1)] | None = None
    services: Annotated[dict[Name, Service], Meta(max_length=limits.SERVICES_MAX)] | None = None


class ExecutorDraining(Event, frozen=True, kw_only=True):
    incarnation: Name
    k: Number


class Returned(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A start that was never begun, or was refused; the action is decided again. `number` names the decision's message.
    retry_after_ms: who was called refuses more for so long, and the quotas that the action names shrink. failed: it was begun,
    failed, and may be tried again, which takes another attempt; reason is then what its outcome says if there is none left."""

    task: Name
    client: Name
    n: Count
    attempt: Number
    number: Number
    reason: Text = ""
    retry_after_ms: Count = 0
    failed: bool = False


class SessionEnded(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sandbox that is gone for another reason than its session.close: idle TTL, loss, refusal."""

    task: Name
    client: Name
    session: Count
    reason: Text = ""


class ActionsReturned(Event, frozen=True, kw_only=True):
    incarnation: Name
    k: Number
    returned: Annotated[list[Returned], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)] = []
    ended: Annotated[list[SessionEnded], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)] = []


class ExecutorLeft(Event, frozen=True, kw_only=True):
    """The last word of an incarnation: it runs nothing any more."""

    incarnation: Name
    k: Number


# --- completions -------------------------------------------------------------------------------------------------


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one attempt ended. Times are measured by the executor on a monotonic clock, `queued_ns` in log time.

    exit_code: of the program; -N if signal N ended it; None where there was no program. same_as: it was not run, because its
    key had been used for action `same_as` of this client, whose outcome it shares; that stands at sequence `at_seq`.
    """

    nonce: Nonce
    attempt: Number = 1
    outcome: Outcome
    reason: Text = ""
    detail: Text = ""
    exit_code: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 32)] | None = None
    units: Count = 0
    queued_ns: Count = 0
    startup_ns: Count = 0
    run_ns: Count = 0
    cpu_ns: Count = 0
    memory_peak_bytes: Count = 0
    retry_after_ms: Count = 0
    same_as: Count = 0
    at_seq: Count = 0


class Output(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a program wrote, or what a file held. If a stream was longer than what is kept, its head and tail are kept and
    `*_bytes` says how long it was. blob: names the task's blob that is the whole Output (`subjects.BlobName`)."""

    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: Count = 0
    stderr_bytes: Count = 0
    data: bytes = b""
    blob: str = ""


class ActionsFinished(Event, frozen=True, kw_only=True):
    """Outcomes for one client (the subject says whose). `ids`, `results` and `outputs` run in parallel; an output may be
    empty. Written by an executor (`incarnation`, `k`) or, as a ruling, by the leader (`epoch`). spent: by id, tokens of quotas as
    they were really taken, where who was called has said so."""

    executor: str = ""
    incarnation: str = ""
    k: Count = 0
    epoch: Count = 0
    ids: Ids
    results: Items
    outputs: Items
    spent: Annotated[list[tuple[Count, dict[Name, Amount]]], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)] = []


# --- the leader --------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Run one attempt. amounts: what it is charged for while it runs, or for session.open until the session ends.
    cores: the ids it may use, which may be a reservation of its session that is charged already. gpus: its own while it runs.
    service: whose copy on exactly these GPUs serves it, restored there first if it is not; evicts: copies that make room."""

    task: Name
    client: Name
    n: Count
    attempt: Number = 1
    nonce: Nonce
    kind: Kind
    session: Count = 0
    amounts: dict[Name, Amount] = {}
    cores: tuple[CoreId, ...] = ()
    units: Count = 0
    timeout_ms: Count
    queued_ns: Count = 0
    predicted_us: Count = 0
    traceparent: str = ""
    payload: bytes = b""
    payload_blob: str = ""
    gpus: tuple[GpuId, ...] = ()
    service: Name = ""
    evicts: tuple[Resident, ...] = ()


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
    cores: tuple[CoreId, ...] = ()


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
    """Restore a copy on GPUs that nobody uses, after those that make room, for an action that will come. Not answered."""

    service: Name
    units: tuple[Count, ...] = ()
    gpus: tuple[GpuId, ...] = ()
    evicts: tuple[Resident, ...] = ()


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
    items: Annotated[list[Item], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)]
    note: WindowNote | None = None


class Quota(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of something outside, shared by all hosts; 0 means that there is none. An action that names it holds one place of
    `concurrency` while it runs, is one of `requests`, and takes the amount it names of `tokens`; both come back `interval_ms`
    later: no interval of that length ever sees more, wherever the provider's own begins. burst: the provider counts requests
    by a bucket of that many, which fills evenly, rather than by intervals."""

    concurrency: Count = 0
    tokens: Count = 0
    interval_ms: Annotated[int, Meta(ge=1, le=limits.DEADLINE_MS_MAX)] = 60_000
    requests: Count = 0
    burst: Count = 0


class LeaderStarted(Event, frozen=True, kw_only=True):
    """A scheduler leads from here on; the record's own sequence is its epoch. Everything the core is configured by stands
    here or in Settings."""

    leader: Name
    behaviour: Number
    policy: str
    settings: dict[str, Setting] = {}
    code_version: str = ""
    python_version: str = ""
    checkpoint_seq: Count = 0
    quotas: Annotated[dict[Name, Quota], Meta(max_length=limits.QUOTAS_MAX)] = {}
    shares: Shares = {}


class Ticked(Event, frozen=True, kw_only=True):
    """Log time goes on."""

    epoch: Count


class ExecutorLost(Event, frozen=True, kw_only=True):
    epoch: Count
    executor: Name
    incarnation: Name
    reason: Text = ""


class Settings(Event, frozen=True, kw_only=True):
    """Live changes: settings and shares by name; admission closed or open; quotas, all of them or None."""

    epoch: Count
    settings: dict[str, Setting] = {}
    admission_closed: bool | None = None
    quotas: Annotated[dict[Name, Quota], Meta(max_length=limits.QUOTAS_MAX)] | None = None
    shares: Shares = {}


class SizeSeen(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a kind on `units` cores. duration_us: the square of the mean square root. weight_ppm: millionths of
    completions that this counts as. times: completions since the kind last changed."""

    units: Number
    duration_us: Number
    weight_ppm: Count
    times: Count = 0


class LearntModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long actions of a task's kind take: serial + parallel / units + overhead * units, and their standard deviation on the
    same units, in millionths of that. count: completions so far. One whose curve is 0 says nothing."""

    task: Name
    kind: Kind
    count: Number
    serial_us: Count = 0
    parallel_us: Count = 0
    overhead_us: Count = 0
    spread_ppm: Count = 0
    sizes: Annotated[list[SizeSeen], Meta(min_length=1, max_length=limits.MODEL_SIZES_MAX)]


class ModelsSeeded(Event, frozen=True, kw_only=True):
    """What was learnt elsewhere, for kinds of which nothing is known here."""

    epoch: Count
    models: Annotated[list[LearntModel], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)]


class DeadLetter(Event, frozen=True, kw_only=True):
    """What could not be decoded, or on which the core would have raised, with where it stood in the log."""

    origin_seq: Count
    subject: str
    reason: Text
    data: bytes


# --- checkpoints -------------------------------------------------------------------------------------------------


class CheckpointPayloads(Event, frozen=True, kw_only=True):
    """Payloads of actions that were open at a checkpoint. `ids` and `payloads` run in parallel."""

    ids: list[tuple[Name, Name, Count]]
    payloads: Items


class CheckpointEnded(Event, frozen=True, kw_only=True):
    """The last message of a checkpoint: without it, it is none.

    seq: of the last message of the log that is in it. log_created: when the stream was made that it belongs to. first_seq:
    of its own first message in its stream. parts, state_bytes, sha256: of the state alone. payloads, payload_bytes: of the
    actions that were open.
    """

    seq: Number
    log_created: str
    first_seq: Number
    parts: Number
    state_bytes: Count
    sha256: bytes
    payloads: Count = 0
    payload_bytes: Count = 0
    digest: bytes = b""
    code_version: str = ""
