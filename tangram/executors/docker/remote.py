"""Control of a container through the engine alone: another host's, or one whose control groups cannot be written.

Slower (tens of milliseconds for a change of limits), and an action's processes are told by their session and their
mark; if that does not end them all, the container is ended.
"""

import asyncio
import shlex
import time
from collections.abc import Callable
from typing import Final

from tangram.executors.backend import Grant
from tangram.executors.cpu import groups
from tangram.executors.cpu.cgroups import IDLE_QUOTA_US
from tangram.executors.docker.containers import lift
from tangram.executors.docker.control import Use
from tangram.executors.docker.engine import DockerUnavailable, Engine, EngineError

COUNT: Final = (
    "n=0; { for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do "
    'while read -r k v; do [ "$k" = oom_kill ] && n=$v; done <"$f"; done; } 2>/dev/null; '
)
"""Shell builtins that put the kernel's count of memory kills, as the container sees it, into n."""
KILL: Final = (
    'c=0; for p in /proc/[0-9]*; do p=${p#/proc/}; [ "$p" -gt 1 ] && { read -r line </proc/$p/stat && set -- ${line##*) } && '
    '[ "$4" = "%s" ] && [ "$1" != Z ] && kill -9 $p && c=1; } 2>/dev/null; done; '
    "for p in $(grep -lzxF %s /proc/[0-9]*/environ 2>/dev/null); do p=${p#/proc/}; kill -9 ${p%%/*} && c=1; done; echo $c"
)
"""Kills by session, with builtins alone, then by mark; writes 1 if it found any."""
KILL_S: Final = 2.0
"""What these scripts have not ended by then forks faster than they read."""
SURE_S: Final = 5.0
POLL_S: Final = 0.02
IDLE_PROCESSES: Final = 2


class RemoteFence:
    def __init__(self, control: "RemoteControl", exec_id: str, said: str, mark: str) -> None:
        self._control, self._exec_id, self._mark = control, exec_id, mark
        self._pid, _, kills = said.partition(" ")
        self._kills = int(kills or 0)

    def on_exit(self, done: Callable[[], None]) -> bool:
        return False

    async def exit_status(self) -> int | None:
        return None

    async def use(self, *, failed: bool) -> Use:
        return Use(oom_kills=await self._control.oom_kills() - self._kills if failed else 0)

    async def empty(self) -> bool:
        return await self._control.processes() <= IDLE_PROCESSES

    async def clear(self, budget_s: float) -> bool:
        end = time.monotonic() + min(budget_s, KILL_S)
        script = KILL % (self._pid, shlex.quote(self._mark))
        while (left := end - time.monotonic()) > 0:
            found = await self._control.script(script, left)
            if not found and not await self._control.alive():
                return True
            if found == "0" and not await self._control.running(self._exec_id):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def park(self, budget_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


class RemoteControl:
    gate = COUNT + 'echo "$$ $n"'

    def __init__(self, engine: Engine, container_id: str) -> None:
        self._engine, self._id = engine, container_id

    async def grant(self, grant: Grant) -> None:
        limits: dict[str, int | str] = {}
        if grant.cores:
            limits["CpusetCpus"] = ",".join(str(core) for core in sorted(grant.cores))
        # Never "unlimited": the engine keeps the last number it was given, and refuses to mix kinds of limits.
        limits["CpuQuota"], limits["CpuPeriod"] = groups.quota(grant.millicores or 1000 * max(1, len(grant.cores)))
        await self._engine.call("POST", f"/containers/{self._id}/update", body=limits)

    async def enter(self, name: str, mark: str, exec_id: str, said: str, grant: Grant) -> RemoteFence:
        return RemoteFence(self, exec_id, said, mark)

    async def rest(self) -> None:
        if await self.processes() > IDLE_PROCESSES:
            limits = dict(zip(("CpuQuota", "CpuPeriod"), IDLE_QUOTA_US, strict=True))
            await self._engine.call("POST", f"/containers/{self._id}/update", body=limits)

    async def alive(self, *, sure: bool = False) -> bool:
        try:
            running = bool((await self._engine.call("GET", f"/containers/{self._id}/json")).json()["State"]["Running"])
        except EngineError:
            return False
        # Nothing can be started any more in one whose main process is ending.
        return running and (not sure or await self.script("echo 1", SURE_S) == "1")

    async def clear(self, budget_s: float) -> bool:
        await lift(self._engine, self._id)
        return False

    async def processes(self) -> int:
        """How many there are in the container; more than all if it is not known."""
        try:
            # (`stats` would tell it too, but takes a second for it.)
            answer = (await self._engine.call("GET", f"/containers/{self._id}/top", {"ps_args": "-eo pid"})).json()
            return len(answer["Processes"])
        except (EngineError, KeyError, TypeError):
            return 1 << 30

    async def running(self, exec_id: str) -> bool:
        try:
            return bool((await self._engine.call("GET", f"/exec/{exec_id}/json")).json()["Running"])
        except EngineError:
            return False

    async def oom_kills(self) -> int:
        text = await self.script(COUNT + 'echo "$n"')
        return int(text) if text.isdecimal() else 0

    async def script(self, text: str, timeout_s: float = 0.0) -> str:
        """What a short shell script in the container writes; "" if it could not be run in time."""
        body = {"AttachStdout": True, "Cmd": ["/bin/sh", "-c", text]}
        try:
            async with asyncio.timeout(timeout_s or self._engine.call_s):
                made = (await self._engine.call("POST", f"/containers/{self._id}/exec", body=body)).json()["Id"]
                async with self._engine.hijack(f"/exec/{made}/start", {"Tty": False}) as (reader, _):
                    return _content(await reader.read(-1)).decode(errors="replace").strip()
        except (EngineError, DockerUnavailable, TimeoutError):
            return ""

    def close(self) -> None:
        pass


def _content(data: bytes) -> bytes:
    """What a stream carries, without the heads of its parts."""
    parts = []
    while len(data) >= 8:
        end = 8 + int.from_bytes(data[4:8], "big")
        parts.append(data[8:end])
        data = data[end:]
    return b"".join(parts)
