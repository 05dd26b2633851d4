"""Everything here runs on a real server: its own port, its own folder, per test. Async tests run on a fresh loop."""

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tangram.broker import Broker, EmbeddedServer

ASYNC_TEST_TIMEOUT_S = 30.0

Connect = Callable[..., AbstractAsyncContextManager[Broker]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def bounded() -> None:
        async with asyncio.timeout(ASYNC_TEST_TIMEOUT_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(tmp_path / "nats") as running:
        yield running


@pytest.fixture
def connect(server: EmbeddedServer) -> Connect:
    """`async with connect() as broker`; keywords as of Broker.connect."""

    @contextlib.asynccontextmanager
    async def connected(**options: Any) -> AsyncIterator[Broker]:
        broker = await Broker.connect(server.url, name="test", **options)
        try:
            yield broker
        finally:
            await broker.close()

    return connected


@pytest.fixture
def freeze(server: EmbeddedServer) -> Iterator[Callable[[], None]]:
    """`freeze()`: the server stands still when it returns (SIGSTOP alone reaches its threads a little later). See `thaw`."""
    pid = server.pid

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")):
            time.sleep(0.001)

    yield stop
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def thaw(server: EmbeddedServer) -> Callable[[], None]:
    pid = server.pid
    return lambda: os.kill(pid, signal.SIGCONT)


@pytest.fixture
def make_stream() -> Callable[..., Awaitable[None]]:
    """`await make_stream(broker, name="S", subjects=["s.>"], **config)`."""

    async def make(broker: Broker, name: str = "S", subjects: tuple[str, ...] = ("s.>",), **config: object) -> None:
        await broker.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": list(subjects), "allow_direct": True, **config})

    return make


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """`await eventually(check)`: until `check()` (sync or async) is true, 5 seconds at most."""

    async def wait(check: Callable[[], Any], timeout_s: float = 5.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            result = check()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return
            assert time.monotonic() < deadline_s, "it did not come true"
            await asyncio.sleep(0.01)

    return wait
