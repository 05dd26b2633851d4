"""What the scheduler knows: a fold over the log. Nothing here reads a clock or does I/O; only `fold` changes it."""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.cores import MILLI, CorePool
from tangram.scheduler.elasticity import Model
from tangram.scheduler.gpus import Copy, GpuPool
from tangram.scheduler.quotas import QuotaPool
from tangram.scheduler.ready import Order, ReadyQueue
from tangram.scheduler.timers import Timers

BEHAVIOUR = 7
"""Version of what `step` and `plan` decide; a leader's record has it, and a log is decided as its leader's version did. It rises
when the same log would be decided otherwise. 6: on GPUs, those whose weights are there go before those who would evict them.
7: what was taken of a quota comes back when log time says so, and not with the next timer, and a guard later; what a lost
executor holds of one comes back when what it ran must have ended; weights are fetched ahead of those that wait."""
BEHAVIOUR_OLDEST = 5
"""The oldest that is still decided as it was."""


class ActionId(NamedTuple):
    task: str
    client: str
    n: int

    def __str__(self) -> str:
        return f"{self.task}/{self.client}/{self.n}"


class GrantKey(NamedTuple):
    """One attempt of one action."""

    action: ActionId
    attempt: int


class HostKey(NamedTuple):
    name: str
    machine_id: str


class QueueKey(NamedTuple):
    """Actions that need the same resources on the same host (None: any) wait in one queue, and its head speaks for all. Each
    task has its own under a policy that shares by task."""

    key: str
    host: HostKey | None
    resources: tuple[str, ...]
    service: str = ""
    task: str = ""


class Phase(IntEnum):
    """Where an open action is. The pairs that may follow each other stand in `fold_actions.TRANSITIONS`."""

    NEW = 0
    WAITING = 1
    """Behind other actions of its session, or for the outcome of the first of its key."""
    READY = 2
    """In a queue; a pass may decide it."""
    DECIDED = 3
    """An incarnation has it."""
    OWED = 4
    """It will not be decided any more; the leader owes its outcome."""
    GONE = 5


@dataclass(slots=True, eq=False)
class Grant:
    """What one attempt holds on a host until its executor answers."""

    key: GrantKey
    incarnation: str
    host: HostKey
    amounts: dict[str, int]
    cores: tuple[int, ...]
    number: int
    finish_ns: int = 0
    """When it is predicted to end, in log time."""
    started_ns: int = 0
    opens: bool = False
    """It is for a session.open."""
    holds_session: bool = False
    """It is a sandbox's reservation, given back when the sandbox is gone."""
    gpus: int = 0
    """A mask, like `Incarnation.gpus`."""
    service: str = ""
    evicted: list[Copy] = field(default_factory=list)
    """What makes room for it. Its executor may not have read that yet."""
    quotas: tuple[str, ...] = ()
    """Names among the amounts that are quotas, of which it holds a place."""
    until_ns: int = 0
    """When it must have ended, if its executor works: its time-out and the budget for killing it are over."""
    session: "Session | None" = None
    """The session the attempt runs in; no other action of it starts before this one's units are back."""

    def left_us(self, now_ns: int) -> float:
        """How long it is taken to run on. Overdue: as a heavy tail has it, for half as long again."""
        left_ns = self.finish_ns - now_ns
        return (left_ns if left_ns > 0 else (now_ns - self.started_ns) / 2) / 1_000


@dataclass(slots=True, eq=False)
class Action:
    id: ActionId
    order: Order
    key: str
    spec: m.ActionSpec
    submitted_ns: int
    """Log time."""
    payload_bytes: int = 0
    """Of its payload, which stays in the log (or a checkpoint) as long as it is open."""
    phase: Phase = Phase.NEW
    ready_ns: int = 0
    """When it became READY, the last time."""
    attempt: int = 1
    refusals: int = 0
    cancelled: bool = False
    """Its producer has asked for its end; it must not be decided again."""
    session: "Session | None" = None
    opens: "Session | None" = None
    queue: QueueKey | None = None
    incarnation: str = ""
    """Who has it, while DECIDED."""
    avoid: tuple[HostKey, ...] = ()
    """Hosts that lost an attempt."""


class SessionPhase(IntEnum):
    OPENING = 0
    OPEN = 1
    ENDING = 2
    """The leader has asked, or owes asking, its executor to end it."""
    ENDED = 3


