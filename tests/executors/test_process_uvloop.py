"""The same back end on uvloop, whose readiness callbacks are libuv's."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from tangram.outcomes import Outcome
from tests.executors.conftest import Lab, eventually, hierarchies, running

uvloop = pytest.importorskip("uvloop")


@pytest.mark.parametrize("kind", ["cgroups", "freezer", "marks"])
def test_programs_end_as_on_asyncio(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with running(Lab(tmp_path, hierarchies(kind))) as lab, contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(lab.session())
            ended = await lab.sh("head -c 5000000 /dev/zero; exit 3", session=session)
            assert (ended.outcome, ended.exit_code, ended.output.stdout_bytes) == (Outcome.FAILED, 3, 5_000_000)
            assert (await lab.sh("yes & echo done", session=session)).outcome is Outcome.OK
            ended = await lab.sh("echo partial; setsid sleep 300 & wait", session=session, timeout_ms=200)
            assert (ended.outcome, ended.output.stdout) == (Outcome.TIMED_OUT, b"partial\n")
            assert 200e6 <= ended.run_ns < 2e9
            keys = [lab.key() for _ in range(20)]
            tasks = [lab.sh("sleep 300 & sleep 300", key=key) for key in keys]
            for key in keys:
                await asyncio.sleep(0)
                lab.backend.kill(key)
            assert {(await task).outcome for task in tasks} == {Outcome.CANCELLED}
            done = await asyncio.gather(*(lab.sh(f"cat; exit {number}", stdin=b"x" * 100_000) for number in range(30)))
            assert [one.exit_code for one in done] == list(range(30))
            assert {one.output.stdout_bytes for one in done} == {100_000}
            assert (await lab.read(session, "missing")).outcome is Outcome.FAILED
            task = lab.sh("sleep 300")
            await eventually(lambda: any("sleep" in one for one in lab.survivors()))
            task.cancel()
            await asyncio.wait([task])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
