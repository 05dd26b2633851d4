"""Everything here runs on the real kernel: real programs, control groups where they can be written, and without.

Each test of a `lab` ends by stopping the back end and checking that nothing is left of it.
"""

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tangram.executors.backend import ActionKey, Ended, Grant, OnOutput, SessionKey
from tangram.executors.cpu.hierarchies import Hierarchies, detect
from tangram.executors.cpu.process import ProcessBackend
from tangram.limits import OUTPUT_BYTES_MAX
from tangram.messages import FileRead, FileWrite, Run, SessionOpen
from tangram.outcomes import Outcome

ONE_CORE = min(os.sched_getaffinity(0))
PYTHON = (sys.executable, "-ISc")
"""Starts several times faster than a `python3` that is a version manager's script."""
MARKED = b"TANGRAM_INCARNATION="


def processes() -> Iterator[int]:
    yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())


def read_proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def state_of(pid: int) -> str:
    """The letter of /proc/<pid>/stat; empty if there is no such process."""
    return read_proc(pid, "stat").rpartition(b") ")[2][:1].decode()


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def survivors(incarnation: str) -> list[str]:
    """Live processes that carry the incarnation's mark or are in its control groups."""
    mark = MARKED + incarnation.encode()
    return [
        f"{pid} {read_proc(pid, 'cmdline')!r}"
        for pid in processes()
        if alive(pid) and (mark in read_proc(pid, "environ").split(b"\0") or incarnation.encode() in read_proc(pid, "cgroup"))
    ]


def own_zombies() -> list[int]:
    own = str(os.getpid())
    found = []
    for pid in processes():
        fields = read_proc(pid, "stat").decode(errors="replace").rpartition(") ")[2].split()
        if fields and fields[0] == "Z" and fields[1] == own:
            found.append(pid)
    return found


async def eventually(true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for a condition that nothing announces."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


class Lab:
    """A back end with short ways to use it."""

    def __init__(self, folder: Path, cgroups: bool | Hierarchies, **options: Any) -> None:
        self.folder = folder
        self._options = {"cgroups": cgroups, **options}
        self._numbers = 0
        self.backend: ProcessBackend

    def begin(self) -> None:
        self.incarnation = uuid.uuid4().hex[:12]
        self.backend = ProcessBackend(self.folder, self.incarnation, **self._options)
        self._descriptors = len(os.listdir("/proc/self/fd"))

    def key(self) -> ActionKey:
        self._numbers += 1
        return ActionKey("task", "client", self._numbers)

    def run(
        self,
        *argv: str,
        key: ActionKey | None = None,
        attempt: int = 1,
        session: SessionKey | None = None,
        timeout_ms: int = 20_000,
        grant: Grant | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        more_env: Mapping[str, str] | None = None,
        cwd: str = "",
        output_max: int = OUTPUT_BYTES_MAX,
        on_output: OnOutput | None = None,
    ) -> "asyncio.Task[Ended]":
        coroutine = self.backend.run(
            key or self.key(),
            attempt,
            session,
            Run(argv=argv, stdin=stdin, env=dict(env or {}), cwd=cwd, output_max=output_max),
            grant or Grant(cores=(ONE_CORE,), millicores=1000),
            timeout_ms=timeout_ms,
            env=more_env or {},
            on_output=on_output,
        )
        return asyncio.get_running_loop().create_task(coroutine)

    def sh(self, script: str, **options: Any) -> "asyncio.Task[Ended]":
        return self.run("/bin/sh", "-c", script, **options)

    async def open(self, memory_mib: int = 0, env: Mapping[str, str] | None = None) -> SessionKey:
        _, _, n = self.key()
        key = SessionKey("task", "client", n)
        ended = await self.backend.open(key, SessionOpen(env=dict(env or {})), Grant(memory_mib=memory_mib))
        assert ended.outcome is Outcome.OK, ended
        return key

    @contextlib.asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[SessionKey]:
        key = await self.open(**options)
        yield key
        ended = await self.backend.close(key)
        assert ended.outcome is Outcome.OK, ended

    def home(self, key: SessionKey) -> Path:
        return self.backend.folder / "sessions" / ".".join(map(str, key)) / "home"

    async def write(self, key: SessionKey, path: str, data: bytes, mode: int = 0o644) -> Ended:
        return await self.backend.write(key, FileWrite(path=path, data=data, mode=mode))

    async def read(self, key: SessionKey, path: str, size_max: int = 1000) -> Ended:
        return await self.backend.read(key, FileRead(path=path, size_max=size_max))

    def survivors(self) -> list[str]:
        return survivors(self.incarnation)

    def groups(self) -> list[Path]:
        """The control groups of single actions and sessions that are there now."""
        return [entry for path in self.backend.paths if path.exists() for entry in path.iterdir() if entry.is_dir()]

    async def check_nothing_left(self) -> None:
        assert self.survivors() == []
        assert own_zombies() == []
        assert not self.backend.folder.exists()
        assert [path for path in self.backend.paths if path.exists()] == []
        assert len(os.listdir("/proc/self/fd")) <= self._descriptors


def hierarchies(kind: str) -> bool | Hierarchies:
    if kind == "marks":
        return False
    found = detect(unified=kind == "cgroups")
    if found is None or (kind == "freezer" and found.has_kill):
        pytest.skip(f"{kind}: this host's control groups cannot be used so")
    return found


@contextlib.asynccontextmanager
async def running(lab: Lab) -> AsyncIterator[Lab]:
    lab.begin()
    try:
        yield lab
    finally:
        await lab.backend.stop()
    await lab.check_nothing_left()


@pytest.fixture(params=["cgroups", "marks"])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    """With control groups and without any. Modules about kills and limits also try those of cgroup v1 alone."""
    async with running(Lab(tmp_path, hierarchies(request.param))) as one:
        yield one


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Lab]:
    """With control groups, for what cannot be had without."""
    async with running(Lab(tmp_path, hierarchies("cgroups"))) as one:
        yield one
