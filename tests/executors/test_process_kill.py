"""Nothing survives that should not, nothing is waited for that need not be."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tangram.executors.backend import Grant
from tangram.executors.cpu import kernel
from tangram.messages import Run
from tangram.outcomes import Outcome
from tests.executors.conftest import ONE_CORE, PYTHON, Lab, alive, eventually, hierarchies, own_zombies, running, state_of


@pytest.fixture(params=["cgroups", "freezer", "marks"])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    async with running(Lab(tmp_path, hierarchies(request.param))) as one:
        yield one


DOUBLE_FORK = """
import os, sys, time
if os.fork(): sys.exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def pids(output: bytes) -> list[int]:
    return [int(word) for word in output.split()]


async def test_children_of_a_timed_out_shell_die_with_it(lab: Lab) -> None:
    ended = await lab.sh("sleep 300 & echo $!; wait", timeout_ms=100)
    assert ended.outcome is Outcome.TIMED_OUT
    assert ended.exit_code == -9
    assert not any(alive(pid) for pid in pids(ended.output.stdout))
    assert lab.survivors() == []


async def test_a_child_in_its_own_session_neither_survives_nor_delays_a_time_out(lab: Lab) -> None:
    began = time.monotonic()
    ended = await lab.sh("setsid sleep 60 & wait", timeout_ms=200)
    assert ended.outcome is Outcome.TIMED_OUT
    assert lab.survivors() == []
    assert (await lab.sh("echo next")).output.stdout == b"next\n"
    assert time.monotonic() - began < 2


async def test_a_killed_program_is_reaped(lab: Lab) -> None:
    key, told = lab.key(), asyncio.Event()
    task = lab.sh("echo $$; exec sleep 300", key=key, on_output=lambda *_: told.set())
    await told.wait()
    lab.backend.kill(key)
    ended = await task
    assert [state_of(pid) for pid in pids(ended.output.stdout)] == [""]
    assert own_zombies() == []


async def test_background_children_do_not_hold_the_result(lab: Lab) -> None:
    for script in ("sleep 60 & echo done", "setsid sleep 60 & echo done", "python3 -m http.server 0 & echo done; exit 0"):
        began = time.monotonic()
        ended = await lab.sh(script)
        assert (ended.outcome, ended.output.stdout) == (Outcome.OK, b"done\n")
        assert time.monotonic() - began < 1
        assert lab.survivors() == []


async def test_a_daemon_that_forked_twice_dies_with_a_single_action(lab: Lab) -> None:
    ended = await lab.run(*PYTHON, DOUBLE_FORK)
    assert ended.outcome is Outcome.OK
    assert lab.survivors() == []


async def test_what_a_successful_action_leaves_lives_until_its_session_ends(lab: Lab) -> None:
    async with lab.session() as session:
        ended = await lab.sh("sleep 300 >/dev/null 2>&1 & echo $!", session=session)
        [left] = pids(ended.output.stdout)
        assert alive(left)
        # Another action's time-out and cancel are no business of it.
        assert (await lab.sh("sleep 300", session=session, timeout_ms=50)).outcome is Outcome.TIMED_OUT
        key = lab.key()
        task = lab.sh("sleep 300", session=session, key=key)
        lab.backend.kill(key)
        assert (await task).outcome is Outcome.CANCELLED
        assert alive(left)
    assert not alive(left)


async def test_what_a_failed_action_leaves_lives_on_too(lab: Lab) -> None:
    """A server that was started before a failing test is wanted by the next action."""
    async with lab.session() as session:
        ended = await lab.sh("sleep 300 >/dev/null 2>&1 & echo $!; exit 3", session=session)
        assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 3)
        [left] = pids(ended.output.stdout)
        assert alive(left)
    assert not alive(left)


async def test_background_writers_are_not_killed_by_a_closed_pipe(lab: Lab) -> None:
    writer = 'while echo noise; do :; done; echo "writing failed" >failed'
    async with lab.session() as session:
        ended = await lab.sh(f"({writer}) & echo $! >pid; echo done; exec 1>&-", session=session)
        assert ended.outcome is Outcome.OK
        await lab.sh("true", session=session)
        [left] = pids((await lab.read(session, "pid")).output.data)
        assert alive(left)
        assert not (lab.home(session) / "failed").exists()


async def test_cancelling_at_once_leaves_no_survivor_200_times(lab: Lab) -> None:
    """The cancel lands before the coroutine began, while the program is placed, or while it runs."""

    async def cancelled_after(turns: int) -> None:
        key = lab.key()
        task = lab.sh("sleep 300 & setsid sleep 300 & sleep 300", key=key)
        for _ in range(turns):
            await asyncio.sleep(0)
        lab.backend.kill(key)
        lab.backend.kill(key)
        assert (await task).outcome is Outcome.CANCELLED

    for batch in range(10):
        await asyncio.gather(*(cancelled_after((batch + number) % 20) for number in range(20)))
    assert lab.survivors() == []


async def test_a_cancel_before_the_coroutine_begins_starts_nothing(lab: Lab) -> None:
    key = lab.key()
    task = lab.sh("touch ../../../began", key=key)
    lab.backend.kill(key)
    assert (await task).outcome is Outcome.CANCELLED
    assert not (lab.backend.folder / "began").exists()


