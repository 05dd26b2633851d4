"""Containers that cannot be made, and none that is left behind."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tangram.executors.backend import Grant, SessionKey
from tangram.executors.docker import DockerBackend, DockerConfig, DockerUnavailable, Engine, remove_incarnation
from tangram.executors.docker.containers import find
from tangram.messages import SessionOpen
from tangram.outcomes import ErrorReason, Outcome

from .conftest import IMAGE, Lab, running
from .interposer import interposed, silent_daemon


async def test_missing_image_is_one_line(local: Lab) -> None:
    _, ended = await local.open(image="no/such-image:1")
    assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.IMAGE)
    assert ended.detail == "image 'no/such-image:1' is not on this host: docker pull no/such-image:1"
    _, ended = await local.open(image="Not A Reference")
    assert ended.outcome is Outcome.ERROR
    assert "\n" not in ended.detail
    await local.backend.settled()
    assert await local.containers() == []


async def test_missing_image_of_one_shots(docker: None) -> None:
    async with running(DockerConfig(image="no/such-image:1")) as lab:
        ended = await lab.run("true")
        assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.IMAGE)


async def test_image_that_cannot_be_started_leaves_nothing(local: Lab) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("hello"))
    query = {"fromSrc": "-", "repo": "tangram-test-empty", "tag": "latest"}
    await local.engine.call("POST", "/images/create", query, tar=buffer.getvalue())
    _, ended = await local.open(image="tangram-test-empty:latest")
    assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.IMAGE), ended
    assert "/bin/sh" in ended.detail
    await asyncio.wait_for(local.backend.settled(), 10)
    assert await local.containers() == []
    await local.engine.call("DELETE", "/images/tangram-test-empty:latest")


@pytest.mark.parametrize(("changes", "home"), [("USER daemon", "/workspace"), ("USER 1234:5678\nWORKDIR /srv/app", "/srv/app")])
async def test_image_with_its_own_user(lab: Lab, changes: str, home: str) -> None:
    async with lab.session():
        (container,) = await lab.containers()
        commit = {"container": container, "repo": "tangram-test-user", "tag": "latest", "changes": changes}
        await lab.engine.call("POST", "/commit", commit, body={})
    try:
        async with lab.session(image="tangram-test-user:latest") as session:
            assert (await lab.write(session, "a/b", b"1", 0o600)).outcome is Outcome.OK
            ended = await lab.sh("pwd; id -u; stat -c %u a a/b; cat a/b", session=session)
            user = "1" if "daemon" in changes else "1234"
            assert ended.output.stdout.decode().split() == [home, user, user, user, "1"], ended
            if home == "/workspace":
                assert (await lab.sh("echo 1 >own", session=session)).outcome is Outcome.OK
    finally:
        await lab.engine.call("DELETE", "/images/tangram-test-user:latest", {"force": "1"})


@pytest.mark.parametrize("cgroups", [None, False])
@pytest.mark.parametrize("answered", [False, True], ids=["unseen", "unanswered"])
@pytest.mark.parametrize("what", ["session", "program"])
async def test_given_up_at_any_call_leaves_nothing(
    docker: None, tmp_path: Path, cgroups: bool | None, answered: bool, what: str
) -> None:
    async with (
        interposed(tmp_path / "docker.sock") as engine,
        running(DockerConfig(image=IMAGE, cgroups=cgroups), engine.url) as lab,
    ):
        for n in range(100):
            held = engine.hold_nth(n, answered=answered)
            task = asyncio.ensure_future(lab.open()) if what == "session" else lab.sh("exit 3")
            reached = asyncio.ensure_future(held.reached.wait())
            await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
            if not held.reached.is_set():
                reached.cancel()
                held.released.set()
                break
            task.cancel()
            await asyncio.wait({task}, timeout=0.01)
            held.released.set()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.wait_for(lab.backend.settled(), 20)
            assert await lab.containers() == [], engine.calls[-10:]
        assert n >= 4
        if what == "session":
            key, _ = await task
            assert (await lab.backend.close(key)).outcome is Outcome.OK


async def test_closed_while_it_is_being_opened(docker: None, tmp_path: Path) -> None:
    async with interposed(tmp_path / "docker.sock") as engine, running(DockerConfig(image=IMAGE), engine.url) as lab:
        held = engine.hold(lambda line: "/start" in line)
        key = SessionKey(*lab.key())
        opening = asyncio.ensure_future(lab.backend.open(key, SessionOpen(), Grant()))
        await held.reached.wait()
        assert (await lab.backend.close(key)).outcome is Outcome.OK
        # Whoever opens it is told, and not broken off.
        assert (await opening).outcome is Outcome.CANCELLED
        held.released.set()
        await asyncio.wait_for(lab.backend.settled(), 20)
        assert await lab.containers() == []


async def test_stop_while_being_made(docker: None) -> None:
    async with running(DockerConfig(image=IMAGE)) as lab:
        opening = [asyncio.create_task(lab.open()) for _ in range(4)]
        singles = [lab.sh("sleep 97") for _ in range(2)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await lab.backend.stop()
        assert time.monotonic() - began < 15
        await asyncio.gather(*opening, *singles, return_exceptions=True)
        ended = await lab.run("true")
        assert ended.outcome is Outcome.ERROR


OWNER = """
import asyncio, sys
from tangram.executors.backend import ActionKey, Grant, SessionKey
from tangram.executors.docker import DockerBackend, DockerConfig, Engine
from tangram.messages import Run, SessionOpen
async def main():
    engine = Engine()
    await engine.check()
    backend = DockerBackend(engine, sys.argv[1], DockerConfig(image=sys.argv[2]))
    await backend.open(SessionKey("t", "c", 1), SessionOpen(), Grant())
    tasks = []
    for n, where in ((2, SessionKey("t", "c", 1)), (3, None)):
        key, run = ActionKey("t", "c", n), Run(argv=("sleep", "97"))
        running = backend.run(key, 1, where, run, Grant(), timeout_ms=90_000, env={}, on_output=None)
        tasks.append(asyncio.create_task(running))
    await asyncio.sleep(1)
    print("up", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


async def test_leftovers_of_a_killed_owner(docker: None) -> None:
    incarnation = f"dead{os.getpid()}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen(  # noqa: ASYNC220 (it is killed, not awaited)
        [sys.executable, "-c", OWNER, incarnation, IMAGE], stdout=subprocess.PIPE, env=env
    )
    assert owner.stdout is not None
    assert await asyncio.to_thread(owner.stdout.readline) == b"up\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    engine = Engine()
    await engine.check()
    assert len(await find(engine, incarnation)) == 2
    assert remove_incarnation(incarnation)
    assert await find(engine, incarnation) == []
    assert remove_incarnation(incarnation)


