"""Live progress: a table that is redrawn on a terminal, a plain line every few seconds elsewhere."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tangram.outcomes import Outcome

REDRAW_S: Final = 0.25
LINE_S: Final = 3.0
"""Often enough to see that it lives, seldom enough for a log file."""


@dataclass(slots=True)
class Counts:
    """Where one policy stands. in_flight: actions submitted and not yet answered. load: of these, (running, queued),
    where somebody can tell; a client cannot."""

    policy: str
    trajectories: int
    actions: int
    trajectories_done: int = 0
    in_flight: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    load: Callable[[], tuple[int, int]] | None = None
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def actions_done(self) -> int:
        return self.outcomes.total()

    def submitted(self) -> None:
        self.in_flight += 1

    def finished(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.outcomes[outcome] += 1

    def cells(self) -> dict[str, str]:
        """The text of each column."""
        elapsed_s = (self.ended_s or time.monotonic()) - self.started_s
        running, queued = self.load() if self.load and self.ended_s is None else (None, None)
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        return {
            "policy": self.policy,
            "time": f"{elapsed_s:.0f} s",
            "trajectories": f"{self.trajectories_done}/{self.trajectories}",
            "actions": f"{self.actions_done}/{self.actions}",
            "in flight": str(self.in_flight),
            "running": "-" if running is None else str(running),
            "queued": "-" if queued is None else str(queued),
            "outcomes": ended or "-",
        }


class Progress:
    """Shows `Counts` as they change, as an asynchronous context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[Counts] = []
        self._note = ""
        self._task: asyncio.Task[None] | None = None

    def note(self, text: str) -> None:
        """Says what goes on besides the policies' runs."""
        self._note = text
        if not self._console.is_terminal and text:
            self._console.print(text, highlight=False)

    def begin(self, policy: str, trajectories: int, actions: int, load: Callable[[], tuple[int, int]] | None = None) -> Counts:
        counts = Counts(policy=policy, trajectories=trajectories, actions=actions, load=load)
        self._rows.append(counts)
        return counts

    def end(self, counts: Counts) -> None:
        counts.ended_s = time.monotonic()
        if not self._console.is_terminal:
            self._line(counts)

    def table(self) -> Table:
        table = Table(caption=self._note or None, caption_justify="left")
        for row in self._rows or [Counts(policy="-", trajectories=0, actions=0)]:
            cells = row.cells()
            if not table.columns:
                for name in cells:
                    table.add_column(name, justify="left" if name in ("policy", "outcomes") else "right")
            table.add_row(*cells.values())
        return table

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._redraw() if self._console.is_terminal else self._lines())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _redraw(self) -> None:
        # Drawn by this task and not by rich's thread, so that nothing changes while it is drawn.
        with Live(self.table(), console=self._console, auto_refresh=False, transient=False) as live:
            try:
                while True:
                    await asyncio.sleep(REDRAW_S)
                    live.update(self.table(), refresh=True)
            finally:
                self._note = ""
                live.update(self.table(), refresh=True)

    async def _lines(self) -> None:
        while True:
            await asyncio.sleep(LINE_S)
            for row in self._rows:
                if row.ended_s is None:
                    self._line(row)

    def _line(self, row: Counts) -> None:
        cells = row.cells()
        policy = cells.pop("policy")
        shown = [f"{name} {text}" for name, text in cells.items() if text != "-"]
        self._console.print(f"{policy}: " + ", ".join(shown), highlight=False, soft_wrap=True)
