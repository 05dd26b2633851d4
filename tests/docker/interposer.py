"""A socket in front of a real engine's, on which single calls can be held or cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

Wanted = Callable[[str], bool]
"""Says of a call's first line ("POST /v1.41/containers/create?name=... HTTP/1.1") whether it is meant."""


class Held:
    """A call that was stopped on its way: before the engine saw it, or (answered) with its answer withheld."""

    def __init__(self, wanted: Wanted, *, answered: bool) -> None:
        self.wanted, self.answered = wanted, answered
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def stop(self) -> None:
        self.reached.set()
        await self.released.wait()


class Interposer:
    def __init__(self, path: Path, engine: str) -> None:
        self.url = f"unix://{path}"
        self.calls: list[str] = []
        self._engine = engine
        self._held: Held | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[asyncio.StreamWriter, str] = {}
        self._at_once: list[list[str]] = []
        self._came = asyncio.Condition()
        self.down = False
        """No call comes through."""

    def hold(self, wanted: Wanted, *, answered: bool = False) -> Held:
        """Stops the next call that is `wanted`."""
        self._held = Held(wanted, answered=answered)
        return self._held

    def hold_nth(self, n: int, *, answered: bool) -> Held:
        """Stops the n-th call from now on, counted from 0."""
        until = len(self.calls) + n + 1
        return self.hold(lambda _: len(self.calls) == until, answered=answered)

    def cut(self, wanted: Wanted) -> int:
        """Breaks off the calls that are open now; how many."""
        meant = [writer for writer, line in self._open.items() if wanted(line)]
        for writer in meant:
            writer.transport.abort()
        return len(meant)

    def most_at_once(self, wanted: Wanted) -> int:
        return max(sum(map(wanted, lines)) for lines in self._at_once)

    async def saw(self, wanted: Wanted) -> None:
        """Waits for such a call, if there has been none."""
        async with self._came:
            await self._came.wait_for(lambda: any(map(wanted, self.calls)))

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            head = await reader.readuntil(b"\r\n")
            line = head.decode().strip()
            if self.down:
                writer.transport.abort()
                return
            self.calls.append(line)
            async with self._came:
                self._came.notify_all()
            held = self._held if self._held is not None and self._held.wanted(line) else None
            if held is not None:
                self._held = None
                if not held.answered:
                    await held.stop()
            self._open[writer] = line
            self._at_once.append(list(self._open.values()))
            engine_reader, engine_writer = await asyncio.open_unix_connection(self._engine)
            engine_writer.write(head)
            there = asyncio.create_task(_pass(reader, engine_writer))
            try:
                await _pass(engine_reader, writer, held if held is not None and held.answered else None)
            finally:
                there.cancel()
                engine_writer.transport.abort()
        self._open.pop(writer, None)
        writer.transport.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for writer in list(self._open):
            writer.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: Held | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            if held is not None and not held.reached.is_set():
                await held.stop()
            writer.write(data)
            await writer.drain()
        writer.write_eof()


@contextlib.asynccontextmanager
async def interposed(path: Path, engine: str = "/var/run/docker.sock") -> AsyncIterator[Interposer]:
    interposer = Interposer(path, engine)
    server = await asyncio.start_unix_server(interposer.accept, path)
    try:
        yield interposer
    finally:
        server.close()
        await interposer.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def silent_daemon(path: Path, answers: int = 0) -> AsyncIterator[str]:
    """The url of an engine that accepts and, after that many calls, never answers."""
    writers: list[asyncio.StreamWriter] = []
    left = answers

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        writers.append(writer)
        left -= 1
        if left >= 0:
            body = b'{"ApiVersion":"1.41","MinAPIVersion":"1.12","Os":"linux"}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
