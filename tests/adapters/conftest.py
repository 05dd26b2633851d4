"""A whole stack for code that blocks: it lives on an event loop in a thread of its own."""

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from tangram.local import LocalStack

T = TypeVar("T")

# mini-swe-agent reads these when it is imported, and makes the folder.
os.environ["MSWEA_SILENT_STARTUP"] = os.environ["MSWEA_CONFIGURED"] = "1"
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp(prefix="tangram-test-mini-")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background of a shell inherits that, and so would the programs of the local environment; ours do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class BlockingStack:
    """A LocalStack and the loop it lives on."""

    def __init__(self, stack: LocalStack, loop: asyncio.AbstractEventLoop) -> None:
        self.stack, self._loop = stack, loop

    @property
    def url(self) -> str:
        return self.stack.url

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def sessions(self) -> list[str]:
        """Names of the folders of sessions that are open."""
        return [path.name for path in self.stack.folder.glob("executors/**/sessions/*")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingStack]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="stack")
    thread.start()
    running = BlockingStack(LocalStack(tmp_path_factory.mktemp("stack")), loop)
    try:
        running.wait(running.stack.start())
        yield running
    finally:
        running.wait(running.stack.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="session", autouse=True)
def _own_configuration_folder() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["MSWEA_GLOBAL_CONFIG_DIR"], ignore_errors=True)