async def test_silent_daemon_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    async with silent_daemon(tmp_path / "docker.sock") as url:
        with pytest.raises(DockerUnavailable, match="did not answer"):
            await Engine(url, call_s=0.3).check()
    async with silent_daemon(tmp_path / "docker2.sock", 1) as url:
        engine = Engine(url, call_s=0.3)
        await engine.check()
        backend = DockerBackend(engine, "silent", DockerConfig(image=IMAGE, create_s=0.5))
        began = time.monotonic()
        ended = await backend.open(SessionKey("t", "c", 1), SessionOpen(), Grant())
        assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.DAEMON)
        assert "\n" not in ended.detail
        assert time.monotonic() - began < 3
        assert not await asyncio.to_thread(remove_incarnation, "silent", url, 1.0)
        began = time.monotonic()
        await backend.stop()
        assert time.monotonic() - began < 25


async def test_no_daemon_is_one_line(docker: None, tmp_path: Path) -> None:
    with pytest.raises(DockerUnavailable, match="no engine answers at unix:///"):
        await Engine(f"unix://{tmp_path}/nothing.sock").check()
    with pytest.raises(DockerUnavailable, match="docker pull no/such"):
        await Engine().check("no/such")
    with pytest.raises(DockerUnavailable, match="only unix"):
        Engine("ssh://elsewhere")
