"""The demo's third job: agents that look for answers through a search provider with a limit, and are judged in the end.

A trajectory thinks (a pause), searches for what its question and the last page suggest, and after some rounds has what it found
judged. The provider is a process of its own that counts requests by its own clock and refuses what is too much; the judge is a
real module on a device that it shares. What is compared with is what frameworks do: a limiter in each worker, of its part.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tangram import messages as m
from tangram.demo import corpus
from tangram.demo.jobs import Trajectory
from tangram.demo.mopd import are_as_before
from tangram.demo.plan import Kind
from tangram.demo.progress import Counts
from tangram.demo.teachers import JUDGE
from tangram.local import RoleProcess
from tangram.producers.client import Client

PER_WORKER: Final = "per-worker"
TASK: Final = "deepsearch"
ENDPOINT: Final = "search"
RATE, BURST = 16, 8
"""Requests a second that the provider takes, and at once."""
WORKERS: Final = 4
ROUNDS: Final = (2, 12)
PAUSE_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Search:
    question: str
    pauses_s: list[float]


def draw(trajectories: int, seed: int) -> list[Search]:
    """Each has its own number of rounds: some questions are hard."""
    rng = random.Random(f"tangram deepsearch {seed}")
    titles = list(corpus.PAGES)
    plans = []
    for _ in range(trajectories):
        rounds = min(ROUNDS[1], max(ROUNDS[0], round(rng.lognormvariate(1.5, 0.6))))
        pauses_s = [PAUSE_S * rng.lognormvariate(-0.125, 0.5) for _ in range(rounds)]
        plans.append(Search(" ".join(rng.sample(titles, 2)), pauses_s))
    return plans


@dataclass(slots=True)
class _Agent(Trajectory):
    """worker: which has it, where each has a limit of its own. pages, verdicts: what the first policy's run was told."""

    plan: Search = field(default_factory=lambda: Search("", []))
    worker: int | None = None
    pages: list[str] = field(default_factory=list)
    verdicts: list[list[float]] = field(default_factory=list)

    async def run(self) -> None:
        found: list[str] = []
        for step, pause_s in enumerate(self.plan.pauses_s):
            await asyncio.sleep(pause_s)
            query = f"{self.plan.question} {found[-1] if found else ''}"
            quotas = {quota_of(self.worker): 1} if self.worker is not None else None
            self.submitted()
            result = await self.client.called(ENDPOINT, {"q": query, "skip": found}, quotas=quotas)
            page = result.response.content if result.ok and result.response is not None else {}
            found.append(page.get("title", ""))
            if step >= len(self.pages):
                self.pages.append(found[-1])
            self.ended(Kind.CALL, result, right=bool(found[-1]) and found[-1] == self.pages[step])
        self.submitted()
        result = await self.client.scored(JUDGE, [f"{self.plan.question}: {title}" for title in found])
        scores = m.decode_scores(result.data) if result.ok else []
        self.ended(Kind.SCORE, result, right=len(scores) == len(found) and are_as_before(self.verdicts, 0, scores))


class Searched:
    """The job."""

    task = TASK

    def __init__(self, trajectories: int, seed: int) -> None:
        self._plans = draw(trajectories, seed)
        self._pages: list[list[str]] = [[] for _ in self._plans]
        self._verdicts: list[list[list[float]]] = [[] for _ in self._plans]

    @property
    def size(self) -> int:
        return len(self._plans)

    @property
    def actions(self) -> int:
        return sum(len(plan.pauses_s) + 1 for plan in self._plans)

    def crowd(self, policy: str, client: Client, counts: Counts) -> Sequence[Trajectory]:
        return [
            _Agent(
                number,
                client,
                counts,
                plan=plan,
                worker=number % WORKERS if policy == PER_WORKER else None,
                pages=self._pages[number],
                verdicts=self._verdicts[number],
            )
            for number, plan in enumerate(self._plans)
        ]


# --- the provider ------------------------------------------------------------------------------------------------


def quota_of(worker: int) -> str:
    return f"worker-{worker}"


def quotas(policy: str) -> list[str]:
    """What a scheduler has to know of the provider's limit: as a whole, or each worker its part."""
    if policy == PER_WORKER:
        return [f"{quota_of(worker)}=requests:{RATE // WORKERS}/1,burst:{BURST // WORKERS}" for worker in range(WORKERS)]
    return [f"{ENDPOINT}=requests:{RATE}/1,burst:{BURST}"]


@asynccontextmanager
async def provider(folder: Path) -> AsyncIterator[str]:
    """The URL of a search provider that runs in a process of its own."""
    arguments = [str(RATE), str(BURST), str(folder)]
    role = await RoleProcess.start("search", arguments, folder / "search.log", module="tangram.demo.search")
    try:
        yield (folder / "url").read_text()
    finally:
        await role.stop()


def declare(path: Path, url: str, policy: str) -> None:
    """Writes the endpoint's declaration for `tangram executor api --endpoints`."""
    takes = "" if policy == PER_WORKER else f"\ntakes = {{ {ENDPOINT} = 1 }}"
    path.write_text(f'[endpoints.{ENDPOINT}]\nurl = "{url}/search"{takes}\n')
