"""The commands as a user types them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tangram.broker import Broker
from tangram.local import LocalStack

from .conftest import eventually, processes_with

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with LocalStack(tmp_path_factory.mktemp("cli")) as stack:
        yield stack.url


async def tangram(*arguments: str, url: str = "", home: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANGRAM")}
    if url:
        environment["TANGRAM_NATS"] = url
    if home is not None:
        environment["TANGRAM_HOME"] = str(home)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tangram", *arguments, stdout=-1, stderr=-1, env=environment
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        (("--", "echo", "hello"), 0, b"hello\n"),
        (("--", "sh", "-c", "echo partial; exit 9"), 9, b"partial\n"),
        (("--timeout", "0.2", "--", "sleep", "60"), 124, b""),
        (("--units", "900", "--", "true"), 125, b""),
        (("--", "sh", "-c", "kill -9 $$"), 137, b""),
        (("--units", "many", "--", "true"), 2, b""),
        (("--", "no-such-program"), 127, b""),
    ],
)
async def test_run_exits_as_the_program_did(url: str, arguments: tuple[str, ...], code: int, out: bytes) -> None:
    done = await tangram("run", *arguments, url=url)
    assert (done.returncode, done.stdout) == (code, out), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--", ""),
        ("run", "--units", "-1", "--", "true"),
        ("up", "--port", "99999"),
        ("up", "--data", "/proc/nothing"),
        ("bench", "pipeline", "--seconds", "-1"),
        ("bench", "pipeline", "--seconds", "nan"),
        ("bench", "scheduler", "--backlog", "-1"),
        ("bench", "scheduler", "--queued", "-1"),
        ("bench", "scheduler", "--payload", "9999999"),
    ],
    ids=" ".join,
)
async def test_what_cannot_be_meant_is_exit_code_2_and_no_traceback(url: str, arguments: tuple[str, ...]) -> None:
    done = await tangram(*arguments, url="" if arguments[0] == "up" else url)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr


async def test_waiting_for_standard_input_can_be_interrupted(url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tangram",
        "run",
        "-i",
        "--",
        "cat",
        stdin=-1,
        stdout=-1,
        stderr=-1,
        env={**os.environ, "TANGRAM_NATS": url},
    )
    broker = await Broker.connect(url, name="test listens")
    try:
        connected = asyncio.Event()
        await broker.subscribe("tangram.ask.shell.*", lambda _: connected.set())
        await asyncio.wait_for(connected.wait(), 10)
    finally:
        await broker.close()
    async with asyncio.timeout(10):
        while process.returncode is None:  # its handler is set a moment after it has connected
            process.send_signal(signal.SIGINT)
            await asyncio.wait({asyncio.create_task(process.wait())}, timeout=0.2)
    assert process.returncode in (130, -signal.SIGINT)


async def test_closed_standard_descriptors_are_as_good_as_empty_ones(url: str) -> None:
    script = f"exec {sys.executable} -m tangram run -i -- cat <&- 2>&-"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=-1, env={**os.environ, "TANGRAM_NATS": url})
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"")


async def test_run_outlives_whoever_reads_its_output(url: str) -> None:
    script = f"{sys.executable} -m tangram run -- seq 200000 | head -1"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", script, stdout=-1, stderr=-1, env={**os.environ, "TANGRAM_NATS": url}
    )
    out, err = await process.communicate()
    assert out == b"1\n"
    assert b"Traceback" not in err


async def test_run_shows_all_output_once(url: str) -> None:
    done = await tangram("run", "--", "seq", "20000", url=url)
    assert done.stdout.split() == [str(i).encode() for i in range(1, 20_001)]


async def test_run_json_is_one_object(url: str) -> None:
    done = await tangram("run", "--json", "--", "echo", "x", url=url)
    found = json.loads(done.stdout)
    assert (found["outcome"], found["stdout"]) == ("ok", "x\n")


async def test_status_says_what_is_there(url: str) -> None:
    done = await tangram("status", "--json", url=url)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["scheduler_answers"] is True
    assert found["hosts"][0]["executors"] == ["cpu-1"]
    assert b"executors: cpu-1" in (await tangram("status", url=url)).stdout


async def test_streams_apply_with_more_room_than_declared(url: str) -> None:
    assert (await tangram("streams", "apply", "--max-bytes", "TANGRAM_BLOBS=2GiB", url=url)).returncode == 0
    assert b"TANGRAM_BLOBS: unchanged" in (await tangram("streams", "apply", url=url)).stdout
    assert (await tangram("streams", "diff", url=url)).stdout == b"no differences\n"
    for wrong in ("TANGRAM_BLOBS", "TANGRAM_BLOBS=lots", "OTHER=1GiB"):
        done = await tangram("streams", "apply", "--max-bytes", wrong, url=url)
        assert done.returncode in (2, 3), done
        assert wrong.partition("=")[0] in done.stderr.decode()


async def test_streams_apply_twice_changes_nothing(url: str) -> None:
    assert (await tangram("streams", "apply", url=url)).returncode == 0
    done = await tangram("streams", "diff", url=url)
    assert (done.returncode, done.stdout) == (0, b"no differences\n")
    shown = json.loads((await tangram("streams", "show", "--json", url=url)).stdout)
    assert shown["TANGRAM"]["messages"] > 0


async def test_no_broker_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    commands = [("status",), ("run", "--", "true"), ("streams", "show"), ("scheduler",), ("executor", "cpu")]
    # Each waits some seconds for one that is just starting: all of them at once.
    ends = await asyncio.gather(*(tangram(*each, url="nats://user:secret@127.0.0.1:1", home=tmp_path) for each in commands))
    for done in ends:
        assert done.returncode == 3, done
        assert len(done.stderr.strip().splitlines()) == 1, done
        assert b"secret" not in done.stderr, done


async def test_up_ends_cleanly_on_an_interrupt(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process, ready = await _up(home)
    assert b"tangram is up" in ready
    running = asyncio.ensure_future(tangram("run", "--", "sh", "-c", "echo $TANGRAM_ACTION; sleep 321", home=home))
    await eventually("the action runs", lambda: processes_with("sleep\0" + "321"))
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 20) == 0
    assert not processes_with(str(home)), "a process was left"
    assert not processes_with("sleep\0" + "321")
    assert not list((home / "executors").glob("*/sandboxes/*")), "a sandbox was left"
    assert (await asyncio.wait_for(running, 20)).returncode in (125, 3)


async def test_up_leaves_nothing_when_it_is_killed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process, _ = await _up(home)
    process.kill()
    await process.wait()
    await eventually("its children end with it", lambda: not processes_with(str(home)), 20)


async def test_up_again_goes_on_with_the_same_log(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for expected in (1, 2):
        process, _ = await _up(home)
        assert (await tangram("run", "--", "true", home=home)).returncode == 0
        found = json.loads((await tangram("status", "--json", home=home)).stdout)
        assert found["actions_finished"] == expected
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_interrupting_run_cancels_its_action(url: str) -> None:
    environment = {**os.environ, "TANGRAM_NATS": url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tangram", "run", "--", "sleep", "432.1", env=environment
    )
    # The command's own line has these words too.
    await eventually("it runs", lambda: len(processes_with("sleep\0" + "432.1")) > 1)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 20) == 130
    await eventually("its program ends", lambda: not processes_with("sleep\0" + "432.1"))


async def _up(home: Path) -> tuple[asyncio.subprocess.Process, bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANGRAM")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tangram", "up", stderr=asyncio.subprocess.PIPE, env={**environment, "TANGRAM_HOME": str(home)}
    )
    assert process.stderr is not None
    line = await asyncio.wait_for(process.stderr.readline(), 30)
    return process, line