@dataclass(slots=True, eq=False)
class Session:
    """A sandbox. It belongs to the incarnation that made it and takes one action at a time."""

    id: ActionId
    """Of the action that opens it."""
    idle_ttl_ns: int
    phase: SessionPhase = SessionPhase.OPENING
    incarnation: str = ""
    host: HostKey | None = None
    cores: tuple[int, ...] = ()
    """Reserved for its whole life by a static policy."""
    grant: GrantKey | None = None
    current: ActionId | None = None
    """The action that is READY or DECIDED, or whose units are not back yet."""
    waiting: "deque[Action]" = field(default_factory=deque)
    key: str = ""
    """The caller's own, of the action that opens it."""


@dataclass(slots=True, eq=False)
class Incarnation:
    """One start of one executor."""

    id: str
    executor: str
    key: str
    host: HostKey
    nodes: tuple[int, ...]
    capacity: dict[str, int]
    joined_seq: int
    k: int = 1
    next_number: int = 1
    live: bool = True
    draining: bool = False
    grants: dict[GrantKey, Grant] = field(default_factory=dict)
    sessions: dict[ActionId, Session] = field(default_factory=dict)
    cores_mask: int = 0
    gpus: int = 0
    """Those of the announced ones that no other live executor of its host had before it."""
    gpus_announced: int = 0
    services: dict[str, m.Service] = field(default_factory=dict)
    fetched_at: int = 0
    """Number of the last message with a prefetch of which nothing has been heard."""
    fetch_evicted: list[Copy] = field(default_factory=list)
    """What makes room for those. It may not have read that yet."""


@dataclass(slots=True, eq=False)
class Load:
    """The recent share of something in use, or a task's cores in use: an exponentially weighted mean over log time, kept by
    `scheduler.load`."""

    used: float = 0.0
    weight: float = 0.0
    at_ns: int = 0


@dataclass(slots=True, eq=False)
class Use:
    """How often a service was wanted lately: uses, each of which fades with age, kept by `scheduler.load`."""

    count: float = 0.0
    at_ns: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """What one task has of a host. amounts: held by its actions and sandboxes, without zeros; load: cores, lately."""

    amounts: dict[str, int] = field(default_factory=dict)
    sessions: int = 0
    load: Load = field(default_factory=Load)
    stamp_ns: int = 0
    """The highest stamp of the server's when it last changed."""

    @property
    def cores(self) -> float:
        return self.amounts.get("cpu", 0) / MILLI


@dataclass(slots=True, eq=False)
class Host:
    key: HostKey
    boot_id: str
    pool: CorePool
    capacity: dict[str, int] = field(default_factory=dict)
    """Of resources other than cpu; cpu is `pool`."""
    used: dict[str, int] = field(default_factory=dict)
    live: list[Incarnation] = field(default_factory=list)
    """Live incarnations, in the order they joined."""
    sessions: int = 0
    load: Load = field(default_factory=Load)
    parts: dict[str, Part] = field(default_factory=dict)
    """By task, kept by `scheduler.parts`."""
    gpus: GpuPool = field(default_factory=GpuPool)
    gpu_load: Load = field(default_factory=Load)


@dataclass(slots=True, eq=False)
class Bound:
    """What a caller's own key stands for: the first action that was submitted with it."""

    n: int
    body: bytes
    """A hash of what was asked for."""
    session: int = 0
    """That it runs in."""
    seq: int = 0
    """Of the stored message that has its outcome; 0 while it is open."""
    outcome: Outcome = Outcome.OK
    """If it has ended."""
    waiting: dict[int, None] = field(default_factory=dict)
    """Later actions of the same key, which share its outcome when it ends."""


@dataclass(slots=True, eq=False)
class Client:
    """Which ids of a client were seen: all below `contiguous`, and those in `sparse`."""

    born: int = 0
    done_below: int = 0
    contiguous: int = 0
    sparse: set[int] = field(default_factory=set)
    cancelled_early: set[int] = field(default_factory=set)
    """Cancels that came before their action."""
    open: int = 0
    instance: int = 0
    """The process that uses its name now; 0 if none has said which it is."""
    others_below: int = 0
    """Seen ids below this are of earlier processes of its name."""
    ended: dict[int, int] = field(default_factory=dict)
    """Where the outcomes stand that a process of this client may not have read: id -> sequence. Of the present process those
    not below `done_below`, of earlier ones whatever was left."""
    cancel_on_disconnect: bool = False
    keys: dict[str, Bound] = field(default_factory=dict)
    """The caller's own keys that stand for an action."""


