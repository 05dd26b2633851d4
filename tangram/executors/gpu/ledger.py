"""The memory of a device that is played on the CPU: who has taken how much, across processes."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path


class DeviceFull(MemoryError):
    """The device has no room. Attributes: wanted, free (bytes)."""

    def __init__(self, wanted: int, free: int) -> None:
        self.wanted, self.free = wanted, free
        super().__init__(f"{wanted:,} bytes are wanted, {free:,} are free")


class Ledger:
    """One process's account at a device. A folder is the device; an account is a file that is locked while its process lives, so
    that what a dead one had is free again, as a driver would have it."""

    def __init__(self, folder: Path, capacity_bytes: int, name: str) -> None:
        """name: of the account, unique. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes
        self._folder, self._path = folder, folder / f"{name}.account"
        self._thread = threading.Lock()
        with self._alone():
            self._own = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(0)
        self.taken_bytes = 0

    def reserve(self, size: int) -> None:
        """Raises DeviceFull, and has taken nothing then."""
        with self._alone():
            free = self.capacity_bytes - self._taken()
            if size > free:
                raise DeviceFull(size, free)
            self._write(self.taken_bytes + size)
            self.taken_bytes += size

    def release(self, size: int) -> None:
        with self._alone():
            assert size <= self.taken_bytes, "more was given back than taken"
            self._write(self.taken_bytes - size)
            self.taken_bytes -= size

    def free_bytes(self) -> int:
        with self._alone():
            return self.capacity_bytes - self._taken()

    def close(self) -> None:
        """All that this account has is free. Idempotent."""
        if self._own >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._own)
            self._own = -1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._thread:
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)

    def _taken(self) -> int:
        return self.taken_bytes + sum(map(_of, (path for path in self._folder.glob("*.account") if path != self._path)))

    def _write(self, taken: int) -> None:
        os.pwrite(self._own, f"{taken:20}".encode(), 0)


def _of(path: Path) -> int:
    """What an account has taken; nothing, if its process is dead."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.pread(fd, 32, 0) or 0)
    else:
        path.unlink(missing_ok=True)
        return 0
    finally:
        os.close(fd)
