"""Engines that stall, break off, run out of disk; many callers at once; limits that change while programs run."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tangram
from tangram.executors.backend import Grant, SessionKey
from tangram.executors.docker import DockerBackend, DockerConfig, Engine
from tangram.executors.docker.containers import find
from tangram.local import LocalStack
from tangram.messages import SessionOpen
from tangram.outcomes import ErrorReason, Outcome

from .conftest import CORES, IMAGE, Lab, running
from .interposer import Interposer, interposed, silent_daemon


def is_start(line: str) -> bool:
    """Of a program: the call whose connection becomes its streams."""
    return "/exec/" in line and "/start" in line


@pytest.fixture
async def engine(docker: None, tmp_path: Path) -> AsyncIterator[Interposer]:
    async with interposed(tmp_path / "docker.sock") as one:
        yield one


# --- an engine that breaks off or stalls --------------------------------------------------------------------------


@pytest.mark.parametrize("cgroups", [None, False])
async def test_broken_stream_invents_no_exit_code(engine: Interposer, cgroups: bool | None) -> None:
    async with running(DockerConfig(image=IMAGE, cgroups=cgroups), engine.url) as lab, lab.session() as session:
        up = asyncio.Event()
        task = lab.sh("echo up; sleep 0.5; exit 3", session=session, on_output=lambda *_: up.set())
        await up.wait()
        assert engine.cut(is_start) == 1
        ended = await task
        assert (ended.outcome, ended.exit_code, ended.output.stdout) == (Outcome.FAILED, 3, b"up\n")


async def test_engine_gone_while_a_program_runs_is_no_success(engine: Interposer) -> None:
    async with running(DockerConfig(image=IMAGE), engine.url) as lab:
        key, _ = await lab.open()
        up = asyncio.Event()
        task = lab.sh("echo up; sleep 97", session=key, on_output=lambda *_: up.set(), timeout_ms=60_000)
        await up.wait()
        engine.down = True
        engine.cut(lambda _: True)
        ended = await asyncio.wait_for(task, 20)
        assert (ended.outcome, ended.exit_code, ended.unkillable) == (Outcome.ERROR, None, False), ended
        engine.down = False
        assert (await lab.backend.close(key)).outcome is Outcome.OK


async def test_container_of_an_unanswered_creation_is_found_and_removed(engine: Interposer) -> None:
    async with running(DockerConfig(image=IMAGE, create_s=0.5), engine.url) as lab:
        held = engine.hold(lambda line: "/containers/create" in line)
        _, ended = await lab.open()
        assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.DAEMON), ended
        # Only now the engine makes it.
        held.released.set()
        await asyncio.wait_for(engine.saw(lambda line: line.startswith("DELETE")), 10)
        end = time.monotonic() + 20
        while await lab.containers():
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


async def test_end_of_a_container_is_told_from_that_of_a_program(lab: Lab) -> None:
    # The main process ends after all others, and waits for one that is slow to give its memory back.
    key, _ = await lab.open(memory_mib=1000)
    up = asyncio.Event()
    hog = "import time; x = b'x' * (700 << 20); print('up', flush=True); time.sleep(97)"
    slow = lab.python(hog, session=key, on_output=lambda *_: up.set())
    await up.wait()
    up.clear()
    quick = lab.sh("echo up; exec sleep 97", session=key, on_output=lambda *_: up.set())
    await up.wait()
    (container,) = await lab.containers()
    await lab.engine.call("DELETE", f"/containers/{container}", {"force": "1"})
    for ended in await asyncio.gather(quick, slow):
        assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True), ended
    assert (await lab.backend.close(key)).outcome is Outcome.OK


# --- many at once -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
async def test_128_starts_at_once_wait_for_their_turn(engine: Interposer) -> None:
    async with running(DockerConfig(image=IMAGE, create_s=300), engine.url) as lab:
        ended = await asyncio.gather(*(lab.sh("exit 3") for _ in range(128)))
        assert not [(each.outcome, each.detail) for each in ended if each.exit_code != 3]
        assert engine.most_at_once(lambda line: "/containers/create" in line) <= lab.config.creates_max
        # Waiting for its turn is no part of a program's time.
        assert max(each.run_ns for each in ended) < 5_000_000_000


async def test_128_starts_on_a_stalled_engine_end_in_bounded_time(tmp_path: Path) -> None:
    async with silent_daemon(tmp_path / "docker.sock", 1) as url:
        engine = Engine(url, call_s=0.5)
        await engine.check()
        backend = DockerBackend(engine, "stalled", DockerConfig(image=IMAGE, create_s=1.0))
        began = time.monotonic()
        ended = await asyncio.gather(*(backend.open(SessionKey("t", "c", n), SessionOpen(), Grant()) for n in range(128)))
        assert time.monotonic() - began < 5
        assert {(each.outcome, each.reason) for each in ended} == {(Outcome.ERROR, ErrorReason.DAEMON)}
        await backend.stop()


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
async def test_each_change_of_cores_is_applied(lab: Lab) -> None:
    first, second = (CORES[0],), (CORES[1],)
    both = tuple(CORES[:2])
    async with lab.session() as session:
        for cores, millicores in (
            (both, 2000),
            (first, 1000),
            (both, 300),
            (second, 1000),
            (both, 2000),
            (second, 50),
            (first, 1000),
        ):
            grant = Grant(cores=cores, millicores=millicores)
            ended = await lab.sh("grep Cpus_allowed_list /proc/self/status", session=session, grant=grant)
            allowed = ended.output.stdout.decode().split(":")[-1].strip()
            assert allowed.replace("-", ",") == ",".join(map(str, cores)), (ended, grant)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
async def test_cores_may_change_while_another_program_holds_them(lab: Lab) -> None:
    async with lab.session() as session:
        up = asyncio.Event()
        longer = lab.sh("echo up; sleep 1", session=session, on_output=lambda *_: up.set(), grant=Grant(cores=(CORES[0],)))
        await up.wait()
        for core in (CORES[1], CORES[0], CORES[1]):
            assert (await lab.run("true", session=session, grant=Grant(cores=(core,)))).outcome is Outcome.OK
        assert (await longer).outcome is Outcome.OK


async def test_cores_that_do_not_exist_are_an_error_not_a_guess(lab: Lab) -> None:
    async with lab.session() as session:
        ended = await lab.run("true", session=session, grant=Grant(cores=(100_000,), millicores=1000))
        assert (ended.outcome, ended.exit_code) == (Outcome.ERROR, None)
        assert "\n" not in ended.detail
        # What was refused does not stay pending.
        assert (await lab.run("true", session=session)).outcome is Outcome.OK


async def test_memory_of_a_session_holds_for_an_action_that_asks_for_more(lab: Lab) -> None:
    async with lab.session(memory_mib=100) as session:
        grant = Grant(cores=(CORES[0],), millicores=1000, memory_mib=400)
        ended = await lab.python("print(len(bytearray(50 << 20)))", session=session, grant=grant)
        assert ended.outcome is Outcome.OK, ended
        ended = await lab.python("print(len(b'x' * (200 << 20)))", session=session, grant=grant)
        assert ended.outcome is Outcome.OUT_OF_MEMORY, ended


async def test_want_of_memory_is_a_verdict_and_not_tried_again(docker: None, tmp_path: Path) -> None:
    arguments = ("--sandbox", "docker", "--image", IMAGE)
    async with LocalStack(tmp_path, executor_arguments=arguments) as stack, tangram.Client(stack.url, task="test") as client:
        result = await client.run(["python3", "-c", "b'x' * (256 << 20)"], memory="64MiB", retry="safe")
        assert (result.outcome, result.is_verdict, result.attempt) == (Outcome.OUT_OF_MEMORY, True, 1), result


# --- a full disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_engine(docker: None, tmp_path: Path) -> "AsyncIterator[Engine]":
    """An engine of its own with the image, whose folder is on a small file system."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=420m", "small", folder], check=True)
    url = f"unix://{folder}/docker.sock"
    arguments = ["--host", url, "--data-root", folder / "data", "--exec-root", tmp_path / "exec", "--pidfile", tmp_path / "pid"]
    with (tmp_path / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(["dockerd", *arguments, "--bridge", "none", "--iptables=false"], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 30
        while subprocess.run(["docker", "--host", url, "version"], capture_output=True, check=False).returncode:
            assert time.monotonic() < end, (tmp_path / "dockerd.log").read_text()[-2000:]
            time.sleep(0.1)
        saved = subprocess.Popen(["docker", "save", IMAGE], stdout=subprocess.PIPE)
        subprocess.run(["docker", "--host", url, "load"], stdin=saved.stdout, check=True, capture_output=True)
        assert saved.stdout is not None
        saved.stdout.close()
        assert saved.wait() == 0
        yield Engine(url)  # type: ignore[misc]
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)
        subprocess.run(["umount", "-l", folder], check=False)


async def test_full_disk_of_the_engine_is_said_and_leaves_nothing(small_engine: Engine) -> None:
    await small_engine.check(IMAGE)
    async with running(DockerConfig(image=IMAGE), small_engine.url) as lab:
        key, ended = await lab.open()
        assert ended.outcome is Outcome.OK, ended
        ended = await lab.sh("head -c 1000000000 /dev/zero >/big; echo $?", session=key, timeout_ms=60_000)
        assert (ended.outcome, ended.output.stdout) == (Outcome.OK, b"1\n"), ended
        assert b"No space left on device" in ended.output.stderr
        ended = await lab.write(key, "file", b"x" * 300_000)
        assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.DISK), ended
        for _ in range(3):
            _, ended = await lab.open()
            assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.DISK), ended
            ended = await lab.run("true")
            assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.DISK), ended
        await asyncio.wait_for(lab.backend.settled(), 30)
        assert len(await find(lab.engine, lab.incarnation)) == 1
        # With room again, everything works again.
        assert (await lab.backend.close(key)).outcome is Outcome.OK
        assert (await lab.run("true")).outcome is Outcome.OK
