"""A log event by event: forward and back come to the same states, breakpoints stop where they say."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram import messages as m
from tangram.cli.main import main
from tangram.replay import walk
from tangram.replay.sources import FileSource
from tangram.replay.walk import Breakpoint, Walker
from tangram.scheduler.checkpoint import dump
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import ActionId, State
from tests.core.world import World, cores
from tests.replay.record import FOLDER, chaos

LOG = chaos(seed=5, steps=400).world.log
DEMO = max(FOLDER.glob("behaviour-*-demo.log"))


def states() -> list[bytes]:
    state, found = State(), [dump(State())]
    for record in LOG:
        step(state, record)
        found.append(dump(state))
    return found


STATES = states()


async def none() -> State | None:
    return None


def opened(log: list[Record]) -> walk.Open:
    async def batches(after_seq: int) -> AsyncIterator[list[Record]]:
        rest = [record for record in log if record.seq > after_seq]
        for at in range(0, len(rest), 7):
            yield rest[at : at + 7]

    return batches


async def walker(every: int = 16) -> Walker:
    found = Walker(opened(LOG), none, _every=every)
    await found.start()
    return found


@given(st.lists(st.integers(0, len(LOG)), min_size=1, max_size=6))
def test_wherever_one_goes_the_state_is_that_of_the_log(targets: list[int]) -> None:
    async def go() -> None:
        found = await walker()
        for target in targets:
            await found.goto(target)
            assert found.at == target
            assert dump(found.state) == STATES[target]

    asyncio.run(go())


def test_forward_and_back_show_the_same_steps() -> None:
    async def go() -> None:
        found = await walker()
        steps = [await found.forward() for _ in range(60)]
        for shown in reversed(steps[:-1]):
            assert await found.back() == shown
        assert await found.back() is None
        assert found.at == 0

    asyncio.run(go())


def test_the_end_is_said_and_can_be_left_again() -> None:
    async def go() -> None:
        found = await walker()
        await found.goto(len(LOG) + 10)
        assert found.at == len(LOG)
        assert await found.forward() is None
        assert await found.forward() is None
        shown = await found.back()
        assert shown is not None
        assert shown.seq == len(LOG) - 1

    asyncio.run(go())


def test_continue_stops_at_each_event_of_a_task_and_back_again() -> None:
    task = next(action.task for record in LOG for action, _ in mentions(record))
    wanted = [record.seq for record in LOG if any(action.task == task for action, _ in mentions(record))]

    async def go() -> None:
        found = await walker()
        forward = []
        while (shown := await found.until([Breakpoint(task=task)])) is not None:
            forward.append(shown.seq)
        assert forward == wanted
        back = []
        while (shown := await found.back_until([Breakpoint(task=task)])) is not None:
            back.append(shown.seq)
        assert back == [seq for seq in wanted[::-1] if seq < LOG[-1].seq], "not that at which one stands"
        assert found.at == 0

    asyncio.run(go())


def mentions(record: Record) -> list[tuple[ActionId, str]]:
    try:
        return walk.mentioned(record.subject, m.decode(record.subject, record.data)[1])
    except m.Malformed:
        return []


def test_snapshots_stay_within_their_bounds() -> None:
    async def go() -> int:
        found = await walker(every=1)
        await found.goto(len(LOG))
        return len(found._snapshots)

    assert len(LOG) > walk.SNAPSHOTS_MAX / 2
    assert asyncio.run(go()) <= walk.SNAPSHOTS_MAX


def test_a_step_says_what_it_changed() -> None:
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(2))
    action = world.submit(cpu=m.Demand(low=1_000))
    world.decide()
    worker.finish(action)

    async def go() -> list[str]:
        found = Walker(opened(world.log), none)
        await found.start()
        lines = []
        while (shown := await found.forward()) is not None:
            lines += shown.lines
        return lines

    text = "\n".join(asyncio.run(go()))
    assert f"+ {action} (run) ready; asks for 1 core" in text
    assert f"{action} ready -> decided: cores 0 on h1" in text
    assert "0 of 2 cores" in text
    assert f"- {action} has its outcome" in text


def test_it_walks_a_file_from_its_checkpoint(tmp_path: Path) -> None:
    source = FileSource(DEMO)

    async def go() -> tuple[int, int]:
        found = Walker(source.batches, source.state)
        await found.start()
        await found.goto(50)
        at = found.at
        await found.goto(10)
        return at, found.at

    assert asyncio.run(go()) == (50, 10)


def prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *commands: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{command}\n" for command in commands)))
    assert main(["replay", "--step", "--file", str(DEMO)]) == 0
    return capsys.readouterr().out


def test_the_prompt_goes_looks_and_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = prompt(monkeypatch, capsys, "break outcome timed_out", "c", "b", "s", "p", "q", "breaks", "delete 1", "n", "c")
    lines = out.splitlines()
    assert lines[0] == "1: outcome timed_out"
    assert "timed_out" in lines[1]
    assert "nobody waits" in out
    assert lines[-1] == "the end of the log"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("foo", "no such command"),
        ("break x", "must be action"),
        ("break outcome fine", "must be one of"),
        ("break action x", "TASK/CLIENT/N"),
        ("goto x", "invalid literal"),
        ("delete 7", "no breakpoint 7"),
        ("show x/y/1", "not open"),
    ],
)
def test_a_bad_command_is_said_and_the_walk_goes_on(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prompt(monkeypatch, capsys, command, "n")
    assert words in out
    assert "1  LeaderStarted" in out


def test_step_goes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--step", "--verify", "--file", str(DEMO)]) == 2
    assert "--step" in capsys.readouterr().err
