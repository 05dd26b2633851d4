"""Who is alive on this host, proven by locks that the kernel drops when a process dies.

State of a host is <state_root>/<host>/: `executors/<executor>.lock` lets one process at a time be an executor;
`incarnations/<incarnation>/` has a lock held as long as that start of it lives, and `info.json`, which says what it may
leave behind. Whoever gets a dead one's lock may clean up, and is alone in doing so.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tangram.executors.cpu import environment, folders, groups, procs
from tangram.executors.cpu.machine import host_cores, host_identity, host_memory_mib

__all__ = [
    "Claim",
    "DeadIncarnation",
    "ExecutorAlreadyRunning",
    "claim",
    "find_dead",
    "host_cores",
    "host_identity",
    "host_memory_mib",
]

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
_INCARNATION_LENGTH: Final = 12
_PENDING: Final = ".new-"
CLEAN_BUDGET_S: Final = 10.0


class ExecutorAlreadyRunning(Exception):
    """Another live process is this executor on this host."""


def _lock(path: Path, *, create: bool) -> int | None:
    """Takes the lock of a file for as long as the descriptor is open; None if another process has it. The descriptor is
    not inherited by programs that are started. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_info(folder: Path, info: dict[str, Any]) -> None:
    new = folder / "info.new"
    new.write_text(json.dumps(info, indent=1))
    new.rename(folder / "info.json")


class Claim:
    """This process is `executor` on this host, in a new `incarnation`, until `release` or its death."""

    def __init__(self, executor: str, incarnation: str, folder: Path, locks: Sequence[int], info: dict[str, Any]) -> None:
        self.executor = executor
        self.incarnation = incarnation
        self.folder = folder
        self._locks = list(locks)
        self._info = info

    def record(
        self,
        back_end: str,
        cgroup_paths: Iterable[Path] = (),
        folders: Iterable[Path] = (),
        ledgers: Iterable[Path] = (),
        engine: str = "",
    ) -> None:
        """States, before anything is started, what a successor has to clean up: control groups, folders, and ledgers
        of process sessions (`ProcessBackend.paths`, `.folder`, `.ledger`). Raises OSError."""
        self._info |= {
            "back_end": back_end,
            "cgroups": [str(path) for path in cgroup_paths],
            "folders": [str(path) for path in folders],
            "ledgers": [str(path) for path in ledgers],
            "engine": engine,
        }
        _write_info(self.folder, self._info)

    def release(self, *, forget: bool = False) -> None:
        """Gives the name back. From now on the incarnation is found dead, cleaned if need be and announced by whoever
        comes next; with `forget` it is not, because it has said its last word and left nothing. Idempotent."""
        if forget and self._locks:
            shutil.rmtree(self.folder, ignore_errors=True)
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()


def claim(state_root: Path, host: str, executor: str) -> Claim:
    """Makes this process the executor of that name on this host.

    Raises ExecutorAlreadyRunning, and OSError if the state folder cannot be written.
    """
    place = Path(state_root).absolute() / host
    (place / "executors").mkdir(parents=True, exist_ok=True)
    (place / "incarnations").mkdir(exist_ok=True)
    named = _lock(place / "executors" / f"{executor}.lock", create=True)
    if named is None:
        raise ExecutorAlreadyRunning(f"executor {executor!r} is already running on host {host!r} (state in {place})")
    try:
        incarnation = "".join(secrets.choice(_ALPHABET) for _ in range(_INCARNATION_LENGTH))
        # It gets its name when its lock is held: until then a search for the dead must not see it.
        pending = place / "incarnations" / f"{_PENDING}{incarnation}"
        pending.mkdir()
        held = _lock(pending / "lock", create=True)
        assert held is not None, "a new file was locked by another process"
        info = {"executor": executor, "pid": os.getpid(), "boot_id": host_identity()[1], "started_s": int(time.time())}
        _write_info(pending, info)
        folder = place / "incarnations" / incarnation
        pending.rename(folder)
    except BaseException:
        os.close(named)
        raise
    return Claim(executor, incarnation, folder, [named, held], info)


class DeadIncarnation:
    """An incarnation whose process is dead. Holds its lock, so that one successor at a time cleans up."""

    def __init__(self, folder: Path, lock: int, info: dict[str, Any]) -> None:
        self.incarnation = folder.name
        self.executor: str = info.get("executor", "")
        self.back_end: str = info.get("back_end", "")
        self._folder = folder
        self._lock = lock
        self._info = info

    def clean(self, budget_s: float = CLEAN_BUDGET_S) -> bool:
        """Kills and removes all that is left of it; true only if nothing is. Otherwise it is let go of, to be found and
        cleaned again. Blocking, for little more than the budget."""
        done = self._clean(budget_s)
        if not done:
            self.close()
        return done

    def _clean(self, budget_s: float) -> bool:
        end = time.monotonic() + budget_s
        gone = True
        boot_id = host_identity()[1]
        if self._info.get("boot_id", boot_id) == boot_id:
            gone &= groups.clear_now(self._paths("cgroups"), max(0.1, end - time.monotonic()))
            mark = f"{environment.INCARNATION}={self.incarnation}".encode()
            leaders: dict[int, int] = {}
            for ledger in self._paths("ledgers"):
                leaders |= procs.read_ledger(ledger)
            gone &= procs.clear_now([mark], leaders, max(0.1, end - time.monotonic()))
        if self.back_end == "docker":
            from tangram.executors.docker.leftovers import remove_incarnation  # noqa: PLC0415 (only hosts with Docker need it)

            gone &= remove_incarnation(self.incarnation, self._info.get("engine", ""), max(1.0, end - time.monotonic()))
        if not gone:
            return False
        done = [folders.remove(path) for path in self._paths("folders")]
        return groups.remove_all(self._paths("cgroups")) and all(done)

    def forget(self) -> None:
        """Removes the last trace, after its end was announced and stored. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Lets others find it again. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _paths(self, name: str) -> list[Path]:
        return [Path(text) for text in self._info.get(name, ())]


def find_dead(state_root: Path, host: str, except_incarnation: str) -> list[DeadIncarnation]:
    """The incarnations on this host, of any executor, whose processes are dead; in the order of their names.

    The caller owns their locks until it forgets or closes each, or could not clean it.
    """
    place = Path(state_root).absolute() / host / "incarnations"
    dead: list[DeadIncarnation] = []
    try:
        names = sorted(os.listdir(place))
    except FileNotFoundError:
        return dead
    for name in names:
        if name == except_incarnation or name.startswith("."):
            continue
        lock = None
        with contextlib.suppress(OSError):
            # Another successor may forget it at this moment.
            lock = _lock(place / name / "lock", create=False)
        if lock is None:
            continue
        try:
            info = json.loads((place / name / "info.json").read_text())
        except (FileNotFoundError, ValueError):
            # Half written when the host lost its power, or half forgotten: there is nothing to go by but its mark.
            info = {}
        dead.append(DeadIncarnation(place / name, lock, info))
    return dead
