"""One trajectory: a session, and a plan carried out in it, step after step.

The model is a pause. Everything else is real: files are written into the session, programs run in it.
"""

import asyncio
import shlex
import time
from dataclasses import dataclass, field
from typing import Final

from tangram.demo.config import DemoConfig
from tangram.demo.plan import Kind, Plan, Step
from tangram.demo.progress import Counts
from tangram.demo.records import Life, Record
from tangram.errors import SessionError
from tangram.producers.client import Client
from tangram.producers.result import Result
from tangram.producers.session import Session

PARALLEL: Final = 0.95
"""Declared for the elastic action: the part of its time that its cores share. Starting its programs is the rest."""


async def act(box: Session, step: Step, config: DemoConfig, units: int | tuple[int, int] | None = None) -> Result:
    """Carries out one step. `units` overrides what an elastic one asks for."""
    # Without site packages and the user's environment: it starts in half the time, and no setting can change a verdict.
    python = [config.python, "-I", "-S"]
    if step.kind is Kind.WRITE:
        return await box.write(step.path, step.text)
    if step.kind is Kind.TEST:
        return await box.run([*python, step.path], units=1, timeout=config.timeout_s, kind=step.kind.value)
    each = shlex.join([*python, step.path])
    command = f'seq 0 {step.programs - 1} | xargs -n 1 -P "${{TANGRAM_UNITS:-1}}" {each}'
    return await box.run(
        command,
        units=units or (1, config.suite_units),
        timeout=config.timeout_s,
        parallel=PARALLEL,
        kind=step.kind.value,
    )


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """Runs `plan`, with `pauses` seconds before its steps. `records` grows as outcomes come; `last_s` is the time of
    the latest, on the clock of time.monotonic. `life` is None until the session was closed."""

    client: Client
    config: DemoConfig
    plan: Plan
    pauses: tuple[float, ...]
    counts: Counts
    records: list[Record] = field(default_factory=list)
    life: Life | None = None
    last_s: float = 0.0

    async def run(self) -> None:
        """Opens the session, carries out every step, closes it. A step that goes wrong is recorded and the next one
        follows, as an agent would go on; without a session there is nothing to follow."""
        opening = Step(kind=Kind.OPEN)
        self.counts.submitted()
        try:
            async with self.client.session(image=self.config.image) as box:
                opened_s = time.monotonic()
                self._record(opening, box.opened)
                for step, pause in zip(self.plan.steps, self.pauses, strict=True):
                    await asyncio.sleep(pause)
                    self.counts.submitted()
                    self._record(step, await act(box, step, self.config))
            self.life = Life(trajectory=self.plan.trajectory, open_s=time.monotonic() - opened_s)
        except SessionError as error:
            if not isinstance(error.result, Result):
                raise
            self._record(opening, error.result)
        self.counts.trajectories_done += 1

    def _record(self, step: Step, result: Result) -> None:
        self.last_s = time.monotonic()
        self.counts.finished(result.outcome)
        self.records.append(
            Record(
                trajectory=self.plan.trajectory,
                kind=step.kind,
                outcome=result.outcome,
                expected=step.expected,
                act_s=result.act_s,
                queued_s=result.queued_s,
                startup_s=result.startup_s,
                run_s=result.run_s,
                units=result.units,
                detail=result.detail,
            )
        )