@dataclass(slots=True)
class Owed:
    """What the leader has to write, until it is seen in the log. Each is a dict for its order and O(1) removal."""

    rulings: dict[ActionId, m.Result] = field(default_factory=dict)
    conflicts: dict[tuple[ActionId, bytes], m.Result] = field(default_factory=dict)
    """(id, nonce) of submissions that were refused because their id is another's; the action of that id, if there is one, has
    nothing to do with it."""
    cancels: dict[tuple[str, GrantKey], None] = field(default_factory=dict)
    ends: dict[tuple[str, ActionId], str] = field(default_factory=dict)
    dismissals: dict[str, str] = field(default_factory=dict)
    fillers: dict[tuple[str, int], None] = field(default_factory=dict)
    """(incarnation, number) of messages that a leader gave up on while a later one was stored: its executor waits for them."""
    losses: dict[str, tuple[str, str]] = field(default_factory=dict)
    """incarnation -> (executor, reason): tells a process that is still there that it was replaced."""

    def __bool__(self) -> bool:
        return bool(self.rulings or self.conflicts or self.cancels or self.ends or self.dismissals or self.fillers or self.losses)


@dataclass(slots=True)
class State:
    seq: int = 0
    """Of the last folded message."""
    stamp_ns: int = 0
    """The highest server stamp so far."""
    now_ns: int = 0
    """Log time: the sum of the steps of the stamp, each clamped to 0..2 s."""
    epoch: int = 0
    """The sequence of the last LeaderStarted; 0 before the first."""
    behaviour: int = BEHAVIOUR_OLDEST
    """Of the leader. A checkpoint that does not say is of the oldest."""
    policy: str = "tangram"
    settings: dict[str, int] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    """Weights by task; one that is not named has 1."""
    admission_closed: bool = False
    """New actions are refused, but for those of open sessions."""
    window: int = 0
    digest: bytes = bytes(8)

    actions: dict[ActionId, Action] = field(default_factory=dict)
    payload_bytes: int = 0
    """Of all open actions."""
    clients: dict[tuple[str, str], Client] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    """How many of `clients` each task has, without zeros."""
    client_horizon_seq: int = 0
    """Clients that connected before this may have been forgotten."""
    sessions: dict[ActionId, Session] = field(default_factory=dict)
    executors: dict[str, str] = field(default_factory=dict)
    """executor -> its current incarnation."""
    incarnations: dict[str, Incarnation] = field(default_factory=dict)
    """Live ones, and lost ones whose units are still held."""
    past: dict[str, None] = field(default_factory=dict)
    """Incarnations that will never be current again; the last 10,000."""
    hosts: dict[HostKey, Host] = field(default_factory=dict)
    queues: dict[QueueKey, ReadyQueue[Action]] = field(default_factory=dict)
    models: dict[tuple[str, str], Model] = field(default_factory=dict)
    """By (task, kind), in the order of their last completion; at most limits.MODELS_MAX. On GPUs the kind is
    "<kind>/<service>"."""
    uses: dict[str, Use] = field(default_factory=dict)
    """By service, in the order of their last use; at most limits.SERVICES_MAX."""
    quotas: dict[str, QuotaPool] = field(default_factory=dict)
    service_costs: dict[str, dict[str, m.Demand]] = field(default_factory=dict)
    """By service, what an action on it takes besides what it names itself, as last announced; at most limits.SERVICES_MAX."""
    timers: Timers = field(default_factory=Timers)
    owed: Owed = field(default_factory=Owed)

    finished: int = 0
    skipped: int = 0
    story: list[str | tuple[object, ...]] = field(default_factory=list)
    """What the last step did, in short lines (those of every action as a tuple of their words); part of the digest."""

    @property
    def wants_ticks(self) -> bool:
        """Also while tokens are out: log time has to go on for them to come back."""
        return bool(self.actions or self.sessions or self.owed) or any(pool.is_out(self.now_ns) for pool in self.quotas.values())

    def next_tick_ns(self, last_ns: int) -> int:
        """When the next tick is due, in log time, if the last was at last_ns: one a second, earlier for a timer, and for a quota
        while somebody waits, but at most every TIMER_GRAIN_NS and QUOTA_GRAIN_NS."""
        found = last_ns + limits.TICK_NS
        due_ns = self.timers.next_due_ns()
        if due_ns is not None:
            found = min(found, max(due_ns, last_ns + limits.TIMER_GRAIN_NS))
        if self.queues:
            for pool in self.quotas.values():
                due_ns = pool.next_ns(self.now_ns)
                if due_ns is not None:
                    found = min(found, max(due_ns, last_ns + limits.QUOTA_GRAIN_NS))
        return found
