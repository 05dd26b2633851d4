"""The demo's second job: students that are distilled from nine teachers, which share two devices that hold three each.

A trajectory writes (a pause), has a batch of what it wrote scored by the teacher of its domain, and goes on. Everything but the
student is real: modules with 64 MiB of weights that come and go, and what they say. The paper's MOPD, on a small scale.
"""

import asyncio
import functools
import random
import time
from dataclasses import dataclass, field
from typing import Final

from tangram import messages as m
from tangram.demo.plan import Kind
from tangram.demo.progress import Counts, Progress
from tangram.demo.records import Life, PolicyRun, Record
from tangram.demo.report import Report, report
from tangram.demo.runner import Load, Stack, together
from tangram.demo.teachers import TEACHERS, TOKENS, name
from tangram.errors import TangramError
from tangram.outcomes import Outcome
from tangram.producers.client import Client

STATIC: Final = "static-service"
POLICIES: Final = (STATIC, "tangram")
TASK: Final = "mopd"
DEVICES: Final = 2
DEVICE_MIB: Final = 200
"""Three teachers."""
BATCHES: Final = 8
ITEMS: Final = (64, 192)
PAUSE_S: Final = 0.4
OWN_SHARE: Final = 0.8
"""Of a trajectory's batches; the others go to any teacher."""
LIMIT_S: Final = 600.0
TOLERANCE: Final = 1e-3
"""Between two devices, or two sizes of a batch, sums are made in another order."""


@dataclass(frozen=True, slots=True)
class Batch:
    pause_s: float
    teacher: str
    items: list[list[int]]


def draw(trajectories: int, seed: int) -> list[list[Batch]]:
    """What each trajectory will ask for: domains are not asked for alike (the first of nine four times as often as the last)."""
    rng = random.Random(f"tangram mopd {seed}")
    weights = [1 / (1 + number / 2.7) for number in range(TEACHERS)]
    plans = []
    for _ in range(trajectories):
        (domain,) = rng.choices(range(TEACHERS), weights)
        plan = []
        for _ in range(BATCHES):
            teacher = domain if rng.random() < OWN_SHARE else rng.randrange(TEACHERS)
            items = [[rng.randrange(TOKENS) for _ in range(64)] for _ in range(rng.randint(*ITEMS))]
            plan.append(Batch(PAUSE_S * rng.lognormvariate(-0.125, 0.5), name(teacher), items))
        plans.append(plan)
    return plans


@dataclass(slots=True)
class _Trajectory:
    number: int
    plan: list[Batch]
    client: Client
    counts: Counts
    expected: list[list[float]]
    """What the first policy's run said; it grows if that is this one."""
    records: list[Record] = field(default_factory=list)
    last_s: float = 0.0

    async def run(self) -> None:
        for step, batch in enumerate(self.plan):
            await asyncio.sleep(batch.pause_s)
            self.counts.submitted()
            result = await self.client.scored(batch.teacher, batch.items, units={1, 2}, parallel=0.8)
            self.last_s = time.monotonic()
            self.counts.finished(result.outcome)
            right = result.ok and self._is_right(step, m.decode_scores(result.data))
            self.records.append(
                Record(
                    trajectory=self.number,
                    kind=Kind.SCORE,
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
        self.counts.trajectories_done += 1

    def _is_right(self, step: int, scores: list[float]) -> bool:
        if step >= len(self.expected):
            self.expected.append(scores)
        known = self.expected[step]
        return len(known) == len(scores) == len(self.plan[step].items) and all(
            abs(one - other) <= TOLERANCE * max(1.0, abs(other)) for one, other in zip(scores, known, strict=True)
        )


async def compare(
    trajectories: int, seed: int, stack: Stack, progress: Progress, *, command: str, load_of: Load | None = None
) -> Report:
    """The same batches under each policy, one policy after the other; what the teachers say must be the same.

    Raises TangramError if a policy does not finish in time, and what `stack` raises.
    """
    plans = draw(trajectories, seed)
    said: list[list[list[float]]] = [[] for _ in plans]
    runs = []
    for policy in POLICIES:
        async with stack(policy) as url, Client(url, task=TASK) as client:
            counts = progress.begin(policy, len(plans), BATCHES * len(plans), load_of and functools.partial(load_of, policy))
            crowd = [_Trajectory(number, plan, client, counts, said[number]) for number, plan in enumerate(plans)]
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(LIMIT_S):
                    await together([each.run() for each in crowd])
            except TimeoutError:
                raise TangramError(f"{policy}: not finished after {LIMIT_S:.0f} s") from None
            finally:
                progress.end(counts)
            makespan_s = max(each.last_s for each in crowd) - started_s
            owned = policy == STATIC
            runs.append(
                PolicyRun(
                    policy=policy,
                    makespan_s=makespan_s,
                    records=tuple(record for each in crowd for record in each.records),
                    # Pinned to services, the devices are nobody else's from beginning to end.
                    lives=tuple(Life(trajectory=device, open_s=makespan_s) for device in range(DEVICES if owned else 0)),
                    reserved_units=1 if owned else 0,
                )
            )
    return report(runs, seed=seed, command=command, baseline=STATIC)
