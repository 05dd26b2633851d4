"""The host as the kernel shows it to this process: who it is, its cores, its memory."""

import os
import re
import socket
import uuid
from pathlib import Path
from typing import Final

from tangram import limits
from tangram.executors.cpu import kernel

_UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def _token(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text.strip())[: limits.NAME_LENGTH_MAX]


def host_identity() -> tuple[str, str]:
    """(machine id, boot id) as names. Where the system has none, they are made of the network address and of the time
    of the boot."""
    machine, boot = "", ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        machine = machine or _read(path)
    boot = _read("/proc/sys/kernel/random/boot_id")
    if not machine:
        machine = f"node-{uuid.getnode():012x}-{socket.gethostname()}"
    if not boot:
        boot = f"boot-{kernel.field(Path('/proc/stat'), 'btime')}"
    return _token(machine), _token(boot)


def _read(path: str) -> str:
    try:
        return kernel.read(Path(path))
    except OSError:
        return ""


def host_cores() -> list[list[int]]:
    """The ids of the cores that this process may use, by NUMA node; nodes without any are left out."""
    usable = os.sched_getaffinity(0)
    nodes: list[list[int]] = []
    places = Path("/sys/devices/system/node").glob("node[0-9]*")
    for place in sorted(places, key=lambda path: int(path.name[4:])):
        cores = sorted(kernel.parse_cores(_read(str(place / "cpulist"))) & usable)
        if cores:
            nodes.append(cores)
    known = {core for cores in nodes for core in cores}
    if rest := sorted(usable - known):
        nodes.append(rest)
    return nodes


def host_memory_mib() -> int:
    """What this process and its children may use at most: the machine's memory or the control group's limit."""
    lines = _read("/proc/meminfo").splitlines()
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    for own, name in _memory_groups():
        for group in (own, *own.parents):
            text = _read(str(group / name))
            if text.isdecimal() and int(text) < _UNLIMITED_BYTES:
                sizes.append(int(text))
    return min(sizes, default=0) >> 20


def _memory_groups() -> list[tuple[Path, str]]:
    """This process's memory groups and the names of their limit files."""
    mounts = [line.split(" ") for line in _read("/proc/self/mounts").splitlines()]
    found: list[tuple[Path, str]] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for _, place, kind, options, *_ in mounts:
            if kind == "cgroup2" and controllers == "":
                found.append((Path(place) / path.lstrip("/"), "memory.max"))
            elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                found.append((Path(place) / path.lstrip("/"), "memory.limit_in_bytes"))
    return found
