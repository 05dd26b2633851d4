"""Single control groups: their limits, their members, their end. v1 and v2."""

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tangram.executors.cpu import kernel
from tangram.executors.cpu.fence import POLL_S
from tangram.executors.cpu.hierarchies import open_cpuset, remove_tree

PERIOD_US: Final = 100_000
PERIOD_US_MAX: Final = 1_000_000
QUOTA_US_MIN: Final = 1_000
"""The kernel refuses less; smaller shares get a longer period."""
_FREEZE_TRIES: Final = 100
_REMOVE_S: Final = 1.0


def quota(millicores: int) -> tuple[int, int]:
    """(quota, period) in microseconds for a fraction of a core."""
    share = PERIOD_US * millicores // 1000
    if share >= QUOTA_US_MIN:
        return share, PERIOD_US
    return QUOTA_US_MIN, min(PERIOD_US_MAX, QUOTA_US_MIN * 1000 // max(1, millicores))


def write_quota(group: Path, *, v2: bool, limit: tuple[int, int] | None) -> None:
    """Sets (quota, period) in microseconds, or no limit. Raises OSError."""
    if v2:
        kernel.write(group / "cpu.max", "max" if limit is None else f"{limit[0]} {limit[1]}")
        return
    kernel.write(group / "cpu.cfs_quota_us", "-1")
    if limit is not None:
        # Two writes: in between, the new period must not meet an old quota that is too large for it.
        kernel.write(group / "cpu.cfs_period_us", str(limit[1]))
        kernel.write(group / "cpu.cfs_quota_us", str(limit[0]))


def lift_quota(group: Path) -> None:
    """Removes a limit on cpu time, if there is one: a killed process needs cpu time to end, and waits for the next period
    if its group has used up its share."""
    for name, value in (("cpu.max", "max"), ("cpu.cfs_quota_us", "-1")):
        with contextlib.suppress(OSError):
            kernel.write(group / name, value)


def write_cores(group: Path, cores: Sequence[int], *, v2: bool) -> None:
    """Pins a group and reads back what the kernel made of it. Raises OSError."""
    wanted = kernel.format_cores(cores)
    try:
        kernel.write(group / "cpuset.cpus", wanted)
    except OSError as error:
        if v2 or error.errno != errno.EACCES:
            raise
        # Cores that came after our parents were made: v1 hands them down only when told.
        open_cpuset(group.parent.parent)
        open_cpuset(group.parent)
        kernel.write(group / "cpuset.cpus", wanted)
    got = kernel.read(group / ("cpuset.cpus.effective" if v2 else "cpuset.cpus"))
    if kernel.parse_cores(got) != frozenset(cores):
        raise OSError(errno.EINVAL, f"cores {wanted} were granted but the kernel gives {got}", str(group))


def write_memory(group: Path, memory_mib: int, *, v2: bool) -> None:
    """Limits memory, without swap. Raises OSError."""
    size = str(memory_mib << 20)
    kernel.write(group / ("memory.max" if v2 else "memory.limit_in_bytes"), size)
    with contextlib.suppress(FileNotFoundError):
        # Absent where the kernel does not account swap.
        kernel.write(group / ("memory.swap.max" if v2 else "memory.memsw.limit_in_bytes"), "0" if v2 else size)


def write_processes(group: Path, processes_max: int) -> None:
    """Limits how many processes and threads a group has, with those below it. Raises OSError."""
    kernel.write(group / "pids.max", str(processes_max))


def members(group: Path) -> list[int]:
    """The processes of this group itself; none if it is gone."""
    try:
        return [int(pid) for pid in kernel.read(group / "cgroup.procs").split()]
    except OSError:
        return []


def tree(group: Path) -> list[Path]:
    """The group and all below it."""
    found = [group]
    with contextlib.suppress(OSError):
        for entry in os.scandir(group):
            if entry.is_dir(follow_symlinks=False):
                found += tree(Path(entry.path))
    return found


class Holder:
    """A holding group with those below it: whether it is empty, and killing all that is in it."""

    def __init__(self, group: Path, *, has_kill: bool) -> None:
        self._group = group
        self._has_kill = has_kill

    def empty(self) -> bool:
        if self._has_kill:
            return kernel.field(self._group / "cgroup.events", "populated") == 0
        return not any(members(group) for group in tree(self._group))

    def signal(self) -> None:
        """Kills all members once."""
        if self._has_kill:
            with contextlib.suppress(FileNotFoundError):
                kernel.write(self._group / "cgroup.kill", "1")
            return
        # Frozen first, because what forks is faster than a list of its processes; v1 may need several tries for it.
        for group in tree(self._group):
            with contextlib.suppress(OSError):
                state = group / "freezer.state"
                for _ in range(_FREEZE_TRIES):
                    kernel.write(state, "FROZEN")
                    if kernel.read(state) == "FROZEN":
                        break
                for pid in members(group):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                kernel.write(state, "THAWED")

    async def clear(self, budget_s: float) -> bool:
        """Kills until nothing is left; false if something is after `budget_s`."""
        end = time.monotonic() + budget_s
        step = 0
        while not self.empty():
            self.signal()
            if self.empty():
                break
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(POLL_S[min(step, len(POLL_S) - 1)])
            step += 1
        return True


def clear_now(roots: Sequence[Path], budget_s: float) -> bool:
    """Kills what is in groups of any hierarchies and below them, until nothing is left. Blocking; false if something is
    after `budget_s`."""
    end = time.monotonic() + budget_s
    for step in range(1_000_000):
        left = {pid for root in roots for place in tree(root) for pid in members(place)}
        if not left:
            return True
        if step == 0:
            for root in roots:
                for place in tree(root):
                    lift_quota(place)
        for root in roots:
            if (root / "cgroup.kill").exists():
                kernel.write(root / "cgroup.kill", "1")
            elif (root / "freezer.state").exists():
                Holder(root, has_kill=False).signal()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(POLL_S[min(step, len(POLL_S) - 1)])
    return False


def remove_all(groups: Iterable[Path]) -> bool:
    """Removes empty groups; false if one is still there after a second. Blocking. A dead process may hold its group for
    a moment longer than it is counted as a member."""
    end = time.monotonic() + _REMOVE_S
    for group in dict.fromkeys(groups):
        pause = 0.0002
        while not remove_tree(group):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
    return True
