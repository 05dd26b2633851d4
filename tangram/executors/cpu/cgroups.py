"""Fences made of control groups: exact cores, exact cpu time, and a kill that nothing escapes.

Groups are tangram/<incarnation>/<session>/<action>, or tangram/<incarnation>/<action> for an action without a session.
On v1 cores, cpu time and the number of processes are set on the session's groups, memory and the holding group are the
action's own; on v2 an action is one leaf below the session. What a session's actions left running is in its leaf `idle`.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tangram import limits
from tangram.executors.backend import Grant
from tangram.executors.cpu import groups, kernel
from tangram.executors.cpu.fence import POLL_S, Usage
from tangram.executors.cpu.hierarchies import Hierarchies, make_all, open_cpuset, remove_tree

IDLE: Final = "idle"
IDLE_QUOTA_US: Final = (groups.QUOTA_US_MIN, groups.PERIOD_US_MAX)
"""What runs on between actions gets 1 ms of cpu per second: the least the kernel grants."""


REAP_S: Final = 0.5
_CORES: Final = {False: "cpuset.cpus", True: "cpuset.cpus.effective"}
"""The file that says which cores a group really has, by whether it is v2."""


class GroupFence:
    """One action's groups, by role."""

    affinity: Sequence[int] = ()

    def __init__(self, enclosure: "GroupEnclosure", leaves: Mapping[str, Path], entries: Sequence[Path]) -> None:
        self._enclosure = enclosure
        self._leaves = leaves
        self._holder = groups.Holder(leaves["hold"], has_kill=enclosure.hierarchies.has_kill)
        self.entries = entries

    def started(self, pid: int) -> None:
        """The groups hold it already."""

    def signal(self) -> None:
        self._holder.signal()

    async def empty(self) -> bool:
        return self._holder.empty()

    async def clear(self, budget_s: float) -> bool:
        if not await self._holder.clear(budget_s):
            return False
        # The dead count until init has read how they ended, and the session's next program needs places.
        end = time.monotonic() + REAP_S
        while self._enclosure.crowded() and time.monotonic() < end:  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(POLL_S[-1])
        return True

    async def park(self, budget_s: float) -> bool:
        targets = self._enclosure.idle_groups()
        end = time.monotonic() + budget_s
        # What forks meanwhile is found in the next round: the holding group is left last.
        while pids := groups.members(self._leaves["hold"]):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    for target in targets:
                        kernel.write(target / "cgroup.procs", str(pid))
            if time.monotonic() > end:
                return False
        return True

    def usage(self) -> Usage:
        v2 = self._enclosure.hierarchies.v2
        if cpuacct := self._leaves.get("cpuacct"):
            cpu_ns = kernel.number(cpuacct / "cpuacct.usage")
        else:
            cpu_ns = kernel.field(self._leaves["hold"] / "cpu.stat", "usage_usec") * 1000
        peak, kills = 0, 0
        if memory := self._leaves.get("memory"):
            peak = kernel.number(memory / ("memory.peak" if v2 else "memory.max_usage_in_bytes"))
            kills = kernel.field(memory / ("memory.events" if v2 else "memory.oom_control"), "oom_kill")
        return Usage(cpu_ns=cpu_ns or None, memory_peak_bytes=peak or None, oom_kills=kills)

    def remove(self) -> None:
        self._enclosure.grounds.discard(self._leaves.values())


