"""Progress on a terminal and without one."""

import asyncio
import io

import pytest
from rich.console import Console

from tangram.demo import progress
from tangram.demo.progress import Progress
from tangram.outcomes import Outcome


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120), out


async def a_run(shown: Progress) -> None:
    async with shown:
        shown.note("measuring")
        await asyncio.sleep(0.05)
        counts = shown.begin("tangram", trajectories=2, actions=3, load=lambda: (1, 4))
        for outcome in (Outcome.OK, Outcome.OK, Outcome.FAILED):
            counts.submitted()
            await asyncio.sleep(0.03)
            counts.finished(outcome)
        counts.submitted()
        counts.trajectories_done = 1
        await asyncio.sleep(0.05)
        shown.end(counts)


@pytest.mark.parametrize("terminal", [True, False])
def test_counts_are_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    where, out = console(terminal=terminal)
    asyncio.run(a_run(Progress(where)))
    text = out.getvalue()
    for part in ("measuring", "tangram", "1/2", "3/3", "failed 1, ok 2"):
        assert part in text


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    where, out = console(terminal=False)
    asyncio.run(a_run(Progress(where)))
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert "\x1b" not in out.getvalue()
    assert any("running 1, queued 4" in line for line in lines)
    assert lines[-1] == "tangram: time 0 s, trajectories 1/2, actions 3/3, in flight 1, outcomes failed 1, ok 2"


def test_an_error_leaves_the_terminal_usable() -> None:
    async def fails() -> None:
        async with Progress(console(terminal=True)[0]):
            await asyncio.sleep(0)
            raise RuntimeError("the job")

    with pytest.raises(RuntimeError, match="the job"):
        asyncio.run(fails())
