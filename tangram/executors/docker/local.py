"""Control of a container on this host, through its control groups. v1, hybrid and v2.

Cores and cpu time are set on the container's own groups, so that a server left by one action has the grant of the
next. On v1 an action has groups of its own below them that hold, count and limit it; on v2 only one that holds it
(without controllers, so that the container's own group may keep processes), and memory is counted for the container.
"""

import asyncio
import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tangram.executors.backend import Grant
from tangram.executors.cpu import groups, kernel
from tangram.executors.cpu.cgroups import IDLE_QUOTA_US
from tangram.executors.cpu.hierarchies import remove_tree
from tangram.executors.docker.control import Use
from tangram.executors.docker.pidfd import wait_exit_code

EXITING: Final = 0x4
"""PF_EXITING, in the flags of /proc/<pid>/stat."""


def find_groups(container_id: str, pid: int) -> dict[str, Path] | None:
    """A container's control groups by role ("hold", "cpu", "cpuset", "memory"; on v2 all the same), if they are here and
    can be written."""
    if pid <= 0:
        return None
    mounts: dict[str, Path] = {}
    for line in kernel.read(Path("/proc/self/mounts")).splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            mounts.setdefault("", Path(place))
        elif kind == "cgroup":
            for option in options.split(","):
                mounts.setdefault(option, Path(place))
    found: dict[str, Path] = {}
    try:
        for line in kernel.read(Path(f"/proc/{pid}/cgroup")).splitlines():
            _, controllers, path = line.split(":", 2)
            for role in controllers.split(","):
                if role in mounts and container_id in path:
                    found[role] = mounts[role] / path.lstrip("/")
        v2 = "cpu" not in mounts
        roles = (
            dict.fromkeys(("hold", "cpu", "cpuset", "memory"), found[""])
            if v2
            else {
                "hold": found[""] if "" in found and (found[""] / "cgroup.kill").exists() else found["freezer"],
                **{role: found[role] for role in ("cpu", "cpuset", "memory")},
            }
        )
    except (OSError, KeyError):
        return None
    # Under systemd a v2 container may lack a controller that nobody asked for.
    needed = [group / "cgroup.procs" for group in roles.values()]
    needed += [roles["cpuset"] / "cpuset.cpus", roles["cpu"] / ("cpu.max" if v2 else "cpu.cfs_quota_us")]
    return roles if all(os.access(path, os.W_OK) for path in needed) else None


class LocalFence:
    def __init__(self, control: "LocalControl", leaves: Mapping[str, Path], pidfd: int) -> None:
        self._control, self._leaves, self._pidfd = control, leaves, pidfd
        self._holder = groups.Holder(leaves["hold"], has_kill=control.has_kill)
        self._kills = control.oom_kills(leaves)
        self._loop = asyncio.get_running_loop()

    def on_exit(self, done: Callable[[], None]) -> bool:
        def ready() -> None:
            self._loop.remove_reader(self._pidfd)
            done()

        self._loop.add_reader(self._pidfd, ready)
        return True

    async def exit_status(self) -> int | None:
        return await wait_exit_code(self._pidfd)

    async def use(self, *, failed: bool) -> Use:
        v2 = self._control.v2
        cpu_ns = kernel.field(self._leaves["hold"] / "cpu.stat", "usage_usec") * 1000
        memory = self._leaves.get("memory")
        peak = kernel.number(memory / ("memory.peak" if v2 else "memory.max_usage_in_bytes")) if memory else 0
        return Use(cpu_ns=cpu_ns, memory_peak_bytes=peak, oom_kills=self._control.oom_kills(self._leaves) - self._kills)

    async def empty(self) -> bool:
        return self._holder.empty()

    async def clear(self, budget_s: float) -> bool:
        self._control.lift()
        return await self._holder.clear(budget_s)

    async def park(self, budget_s: float) -> bool:
        end = time.monotonic() + budget_s
        roles = [role for role in reversed(list(self._leaves)) if role != "memory" or not self._control.v2]
        targets = [self._control.groups[role] for role in roles]
        # What forks meanwhile is found in the next round: the holding group is left last.
        while pids := groups.members(self._leaves["hold"]):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    for target in targets:
                        kernel.write(target / "cgroup.procs", str(pid))
            if time.monotonic() > end:
                return False
        return True

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._control.discard([group for group in self._leaves.values() if group not in self._control.groups.values()])


