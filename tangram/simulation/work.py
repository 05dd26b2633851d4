"""What is simulated: trajectories of actions, with the truth about their durations, which the scheduler is not told."""

from dataclasses import dataclass
from typing import NamedTuple

from tangram import messages as m
from tangram.scheduler.cores import MILLI


class Work(NamedTuple):
    """One action. legal: the amounts it may get, if not all from low to high. scalable_ns: the part of duration_ns (its run
    time on one unit) that shrinks with the units it gets, up to `high` of them. hint: what its user declares.

    key: its units are cores ("cpu") or GPUs ("gpu", on a copy of `service`); "api" has none. tokens: by quota.
    """

    kind: str
    think_ns: int
    duration_ns: int
    scalable_ns: int = 0
    low: int = 1
    high: int = 1
    legal: tuple[int, ...] = ()
    memory_mib: int = 0
    hint: m.Hint | None = None
    key: str = "cpu"
    service: str = ""
    tokens: tuple[tuple[str, int], ...] = ()

    def run_ns(self, units: int) -> int:
        """Amdahl's law: the serial part, and the scalable part divided by the units."""
        return self.duration_ns - self.scalable_ns + self.scalable_ns // max(1, min(units, self.high))

    def truth(self) -> m.Hint:
        """A hint that says how long it will really take."""
        parallel_ppm = self.scalable_ns * 1_000_000 // self.duration_ns if self.duration_ns else 0
        return m.Hint(duration_us=max(self.duration_ns // 1_000, 1), parallel_ppm=parallel_ppm)

    def cost(self) -> dict[str, m.Demand]:
        cost = {name: m.Demand(low=tokens) for name, tokens in self.tokens}
        if self.key == "cpu":
            legal = tuple(amount * MILLI for amount in self.legal)
            cost["cpu"] = m.Demand(low=self.low * MILLI, high=self.high * MILLI, legal=legal)
        elif self.key == "gpu":
            cost["gpu"] = m.Demand(low=self.low, high=self.high, legal=self.legal)
        if self.memory_mib:
            cost["memory"] = m.Demand(low=self.memory_mib)
        return cost


class Trajectory(NamedTuple):
    """Its actions run one after the other: each is submitted `think_ns` after the one before it has ended."""

    number: int
    task: str
    start_ns: int
    work: list[Work]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that scores on GPUs in chunks of 1, 2, 4 or 8."""

    weights_gib: float
    restore_gb_per_s: float = 25.0
    """Of one GPU: host memory over PCIe 5 x16, less what is lost. Assumed."""
    restore_fixed_s: float = 0.1
    """Assumed."""

    @property
    def service(self) -> m.Service:
        return m.Service(
            weights_mib=round(self.weights_gib * 1024),
            restore_us=round(self.weights_gib * 1.073741824 / self.restore_gb_per_s * 1e6),
            restore_fixed_us=round(self.restore_fixed_s * 1e6),
        )
