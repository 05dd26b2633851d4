"""What a timeline knows: attempts, hosts, executors and the queue, in log time."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

RUNNING: Final = ""
"""Outcome of an attempt that had not ended when the log did, and of an action that was still queued."""
RETURNED: Final = "returned"
"""Outcome of an attempt that an executor gave back without beginning it."""
SUPERSEDED: Final = "superseded"
"""Outcome of a lost attempt whose action got another one."""


@dataclass(slots=True)
class Attempt:
    """One attempt of one action, or an action that never had one (host is "").

    Times ending in _ns are log time; None: not before the log's end. ready_ns: when
    nothing but units, and what came before it, kept it from starting. finished_ns: its executor's answer, or the loss of the
    executor. freed_ns: when its units came back, which a lost executor's do late and a sandbox's when it is closed.
    blocked: what it lacked when it became ready; "" if nothing. startup_ns, run_ns, cpu_ns: measured by the executor.
    """

    task: str
    client: str
    n: int
    _: KW_ONLY
    attempt: int
    kind: str
    session: int
    submitted_ns: int
    ready_ns: int | None = None
    decided_ns: int | None = None
    finished_ns: int | None = None
    freed_ns: int | None = None
    host: str = ""
    executor: str = ""
    incarnation: str = ""
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    service: str = ""
    millicores: int = 0
    """Charged for it; 0 if it runs on cores that its session holds, or on none."""
    units: int = 0
    memory_mib: int = 0
    predicted_us: int = 0
    blocked: str = ""
    outcome: str = RUNNING
    reason: str = ""
    detail: str = ""
    exit_code: int | None = None
    startup_ns: int = 0
    run_ns: int = 0
    cpu_ns: int = 0
    memory_peak_bytes: int = 0


class Cores(NamedTuple):
    """The cores that a host's live executors offer from `at_ns` on."""

    at_ns: int
    cores: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class HostSeen:
    name: str
    offers: list[Cores] = field(default_factory=list)

    @property
    def cores(self) -> tuple[int, ...]:
        """Every core that it ever offered."""
        return tuple(sorted({core for offer in self.offers for core in offer.cores}))


class ExecutorEvent(NamedTuple):
    """what: joined, draining, left or lost."""

    at_ns: int
    host: str
    executor: str
    incarnation: str
    what: str
    why: str


class Queue(NamedTuple):
    """From `at_ns` on: actions that may start but have no units; those behind others of their session; attempts that run."""

    at_ns: int
    ready: int
    behind: int
    running: int


class Clock(NamedTuple):
    """From `at_ns` of log time on, a server stamp is `stamp_ns` plus the log time since then."""

    at_ns: int
    stamp_ns: int


@dataclass(slots=True, kw_only=True)
class Timeline:
    """attempts: in the order of their decisions, then actions that had none in the order of their end."""

    attempts: list[Attempt] = field(default_factory=list)
    hosts: list[HostSeen] = field(default_factory=list)
    executors: list[ExecutorEvent] = field(default_factory=list)
    queue: list[Queue] = field(default_factory=list)
    clock: list[Clock] = field(default_factory=list)
    policies: list[tuple[int, str]] = field(default_factory=list)
    """(log time, policy) of each leader's start."""
    begin_ns: int = 0
    """Of the checkpoint from which the log was read."""
    end_ns: int = 0
    first_seq: int = 0
    last_seq: int = 0
    actions: int = 0
    skipped: int = 0

    def stamp_ns(self, at_ns: int) -> int:
        """The server's stamp at a moment of log time."""
        latest = [clock for clock in self.clock if clock.at_ns <= at_ns]
        return latest[-1].stamp_ns + at_ns - latest[-1].at_ns if latest else 0
