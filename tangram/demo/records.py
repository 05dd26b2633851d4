"""What is kept of each action and each session, for the figures."""

from dataclasses import dataclass

from tangram.demo.plan import Kind
from tangram.outcomes import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One action as its trajectory saw it. act_s: from submission to result. queued_s, startup_s, run_s: as measured on
    the other side; what they leave of act_s is the way there and back. units: whole cores it got."""

    trajectory: int
    kind: Kind
    outcome: Outcome
    expected: Outcome
    act_s: float
    queued_s: float = 0.0
    startup_s: float = 0.0
    run_s: float = 0.0
    units: int = 0
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return self.outcome is not self.expected

    @property
    def core_seconds(self) -> float:
        return self.units * (self.startup_s + self.run_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A session: seconds from its being granted to its being closed."""

    trajectory: int
    open_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """All that one policy did. makespan_s: from the start of all trajectories to the last outcome of the last one.
    reserved_units: cores that each session held for its life; 0 if only actions hold cores."""

    policy: str
    makespan_s: float
    records: tuple[Record, ...]
    lives: tuple[Life, ...]
    reserved_units: int = 0
