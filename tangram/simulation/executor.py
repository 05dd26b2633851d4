"""Virtual executors: one a host and kind. They alone know how long an action takes."""

from collections.abc import Callable

from tangram import messages as m
from tangram import subjects
from tangram.errors import TangramError
from tangram.outcomes import Outcome
from tangram.scheduler.cores import MILLI
from tangram.scheduler.state import ActionId
from tangram.simulation.client import Crowd
from tangram.simulation.clock import Clock
from tangram.simulation.leader import Log
from tangram.simulation.pool import Machine

Ended = Callable[[ActionId, m.Start, str, int, int], None]
"""Called with an action's id, what started it, its host, when it started and how long its start-up took (virtual nanoseconds),
when it has ended."""


class VirtualExecutor:
    """crowd: says how long an action takes, and how it ends. held_unit_ns: what was held in cores, or GPUs, x nanoseconds, by
    actions and by sandboxes that are closed. restores: times that it brought weights onto GPUs."""

    def __init__(
        self,
        host: str,
        key: str,
        machine: Machine,
        services: dict[str, m.Service],
        clock: Clock,
        log: Log,
        crowd: Crowd,
        on_end: Ended,
        *,
        has_cores: bool,
    ) -> None:
        self.name = host if key == "cpu" else f"{host}-{key}"
        self.key = key
        self.held_unit_ns = 0
        self.restores = 0
        self._host, self._services = host, services
        self._memory_mib = machine.gpu_memory_mib
        self._copies: dict[tuple[str, tuple[int, ...]], int] = {}
        """MiB on each of its GPUs, by service and GPUs."""
        self._there_ns: dict[tuple[str, tuple[int, ...]], int] = {}
        """When a copy that is fetched will be there."""
        self._clock, self._log = clock, log
        self._crowd, self._on_end = crowd, on_end
        self._k = 1
        self._sandboxes: dict[tuple[str, str, int], tuple[int, int]] = {}
        """What each holds in units, and since when."""
        first, nodes = 0, []
        for cores in machine.nodes:
            nodes.append(list(range(first, first + cores)))
            first += cores
        joined = m.ExecutorJoined(
            incarnation=self.name,
            key=key,
            host=host,
            machine_id=host,
            boot_id="1",
            cores=nodes if has_cores else [],
            capacity={"memory": machine.memory_mib}
            | dict(machine.others)
            | ({"gpu_memory": machine.gpu_memory_mib} if key == "gpu" else {}),
            gpus=list(range(machine.gpus)) if key == "gpu" else [],
            services=services if key == "gpu" else {},
        )
        log.put(subjects.executors(self.name), joined)

    def read(self, message: m.DecisionsMade) -> None:
        """Begins what was decided. Raises TangramError for an item that it does not know."""
        for item in message.items:
            if isinstance(item, m.Start):
                self._begin(item)
            elif isinstance(item, m.Prefetch):
                self._there_ns[item.service, item.gpus] = self._clock.now_ns + self._restore(item)
            elif isinstance(item, m.EndSession):
                self._close((item.task, item.client, item.session))
                gone = m.SessionEnded(task=item.task, client=item.client, session=item.session, reason="closed")
                self._k += 1
                self._log.put(subjects.executors(self.name), m.ActionsReturned(incarnation=self.name, k=self._k, ended=[gone]))
            elif not isinstance(item, m.Cancel):  # whose answer is the outcome, when it comes
                raise TangramError(f"the virtual executor {self.name} cannot do {item}")

    def _begin(self, start: m.Start) -> None:
        action_id = ActionId(start.task, start.client, start.n)
        started_ns = self._clock.now_ns
        startup_ns = 0
        if start.gpus:
            fetched_ns = self._there_ns.pop((start.service, start.gpus), 0)
            startup_ns = self._restore(start) or max(0, fetched_ns - started_ns)
        run_ns = self._crowd.run_ns(action_id, start.units)
        self._clock.at(started_ns + startup_ns + run_ns, lambda: self._end(action_id, start, started_ns, startup_ns))

    def _restore(self, start: m.Start | m.Prefetch) -> int:
        """Makes room, brings the weights if they are not there, and returns what that takes."""
        for each in start.evicts:
            self._copies.pop((each.service, each.gpus), None)
        key = (start.service, start.gpus)
        if not start.service or key in self._copies:
            return 0
        offer, size = self._services[start.service], len(start.gpus)
        self._copies[key] = -(-offer.weights_mib // size)
        for gpu in start.gpus:
            if sum(mib for (_, gpus), mib in self._copies.items() if gpu in gpus) > self._memory_mib:
                raise TangramError(f"{self.name}: GPU {gpu} has no room for {start.service}")
        self.restores += 1
        return (offer.restore_fixed_us + offer.restore_us // size) * 1_000

    def _end(self, action_id: ActionId, start: m.Start, started_ns: int, startup_ns: int) -> None:
        now_ns = self._clock.now_ns
        self._k += 1
        outcome = self._crowd.outcome(action_id, start.units)
        is_ok = outcome is Outcome.OK
        result = m.Result(
            nonce=start.nonce,
            attempt=start.attempt,
            outcome=outcome,
            exit_code=0 if is_ok else 1 if outcome is Outcome.FAILED else None,
            units=start.units,
            queued_ns=start.queued_ns,
            startup_ns=startup_ns,
            run_ns=now_ns - started_ns - startup_ns,
        )
        finished = m.ActionsFinished(
            executor=self.name, incarnation=self.name, k=self._k, ids=[start.n], results=[m.encode(result)], outputs=[b""]
        )
        self._log.put(subjects.completions(start.task, start.client), finished)
        units = len(start.gpus) or start.amounts.get("cpu", 0) // MILLI
        if start.kind == "session.open" and is_ok:
            self._sandboxes[action_id] = (units, started_ns)
        else:
            self.held_unit_ns += units * (now_ns - started_ns)
        if start.kind == "session.close" and is_ok:
            self._close((start.task, start.client, start.session))
        self._on_end(action_id, start, self._host, started_ns, startup_ns)

    def _close(self, sandbox: tuple[str, str, int]) -> None:
        units, since_ns = self._sandboxes.pop(sandbox)
        self.held_unit_ns += units * (self._clock.now_ns - since_ns)
