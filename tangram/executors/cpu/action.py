"""One attempt of a program, from its limits to its outcome, and what a session keeps between its programs."""

import asyncio
import errno
import time
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from tangram import limits
from tangram.executors.attempt import Attempt, error, invalid
from tangram.executors.backend import Ended, SessionKey
from tangram.executors.cpu import environment
from tangram.executors.cpu.fence import Enclosure, Fence
from tangram.executors.cpu.files import DISK_ERRORS
from tangram.executors.cpu.folders import Folder
from tangram.executors.cpu.output import Reader
from tangram.executors.cpu.spawn import spawn
from tangram.executors.cpu.supervise import Program
from tangram.messages import Output
from tangram.outcomes import ErrorReason, Outcome

SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN})
"""The host has no descriptors, or no processes, left just now."""


def failed(problem: OSError, *, begun: bool = True) -> Ended:
    """The host could not do what was asked: `error`, or `rejected` if the request itself was too large for it. begun: a
    program may have been started."""
    detail = str(problem)[: limits.DETAIL_LENGTH_MAX]
    if problem.errno == errno.E2BIG:
        return invalid(f"argv, env: {detail}")
    reason = ErrorReason.DISK if problem.errno in DISK_ERRORS else ErrorReason.INTERNAL
    return replace(error(reason, detail), not_begun=not begun and problem.errno in SCARCE)


class SessionState(Struct, kw_only=True, eq=False):
    """An open session. sinks: pipes that its background processes still hold. actions: those running in it now."""

    key: SessionKey
    folder: Folder
    enclosure: Enclosure
    env: Mapping[str, str]
    closing: bool = False
    actions: list["Action"] = field(default_factory=list)
    sinks: list[Reader] = field(default_factory=list)
    closed: asyncio.Lock = field(default_factory=asyncio.Lock)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, action: "Action") -> None:
        self.actions.append(action)
        self._idle.clear()

    def leave(self, action: "Action") -> None:
        self.actions.remove(action)
        if self.actions:
            return
        self._idle.set()
        if not self.closing:
            self.enclosure.rest()

    async def idle(self) -> None:
        """Waits until no action runs in it; all of them must have been told to end."""
        if self.actions:
            await self._idle.wait()

    def sink(self, reader: Reader) -> None:
        """Keeps a pipe open, and empty, for a background process."""
        if not reader.closed:
            self.sinks.append(reader)
            reader.sink(self.sinks.remove)

    def close_sinks(self) -> None:
        for reader in self.sinks:
            reader.close()
        self.sinks.clear()


class Action(Attempt):
    """fence: set while it may have processes."""

    fence: Fence | None = None
    program: Program | None = None
    begun = False
    """Whether its program may have been started."""

    @property
    def marks(self) -> list[str]:
        return [f"{environment.ACTION}={self.key}", f"{environment.ATTEMPT}={self.attempt}"]

    async def perform(self, folder: Folder, enclosure: Enclosure, session: SessionState | None) -> Ended:
        """Runs the program in `folder` and `enclosure`. Raises OSError if it could not be started."""
        if self.early is not None:
            return self.not_begun(self.early)
        enclosure.grant(self.grant)
        fence = enclosure.fence(f"{self.key.n}.{self.attempt}", self.marks, self.grant.memory_mib)
        try:
            program = self._start(folder, fence, session)
        except BaseException:
            fence.remove()
            raise
        self.fence, self.program = fence, program
        clean = False
        try:
            await program.ended
            ended, clean = await self._finish(program, fence, session)
            return ended
        finally:
            program.close()
            for reader in (program.stdout, program.stderr):
                reader.kept.close()
                if session is None or reader not in session.sinks:
                    reader.close()
            if clean:
                fence.remove()
                self.fence = None

    def _start(self, folder: Folder, fence: Fence, session: SessionState | None) -> Program:
        key, session_env = (None, {}) if session is None else (session.key, session.env)
        env = self.environment(environment.of_host(folder.home, folder.tmp), key, session_env)
        child = spawn(self.payload.argv, env, folder.home / self.payload.cwd, self.payload.stdin, fence.entries, fence.affinity)
        self.begun = True
        try:
            fence.started(child.pid)
        except BaseException:
            child.discard()
            raise
        return Program(child, self.timeout_ms, self.called_ns, self.on_output, output_max=self.payload.output_max, held=self.held)

    async def _finish(self, program: Program, fence: Fence, session: SessionState | None) -> tuple[Ended, bool]:
        """After the main process ended or was asked to: kills or parks the rest, and says how it went, and whether
        nothing of the action is left in its fence."""
        end = time.monotonic() + limits.KILL_BUDGET_MS / 1000
        if program.cause is not None:
            # The gate may not have entered the groups yet, so its process is killed by its own number too.
            program.signal()
            fence.signal()
            await program.wait_exit(end - time.monotonic())
        program.drain()
        usage = fence.usage()
        outcome, detail = _outcome(program, usage.oom_kills)
        clean = True
        # A program that ended by itself may have left a server for the next one, whatever its exit code was.
        if outcome not in (Outcome.OK, Outcome.FAILED) or session is None or session.closing:
            clean = await fence.clear(max(0.0, end - time.monotonic()))
            program.drain()
        elif not await fence.empty():
            for reader in (program.stdout, program.stderr):
                session.sink(reader)
            if not await fence.park(1.0):
                clean = await fence.clear(max(0.0, end - time.monotonic()))
                detail = "what it left running did not stop forking and was killed"
        unkillable = not clean or not program.exited
        if unkillable:
            detail = f"a process survives SIGKILL; {detail}".rstrip("; ")
        return self._ended(program, fence, outcome, detail, unkillable=unkillable), clean

    def _ended(self, program: Program, fence: Fence, outcome: Outcome, detail: str, *, unkillable: bool) -> Ended:
        usage = fence.usage()
        cpu_ns, peak = usage.cpu_ns or 0, usage.memory_peak_bytes or 0
        if program.usage is not None:
            cpu_ns = cpu_ns or round((program.usage.ru_utime + program.usage.ru_stime) * 1e9)
            peak = peak or program.usage.ru_maxrss * 1024
        return Ended(
            outcome=outcome,
            reason=ErrorReason.INTERNAL if outcome is Outcome.ERROR else "",
            detail=detail[: limits.DETAIL_LENGTH_MAX],
            exit_code=None if program.gate_error else program.exit_code,
            output=Output(
                stdout=program.stdout.kept.value(),
                stderr=program.stderr.kept.value(),
                stdout_bytes=program.stdout.kept.total,
                stderr_bytes=program.stderr.kept.total,
            ),
            startup_ns=program.startup_ns,
            run_ns=program.run_ns,
            cpu_ns=cpu_ns,
            memory_peak_bytes=peak,
            session_lost=outcome is Outcome.ENVIRONMENT_LOST,
            unkillable=unkillable,
        )


def _outcome(program: Program, oom_kills: int) -> tuple[Outcome, str]:
    """The outcome and its detail."""
    if program.cause is not None:
        return program.cause, ""
    if program.gate_error:
        return Outcome.ERROR, f"could not be placed in its limits: {program.gate_error}"
    if program.exit_code is None:
        return Outcome.ERROR, "its exit status was taken by another part of the executor's process"
    detail = f"oom_kills={oom_kills}" if oom_kills else ""
    if program.exit_code == 0:
        return Outcome.OK, detail
    # Only the kernel's counter tells a lack of memory from any other SIGKILL.
    return (Outcome.OUT_OF_MEMORY if oom_kills else Outcome.FAILED), detail