class LocalControl:
    gate = 'echo "$$ 0"'

    def __init__(self, found: Mapping[str, Path], pid: int) -> None:
        """`found`: of find_groups. pid: of the container's main process."""
        self.groups = found
        self.v2 = (found["hold"] / "cpu.max").exists()
        self.has_kill = (found["hold"] / "cgroup.kill").exists()
        self._pidfd = os.pidfd_open(pid)
        self._stat = Path(f"/proc/{pid}/stat")
        self._stale: list[Path] = []

    async def grant(self, grant: Grant) -> None:
        # Cpu time is limited when the program begins, not before: entering the container must not take longer for it.
        self.lift()
        cores = grant.cores or tuple(kernel.parse_cores(kernel.read(self._parent_cores())))
        groups.write_cores(self.groups["cpuset"], cores, v2=self.v2)

    def _parent_cores(self) -> Path:
        return self.groups["cpuset"].parent / ("cpuset.cpus.effective" if self.v2 else "cpuset.cpus")

    async def enter(self, name: str, mark: str, exec_id: str, said: str, grant: Grant) -> LocalFence:
        pid = self._host_pid(said.partition(" ")[0])
        # It waits for us, so its number cannot pass to another process.
        pidfd = os.pidfd_open(pid)
        leaves: dict[str, Path] = {}
        try:
            for role in ("hold",) if self.v2 else ("hold", "memory"):
                leaves[role] = self.groups[role] / f"act-{name}"
                leaves[role].mkdir(exist_ok=True)
            if grant.memory_mib and not self.v2:
                groups.write_memory(leaves["memory"], grant.memory_mib, v2=False)
            for group in leaves.values():
                kernel.write(group / "cgroup.procs", str(pid))
            fence = LocalFence(self, {**leaves, **({"memory": self.groups["memory"]} if self.v2 else {})}, pidfd)
            exact = grant.cores and grant.millicores >= 1000 * len(grant.cores)
            if grant.millicores and not exact:
                groups.write_quota(self.groups["cpu"], v2=self.v2, limit=groups.quota(grant.millicores))
        except BaseException:
            os.close(pidfd)
            self.discard(list(leaves.values()))
            raise
        return fence

    def _host_pid(self, inside: str) -> int:
        """Of the shell that has this process id in the container and is in no action's group yet. Raises OSError."""
        # The latest one mostly has the highest number.
        for pid in sorted(groups.members(self.groups["hold"]), reverse=True):
            with contextlib.suppress(OSError):
                status = kernel.read(Path(f"/proc/{pid}/status"))
                if status.partition("\nNSpid:")[2].partition("\n")[0].split()[-1:] == [inside]:
                    return pid
        raise ProcessLookupError(errno.ESRCH, f"the action's shell, {inside} in its container, is not in its control group")

    def oom_kills(self, leaves: Mapping[str, Path]) -> int:
        return kernel.field(leaves["memory"] / ("memory.events" if self.v2 else "memory.oom_control"), "oom_kill")

    def lift(self) -> None:
        groups.lift_quota(self.groups["cpu"])

    async def rest(self) -> None:
        with contextlib.suppress(OSError):
            groups.write_quota(self.groups["cpu"], v2=self.v2, limit=IDLE_QUOTA_US)

    async def alive(self, *, sure: bool = False) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(0):
            return False
        try:
            return not int(kernel.read(self._stat).rpartition(") ")[2].split()[6]) & EXITING
        except OSError:
            return False

    async def clear(self, budget_s: float) -> bool:
        self.lift()
        return await groups.Holder(self.groups["hold"], has_kill=self.has_kill).clear(budget_s)

    def discard(self, leaving: list[Path]) -> None:
        """Removes empty groups. A dead process may hold its group for a moment longer than it is counted as a member;
        what cannot be removed now is removed with those that come later, at last with the container's own."""
        self._stale = [group for group in (*self._stale, *leaving) if not remove_tree(group)]

    def close(self) -> None:
        if self._pidfd >= 0:
            self.discard([])
            os.close(self._pidfd)
            self._pidfd = -1
