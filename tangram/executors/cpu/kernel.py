"""The small files of /sys/fs/cgroup and /proc, read and written so that no error is lost."""

import os
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Writes a control file in one system call. Raises OSError with the file's name."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        # The kernel's answer to a value comes from write(), which knows no file name.
        raise OSError(error.errno, f"{error.strerror} (writing {text!r})", str(path)) from None
    finally:
        os.close(fd)


def read(path: Path) -> str:
    """The whole content of a control file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65_536):
            parts.append(part)
        return b"".join(parts).decode(errors="replace").strip()
    finally:
        os.close(fd)


def field(path: Path, name: str) -> int:
    """The number after `name` in a file of "name number" lines; 0 if there is no such file or line."""
    try:
        text = read(path)
    except OSError:
        return 0
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def number(path: Path) -> int:
    """A file's only number; 0 if it has none or does not exist."""
    try:
        return int(read(path))
    except (OSError, ValueError):
        return 0


def parse_cores(text: str) -> frozenset[int]:
    """Core ids of the kernel's list format ("0-3,8"). Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def format_cores(cores: Iterable[int]) -> str:
    return ",".join(str(core) for core in sorted(cores))
