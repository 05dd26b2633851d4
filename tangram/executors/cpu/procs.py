"""Processes as /proc shows them, found by marks in the environment they were started with, by their process session, and
by descent from either. For hosts whose control groups cannot be written, and for cleaning up after the dead."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from tangram.executors.cpu.fence import POLL_S

_DEAD: Final = frozenset("ZX")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_FOREIGN_AGE_S: Final = 10
"""A process of this age without our marks is not ours: only in its first moment is one of ours without them, between its
fork and its exec."""
_THREADS_OF_THE_KERNEL: Final = 2

_LISTINGS_MAX: Final = 16
"""Of one look: on a host where processes end all the time each listing would call for another."""
_NOTHING: Final = frozenset({b""})

Foreign = set[tuple[int, int]]
"""(pid, start time) of processes that need not be looked into again."""


class Process(Struct, frozen=True):
    """A line of /proc/<pid>/stat. `started` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    session: int
    started: int


def _read(path: str) -> bytes:
    """Empty if it is not there or not ours to read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 65_536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)


def process(pid: int) -> Process | None:
    """None if there is no such process."""
    # The name in brackets can contain anything, brackets and spaces too.
    fields = _read(f"/proc/{pid}/stat").rpartition(b") ")[2].split(None, 20)
    if len(fields) <= 19:
        return None
    return Process(pid, chr(fields[0][0]), int(fields[1]), int(fields[3]), int(fields[19]))


class Snapshot(Struct, frozen=True):
    """All processes at one moment; `environments` of those that may be ours."""

    everyone: dict[int, Process]
    environments: dict[int, frozenset[bytes]]

    def find(self, marks: Sequence[bytes], leaders: Mapping[int, int]) -> list[Process]:
        """The live processes with all the marks (NAME=value), those in the process sessions of `leaders` (pid to start
        time), and their descendants; never the caller."""
        own = os.getpid()
        wanted = frozenset(marks)
        found = {pid for pid, environment in self.environments.items() if wanted <= environment}
        found |= {pid for pid, one in self.everyone.items() if one.session in leaders and self._is_led(one, leaders)}
        found.discard(own)
        if not found:
            return []
        children: dict[int, list[int]] = {}
        for one in self.everyone.values():
            children.setdefault(one.parent, []).append(one.pid)
        queue = list(found)
        while queue:
            for pid in children.get(queue.pop(), ()):
                if pid not in found and pid != own:
                    found.add(pid)
                    queue.append(pid)
        return [self.everyone[pid] for pid in sorted(found) if self.everyone[pid].state not in _DEAD]

    def _is_led(self, one: Process, leaders: Mapping[int, int]) -> bool:
        # While a session has members, no new process gets its number: another leader means another session.
        leader = self.everyone.get(one.session)
        return leader is None or leader.started == leaders[one.session]


def scan(foreign: Foreign) -> Snapshot:
    """Reads /proc. `foreign` is brought up to date. Blocking, for some milliseconds with many processes."""
    everyone: dict[int, Process] = {}
    environments: dict[int, frozenset[bytes]] = {}
    young = (time.clock_gettime(time.CLOCK_BOOTTIME) - _FOREIGN_AGE_S) * _TICKS_PER_S
    known: Foreign = set()
    listed: set[str] = set()
    for _ in range(_LISTINGS_MAX):
        new = [name for name in os.listdir("/proc") if name.isdecimal() and name not in listed]
        listed.update(new)
        vanished = False
        for name in new:
            if (one := process(int(name))) is None:
                vanished = True
                continue
            everyone[one.pid] = one
            vanished |= one.state in _DEAD
            key = (one.pid, one.started)
            if key in foreign:
                known.add(key)
                continue
            environment = frozenset(_read(f"/proc/{name}/environ").split(b"\0"))
            if any(entry.startswith(b"TANGRAM_") for entry in environment):
                environments[one.pid] = environment
            elif one.started < young:
                known.add(key)
            elif environment == _NOTHING and process(int(name)) is None:
                vanished = True
        if not vanished:  # else it may have left a child that no listing has shown yet
            break
    # Replaced at once: another thread may be reading it.
    foreign.clear()
    foreign.update(known)
    return Snapshot(everyone, environments)


def kill(found: Iterable[Process]) -> None:
    """Kills these. All are stopped first, because what forks is faster than a list of its processes."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, sign)


def clear_now(marks: Sequence[bytes], leaders: Mapping[int, int], budget_s: float) -> bool:
    """Kills what `Snapshot.find` finds until it finds nothing; false if it still does after `budget_s`. Blocking."""
    foreign: Foreign = set()
    end = time.monotonic() + budget_s
    step = 0
    while found := scan(foreign).find(marks, leaders):
        if time.monotonic() > end:
            return False
        kill(found)
        time.sleep(POLL_S[min(step, len(POLL_S) - 1)])
        step += 1
    return True


def read_ledger(path: Path) -> dict[int, int]:
    """The leaders recorded in a ledger (see marks.py); a torn last line is left out."""
    leaders: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            pid, _, started = line.partition(" ")
            if pid.isdecimal() and started.isdecimal():
                leaders[int(pid)] = int(started)
    return leaders