async def test_a_kill_without_a_run_harms_no_later_attempt(lab: Lab) -> None:
    key = lab.key()
    lab.backend.kill(key)
    assert (await lab.sh("true", key=key)).outcome is Outcome.OK
    lab.backend.kill(key)
    assert (await lab.sh("true", key=key, attempt=2)).outcome is Outcome.OK


async def test_whoever_stops_waiting_ends_the_program(lab: Lab) -> None:
    task = lab.sh("sleep 300")
    await eventually(lambda: lab.survivors() != [])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: lab.survivors() == [])


async def test_programs_that_ignore_signals_or_stop_themselves_are_killed(lab: Lab) -> None:
    for script in ("trap '' TERM INT HUP; sleep 300 & wait; wait", "kill -STOP $$"):
        ended = await lab.sh(script, timeout_ms=100)
        assert ended.outcome is Outcome.TIMED_OUT
        assert not ended.unkillable


async def test_a_fork_storm_is_ended(lab: Lab) -> None:
    storm = "import os\nfor _ in range(40):\n  if os.fork() == 0:\n    while True:\n      if os.fork(): os._exit(0)"
    ended = await lab.run(*PYTHON, f"{storm}\nimport time\ntime.sleep(300)", timeout_ms=300)
    assert ended.outcome is Outcome.TIMED_OUT
    assert not ended.unkillable
    assert lab.survivors() == []


async def test_a_program_killed_by_its_own_signal_is_no_time_out(lab: Lab) -> None:
    ended = await lab.sh("kill -9 $$", timeout_ms=5_000)
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, -9)
    assert ended.detail == ""


async def test_a_time_out_keeps_the_output_until_then(lab: Lab) -> None:
    ended = await lab.sh("echo partial; echo problem >&2; sleep 300", timeout_ms=300)
    assert ended.outcome is Outcome.TIMED_OUT
    assert (ended.output.stdout, ended.output.stderr) == (b"partial\n", b"problem\n")
    assert 300e6 <= ended.run_ns < 2e9


@pytest.mark.parametrize("script", ["exit 3", "exec sh -c 'exit 3'", "set -e; false; true", "kill -9 $$"])
async def test_a_shell_that_ends_early_ends_its_action_only(lab: Lab, script: str) -> None:
    async with lab.session() as session:
        began = time.monotonic()
        assert (await lab.sh(script, session=session)).outcome is Outcome.FAILED
        assert time.monotonic() - began < 1
        assert (await lab.sh("echo on", session=session)).output.stdout == b"on\n"


async def test_stop_ends_everything_and_nothing_starts_after_it(lab: Lab) -> None:
    session = await lab.open()
    await lab.sh("sleep 300 &", session=session)
    running = [lab.sh("sleep 300"), lab.sh("setsid sleep 300 & sleep 300", session=session)]
    await eventually(lambda: len(lab.survivors()) >= 4)
    began = time.monotonic()
    await lab.backend.stop()
    assert time.monotonic() - began < 3
    assert {(await task).outcome for task in running} <= {Outcome.CANCELLED, Outcome.ENVIRONMENT_LOST}
    assert lab.survivors() == []
    assert (await lab.sh("true")).outcome is Outcome.ERROR


async def test_64_at_once(lab: Lab) -> None:
    done = await asyncio.gather(*(lab.sh(f"echo {number}; exit {number}") for number in range(64)))
    assert [(one.exit_code, one.output.stdout) for one in done] == [(number, f"{number}\n".encode()) for number in range(64)]


@pytest.fixture
def frozen() -> Iterator[Path]:
    """A group in which processes do not die of SIGKILL until they are thawed."""
    group = Path(f"/sys/fs/cgroup/freezer/tangram-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no freezer of cgroup v1 to make a process unkillable with")
    (group / "freezer.state").write_text("FROZEN")
    yield group
    group.rmdir()


async def test_what_survives_sigkill_is_said_and_reaped_later(frozen: Path, limited: Lab) -> None:
    out: list[bytes] = []
    key = limited.key()
    task = limited.sh("echo $$; exec sleep 300", key=key, on_output=lambda _, data: out.append(data))
    await eventually(lambda: bool(out))
    [pid] = pids(out[0])
    kernel.write(frozen / "cgroup.procs", str(pid))
    try:
        limited.backend.kill(key)
        ended = await task
        assert (ended.outcome, ended.unkillable, ended.exit_code) == (Outcome.CANCELLED, True, None)
        assert "survives SIGKILL" in ended.detail
        assert key in limited.backend.unkillable
    finally:
        kernel.write(frozen / "freezer.state", "THAWED")
        await eventually(lambda: state_of(pid) == "")
    await eventually(lambda: key not in limited.backend.unkillable)


async def test_an_action_that_is_running_is_not_started_twice(lab: Lab) -> None:
    key = lab.key()
    first = lab.sh("sleep 300", key=key)
    again = await lab.backend.run(
        key, 2, None, Run(argv=("true",)), Grant(cores=(ONE_CORE,)), timeout_ms=1000, env={}, on_output=None
    )
    assert again.outcome is Outcome.ERROR
    lab.backend.kill(key)
    assert (await first).outcome is Outcome.CANCELLED
