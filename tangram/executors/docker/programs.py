"""One program in a container: started by the engine behind a gate, its streams taken apart, its end noticed.

The gate is a shell that says its process id, waits for a line, and becomes the program. So limits are in place before
the program begins, and one that is given up before that never begins: its gate's input ends.
"""

import asyncio
import contextlib
import struct
from collections.abc import Mapping
from typing import Any, Final

from tangram import limits
from tangram.executors.backend import OnOutput
from tangram.executors.cpu.output import CHUNK_BYTES, HeadTail, Held
from tangram.executors.cpu.supervise import now_ns
from tangram.executors.docker.control import Fence
from tangram.executors.docker.engine import DockerUnavailable, Engine, EngineError
from tangram.messages import Run
from tangram.outcomes import Outcome

GATE: Final = '; IFS= read -r _ || exit 125; cd -- "$1" || exit 126; shift; exec "$@"'
STREAMS: Final = {1: "stdout", 2: "stderr"}
TIMER_S_MAX: Final = 10.0
"""Event loops' timers stand still while the host is suspended, the time-out does not: it is looked at this often."""
SAID_BYTES_MAX: Final = 500
RUNNING_PAUSE_S: Final = 0.25
QUIET_S: Final = 0.1
LAST_S: Final = 0.5
LAST_MAX_S: Final = 2.0
"""Output that is on its way when the program has ended arrives with shorter pauses than these: the first where others
may hold the streams, the second where their end is late (an engine waits up to 2 s for the streams of the container's
previous program, if something still holds them). The third is for a background process that goes on writing."""
EXIT_CODE_S: Final = 30.0
"""For an engine's word on a program that has ended: a slow one costs time, one that is given up a verdict."""


class Broken(Exception):
    """The stream of a program that did not begin ended; the text is what it wrote."""


