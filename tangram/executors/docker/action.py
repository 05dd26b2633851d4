"""One attempt of a program in a container, from its limits to its outcome."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from tangram import limits
from tangram.executors.attempt import Attempt, error, lost_session
from tangram.executors.backend import Ended, SessionKey
from tangram.executors.cpu import environment
from tangram.executors.cpu.supervise import now_ns
from tangram.executors.docker import programs
from tangram.executors.docker.containers import Container
from tangram.executors.docker.control import Control, Fence, Use
from tangram.executors.docker.engine import DockerUnavailable, Engine, EngineError
from tangram.executors.docker.programs import Broken, Program
from tangram.messages import Output
from tangram.outcomes import ErrorReason, Outcome

T = TypeVar("T")
KILLED = (None, -9, 137)
"""How a program ends that was killed, perhaps with its container."""
BUDGET_S = limits.KILL_BUDGET_MS / 1000


def lost(session: SessionKey | None) -> Ended:
    return lost_session() if session is not None else Ended(outcome=Outcome.ENVIRONMENT_LOST, detail="its container is gone")


class Box(Struct, kw_only=True, eq=False):
    """A running container with its control.

    actions: those running in it now. owner: ids of the files put into it. limiting: held while its limits change.
    lost: it was seen to have ended.
    """

    container: Container
    control: Control
    env: Mapping[str, str] = {}
    owner: tuple[int, int] = (0, 0)
    session: SessionKey | None = None
    closing: bool = False
    lost: bool = False
    actions: list["Action"] = field(default_factory=list)
    closed: asyncio.Lock = field(default_factory=asyncio.Lock)
    limiting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Action(Attempt):
    """fence: set while it may have processes; the caller closes it if the action ended unkillable."""

    fence: Fence | None = None

    async def unless_ended(self, making: Awaitable[T]) -> T | None:
        """The result of `making`, which is cancelled, and None, if the action is ended first. Raises what it raises."""
        task = asyncio.ensure_future(making)
        stopped = asyncio.ensure_future(self.stopped.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self.early is None:
                return await task
            return None
        finally:
            stopped.cancel()
            task.cancel()

    async def perform(self, engine: Engine, box: Box) -> Ended:
        """Runs the program. Raises EngineError, DockerUnavailable, OSError if it could not be started."""
        box.actions.append(self)
        try:
            async with box.limiting:
                await box.control.grant(self.grant)
            return await self._perform(engine, box)
        finally:
            box.actions.remove(self)
            async with box.limiting:
                # A container that is gone uses nothing; an engine that hangs fails the next action by itself.
                with contextlib.suppress(EngineError, DockerUnavailable):
                    if not box.actions and not box.closing and box.session is not None:
                        await box.control.rest()

    async def _perform(self, engine: Engine, box: Box) -> Ended:
        if self.early is not None:
            return self.not_begun(self.early)
        exec_id = await programs.create(
            engine, box.container.id, box.control.gate, box.container.home, self.payload, self._environment(box)
        )
        # Aborting the connection ends a gate that waits, so from here on nothing is left by giving up.
        async with engine.hijack(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False}) as (reader, writer):
            program = Program(engine, exec_id, self.on_output, output_max=self.payload.output_max, held=self.held)
            program.attach(reader, writer)
            clean = False
            try:
                if (refused := await self._let_in(program, box)) is not None:
                    clean = True
                    return refused
                startup_ns = now_ns() - self.called_ns
                await program.ended
                ended, clean = await self._finish(program, box, startup_ns)
                return ended
            except (EngineError, DockerUnavailable, OSError) as problem:
                # With the engine gone the program is ended all the same, where that goes without it.
                clean = self.fence is None or await self.fence.clear(BUDGET_S)
                return replace(error(ErrorReason.DAEMON, problem), unkillable=not clean)
            finally:
                program.close()
                # What could not be ended keeps its cpu time, which it needs to end.
                box.closing = box.closing or not clean
                if clean and self.fence is not None:
                    self.fence.close()
                    self.fence = None

    async def _let_in(self, program: Program, box: Box) -> Ended | None:
        """Puts the waiting gate into its limits and opens it, unless the action was ended before."""
        try:
            said = await self.unless_ended(program.said())
        except Broken as broken:
            if not await box.control.alive(sure=True):
                return lost(box.session)
            return error(ErrorReason.IMAGE, f"the container's /bin/sh did not start: {broken}")
        except TimeoutError:
            return error(ErrorReason.DAEMON, "docker: the program's start was not confirmed in time")
        if said is None:
            return self.not_begun(self.early or Outcome.CANCELLED)
        name = f"{self.key.task}.{self.key.client}.{self.key.n}.{self.attempt}"
        mark = f"{environment.ACTION}={self.key}"
        self.fence = await box.control.enter(name, mark, program.exec_id, said, self.grant)
        if self.early is not None:
            return self.not_begun(self.early)
        self.program = program
        program.begin(self.fence, self.payload.stdin, self.timeout_ms)
        return None

    async def _finish(self, program: Program, box: Box, startup_ns: int) -> tuple[Ended, bool]:
        """After the main process ended or was asked to: kills or parks the rest, and says how it went, and whether
        nothing of the action is left in its fence."""
        assert self.fence is not None
        fence, end = self.fence, time.monotonic() + BUDGET_S
        clean = True
        if program.cause is not None:
            clean = await fence.clear(BUDGET_S)
            await program.last_output(more=not clean)
            code = await fence.exit_status() if clean else None
        else:
            await program.last_output(more=not await fence.empty())
            code = await program.exit_code()
        use = await fence.use(failed=program.cause is None and code != 0)
        outcome, detail = await self._outcome(program.cause, code, use, box)
        # A program that ended by itself may have left a server for the next one, whatever its exit code was.
        if outcome not in (Outcome.OK, Outcome.FAILED) or box.session is None or box.closing:
            clean = await fence.clear(max(0.0, end - time.monotonic()))
        elif not await fence.empty() and not await fence.park(1.0):
            clean = await fence.clear(max(0.0, end - time.monotonic()))
            detail = "what it left running did not stop forking and was killed"
        if not clean:
            detail = f"a process survives SIGKILL; {detail}".rstrip("; ")
        stdout, stderr = program.kept["stdout"], program.kept["stderr"]
        ended = Ended(
            outcome=outcome,
            reason=ErrorReason.DAEMON if outcome is Outcome.ERROR else "",
            detail=detail[: limits.DETAIL_LENGTH_MAX],
            exit_code=code,
            output=Output(stdout=stdout.value(), stderr=stderr.value(), stdout_bytes=stdout.total, stderr_bytes=stderr.total),
            startup_ns=startup_ns,
            run_ns=program.run_ns,
            cpu_ns=use.cpu_ns,
            memory_peak_bytes=use.memory_peak_bytes,
            session_lost=box.session is not None and (outcome is Outcome.ENVIRONMENT_LOST or box.lost),
            unkillable=not clean,
        )
        return ended, clean

    async def _outcome(self, cause: Outcome | None, code: int | None, use: Use, box: Box) -> tuple[Outcome, str]:
        """The outcome and its detail."""
        detail = f"oom_kills={use.oom_kills}" if use.oom_kills else ""
        if code == 0 and cause is None:
            return Outcome.OK, detail
        box.lost = not await box.control.alive(sure=code in KILLED)
        if cause is not None:
            return cause, ""
        # Only the kernel's counter tells a lack of memory from any other SIGKILL.
        if use.oom_kills:
            return Outcome.OUT_OF_MEMORY, detail
        if box.lost:
            return Outcome.ENVIRONMENT_LOST, "its container ended"
        if code is None:
            return Outcome.ERROR, "docker: the engine does not know its exit code"
        return Outcome.FAILED, ""

    def _environment(self, box: Box) -> dict[str, str]:
        base = {"HOME": box.container.home, "TMPDIR": "/tmp"} if box.container.strict else {}
        return self.environment(base, box.session, box.env)
