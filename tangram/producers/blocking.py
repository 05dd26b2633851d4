"""The client without an event loop of the caller's: one loop in a thread of its own. Safe to use from many threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from tangram import limits
from tangram.errors import ClientClosed
from tangram.producers.client import Client
from tangram.producers.options import CallOptions, RunOptions, ScoreOptions, SessionOptions, SessionRunOptions
from tangram.producers.request import Units
from tangram.producers.result import Result
from tangram.producers.session import Session
from tangram.producers.waiting import Waiting

T = TypeVar("T")


class BlockingClient:
    """As `tangram.Client`, each call returning when its action has ended. Interrupting a call cancels its action."""

    def __init__(
        self,
        url: str | None = None,
        *,
        task: str,
        name: str | None = None,
        connect_timeout: float = 10.0,
        cancel_on_disconnect: bool = False,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "url": url,
            "task": task,
            "name": name,
            "connect_timeout": connect_timeout,
            "cancel_on_disconnect": cancel_on_disconnect,
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Client | None = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Raises BrokerUnavailable, InvalidRequest. Connected already, it does nothing."""
        if self._client is not None:
            return
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="tangram-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._wait(_made(self._arguments))
        except BaseException:
            self._end_loop()
            raise

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            try:
                self._wait(client.close())
            finally:
                self._end_loop()

    def run(self, command: str | Sequence[str], **options: Unpack[RunOptions]) -> Result:
        """See `Client.run`."""
        return self._wait(self._connected.run(command, **options))

    def start(self, command: str | Sequence[str], **options: Unpack[RunOptions]) -> "BlockingWaiting":
        """See `Client.start`."""
        return BlockingWaiting(self, self._wait(self._connected.start(command, **options)))

    def result(self, id: int | str | None = None, *, key: str = "", timeout: float | None = None) -> Result:  # noqa: A002
        """See `Client.result`."""
        return self._wait(self._connected.result(id, key=key, timeout=timeout))

    def cancel(self, id: int | str) -> None:  # noqa: A002
        """See `Client.cancel`."""
        self._wait(_called(partial(self._connected.cancel, id)))

    def noop(self, *, units: Units = 1) -> Result:
        return self._wait(self._connected.noop(units=units))

    def score(self, service: str, batch: Sequence[object], **options: Unpack[ScoreOptions]) -> list[float]:
        """See `Client.score`."""
        return self._wait(self._connected.score(service, batch, **options))

    def scored(self, service: str, batch: Sequence[object], **options: Unpack[ScoreOptions]) -> Result:
        """See `Client.scored`."""
        return self._wait(self._connected.scored(service, batch, **options))

    def called(self, endpoint: str, arguments: Mapping[str, object] | None = None, **options: Unpack[CallOptions]) -> Result:
        """See `Client.called`."""
        return self._wait(self._connected.called(endpoint, arguments, **options))

    def call(self, endpoint: str, arguments: Mapping[str, object] | None = None, **options: Unpack[CallOptions]) -> Any:
        """See `Client.call`."""
        return self._wait(self._connected.call(endpoint, arguments, **options))

    @contextmanager
    def session(self, **options: Unpack[SessionOptions]) -> "Iterator[BlockingSession]":
        """See `Client.session`."""
        box = self.open_session(**options)
        try:
            yield box
        finally:
            box.close()

    def open_session(self, **options: Unpack[SessionOptions]) -> "BlockingSession":
        return BlockingSession(self, self._wait(self._connected.open_session(**options)))

    @property
    def _connected(self) -> Client:
        if self._client is None:
            raise ClientClosed("the client is not connected: use it in a `with` block, or call connect()")
        return self._client

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt in this thread ends the action too
            raise

    def _end_loop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingWaiting:
    """As `tangram.Waiting`: `result()` waits for the outcome."""

    def __init__(self, client: BlockingClient, waiting: Waiting) -> None:
        self._client, self._waiting = client, waiting
        self.id = waiting.id

    def cancel(self) -> None:
        self._client._wait(_called(self._waiting.cancel))

    def result(self) -> Result:
        return self._client._wait(_awaited(self._waiting))


class BlockingSession:
    """As `tangram.Session`."""

    def __init__(self, client: BlockingClient, session: Session) -> None:
        self._client, self._session = client, session
        self.opened = session.opened

    def run(self, command: str | Sequence[str], **options: Unpack[SessionRunOptions]) -> Result:
        return self._client._wait(self._session.run(command, **options))

    def start(self, command: str | Sequence[str], **options: Unpack[SessionRunOptions]) -> BlockingWaiting:
        return BlockingWaiting(self._client, self._client._wait(self._session.start(command, **options)))

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644, timeout: float = 60.0) -> Result:
        return self._client._wait(self._session.write(path, data, mode=mode, timeout=timeout))

    def read(self, path: str, *, size_max: int = limits.FILE_BYTES_MAX, timeout: float = 60.0) -> Result:
        return self._client._wait(self._session.read(path, size_max=size_max, timeout=timeout))

    def close(self) -> Result:
        return self._client._wait(self._session.close())


async def _made(arguments: Mapping[str, Any]) -> Client:
    client = Client(**arguments)
    await client.connect()
    return client


async def _called(function: Callable[[], None]) -> None:
    """In the loop's thread."""
    function()


async def _awaited(waiting: Waiting) -> Result:
    return await waiting