class Program:
    """A started program. `ended` is done when its main process has ended or it has to be killed; `cause` says for which
    reason it has to be killed, None if it ended by itself."""

    def __init__(self, engine: Engine, exec_id: str, on_output: OnOutput | None, *, output_max: int, held: Held) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine, self.exec_id, self._on_output = engine, exec_id, on_output
        self._said: asyncio.Future[str] = self._loop.create_future()
        self._early = {name: bytearray() for name in STREAMS.values()}
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._until_ns = 0
        self._began_ns = 0
        self._count = 0
        self._closed = False
        self._fence: Fence | None = None
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self.drained: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.cause: Outcome | None = None
        self.run_ns = 0
        self.kept = {name: HeadTail(output_max, held) for name in STREAMS.values()}

    def attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._tasks.append(asyncio.create_task(self._pump(reader)))

    async def said(self) -> str:
        """What the gate says. Raises Broken if it ends without, TimeoutError."""
        async with asyncio.timeout(self._engine.call_s):
            return await self._said

    def begin(self, fence: Fence, stdin: bytes, timeout_ms: int) -> None:
        """Lets the program begin, once it is in its fence."""
        self._fence = fence
        fence.on_exit(self._note_exit)
        self._began_ns = now_ns()
        self._until_ns = self._began_ns + timeout_ms * 1_000_000
        self._tasks.append(asyncio.create_task(self._feed(stdin)))
        self._arm()

    def end(self, cause: Outcome) -> None:
        """Asks for the end for a reason; the first reason counts, and none counts after the program's own end."""
        if not self.ended.done():
            self.cause = cause
            self.ended.set_result(None)

    async def last_output(self, *, more: bool) -> None:
        """Takes what is on its way. `more`: others may still hold the streams, so their end is not waited for."""
        pause = QUIET_S if more else LAST_S
        end = self._loop.time() + LAST_MAX_S
        while not self.drained.done() and self._loop.time() < end:
            before = self._count
            await asyncio.wait([self.drained], timeout=pause)
            if before == self._count:
                return

    async def exit_code(self) -> int | None:
        """Of the ended program; None if nobody can say. Never a guess."""
        code = await self._fence.exit_status() if self._fence is not None and self.exited.done() else None
        end = self._loop.time() + EXIT_CODE_S
        pause = 0.001
        while code is None and self._loop.time() < end:
            try:
                # An engine holds this answer back while it still waits for output.
                answer = (await self._engine.call("GET", f"/exec/{self.exec_id}/json", timeout_s=EXIT_CODE_S)).json()
            except (EngineError, DockerUnavailable):
                return None
            if not answer["Running"]:
                return None if answer.get("ExitCode") is None else int(answer["ExitCode"])
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return code

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for kept in self.kept.values():
            kept.close()
        if self._said.done() and not self._said.cancelled():
            self._said.exception()

    # --- its streams ---------------------------------------------------------------------------------------------

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                stream, size = struct.unpack(">BxxxI", await reader.readexactly(8))
                while size:
                    data = await reader.read(min(size, CHUNK_BYTES))
                    if not data:
                        return
                    size -= len(data)
                    self._take(STREAMS.get(stream, "stderr"), data)
        except (OSError, EOFError):
            # Its end, or the engine's: only the exit code tells, and without one the outcome is no success.
            pass
        finally:
            if not self._said.done():
                text = bytes(self._early["stderr"] + self._early["stdout"]).decode(errors="replace")
                self._said.set_exception(Broken(" ".join(text.split())))
            self.drained.set_result(None)
            if self._began_ns and not self._closed and not self.exited.done():
                self._tasks.append(asyncio.create_task(self._outlive()))

    async def _outlive(self) -> None:
        """After the streams' end: mostly the program's end too, but it may just have closed them. An engine that does
        not answer has lost it."""
        pause = 0.001
        with contextlib.suppress(EngineError, DockerUnavailable):
            while (await self._engine.call("GET", f"/exec/{self.exec_id}/json")).json()["Running"]:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RUNNING_PAUSE_S)
        self._note_end()

    def _take(self, stream: str, data: bytes) -> None:
        if not self._said.done():
            early = self._early[stream]
            early += data[:SAID_BYTES_MAX]
            line, newline, rest = bytes(early).partition(b"\n")
            # Some shells complain of their environment before they do anything.
            if not newline or stream != "stdout":
                return
            self._said.set_result(line.decode(errors="replace"))
            data = rest
            if not data:
                return
        self.kept[stream].add(data)
        self._count += len(data)
        if self._on_output is not None:
            try:
                self._on_output(stream, data)
            except Exception:
                # Live output is best effort; the outcome's output is the one that counts.
                self._on_output = None
        if self._count > limits.OUTPUT_KILL_BYTES:
            self.end(Outcome.OUTPUT_LIMIT)

    async def _feed(self, data: bytes) -> None:
        # A program may end, or close its input, without reading it: that is no failure.
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(b"\n")  # opens the gate
            for at in range(0, len(data), CHUNK_BYTES):
                self._writer.write(data[at : at + CHUNK_BYTES])
                await self._writer.drain()
            self._writer.write_eof()

    def _note_exit(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
        self._note_end()

    def _note_end(self) -> None:
        if not self.run_ns:
            self.run_ns = now_ns() - self._began_ns
        if not self.ended.done():
            self.ended.set_result(None)

    def _arm(self) -> None:
        left_ns = self._until_ns - now_ns()
        if left_ns <= 0:
            self.end(Outcome.TIMED_OUT)
        else:
            self._timer = self._loop.call_later(min(left_ns / 1e9, TIMER_S_MAX), self._arm)


async def create(engine: Engine, container_id: str, gate: str, home: str, payload: Run, env: Mapping[str, str]) -> str:
    """Prepares a program; the id of it. Raises EngineError, DockerUnavailable."""
    body: dict[str, Any] = {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Cmd": [
            "/bin/sh",
            "-c",
            gate + GATE,
            "sh",
            f"{home.rstrip('/')}/{payload.cwd}" if not payload.cwd.startswith("/") else payload.cwd,
            *_words(payload),
        ],
    }
    return str((await engine.call("POST", f"/containers/{container_id}/exec", body=body)).json()["Id"])


def _words(payload: Run) -> list[str]:
    """The arguments, with a name that shells would take for an option of `exec` made a path."""
    name, *rest = payload.argv
    return [f"./{name}" if name.startswith("-") else name, *rest]
