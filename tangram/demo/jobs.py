"""Jobs of the demo, one or several at once, under one policy after the other."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol

from tangram.demo.plan import Kind
from tangram.demo.progress import Counts, Progress
from tangram.demo.records import Life, PolicyRun, Record
from tangram.demo.report import Report, figures, report
from tangram.demo.runner import Stack, together
from tangram.errors import TangramError
from tangram.outcomes import Outcome
from tangram.producers.client import Client
from tangram.producers.result import Result

LIMIT_S: Final = 600.0


@dataclass(slots=True)
class Trajectory(ABC):
    """One of a job's, under one policy. last_s: when its last action ended."""

    number: int
    client: Client
    counts: Counts
    records: list[Record] = field(default_factory=list)
    last_s: float = 0.0

    def submitted(self) -> None:
        self.counts.submitted()

    def ended(self, kind: Kind, result: Result, *, right: bool) -> None:
        """right: what came is what should have come; of what did not end well its outcome says enough."""
        self.last_s = time.monotonic()
        self.counts.finished(result.outcome)
        self.records.append(
            Record(
                trajectory=self.number,
                kind=kind,
                outcome=result.outcome,
                expected=Outcome.OK if right or not result.ok else Outcome.ERROR,
                act_s=result.act_s,
                queued_s=result.queued_s,
                startup_s=result.startup_s,
                run_s=result.run_s,
                units=result.units,
                detail=result.detail,
            )
        )

    @abstractmethod
    async def run(self) -> None:
        """To its end."""


class Job(Protocol):
    """task: whose its actions are. size, actions: how many trajectories, and how many actions they have together."""

    task: str

    @property
    def size(self) -> int: ...

    @property
    def actions(self) -> int: ...

    def crowd(self, policy: str, client: Client, counts: Counts) -> Sequence[Trajectory]:
        """All of its trajectories, before they begin. What they were told the first time has to come again."""


async def compare(
    jobs: Sequence[Job],
    policies: Sequence[str],
    stack: Stack,
    progress: Progress,
    *,
    seed: int,
    command: str,
    reserved: int = 0,
) -> Report:
    """The same actions under each policy, one policy after the other; the first is the baseline. reserved: GPUs that are nobody
    else's under it, from beginning to end.

    Raises TangramError if a policy does not finish in time, and what `stack` raises.
    """
    runs = []
    by_job: dict[str, dict[str, dict[str, float]]] = {job.task: {} for job in jobs}
    for policy in policies:
        async with AsyncExitStack() as opened:
            url = await opened.enter_async_context(stack(policy))
            counts = progress.begin(policy, sum(job.size for job in jobs), sum(job.actions for job in jobs))
            crowds = {}
            for job in jobs:
                client = await opened.enter_async_context(Client(url, task=job.task))
                crowds[job.task] = job.crowd(policy, client, counts)
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(LIMIT_S):
                    await together([_counted(each) for crowd in crowds.values() for each in crowd])
            except TimeoutError:
                raise TangramError(f"{policy}: not finished after {LIMIT_S:.0f} s") from None
            finally:
                progress.end(counts)
            is_owned = reserved and policy == policies[0]
            makespan_s = _until(crowds.values(), started_s)
            lives = tuple(Life(trajectory=number, open_s=makespan_s) for number in range(reserved if is_owned else 0))
            runs.append(_run(policy, crowds.values(), makespan_s, lives))
            for task, crowd in crowds.items():
                own = figures(_run(policy, [crowd], _until([crowd], started_s), ()))
                by_job[task][policy] = {"mean_act_s": own["mean_act_s"], "makespan_s": own["makespan_s"]}
    found = report(runs, seed=seed, command=command, baseline=policies[0])
    if len(jobs) > 1:
        found["jobs"] = by_job
    return found


async def _counted(trajectory: Trajectory) -> None:
    await trajectory.run()
    trajectory.counts.trajectories_done += 1


def _until(crowds: Iterable[Sequence[Trajectory]], started_s: float) -> float:
    return max(each.last_s for crowd in crowds for each in crowd) - started_s


def _run(policy: str, crowds: Iterable[Sequence[Trajectory]], makespan_s: float, lives: tuple[Life, ...]) -> PolicyRun:
    return PolicyRun(
        policy=policy,
        makespan_s=makespan_s,
        records=tuple(record for crowd in crowds for each in crowd for record in each.records),
        lives=lives,
        reserved_units=1 if lives else 0,
    )
