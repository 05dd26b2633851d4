"""Files of a session, by the engine's archive calls, on tar files that are made and read here.

A path is relative to the session's folder, or absolute in the container. What is written is a new regular file; no
symbolic link below the path's first folder is followed. What is read is a regular file that was looked at first.
"""

import base64
import io
import json
import tarfile
import time
from pathlib import PurePosixPath
from typing import Any, Final

from tangram.executors.backend import Ended
from tangram.executors.docker.containers import Container
from tangram.executors.docker.engine import Engine, EngineError
from tangram.executors.docker.remote import RemoteControl
from tangram.messages import FileRead, FileWrite, Output
from tangram.outcomes import ErrorReason, Outcome

DIRECTORY: Final = 1 << 31
SYMLINK: Final = 1 << 27
NOT_REGULAR: Final = DIRECTORY | SYMLINK | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""Bits of Go's FileMode, in which the engine answers."""
TAR_EXTRA_BYTES: Final = 64 * 1024


class Refused(Exception):
    """A path that may not be used; the text says why."""


def absolute(home: str, path: str) -> PurePosixPath:
    """Raises Refused."""
    wanted = PurePosixPath(path)
    if ".." in wanted.parts:
        raise Refused("path: `..` is not allowed")
    if path.endswith("/") or not wanted.name:
        raise Refused("path: names a folder")
    return PurePosixPath(home) / wanted


async def look(engine: Engine, container_id: str, path: PurePosixPath) -> dict[str, Any] | None:
    """What is at a path, a symbolic link itself; None if nothing. Raises EngineError, DockerUnavailable."""
    try:
        answer = await engine.call("HEAD", f"/containers/{container_id}/archive", {"path": str(path)})
    except EngineError as error:
        if error.status == 404:
            return None
        raise
    return dict(json.loads(base64.b64decode(answer.headers.get("x-docker-container-path-stat", ""))))


async def write(engine: Engine, container: Container, owner: tuple[int, int], payload: FileWrite) -> Ended:
    """Raises EngineError, DockerUnavailable."""
    try:
        target = absolute(container.home, payload.path)
        # The topmost folders are the image's; a link among those below may be a program's.
        start = PurePosixPath(container.home) if target.is_relative_to(container.home) else PurePosixPath(*target.parts[:2])
        base = start if start != target else target.parent
        for parent in reversed([each for each in target.parents if each.is_relative_to(start) and each != start]):
            found = await look(engine, container.id, parent)
            if found is None:
                break
            if not found["mode"] & DIRECTORY:
                raise Refused(f"path: {parent} is not a folder")
            base = parent
        found = await look(engine, container.id, target)
        if found is not None and found["mode"] & DIRECTORY:
            raise Refused("path: names a folder")
    except Refused as refusal:
        return Ended(outcome=Outcome.FAILED, detail=str(refusal))
    data = _pack(target.relative_to(base), payload, owner)
    if base == start and await look(engine, container.id, base) is None:
        base, data = PurePosixPath("/"), _pack(target.relative_to("/"), payload, owner)
    try:
        query = {"path": str(base), "noOverwriteDirNonDir": "1"}
        await engine.call("PUT", f"/containers/{container.id}/archive", query, tar=data)
    except EngineError as error:
        if "no space left" in str(error):
            return Ended(outcome=Outcome.ERROR, reason=ErrorReason.DISK, detail="no space left on the host's disk")
        if error.status in (400, 403):
            return Ended(outcome=Outcome.FAILED, detail=str(error))
        raise
    return Ended(outcome=Outcome.OK)


async def owner_of(engine: Engine, container: Container) -> tuple[int, int]:
    """The ids that files of a session get: those of the image's user, as its container counts."""
    user, _, group = container.user.partition(":")
    if not user:
        return (0, 0)
    if user.isdecimal() and group.isdecimal():
        return int(user), int(group)
    told = (await RemoteControl(engine, container.id).script("id -u; id -g")).split()
    if len(told) != 2 or not all(each.isdecimal() for each in told):
        raise EngineError(0, f"the ids of the image's user {container.user!r} cannot be found (needs `id`)")
    return int(told[0]), int(told[1])


async def make_folder(engine: Engine, container_id: str, path: str, owner: tuple[int, int]) -> None:
    """Gives a folder below the root to `owner`. Raises EngineError, DockerUnavailable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(_member(path.strip("/"), tarfile.DIRTYPE, 0o755, owner))
    await engine.call("PUT", f"/containers/{container_id}/archive", {"path": "/"}, tar=buffer.getvalue())


def _pack(relative: PurePosixPath, payload: FileWrite, owner: tuple[int, int]) -> bytes:
    """A tar file of the missing folders and the file, nothing else."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in reversed(relative.parents[:-1]):
            tar.addfile(_member(str(parent), tarfile.DIRTYPE, 0o755, owner))
        member = _member(str(relative), tarfile.REGTYPE, payload.mode & 0o777, owner)
        member.size = len(payload.data)
        tar.addfile(member, io.BytesIO(payload.data))
    return buffer.getvalue()


def _member(name: str, kind: bytes, mode: int, owner: tuple[int, int]) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, mode, int(time.time())
    member.uid, member.gid = owner
    return member


async def read(engine: Engine, container: Container, payload: FileRead) -> Ended:
    """Raises EngineError, DockerUnavailable."""
    try:
        target = absolute(container.home, payload.path)
        found = await look(engine, container.id, target)
        if found is None:
            raise Refused("path: no such file")
        if found["mode"] & NOT_REGULAR:
            raise Refused("path: not a regular file")
        if found["size"] > payload.size_max:
            raise Refused(f"too large: {found['size']} bytes")
        size_max = payload.size_max + TAR_EXTRA_BYTES
        answer = await engine.call("GET", f"/containers/{container.id}/archive", {"path": str(target)}, size_max=size_max)
        return Ended(outcome=Outcome.OK, output=Output(data=_unpack(answer.body, payload.size_max)))
    except Refused as refusal:
        return Ended(outcome=Outcome.FAILED, detail=str(refusal))


def _unpack(data: bytes, size_max: int) -> bytes:
    """The content of the first member. It is looked at again: it may have changed since. Raises Refused."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            member = tar.next()
            if member is None or not member.isreg():
                raise Refused("path: not a regular file")
            if member.size > size_max:
                raise Refused(f"too large: {member.size} bytes")
            source = tar.extractfile(member)
            content = source.read() if source is not None else b""
    except tarfile.TarError as error:
        raise Refused(f"path: cannot be read ({error})") from None
    if len(content) != member.size:
        raise Refused("path: changed while it was read")
    return content
