"""Files of a session, put in and taken out by the executor. Blocking: call it in a thread.

A path is relative to the session's folder, or absolute within it. Symbolic links are followed only as far as they stay
inside. The process back end has one user for all, so this guards against accidents and careless agents; the check of
the opened file's own path closes the gap between looking and opening.
"""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path, PurePath
from typing import Final

from tangram.executors.backend import Ended
from tangram.messages import FileRead, FileWrite, Output
from tangram.outcomes import ErrorReason, Outcome

DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""The host's disk failed, not the action."""

READ_BYTES: Final = 1 << 20
"""At a time: each read makes room for as much as it may return."""


class Refused(Exception):
    """A path that may not be used; the text says why."""


def failure(error: OSError) -> Ended:
    """`error` for a disk that failed, `failed` for what the request itself ran into."""
    text = error.strerror or str(error)
    if error.errno in DISK_ERRORS:
        return Ended(outcome=Outcome.ERROR, reason=ErrorReason.DISK, detail=text)
    return Ended(outcome=Outcome.FAILED, detail=text)


def write(folder: Path, payload: FileWrite) -> Ended:
    """Makes parents, writes beside the target and renames, so that no reader sees half a file."""
    try:
        name = _inside(folder, payload.path).name
        parent = _real(folder, payload.path, parent=True)
        parent.mkdir(parents=True, exist_ok=True)
        _replace(folder, parent, name, payload)
    except Refused as refusal:
        return Ended(outcome=Outcome.FAILED, detail=str(refusal))
    except OSError as error:
        return failure(error)
    return Ended(outcome=Outcome.OK)


def read(folder: Path, payload: FileRead) -> Ended:
    try:
        return _read(folder, payload)
    except Refused as refusal:
        return Ended(outcome=Outcome.FAILED, detail=str(refusal))
    except OSError as error:
        return failure(error)


def _inside(folder: Path, path: str) -> PurePath:
    """`path` relative to `folder`, by its text alone. Raises Refused."""
    wanted = PurePath(path)
    if ".." in wanted.parts:
        raise Refused("path: `..` is not allowed")
    if wanted.is_absolute():
        if not wanted.is_relative_to(folder):
            raise Refused("path: outside the session's folder")
        wanted = wanted.relative_to(folder)
    if not wanted.parts or path.endswith("/"):
        raise Refused("path: names a folder")
    return wanted


def _real(folder: Path, path: str, *, parent: bool) -> Path:
    """Where `path` (or its parent) is after following links. Raises Refused if that is outside."""
    wanted = folder / _inside(folder, path)
    real = Path(os.path.realpath(wanted.parent if parent else wanted))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise Refused("path: a symbolic link leads outside the session's folder")
    return real


def _check_opened(folder: Path, fd: int) -> None:
    if not Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(os.path.realpath(folder)):
        raise Refused("path: outside the session's folder")


def _replace(folder: Path, parent: Path, name: str, payload: FileWrite) -> None:
    directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_opened(folder, directory)
        temporary = f".{secrets.token_hex(8)}.part"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            try:
                view = memoryview(payload.data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, payload.mode)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def _read(folder: Path, payload: FileRead) -> Ended:
    real = _real(folder, payload.path, parent=False)
    # Looked at first, because opening a device can already act on it.
    if not stat.S_ISREG(real.lstat().st_mode):
        raise Refused("path: not a regular file")
    fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_opened(folder, fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refused("path: not a regular file")
        if info.st_size > payload.size_max:
            raise Refused(f"too large: {info.st_size} bytes")
        data = bytearray()
        while part := os.read(fd, min(READ_BYTES, payload.size_max + 1 - len(data))):
            data += part
            if len(data) > payload.size_max:
                raise Refused(f"too large: more than {payload.size_max} bytes")
    finally:
        os.close(fd)
    return Ended(outcome=Outcome.OK, output=Output(data=bytes(data)))
