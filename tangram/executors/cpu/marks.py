"""Fences without control groups: processes are found by marks in their environment, by their process session, and by
descent from either. A program that clears its environment, leaves its session and outlives its parent escapes; cores
are kept by affinity, which a program can change; there is no limit on cpu time or memory.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from tangram.executors.backend import Grant
from tangram.executors.cpu import environment
from tangram.executors.cpu.fence import POLL_S, Usage

_DEAD: Final = frozenset("ZX")
_LEDGER_BYTES_MAX: Final = 65_536
"""The ledger is written anew, with the live leaders only, when it has grown to this."""


class Process(Struct, frozen=True):
    """A line of /proc/<pid>/stat. `started` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int


def process(pid: int) -> Process | None:
    """None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The name in brackets can contain anything, brackets and spaces too.
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def has_marks(pid: int, marks: Iterable[bytes]) -> bool:
    """Whether the environment with which `pid` was started has all of these NAME=value."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            environ = file.read()
    except OSError:
        return False
    found = environ.split(b"\0")
    return all(mark in found for mark in marks)


def find(marks: Sequence[bytes], leaders: Mapping[int, int]) -> list[Process]:
    """The live processes with all the marks, those in the process sessions of `leaders` (pid to start time), and their
    descendants; never the caller. Blocking: it reads all of /proc."""
    everyone: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (seen := process(int(name))) is not None:
            everyone[seen.pid] = seen
    own = os.getpid()

    def is_led(one: Process) -> bool:
        # While a session has members, no new process gets its number: another leader means another session.
        started = leaders.get(one.session)
        if started is None:
            return False
        leader = everyone.get(one.session)
        return leader is None or leader.started == started

    found = {pid for pid, one in everyone.items() if pid != own and (is_led(one) or has_marks(pid, marks))}
    children: dict[int, list[int]] = {}
    for one in everyone.values():
        children.setdefault(one.parent, []).append(one.pid)
    queue = list(found)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found and pid != own:
                found.add(pid)
                queue.append(pid)
    return [everyone[pid] for pid in sorted(found) if everyone[pid].state not in _DEAD]


def kill(found: Iterable[Process]) -> None:
    """Kills these. All are stopped first, because what forks is faster than a list of its processes."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, sign)


def clear_now(marks: Sequence[bytes], leaders: Mapping[int, int], budget_s: float) -> bool:
    """Kills what `find` finds until it finds nothing; false if it still does after `budget_s`. Blocking."""
    end = time.monotonic() + budget_s
    for step in range(1_000_000):
        found = find(marks, leaders)
        if not found:
            return True
        kill(found)
        if time.monotonic() > end:
            break
        time.sleep(POLL_S[min(step, len(POLL_S) - 1)])
    return not find(marks, leaders)


class _Marked:
    """Processes with the given marks or in the process sessions of `leaders`."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = [mark.encode() for mark in marks]
        self.leaders: dict[int, int] = {}

    async def empty(self) -> bool:
        return not await asyncio.to_thread(find, self._marks, dict(self.leaders))

    async def clear(self, budget_s: float) -> bool:
        end = time.monotonic() + budget_s
        for step in range(1_000_000):
            found = await asyncio.to_thread(find, self._marks, dict(self.leaders))
            if not found:
                return True
            kill(found)
            if time.monotonic() > end:
                break
            await asyncio.sleep(POLL_S[min(step, len(POLL_S) - 1)])
        return await self.empty()


class MarkFence(_Marked):
    entries: Sequence[Path] = ()

    def __init__(self, grounds: "MarkGrounds", enclosure: "MarkEnclosure", marks: Sequence[str]) -> None:
        super().__init__(marks)
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
        super().__init__(marks)
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

    def __init__(self, incarnation: str, ledger: Path) -> None:
        self.marks = (f"{environment.INCARNATION}={incarnation}",)
        super().__init__(self.marks)
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


def read_ledger(path: Path) -> dict[int, int]:
    """The leaders recorded in a ledger; a torn last line is left out."""
    leaders: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            pid, _, started = line.partition(" ")
            if pid.isdecimal() and started.isdecimal():
                leaders[int(pid)] = int(started)
    return leaders
