"""Everything here runs on a real Docker engine with the image of deploy/sandbox/make-test-image.sh.

Without them the tests are skipped; with "docker" in TANGRAM_REQUIRE they fail. Each test of a `lab` ends by stopping
the back end and checking that no container of it is left.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from tangram.executors.backend import ActionKey, Ended, Grant, OnOutput, SessionKey
from tangram.executors.docker import DockerBackend, DockerConfig, DockerUnavailable, Engine
from tangram.executors.docker.containers import find
from tangram.executors.docker.engine import EngineError
from tangram.limits import OUTPUT_BYTES_MAX
from tangram.messages import FileRead, FileWrite, Run, SessionOpen
from tangram.outcomes import Outcome

IMAGE = os.environ.get("TANGRAM_TEST_IMAGE", "tangram-test:latest")
CORES = sorted(os.sched_getaffinity(0))
ONE_CORE = CORES[0]


async def _missing() -> str:
    try:
        engine = Engine()
        await engine.check()
        await engine.call("GET", f"/images/{IMAGE}/json")
    except DockerUnavailable as error:
        return f"{error}; deploy/sandbox/start-dockerd.sh starts one"
    except EngineError as error:
        return f"{error}; deploy/sandbox/make-test-image.sh makes it"
    return ""


@pytest.fixture(scope="session")
def docker() -> None:
    missing = asyncio.run(_missing())
    if missing and "docker" in os.environ.get("TANGRAM_REQUIRE", ""):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


async def eventually(true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for a condition that nothing announces."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


class Lab:
    """A back end with short ways to use it."""

    def __init__(self, engine: Engine, config: DockerConfig) -> None:
        self.engine, self.config = engine, config
        self.local = config.cgroups is None
        self.incarnation = uuid.uuid4().hex[:12]
        self.backend = DockerBackend(engine, self.incarnation, config)
        self._numbers = 0

    def key(self) -> ActionKey:
        self._numbers += 1
        return ActionKey("task", "client", self._numbers)

    def run(
        self,
        *argv: str,
        key: ActionKey | None = None,
        session: SessionKey | None = None,
        timeout_ms: int = 20_000,
        grant: Grant | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        more_env: Mapping[str, str] | None = None,
        cwd: str = "",
        output_max: int = OUTPUT_BYTES_MAX,
        on_output: OnOutput | None = None,
    ) -> "asyncio.Task[Ended]":
        coroutine = self.backend.run(
            key or self.key(),
            1,
            session,
            Run(argv=argv, stdin=stdin, env=dict(env or {}), cwd=cwd, output_max=output_max),
            grant or Grant(cores=(ONE_CORE,), millicores=1000),
            timeout_ms=timeout_ms,
            env=more_env or {},
            on_output=on_output,
        )
        return asyncio.get_running_loop().create_task(coroutine)

    def sh(self, script: str, **options: Any) -> "asyncio.Task[Ended]":
        return self.run("/bin/sh", "-c", script, **options)

    def python(self, script: str, **options: Any) -> "asyncio.Task[Ended]":
        return self.run("python3", "-ISc", script, **options)

    async def open(self, image: str = "", memory_mib: int = 0, env: Mapping[str, str] | None = None) -> tuple[SessionKey, Ended]:
        key = SessionKey(*self.key())
        ended = await self.backend.open(key, SessionOpen(image=image, env=dict(env or {})), Grant(memory_mib=memory_mib))
        return key, ended

    @contextlib.asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[SessionKey]:
        key, ended = await self.open(**options)
        assert ended.outcome is Outcome.OK, ended
        yield key
        ended = await self.backend.close(key)
        assert ended.outcome is Outcome.OK, ended

    async def write(self, key: SessionKey, path: str, data: bytes, mode: int = 0o644) -> Ended:
        return await self.backend.write(key, FileWrite(path=path, data=data, mode=mode))

    async def read(self, key: SessionKey, path: str, size_max: int = 1000) -> Ended:
        return await self.backend.read(key, FileRead(path=path, size_max=size_max))

    async def containers(self) -> list[str]:
        return await find(self.engine, self.incarnation)


@contextlib.asynccontextmanager
async def running(config: DockerConfig, url: str = "") -> AsyncIterator[Lab]:
    engine = Engine(url)
    await engine.check()
    descriptors = len(os.listdir("/proc/self/fd"))
    lab = Lab(engine, config)
    try:
        yield lab
    finally:
        await lab.backend.stop()
    assert await lab.containers() == []
    # A transport's descriptor is closed by a later turn of the loop.
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


@pytest.fixture(params=["groups", "engine"])
async def lab(request: pytest.FixtureRequest, docker: None) -> AsyncIterator[Lab]:
    """With limits written to control groups, and through the engine alone."""
    async with running(DockerConfig(image=IMAGE, cgroups=None if request.param == "groups" else False)) as one:
        yield one


@pytest.fixture
async def local(docker: None) -> AsyncIterator[Lab]:
    """For what does not differ between the two, in the usual way."""
    async with running(DockerConfig(image=IMAGE)) as one:
        yield one
