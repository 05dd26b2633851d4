"""How the limits of a container are changed while it lives, and how one action in it is told from the others.

Two implementations: `LocalControl` (local.py) writes control groups of a container on this host, `RemoteControl`
(remote.py) goes through the engine alone.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from tangram.executors.backend import Grant


class Use(Struct, frozen=True, kw_only=True):
    """What an action used. oom_kills: its processes that the kernel killed for want of memory."""

    cpu_ns: int = 0
    memory_peak_bytes: int = 0
    oom_kills: int = 0


class Fence(Protocol):
    """Around one action in a container."""

    def on_exit(self, done: Callable[[], None]) -> bool:
        """Whether `done` will be called at the end of the action's main process; else only its output's end tells."""

    async def exit_status(self) -> int | None:
        """How the main process ended, -N by signal N, straight from the kernel; None where it does not tell."""

    async def use(self, *, failed: bool) -> Use:
        """What it has used; `failed` says that the count of memory kills matters."""

    async def empty(self) -> bool: ...

    async def clear(self, budget_s: float) -> bool:
        """Kills all of the action; false if something is left after `budget_s`."""

    async def park(self, budget_s: float) -> bool:
        """Leaves what still runs to the session; false if that could not be done."""

    def close(self) -> None:
        """Frees what the fence takes. Idempotent."""


class Control(Protocol):
    """Of one container."""

    gate: str
    """What the shell that becomes the program says first: its process id in the container and, perhaps, a number."""

    async def grant(self, grant: Grant) -> None:
        """Gives these cores. Raises OSError, EngineError, DockerUnavailable."""

    async def enter(self, name: str, mark: str, exec_id: str, said: str, grant: Grant) -> Fence:
        """Puts a fence around the waiting shell of an action, and its cpu time and memory limits. Raises as `grant`."""

    async def rest(self) -> None:
        """Takes the cpu from what runs on between actions, but for a minimum."""

    async def alive(self, *, sure: bool = False) -> bool:
        """Whether the container still runs; `sure` says that it must not be about to end either, which kills all others
        in it before its main process is gone. Raises DockerUnavailable."""

    async def clear(self, budget_s: float) -> bool:
        """Kills all in the container, its main process too; false where that is not possible or something is left."""

    def close(self) -> None: ...
