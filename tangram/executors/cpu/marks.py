"""Fences without control groups: processes are found by marks in their environment and by their process session.

A program that clears its environment, leaves its session and outlives its parent escapes; cores are kept by affinity,
which a program can change; there is no limit on cpu time or memory.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tangram.executors.backend import Grant
from tangram.executors.cpu import environment
from tangram.executors.cpu.fence import POLL_S, Usage
from tangram.executors.cpu.procs import Foreign, Process, Snapshot, kill, process, scan

_LEDGER_BYTES_MAX: Final = 65_536
"""The ledger is written anew, with the live leaders only, when it has grown to this."""


class Scanner:
    """Looks at all processes for many at once: whoever asks during a look shares the next one."""

    def __init__(self) -> None:
        self._foreign: Foreign = set()
        self._looking: asyncio.Task[Snapshot] | None = None
        self._next: asyncio.Task[Snapshot] | None = None

    async def look(self) -> Snapshot:
        """The processes at a moment after the call."""
        if self._next is None:
            self._next = asyncio.create_task(self._look_after(self._looking))
        return await asyncio.shield(self._next)

    async def _look_after(self, before: "asyncio.Task[Snapshot] | None") -> Snapshot:
        if before is not None:
            await asyncio.wait([before])
        self._looking, self._next = self._next, None
        return await asyncio.to_thread(scan, self._foreign)


class _Marked:
    """Processes with the given marks or in the process sessions of `leaders`."""

    def __init__(self, scanner: Scanner, marks: Sequence[str]) -> None:
        self._scanner = scanner
        self._marks = [mark.encode() for mark in marks]
        self.leaders: dict[int, int] = {}

    async def _find(self) -> list[Process]:
        return (await self._scanner.look()).find(self._marks, self.leaders)

    async def empty(self) -> bool:
        return not await self._find()

    async def clear(self, budget_s: float) -> bool:
        end = time.monotonic() + budget_s
        step = 0
        while found := await self._find():
            if time.monotonic() > end:
                return False
            kill(found)
            await asyncio.sleep(POLL_S[min(step, len(POLL_S) - 1)])
            step += 1
        return True


class MarkFence(_Marked):
    entries: Sequence[Path] = ()

    def __init__(self, grounds: "MarkGrounds", enclosure: "MarkEnclosure", marks: Sequence[str]) -> None:
        super().__init__(grounds.scanner, marks)
        self._grounds = grounds
        self._enclosure = enclosure
        self.affinity: Sequence[int] = enclosure.cores

    def started(self, pid: int) -> None:
        if (leader := process(pid)) is not None:
            self.leaders[pid] = leader.started
            self._grounds.record(pid, leader.started)

    def signal(self) -> None:
        for pid in self.leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    async def park(self, budget_s: float) -> bool:
        self._enclosure.leaders |= self.leaders
        self.leaders = {}
        return True

    def usage(self) -> Usage:
        return Usage()

    def remove(self) -> None:
        self._grounds.forget(self.leaders)


class MarkEnclosure(_Marked):
    def __init__(self, grounds: "MarkGrounds", marks: Sequence[str]) -> None:
        super().__init__(grounds.scanner, marks)
        self._grounds = grounds
        self.cores: Sequence[int] = ()

    def grant(self, grant: Grant) -> None:
        self.cores = grant.cores

    def rest(self) -> None:
        """Nothing here can take the cpu away from a process that is to live on."""

    def fence(self, name: str, marks: Sequence[str], memory_mib: int) -> MarkFence:
        return MarkFence(self._grounds, self, [*self._grounds.marks, *marks])

    def remove(self) -> None:
        self._grounds.forget(self.leaders)


class MarkGrounds(_Marked):
    """Everything of one incarnation. The ledger is a file of "pid start-time" lines, for a successor to clean up by."""

    paths: Sequence[Path] = ()
    enforces: frozenset[str] = frozenset()

    def __init__(self, incarnation: str, ledger: Path) -> None:
        self.scanner = Scanner()
        self.marks = (f"{environment.INCARNATION}={incarnation}",)
        super().__init__(self.scanner, self.marks)
        self._ledger = ledger
        self._written = 0
        self._fd = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def session(self, name: str, marks: Sequence[str], memory_mib: int) -> MarkEnclosure:
        return MarkEnclosure(self, [*self.marks, *marks])

    def single(self, name: str, marks: Sequence[str]) -> MarkEnclosure:
        return MarkEnclosure(self, [*self.marks, *marks])

    def record(self, pid: int, started: int) -> None:
        self.leaders[pid] = started
        self._written += os.write(self._fd, f"{pid} {started}\n".encode())
        if self._written > _LEDGER_BYTES_MAX:
            self._rewrite()

    def _rewrite(self) -> None:
        new = self._ledger.with_suffix(".new")
        new.write_text("".join(f"{pid} {started}\n" for pid, started in self.leaders.items()))
        new.rename(self._ledger)
        os.close(self._fd)
        self._fd = os.open(self._ledger, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._written = 0

    def forget(self, leaders: Iterable[int]) -> None:
        for pid in leaders:
            self.leaders.pop(pid, None)

    def remove(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._ledger.unlink(missing_ok=True)
