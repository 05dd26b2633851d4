"""One program from its start to the end of its main process: its time, its output, and what ended it.

Everything happens in readiness callbacks of the event loop; there is no thread and no signal handler per program.
"""

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Final

from tangram import limits
from tangram.executors.backend import OnOutput
from tangram.executors.cpu.output import HeadTail, Held, Reader
from tangram.executors.cpu.spawn import Child
from tangram.outcomes import Outcome

_TIMER_S_MAX: Final = 10.0
"""Event loops' timers stand still while the host is suspended, the time-out does not: it is looked at this often."""
_STATUS_BYTES: Final = 1_000


def now_ns() -> int:
    """Time since boot, with the time the host was suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Program:
    """A running program. `ended` is done when its main process has ended and was reaped, or has to be killed; `cause`
    says for which reason it has to be killed, None if it ended by itself."""

    def __init__(
        self, child: Child, timeout_ms: int, called_ns: int, on_output: OnOutput | None, *, output_max: int, held: Held
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._child = child
        self._timeout_ns = timeout_ms * 1_000_000
        self._on_output = on_output
        self._status = bytearray()
        self._status_open = True
        self._called_ns = called_ns
        self._started_ns = now_ns()
        self._timer: asyncio.TimerHandle | None = None
        self._total = 0
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.cause: Outcome | None = None
        self.exit_code: int | None = None
        self.usage: resource.struct_rusage | None = None
        self.startup_ns = 0
        self.run_ns = 0
        self.stdout = Reader(self._loop, child.stdout, HeadTail(output_max, held), self._receiver("stdout"))
        self.stderr = Reader(self._loop, child.stderr, HeadTail(output_max, held), self._receiver("stderr"))
        os.set_blocking(child.status, False)
        self._loop.add_reader(child.status, self._read_status)
        self._loop.add_reader(child.pidfd, self._reap)
        self._arm()

    @property
    def gate_error(self) -> str:
        """Why the program could not be placed in its limits; then it did not run."""
        return self._status.decode(errors="replace").strip()

    @property
    def exited(self) -> bool:
        return self._exited.done()

    def end(self, cause: Outcome) -> None:
        """Asks for the end for a reason; the first reason counts, and none counts after the program's own end."""
        if not self.ended.done():
            self._reap()
        if not self.ended.done():
            self.cause = cause
            self.ended.set_result(None)

    def signal(self) -> None:
        """Kills the main process's group, unless the main process has been reaped."""
        if not self.exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    async def wait_exit(self, budget_s: float) -> bool:
        """Whether the main process, which was killed, is gone within the budget."""
        await asyncio.wait([self._exited], timeout=budget_s)
        return self.exited

    def drain(self) -> None:
        """Reads what is in the pipes now."""
        self.stdout.drain()
        self.stderr.drain()

    def close(self) -> None:
        """Frees everything but the readers. A main process that is still there is reaped whenever it ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._close_status()

    def _receiver(self, stream: str) -> Callable[[bytes], None]:
        def receive(data: bytes) -> None:
            self._total += len(data)
            if self._on_output is not None:
                try:
                    self._on_output(stream, data)
                except Exception:
                    # Live output is best effort; the outcome's output is the one that counts.
                    self._on_output = None
            if self._total > limits.OUTPUT_KILL_BYTES:
                self.end(Outcome.OUTPUT_LIMIT)

        return receive

    def _read_status(self) -> None:
        try:
            data = os.read(self._child.status, _STATUS_BYTES)
        except BlockingIOError:
            return
        if data:
            self._status += data[: _STATUS_BYTES - len(self._status)]
            return
        if not self.exited:
            self._started_ns = now_ns()
        self._close_status()

    def _close_status(self) -> None:
        if self._status_open:
            self._status_open = False
            self._loop.remove_reader(self._child.status)
            os.close(self._child.status)

    def _reap(self) -> None:
        try:
            pid, status, self.usage = os.wait4(self._child.pid, os.WNOHANG)
        except ChildProcessError:
            # Somebody else in this process waits for all children, or ignores SIGCHLD: how it ended is not known.
            pid, status = self._child.pid, None
        if pid == 0:
            return
        ended_ns = now_ns()
        while self._status_open:
            before = len(self._status)
            self._read_status()
            if len(self._status) == before:
                self._close_status()
        self.exit_code = None if status is None else os.waitstatus_to_exitcode(status)
        self.startup_ns = self._started_ns - self._called_ns
        self.run_ns = max(0, ended_ns - self._started_ns)
        self._loop.remove_reader(self._child.pidfd)
        os.close(self._child.pidfd)
        self._exited.set_result(None)
        if not self.ended.done():
            self.ended.set_result(None)

    def _arm(self) -> None:
        left_ns = self._started_ns + self._timeout_ns - now_ns()
        if left_ns <= 0:
            self.end(Outcome.TIMED_OUT)
        else:
            self._timer = self._loop.call_later(min(left_ns / 1e9, _TIMER_S_MAX), self._arm)
