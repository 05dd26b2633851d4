"""Time-outs, cancels and what programs leave behind."""

import asyncio
import time

import pytest

from tangram.executors.backend import ActionKey
from tangram.outcomes import Outcome

from .conftest import Lab

TREE = (
    "(setsid sh -c 'while :; do sleep 0.05; done' &); setsid sleep 97 & trap '' TERM INT HUP; echo up; while :; do sleep 97; done"
)


async def count(lab: Lab, session: object) -> int:
    """How many processes there are in the container, without the one that counts."""
    script = "import os; print(sum(each.isdecimal() for each in os.listdir('/proc')) - 1)"
    return int((await lab.python(script, session=session)).output.stdout)


async def test_time_out_ends_the_whole_tree_and_the_next_starts_at_once(lab: Lab) -> None:
    async with lab.session() as session:
        before = await count(lab, session)
        ended = await lab.sh(TREE, session=session, timeout_ms=500)
        assert ended.outcome is Outcome.TIMED_OUT
        assert ended.output.stdout == b"up\n"
        assert not ended.session_lost
        assert not ended.unkillable
        assert 400_000_000 < ended.run_ns < 2_000_000_000
        began = time.monotonic()
        assert await count(lab, session) == before
        assert time.monotonic() - began < 1.5


async def test_cancel_by_key_and_by_task(lab: Lab) -> None:
    async with lab.session() as session:
        before = await count(lab, session)
        key = lab.key()
        up = asyncio.Event()
        running = lab.sh(TREE, key=key, session=session, on_output=lambda *_: up.set())
        await up.wait()
        lab.backend.kill(key)
        assert (await running).outcome is Outcome.CANCELLED
        up.clear()
        running = lab.sh(TREE, session=session, on_output=lambda *_: up.set())
        await up.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await lab.backend.settled()
        assert await count(lab, session) == before


async def test_cancel_at_any_moment_of_the_start(lab: Lab) -> None:
    async with lab.session() as session:
        before = await count(lab, session)
        for delay in (None, 0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06):
            key = lab.key()
            running = lab.sh("sleep 97", key=key, session=session)
            if delay is not None:
                await asyncio.sleep(delay)
            lab.backend.kill(key)
            assert (await running).outcome is Outcome.CANCELLED
        end = time.monotonic() + 3
        # A gate that was given up ends by itself, but has to be started for that.
        while await count(lab, session) != before:
            assert time.monotonic() < end


async def test_kill_of_nothing_is_nothing(local: Lab) -> None:
    local.backend.kill(ActionKey("task", "client", 9))


async def test_background_child_does_not_hold_the_result(lab: Lab) -> None:
    async with lab.session() as session:
        began = time.monotonic()
        ended = await lab.sh("sleep 97 & echo started", session=session)
        # Through the engine alone, its own wait of 2 s for the streams is the bound.
        assert time.monotonic() - began < (1.0 if lab.local else 4.0)
        assert (ended.outcome, ended.output.stdout) == (Outcome.OK, b"started\n")
        ended = await lab.sh("pgrep -c sleep || ps | grep -c sleep; exit 0", session=session)
        assert ended.outcome is Outcome.OK


async def test_server_outlives_its_action_but_gets_no_cpu_between(local: Lab) -> None:
    async with local.session() as session:
        spin = "import os,time\nfd=os.open('/workspace/n',66)\nwhile 1: os.pwrite(fd,b'%012.6f'%time.process_time(),0)"
        await local.python(f"import subprocess,sys; subprocess.Popen([sys.executable,'-ISc',{spin!r}])", session=session)
        await asyncio.sleep(0.3)
        first = float((await local.read(session, "n")).output.data)
        await asyncio.sleep(1.0)
        second = float((await local.read(session, "n")).output.data)
        assert second - first < 0.2
        await local.sh("sleep 0.5", session=session)
        assert float((await local.read(session, "n")).output.data) > second + 0.2


async def test_close_ends_what_runs(lab: Lab) -> None:
    key, _ = await lab.open()
    up = asyncio.Event()
    running = lab.sh(TREE, session=key, on_output=lambda *_: up.set())
    await up.wait()
    assert (await lab.backend.close(key)).outcome is Outcome.OK
    ended = await running
    assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True)
    assert await lab.containers() == []


async def test_kill_all_of_oneself_ends_the_action_only(local: Lab) -> None:
    async with local.session() as session:
        ended = await local.sh("kill -9 -1; kill -9 $$", session=session)
        assert ended.outcome is Outcome.FAILED
        assert (await local.run("true", session=session)).outcome is Outcome.OK


async def test_stopped_program_is_timed_out(local: Lab) -> None:
    async with local.session() as session:
        ended = await local.sh("kill -STOP $$", session=session, timeout_ms=300)
        assert ended.outcome is Outcome.TIMED_OUT


async def test_one_shot_leaves_nothing(lab: Lab) -> None:
    ended = await lab.sh(TREE, timeout_ms=300)
    assert ended.outcome is Outcome.TIMED_OUT
    await lab.backend.settled()
    assert await lab.containers() == []
