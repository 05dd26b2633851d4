"""Virtual trajectories: a closed loop of thinking and acting, in a sandbox that is opened first and closed last."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from tangram import limits, subjects
from tangram import messages as m
from tangram.errors import TangramError
from tangram.outcomes import Outcome
from tangram.scheduler.state import ActionId
from tangram.simulation.clock import Clock
from tangram.simulation.leader import Log, payload_of
from tangram.simulation.work import Trajectory, Work

_OPEN: Final = 1
"""The number of the action that opens the sandbox; the first of the trajectory's own follows it."""
_NONCE: Final = bytes(limits.NONCE_BYTES)


class Done(NamedTuple):
    """An action that has ended. Times in virtual nanoseconds; startup_ns is part of what lies between start and finish."""

    trajectory: Trajectory
    step: int
    arrived_ns: int
    started_ns: int
    finished_ns: int
    units: int
    host: str
    startup_ns: int = 0

    @property
    def work(self) -> Work:
        return self.trajectory.work[self.step]


class Crowd(Protocol):
    """Whoever submits the actions of a simulation. keys: the kinds of executors that it needs."""

    keys: set[str]

    def run_ns(self, action_id: ActionId, units: int) -> int:
        """How long an action runs on so many units."""

    def outcome(self, action_id: ActionId, units: int) -> Outcome:
        """How it ends there."""

    def ended(self, action_id: ActionId, units: int, host: str, started_ns: int, startup_ns: int) -> None: ...

    def ruled(self, action_id: ActionId, result: m.Result) -> None:
        """It will not run. Raises TangramError if that ends the simulation."""

    def unfinished(self) -> str:
        """When nothing goes on any more: what should have, or ""."""


class Trajectories:
    """Each with a client of its own. done: the actions that have ended, in that order."""

    def __init__(self, trajectories: Sequence[Trajectory], clock: Clock, log: Log, *, one_shot: bool, oracle: bool) -> None:
        self.keys = {work.key for trajectory in trajectories for work in trajectory.work}
        self.done: list[Done] = []
        self._expected = sum(len(trajectory.work) for trajectory in trajectories)
        self._clients: dict[tuple[str, str], VirtualClient] = {}
        for trajectory in trajectories:
            client = VirtualClient(trajectory, clock, log, self.done.append, one_shot=one_shot, oracle=oracle)
            self._clients[(trajectory.task, client.name)] = client

    def run_ns(self, action_id: ActionId, units: int) -> int:
        return self._clients[action_id[:2]].run_ns(action_id, units)

    def outcome(self, action_id: ActionId, units: int) -> Outcome:
        return Outcome.OK

    def ended(self, action_id: ActionId, units: int, host: str, started_ns: int, startup_ns: int) -> None:
        self._clients[action_id[:2]].ended(action_id, units, host, started_ns, startup_ns)

    def ruled(self, action_id: ActionId, result: m.Result) -> None:
        words = " ".join(filter(None, (str(result.outcome), result.reason, result.detail)))
        raise TangramError(f"action {action_id} was not run: {words}")

    def unfinished(self) -> str:
        left = self._expected - len(self.done)
        return f"{left} of {self._expected} actions have not ended" if left else ""


class VirtualClient:
    """Submits the actions of one trajectory. one_shot: without a sandbox, each action where there is room; so it is for one
    that has no use for cores. oracle: with hints that tell the truth."""

    def __init__(
        self, trajectory: Trajectory, clock: Clock, log: Log, on_done: Callable[[Done], None], *, one_shot: bool, oracle: bool
    ) -> None:
        self.name = f"t{trajectory.number}"
        self._trajectory = trajectory
        self._clock, self._log, self._on_done = clock, log, on_done
        self._one_shot = one_shot or not any(work.key == "cpu" for work in trajectory.work)
        self._oracle = oracle
        self._next = 0
        self._arrived_ns = 0
        clock.at(trajectory.start_ns, self._start)

    def _start(self) -> None:
        if not self._one_shot:
            self._submit(_OPEN, "session.open", {})
        self._think()

    def _think(self) -> None:
        self._clock.at(self._clock.now_ns + self._trajectory.work[self._next].think_ns, self._act)

    def _act(self) -> None:
        self._arrived_ns = self._clock.now_ns
        work = self._trajectory.work[self._next]
        hint = work.truth() if self._oracle else work.hint
        self._submit(_OPEN + 1 + self._next, work.kind, work.cost(), hint, work.key, work.service)

    def _submit(
        self, n: int, kind: str, cost: dict[str, m.Demand], hint: m.Hint | None = None, key: str = "cpu", service: str = ""
    ) -> None:
        spec = m.ActionSpec(
            nonce=_NONCE,
            kind=kind,
            cost=cost,
            hint=hint,
            timeout_ms=limits.TIMEOUT_MS_MAX,
            deadline_ms=limits.DEADLINE_MS_MAX,
            session=0 if self._one_shot or n == _OPEN or key != "cpu" else _OPEN,
            idle_ttl_ms=limits.DEADLINE_MS_MAX,
            service=service,
        )
        message = m.ActionsSubmitted(client=self.name, done_below=n, ids=[n], specs=[m.encode(spec)], payloads=[payload_of(kind)])
        self._log.put(subjects.actions(key, self._trajectory.task), message)

    def run_ns(self, action_id: ActionId, units: int) -> int:
        index = action_id.n - _OPEN - 1
        work = self._trajectory.work
        return work[index].run_ns(units) if 0 <= index < len(work) else 0

    def ended(self, action_id: ActionId, units: int, host: str, started_ns: int, startup_ns: int) -> None:
        index = action_id.n - _OPEN - 1
        if not 0 <= index < len(self._trajectory.work):
            return
        done = Done(self._trajectory, index, self._arrived_ns, started_ns, self._clock.now_ns, units, host, startup_ns)
        self._on_done(done)
        self._next += 1
        if self._next < len(self._trajectory.work):
            self._think()
        elif not self._one_shot:
            self._submit(_OPEN + 1 + self._next, "session.close", {})
