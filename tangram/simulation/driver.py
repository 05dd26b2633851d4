"""A simulation: the log, its leader, the executors of a pool and the trajectories, on one virtual clock."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.errors import TangramError
from tangram.scheduler.compose import Outgoing
from tangram.scheduler.fold import Record
from tangram.scheduler.policies import SETTINGS
from tangram.scheduler.services import pinned
from tangram.scheduler.state import BEHAVIOUR, ActionId, State
from tangram.simulation.client import Crowd, Done, Trajectories
from tangram.simulation.clock import Clock
from tangram.simulation.executor import VirtualExecutor
from tangram.simulation.leader import Leader, Log
from tangram.simulation.pool import Machine
from tangram.simulation.work import Trajectory

ROUND_TRIP_NS: Final = 2_000_000
"""From a window's writing to its reading: the p50 of `tangram bench pipeline` with one action in flight, nearly all of which
it is."""
UNITS_SETTING: Final = {"static-trajectory": "static_units", "static-service": "static_units", "fixed-units": "fixed_units"}
"""Of policies with a fixed size: how the core is told it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How it is scheduled. one_shot: no sandboxes, so no action is bound to a host. oracle: hints that tell the truth, and
    nothing is learnt. services: what the GPUs serve; quotas: what is shared by all."""

    policy: str = "tangram"
    settings: dict[str, int] = field(default_factory=dict)
    round_trip_ns: int = ROUND_TRIP_NS
    one_shot: bool = False
    oracle: bool = False
    services: dict[str, m.Service] = field(default_factory=dict)
    quotas: dict[str, m.Quota] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """How many a policy with a fixed size gives, or reserves."""
        name = UNITS_SETTING.get(self.policy, "")
        return self.settings.get(name, SETTINGS[name].default) if name in SETTINGS else 1


MakeCrowd = Callable[[Clock, Log], Crowd]


class Simulation:
    """crowd: whoever submits; by default the trajectories, each with a client of its own. real_ns: a clock for what passes take,
    which changes nothing else. observe: is told each record of the simulated log."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        pool: Sequence[Machine],
        setup: Setup,
        real_ns: Callable[[], int] = lambda: 0,
        *,
        crowd: MakeCrowd | None = None,
        observe: Callable[[Record], None] | None = None,
    ) -> None:
        self.done: list[Done] = []
        """Of the trajectories: what has ended, in that order."""
        self.setup = setup
        self._clock = Clock()
        self._log = Log(self._clock, observe)
        started = m.LeaderStarted(
            leader="simulation",
            behaviour=BEHAVIOUR,
            policy=setup.policy,
            settings={"learn": 0, **setup.settings} if setup.oracle else setup.settings,
            quotas=setup.quotas,
            shares=setup.shares,
        )
        self._leader = Leader(self._clock, self._log, started, setup.round_trip_ns, self._read, real_ns)
        self._executors: dict[str, VirtualExecutor] = {}
        if crowd is not None:
            self._crowd = crowd(self._clock, self._log)
        else:
            self._crowd = everyone = Trajectories(
                trajectories, self._clock, self._log, one_shot=setup.one_shot, oracle=setup.oracle
            )
            self.done = everyone.done
        keys = self._crowd.keys
        for number, machine in enumerate(pool):
            for key, has_cores in machine.kinds or _kinds(machine, keys if number == 0 else ()):
                executor = VirtualExecutor(
                    f"h{number}",
                    key,
                    machine,
                    setup.services,
                    self._clock,
                    self._log,
                    self._crowd,
                    self._ended,
                    has_cores=has_cores,
                )
                self._executors[executor.name] = executor
        self._idle_ticks = 0

    @property
    def state(self) -> State:
        return self._log.state

    @property
    def pass_ns(self) -> list[int]:
        return self._leader.pass_ns

    def held_unit_ns(self, key: str) -> int:
        """Cores, or GPUs, times nanoseconds."""
        return sum(executor.held_unit_ns for executor in self._executors.values() if executor.key == key)

    @property
    def owned_gpus(self) -> int:
        """GPUs that belong to services under a static policy."""
        return sum(gpus.bit_count() for each in pinned(self.state).values() for _, gpus in each)

    @property
    def restores(self) -> int:
        """Times that weights were brought onto GPUs."""
        return sum(executor.restores for executor in self._executors.values())

    def run(self) -> None:
        """Raises TangramError if an action does not end well, as one that fits on no host does not."""
        while self.advance():
            pass
        if left := self._crowd.unfinished():
            raise TangramError(left)

    def advance(self) -> bool:
        """Goes on to the next instant at which something happens; False if nothing will."""
        event_ns, tick_ns = self._clock.next_ns(), self._leader.next_tick_ns()
        if event_ns is not None and (tick_ns is None or event_ns <= tick_ns):
            self._idle_ticks = 0
            self._clock.move(event_ns)
        elif tick_ns is not None:
            self._idle_ticks = 0 if event_ns is not None or not self.state.actions else self._idle_ticks + 1
            if self._idle_ticks > limits.SIMULATED_IDLE_TICKS_MAX:
                raise TangramError(self._stuck())
            self._clock.move(tick_ns)
            self._leader.tick()
        else:
            return False
        self._leader.turn()
        return True

    def _stuck(self) -> str:
        waiting = [next(iter(queue)) for queue in self.state.queues.values()]
        first = min(waiting, key=lambda action: action.order) if waiting else next(iter(self.state.actions.values()))
        service = f" for {first.spec.service}" if first.spec.service else ""
        wants = ", ".join(f"{name} {demand.low}" for name, demand in first.spec.cost.items()) or first.key
        return (
            f"{len(self.state.actions)} actions wait, and nothing runs that could make room for them; the first, {first.id}, "
            f"wants {wants}{service} on an executor of kind {first.key}"
        )

    def _read(self, outgoing: Outgoing) -> None:
        message = outgoing.message
        if isinstance(message, m.DecisionsMade):
            self._executors[message.incarnation].read(message)
        elif isinstance(message, m.ActionsFinished):
            address, _ = m.decode(outgoing.subject, m.encode(message))
            for n, raw in zip(message.ids, message.results, strict=True):
                self._crowd.ruled(ActionId(address.first, address.second, n), m.decode_result(raw))

    def _ended(self, action_id: ActionId, start: m.Start, host: str, started_ns: int, startup_ns: int) -> None:
        self._crowd.ended(action_id, start.units, host, started_ns, startup_ns)


def _kinds(machine: Machine, wanted: Collection[str]) -> list[tuple[str, bool]]:
    """Those of its cores and GPUs, and of the wanted ones those that need neither."""
    found = [("cpu", True)] * (machine.cores > 0) + [("gpu", False)] * (machine.gpus > 0)
    return found + [(key, False) for key in sorted(wanted) if key not in ("cpu", "gpu")]