class GroupEnclosure:
    """The groups of a session, or of one action without one (`single`)."""

    def __init__(self, grounds: "GroupGrounds", name: str, *, single: bool, memory_mib: int = 0) -> None:
        self.grounds = grounds
        self.hierarchies = grounds.hierarchies
        self._bases = grounds.bases
        self._name = name
        self._single = single
        self._groups: dict[str, Path] = {}
        self._cores: tuple[int, ...] = ()
        self._quota: tuple[int, int] | None = None
        self._affinity: Sequence[int] = ()
        self._rests = False
        for role in self._bases:
            # A single action mostly needs no quota; its cpuset is made when cores are granted.
            if self.hierarchies.v2 or not single or role not in ("cpu", "cpuset"):
                self._make(role)
        self._holder = groups.Holder(self._groups["hold"], has_kill=self.hierarchies.has_kill)
        if self.hierarchies.v2 and not single:
            inner = [role for role in ("memory", "pids") if role in self._bases]
            if inner:
                kernel.write(self._groups["hold"] / "cgroup.subtree_control", " ".join(f"+{role}" for role in inner))
        if memory_mib and "memory" in self._groups:
            groups.write_memory(self._groups["memory"], memory_mib, v2=self.hierarchies.v2)
        if "pids" in self._groups:
            groups.write_processes(self._groups["pids"], grounds.processes_max)

    def crowded(self) -> bool:
        """Whether a session has used up most of its processes."""
        if self._single or "pids" not in self._groups:
            return False
        return kernel.number(self._groups["pids"] / "pids.current") > self.grounds.processes_max // 2

    def _make(self, role: str) -> Path:
        if role not in self._groups:
            group = self._bases[role] / self._name
            group.mkdir(exist_ok=True)
            if role == "cpuset" and not self.hierarchies.v2:
                open_cpuset(group)
            self._groups[role] = group
        return self._groups[role]

    def grant(self, grant: Grant) -> None:
        v2 = self.hierarchies.v2
        pinned = "cpuset" in self._bases
        self._affinity = () if pinned else grant.cores
        if pinned and grant.cores != self._cores:
            cores = grant.cores or tuple(kernel.parse_cores(kernel.read(self._bases["cpuset"] / _CORES[v2])))
            groups.write_cores(self._make("cpuset"), cores, v2=v2)
            self._cores = grant.cores
        exact = pinned and grant.cores and grant.millicores >= 1000 * len(grant.cores)
        limit = groups.quota(grant.millicores) if grant.millicores and not exact else None
        if limit != self._quota and "cpu" in self._bases:
            groups.write_quota(self._make("cpu"), v2=v2, limit=limit)
            self._quota = limit
        if self._rests:
            self._freeze("0")
            self._rests = False

    def rest(self) -> None:
        if groups.Holder(self._groups["hold"], has_kill=self.hierarchies.has_kill).empty():
            return
        if "cpu" in self._bases:
            groups.write_quota(self._make("cpu"), v2=self.hierarchies.v2, limit=IDLE_QUOTA_US)
            self._quota = IDLE_QUOTA_US
        else:
            self._freeze("1")
            self._rests = True

    def _freeze(self, state: str) -> None:
        """Stands in for a quota where the cpu controller is not ours."""
        if self.hierarchies.has_kill:
            kernel.write(self._groups["hold"] / IDLE / "cgroup.freeze", state)

    def _leaf(self, role: str, name: str) -> Path:
        group = self._groups[role] / name
        group.mkdir(exist_ok=True)
        return group

    def fence(self, name: str, marks: Sequence[str], memory_mib: int) -> GroupFence:
        leaves: dict[str, Path] = {}
        for role in ("cpuacct", "memory", "hold"):
            if role in self._bases:
                leaves[role] = self._groups[role] if self._single else self._leaf(role, name)
        if memory_mib and "memory" in leaves:
            groups.write_memory(leaves["memory"], memory_mib, v2=self.hierarchies.v2)
        # Several roles may share a group.
        places = dict.fromkeys(leaves.values() if self.hierarchies.v2 else {**self._groups, **leaves}.values())
        entries = [place / "cgroup.procs" for place in places]
        fence = GroupFence(self, leaves, entries)
        fence.affinity = self._affinity
        return fence

    def idle_groups(self) -> list[Path]:
        """Where what an action leaves behind goes; the holding group is last."""
        hold = self._leaf("hold", IDLE)
        if self.hierarchies.v2:
            return [hold]
        return [*(self._groups[role] for role in ("cpuacct", "memory") if role in self._groups), hold]

    async def clear(self, budget_s: float) -> bool:
        if "cpu" in self._groups and self._quota is not None:
            groups.lift_quota(self._groups["cpu"])
            self._quota = None
        return await self._holder.clear(budget_s)

    def remove(self) -> None:
        self.grounds.discard(self._groups.values())


class GroupGrounds:
    """The groups of one incarnation. Raises OSError when they cannot be made."""

    def __init__(self, hierarchies: Hierarchies, incarnation: str, processes_max: int = limits.PROCESSES_MAX) -> None:
        self.hierarchies, self.processes_max = hierarchies, processes_max
        self.bases = make_all(hierarchies, incarnation)
        self.paths: Sequence[Path] = tuple(dict.fromkeys(self.bases.values()))
        names = {"cpuset": "cores", "cpu": "cpu", "memory": "memory", "pids": "processes", "hold": "kill"}
        self.enforces = frozenset(names[role] for role in self.bases if role in names)
        self._holder = groups.Holder(self.bases["hold"], has_kill=hierarchies.has_kill)
        self._stale: list[Path] = []

    def session(self, name: str, marks: Sequence[str], memory_mib: int) -> GroupEnclosure:
        return GroupEnclosure(self, name, single=False, memory_mib=memory_mib)

    def single(self, name: str, marks: Sequence[str]) -> GroupEnclosure:
        return GroupEnclosure(self, name, single=True)

    async def clear(self, budget_s: float) -> bool:
        return await self._holder.clear(budget_s)

    def discard(self, leaving: Iterable[Path]) -> None:
        """Removes empty groups. A dead process may hold its group for a moment longer than it is counted as a member;
        what cannot be removed now is removed with those that come later."""
        self._stale = [group for group in dict.fromkeys((*self._stale, *leaving)) if not remove_tree(group)]

    def remove(self) -> None:
        groups.remove_all(self.paths)
