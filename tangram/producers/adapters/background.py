"""Sessions for frameworks that call from threads: one client of the process for each (broker, task), on one event loop in a
thread of its own. A client is connected for its first session, closed after its last, and at the process's exit."""

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from tangram.errors import BrokerError, ClientClosed, TangramError
from tangram.producers.client import Client
from tangram.producers.result import Result
from tangram.producers.session import Session

log = logging.getLogger(__name__)
T = TypeVar("T")
Key = tuple[str | None, str]

CLOSE_PATIENCE_S: Final = 5.0
"""Closing waits this long for an answer: a broker that is gone must not hold up the caller's exit. idle_ttl closes it then."""


class SharedSession:
    """As `tangram.Session`, its calls returning when their actions have ended. Safe to use from many threads.

    Interrupting a call cancels its action. Use it in the process that opened it.
    """

    def __init__(self, background: "_Background", shared: "_Shared", session: Session) -> None:
        self._background, self._shared, self._session = background, shared, session
        self.opened = session.opened

    def run(self, command: str | Sequence[str], **options: Any) -> Result:
        """Options as for `Session.run`. Raises InvalidRequest, ClientClosed."""
        return self._background.wait(self._session.run(command, **options))

    def close(self) -> None:
        """Ends the session and everything in it; waits for that, but not for ever. Idempotent."""
        if self._background.is_ours:
            self._background.wait(self._background.leave(self._shared, self._session))

    def close_soon(self) -> None:
        """As `close`, without waiting: for finalizers, which run in any thread at any time."""
        if self._background.is_ours:
            self._background.start(self._background.leave(self._shared, self._session))


def open_session(url: str | None, task: str, *, connect_timeout: float = 10.0, **options: Any) -> SharedSession:
    """Options as for `Client.session`. connect_timeout: if it has to be connected yet.

    Raises BrokerUnavailable, InvalidRequest, SessionError.
    """
    background = _background()
    return background.wait(background.enter((url, task), connect_timeout, options))


class _Shared:
    """A client and its open sessions. `users` also counts those that are being opened."""

    def __init__(self, key: Key, connect_timeout_s: float) -> None:
        self.key = key
        self.client = Client(key[0], task=key[1], connect_timeout=connect_timeout_s)
        self.connecting = asyncio.create_task(self.client.connect())
        self.sessions: set[Session] = set()
        self.users = 0


class _Background:
    """The loop, its thread, and the clients. Only `wait`, `start` and `end` are called from other threads: all state belongs
    to the loop, so nothing needs a lock."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._shared: dict[Key, _Shared] = {}
        self._started: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tangram-background", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether its thread is in this process (a fork has no copy of it), and runs."""
        return self._pid == os.getpid() and not self._loop.is_closed()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self.is_ours:
            coroutine.close()
            raise ClientClosed("this session was opened in another process, or this one is ending")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt in this thread ends the action too
            raise

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._started.add(future)
        future.add_done_callback(self._started.discard)

    async def enter(self, key: Key, connect_timeout_s: float, options: dict[str, Any]) -> SharedSession:
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(key, connect_timeout_s)
        shared.users += 1
        try:
            await asyncio.shield(shared.connecting)
            session = await shared.client.open_session(**options)
        except BaseException as error:
            if isinstance(error, BrokerError | ClientClosed):
                self._forget(shared)  # not connected, or closed for good: the next one begins anew
            await self._release(shared)
            raise
        shared.sessions.add(session)
        return SharedSession(self, shared, session)

    async def leave(self, shared: _Shared, session: Session) -> None:
        if session not in shared.sessions:
            return
        shared.sessions.discard(session)
        try:
            await asyncio.wait_for(session.close(), CLOSE_PATIENCE_S)
        except (TangramError, TimeoutError) as error:
            log.info("a session was left to its idle_ttl: %r", error)
        finally:
            await self._release(shared)

    async def _release(self, shared: _Shared) -> None:
        shared.users -= 1
        if shared.users:
            return
        self._forget(shared)
        shared.connecting.cancel()
        await asyncio.gather(shared.connecting, return_exceptions=True)
        await shared.client.close()

    def _forget(self, shared: _Shared) -> None:
        if self._shared.get(shared.key) is shared:
            del self._shared[shared.key]

    def end(self) -> None:
        """Closes what is open, then the loop. At exit."""
        if not self.is_ours:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(2 * CLOSE_PATIENCE_S)
        except (Exception, KeyboardInterrupt) as error:
            log.info("not all sessions could be closed: %r", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        await asyncio.wait([asyncio.ensure_future(self._close_all())], timeout=CLOSE_PATIENCE_S)
        for _ in range(5):  # a task that is cancelled may wait once more, to clean up
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest, timeout=0.1)

    async def _close_all(self) -> None:
        leaving = [asyncio.wrap_future(future) for future in list(self._started)]
        for shared in list(self._shared.values()):
            leaving += [asyncio.ensure_future(self.leave(shared, session)) for session in shared.sessions]
        await asyncio.gather(*leaving, return_exceptions=True)
        for shared in list(self._shared.values()):  # whose sessions were still being opened
            self._forget(shared)
            await shared.client.close()


_one: _Background | None = None
_making = threading.Lock()


def _background() -> _Background:
    global _one  # noqa: PLW0603  # one of a process is the point
    with _making:
        if _one is None or not _one.is_ours:
            _one = _Background()
            atexit.register(_one.end)
        return _one
