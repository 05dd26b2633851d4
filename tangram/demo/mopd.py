"""The demo's second job: students that are distilled from nine teachers, which share two devices that hold three each.

A trajectory writes (a pause), has a batch of what it wrote scored by the teacher of its domain, and goes on. Everything but the
student is real: modules with 64 MiB of weights that come and go, and what they say. The paper's MOPD, on a small scale.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tangram import messages as m
from tangram.demo.jobs import Trajectory
from tangram.demo.plan import Kind
from tangram.demo.progress import Counts
from tangram.demo.teachers import TEACHERS, TOKENS, name
from tangram.producers.client import Client

STATIC: Final = "static-service"
TASK: Final = "mopd"
DEVICES: Final = 2
DEVICE_MIB: Final = 200
"""Three teachers."""
BATCHES: Final = 8
ITEMS: Final = (64, 192)
PAUSE_S: Final = 0.4
OWN_SHARE: Final = 0.8
"""Of a trajectory's batches; the others go to any teacher."""
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
class _Student(Trajectory):
    """expected: what the first policy's run said; it grows if that is this one."""

    plan: list[Batch] = field(default_factory=list)
    expected: list[list[float]] = field(default_factory=list)

    async def run(self) -> None:
        for step, batch in enumerate(self.plan):
            await asyncio.sleep(batch.pause_s)
            self.submitted()
            result = await self.client.scored(batch.teacher, batch.items, units={1, 2}, parallel=0.8)
            scores = m.decode_scores(result.data) if result.ok else []
            right = len(scores) == len(batch.items) and are_as_before(self.expected, step, scores)
            self.ended(Kind.SCORE, result, right=right)


def are_as_before(expected: list[list[float]], step: int, scores: list[float]) -> bool:
    """Whether a trajectory's scores are those of the first time, which this may be: then they are kept."""
    if step >= len(expected):
        expected.append(scores)
    known = expected[step]
    return len(known) == len(scores) and all(
        abs(one - other) <= TOLERANCE * max(1.0, abs(other)) for one, other in zip(scores, known, strict=True)
    )


class Distilled:
    """The job."""

    task = TASK

    def __init__(self, trajectories: int, seed: int) -> None:
        self._plans = draw(trajectories, seed)
        self._said: list[list[list[float]]] = [[] for _ in self._plans]

    @property
    def size(self) -> int:
        return len(self._plans)

    @property
    def actions(self) -> int:
        return BATCHES * len(self._plans)

    def crowd(self, policy: str, client: Client, counts: Counts) -> Sequence[Trajectory]:
        return [
            _Student(number, client, counts, plan=plan, expected=self._said[number]) for number, plan in enumerate(self._plans)
        ]
