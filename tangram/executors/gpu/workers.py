"""Workers as the executor sees them: born in a nursery, asked over a socket, born again after a death."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tangram.executors.cpu import environment
from tangram.executors.gpu.frames import FRAME_BYTES_MAX, LENGTH
from tangram.executors.gpu.places import Failed

CLOSE_S: Final = 5.0


class Nursery:
    """The process that forks workers; one for each incarnation of an executor, whose mark they bear. Raises OSError."""

    def __init__(self, incarnation: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tangram.executors.gpu.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, environment.INCARNATION: incarnation},
            )
        self._orders = ours

    def birth(self, plan: Mapping[str, Any]) -> socket.socket:
        """A new worker's socket. Raises Failed if the nursery is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._orders, [json.dumps(plan).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise Failed("load", f"the process that starts workers is gone: {error}") from None
        return ours

    async def close(self) -> None:
        """Its workers end with it."""
        self._orders.close()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


class Worker:
    """A `Place` in a process of its own. plan: see `worker.Plan`."""

    def __init__(self, nursery: Nursery, plan: Mapping[str, Any]) -> None:
        self._nursery, self._plan = nursery, plan
        self.is_resident = False
        self.births = 0
        self._bytes = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._pidfd = -1
        self._turn = asyncio.Lock()
        self._is_doomed = False

    async def load(self) -> int:
        async with self._turn:
            await self._ready()
        return self._bytes

    async def restore(self) -> None:
        await self._ask("restore")
        self.is_resident = True

    async def evict(self) -> None:
        self.is_resident = False
        await self._ask("evict")

    async def score(self, batch: list[Any]) -> list[float]:
        return msgspec.convert(await self._ask("score", batch), list[float])

    def kill(self) -> None:
        self._is_doomed = True
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> bool:
        try:
            async with asyncio.timeout(CLOSE_S):
                self.kill()
                async with self._turn:
                    await self._buried()
        except TimeoutError:
            return False
        return True

    async def _ask(self, verb: str, argument: Any = None) -> Any:
        async with self._turn:
            await self._ready()
            return await self._call(verb, argument)

    async def _ready(self) -> None:
        if self._streams is not None and (self._is_doomed or self._streams[0].at_eof()):
            await self._buried()  # it died, or was killed, while nobody asked it
        if self._streams is not None:
            return
        self._is_doomed = False
        own = self._nursery.birth(self._plan)
        own.setblocking(False)
        self._streams = await asyncio.open_connection(sock=own)
        self.births += 1
        self._pidfd = os.pidfd_open(await self._call("pid", None))
        self._bytes = await self._call("load", None)

    async def _call(self, verb: str, argument: Any) -> Any:
        """One request and its answer. Whoever stops waiting for it stops the worker: nobody else could read that answer."""
        assert self._streams is not None
        reader, writer = self._streams
        try:
            data = msgspec.msgpack.encode([verb, argument])
            writer.write(LENGTH.pack(len(data)) + data)
            await writer.drain()
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if size > FRAME_BYTES_MAX:
                raise ConnectionError(f"an answer of {size} bytes")
            answer = msgspec.msgpack.decode(await reader.readexactly(size))
        except (OSError, EOFError) as error:
            await self._buried()
            raise Failed("died", f"the worker of {self._plan['service']} died while it was asked to {verb}: {error}") from None
        except BaseException:
            self.kill()
            await self._buried()
            raise
        if answer[0]:
            return answer[1]
        if answer[1] in ("load", "broken"):
            await self._buried()  # what it has made is of no use
        raise Failed(answer[1], answer[2])

    async def _buried(self) -> None:
        """Returns when it is dead: until then the device is in use. Another is born when it is needed."""
        self.kill()
        self.is_resident = False
        if self._pidfd >= 0:
            await _exit_of(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._streams is not None:
            writer = self._streams[1]
            self._streams = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _exit_of(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    exited = loop.create_future()
    loop.add_reader(pidfd, lambda: None if exited.done() else exited.set_result(None))
    try:
        await exited
    finally:
        loop.remove_reader(pidfd)
