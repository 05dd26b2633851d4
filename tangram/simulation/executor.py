"""Virtual executors: one a host. They alone know how long an action takes."""

from collections.abc import Callable

from tangram import messages as m
from tangram import subjects
from tangram.errors import TangramError
from tangram.outcomes import Outcome
from tangram.scheduler.cores import MILLI
from tangram.scheduler.state import ActionId
from tangram.simulation.clock import Clock
from tangram.simulation.leader import Log
from tangram.simulation.pool import Machine

Ended = Callable[[ActionId, m.Start, str, int], None]
"""Called with an action's id, what started it, its host and when it started (virtual nanoseconds), when it has ended."""


class VirtualExecutor:
    """run_ns(id, units): how long an action takes. held_unit_ns: what was held in cores x nanoseconds, by actions and by
    sandboxes that are closed."""

    def __init__(
        self, name: str, machine: Machine, clock: Clock, log: Log, run_ns: Callable[[ActionId, int], int], on_end: Ended
    ) -> None:
        self.name = name
        self.held_unit_ns = 0
        self._clock, self._log = clock, log
        self._run_ns, self._on_end = run_ns, on_end
        self._k = 1
        self._sandboxes: dict[tuple[str, str, int], tuple[int, int]] = {}
        """What each holds in units, and since when."""
        first, nodes = 0, []
        for cores in machine.nodes:
            nodes.append(list(range(first, first + cores)))
            first += cores
        joined = m.ExecutorJoined(
            incarnation=name,
            key="cpu",
            host=name,
            machine_id=name,
            boot_id="1",
            cores=nodes,
            capacity={"memory": machine.memory_mib},
        )
        log.put(subjects.executors(name), joined)

    def read(self, message: m.DecisionsMade) -> None:
        """Begins what was decided. Raises TangramError for an item that it does not know."""
        for item in message.items:
            if not isinstance(item, m.Start):
                raise TangramError(f"the virtual executor {self.name} cannot do {item}")
            self._begin(item)

    def _begin(self, start: m.Start) -> None:
        action_id = ActionId(start.task, start.client, start.n)
        started_ns = self._clock.now_ns
        run_ns = self._run_ns(action_id, start.units)
        self._clock.at(started_ns + run_ns, lambda: self._end(action_id, start, started_ns))

    def _end(self, action_id: ActionId, start: m.Start, started_ns: int) -> None:
        now_ns = self._clock.now_ns
        self._k += 1
        result = m.Result(
            nonce=start.nonce,
            attempt=start.attempt,
            outcome=Outcome.OK,
            exit_code=0,
            units=start.units,
            queued_ns=start.queued_ns,
            run_ns=now_ns - started_ns,
        )
        finished = m.ActionsFinished(
            executor=self.name, incarnation=self.name, k=self._k, ids=[start.n], results=[m.encode(result)], outputs=[b""]
        )
        self._log.put(subjects.completions(start.task, start.client), finished)
        units = start.amounts.get("cpu", 0) // MILLI
        if start.kind == "session.open":
            self._sandboxes[action_id] = (units, started_ns)
        else:
            self.held_unit_ns += units * (now_ns - started_ns)
        if start.kind == "session.close":
            units, since_ns = self._sandboxes.pop((start.task, start.client, start.session))
            self.held_unit_ns += units * (now_ns - since_ns)
        self._on_end(action_id, start, self.name, started_ns)
