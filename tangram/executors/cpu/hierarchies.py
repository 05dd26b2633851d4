"""Which control group hierarchies this host lets us write, and how they are made ready.

On v1 (or hybrid) each controller has a hierarchy of its own; the processes are held by the unified one, which has
`cgroup.kill`, else by the freezer. On v2 there is one hierarchy, in which groups with processes have no children.
All executors of a host share the folder `tangram` in each, which stays; below it each incarnation has its own.
"""

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from tangram.executors.cpu import kernel

TOP: Final = "tangram"
V1_ROLES: Final[tuple[str, ...]] = ("cpu", "cpuset", "memory", "pids")
V2_CONTROLLERS: Final[tuple[str, ...]] = ("cpu", "cpuset", "memory", "pids")


class Hierarchies(Struct, frozen=True, kw_only=True):
    """The folder in which our groups are made, by role: "hold" (which processes belong together), "cpu", "cpuset",
    "memory", "pids", "cpuacct". On v2 all roles that are there share one folder."""

    v2: bool
    top: Mapping[str, Path]

    @property
    def has_kill(self) -> bool:
        """Whether the holding groups have cgroup.kill (false: they are of the v1 freezer)."""
        return self.v2 or "unified" in self.top


def detect(*, unified: bool = True) -> Hierarchies | None:
    """What can be used here, made ready; None if nothing. `unified` False leaves out a hybrid host's unified part."""
    pure: list[Path] = []
    v1: dict[str, Path] = {}
    for line in kernel.read(Path("/proc/self/mounts")).splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            pure.append(Path(place))
        elif kind == "cgroup":
            v1.update(dict.fromkeys(options.split(","), Path(place)))
    if pure and not any(role in v1 for role in V1_ROLES):
        return _detect_v2(pure[0])
    return _detect_v1(v1, pure[0] if pure and unified else None)


def _detect_v2(mount: Path) -> Hierarchies | None:
    """At the root of what we see if we may, else below the executor's own group (delegated by systemd)."""
    own = _own_group(mount)
    for place in dict.fromkeys((mount, own)):
        with contextlib.suppress(OSError):
            controllers = _delegate(place)
            top = _make(place / TOP)
            os.stat(top / "cgroup.kill")
            _enable(top, controllers)
            ready = kernel.read(top / "cgroup.subtree_control").split()
            return Hierarchies(v2=True, top={"hold": top, **dict.fromkeys(ready, top)})
    return None


def _own_group(mount: Path) -> Path:
    for line in kernel.read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            return mount / line[3:].lstrip("/")
    return mount


def _delegate(place: Path) -> list[str]:
    """Hands the controllers of `place` to its children; returns those that are theirs now.

    A group that is not the root may not hold processes then: the executor moves into a leaf of its own if it is the
    only one there. Raises OSError.
    """
    wanted: list[str] = [name for name in V2_CONTROLLERS if name in kernel.read(place / "cgroup.controllers").split()]
    try:
        _enable(place, wanted)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        if kernel.read(place / "cgroup.procs").split() == [str(os.getpid())]:
            leaf = _make(place / f"{TOP}-executor")
            kernel.write(leaf / "cgroup.procs", "0")
            _enable(place, wanted)
    ready = kernel.read(place / "cgroup.subtree_control").split()
    return [name for name in wanted if name in ready]


def _enable(place: Path, controllers: list[str]) -> None:
    if controllers:
        kernel.write(place / "cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))


def _detect_v1(v1: Mapping[str, Path], unified: Path | None) -> Hierarchies | None:
    top: dict[str, Path] = {}
    for role in (*V1_ROLES, "cpuacct", "freezer"):
        if role in v1:
            with contextlib.suppress(OSError):
                top[role] = _make(v1[role] / TOP)
    if unified is not None:
        with contextlib.suppress(OSError):
            place = _make(unified / TOP)
            os.stat(place / "cgroup.kill")
            top["unified"] = place
    hold = top.get("unified") or top.get("freezer")
    if hold is None:
        return None
    if "unified" in top:
        # cpu.stat of the unified hierarchy counts cpu time whichever controllers it has.
        top.pop("cpuacct", None)
        top.pop("freezer", None)
    if "cpuset" in top:
        open_cpuset(top["cpuset"])
    return Hierarchies(v2=False, top={**top, "hold": hold})


def open_cpuset(group: Path) -> None:
    """A new v1 cpuset is empty and takes no process: it gets all that its parent has. Raises OSError."""
    for name in ("cpuset.mems", "cpuset.cpus"):
        wanted = kernel.read(group.parent / name)
        if kernel.read(group / name) != wanted:
            kernel.write(group / name, wanted)


def _make(group: Path) -> Path:
    group.mkdir(exist_ok=True)
    if not os.access(group / "cgroup.procs", os.W_OK):
        raise PermissionError(errno.EACCES, "not writable", str(group))
    return group


def make_all(hierarchies: Hierarchies, name: str) -> dict[str, Path]:
    """Makes the group `name` in each hierarchy; returns it by role. Raises OSError."""
    bases: dict[str, Path] = {}
    for role, top in hierarchies.top.items():
        base = top / name
        base.mkdir(exist_ok=True)
        if role == "cpuset" and not hierarchies.v2:
            open_cpuset(base)
        bases[role] = base
    if hierarchies.v2:
        _enable(bases["hold"], [role for role in V2_CONTROLLERS if role in bases])
    return bases


def remove_tree(group: Path) -> bool:
    """Removes a group and those below it, as far as they are empty; whether nothing is left."""
    try:
        below = [entry.path for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return True
    gone = [remove_tree(Path(path)) for path in below]
    try:
        os.rmdir(group)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return all(gone)
