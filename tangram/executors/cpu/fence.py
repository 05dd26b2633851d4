"""What holds the processes of an action or a session together, so that they can be limited, counted and ended.

Two implementations: control groups (`cgroups.py`), which nothing escapes, and marks in the environment (`marks.py`),
where control groups cannot be written. What is started in a fence belongs to it, however often it forks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from tangram.executors.backend import Grant

POLL_S: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03)
"""Pauses between looks at whether killed processes are gone; the last one repeats."""


class Usage(Struct, frozen=True, kw_only=True):
    """None where the fence does not know. oom_kills: processes that the kernel killed for want of memory."""

    cpu_ns: int | None = None
    memory_peak_bytes: int | None = None
    oom_kills: int = 0


class Fence(Protocol):
    """Around one action."""

    entries: Sequence[Path]
    """Files that a process writes 0 to in order to enter."""
    affinity: Sequence[int]
    """Cores to start the program on, where no control group pins them."""

    def started(self, pid: int) -> None:
        """`pid`, which leads a process session of its own, is the action's main process."""

    def signal(self) -> None:
        """Kills what can be killed at once, without waiting."""

    async def empty(self) -> bool: ...

    async def clear(self, budget_s: float) -> bool:
        """Kills all until nothing is left; False if something is after `budget_s`."""

    async def park(self, budget_s: float) -> bool:
        """Hands what is left to the session; False if that could not be done."""

    def usage(self) -> Usage: ...

    def remove(self) -> None:
        """Frees what an empty fence takes."""


class Enclosure(Protocol):
    """Around a session, or around one action without a session."""

    def grant(self, grant: Grant) -> None:
        """Gives cores and cpu time to all inside. Raises OSError if the kernel does not do exactly that."""

    def rest(self) -> None:
        """Takes the cpu away from what runs on between actions, but for a minimum."""

    def fence(self, name: str, marks: Sequence[str], memory_mib: int) -> Fence: ...

    async def clear(self, budget_s: float) -> bool:
        """As Fence.clear, for the whole session."""

    def remove(self) -> None: ...


class Grounds(Protocol):
    """Around everything of one incarnation."""

    paths: Sequence[Path]
    """Control groups to be recorded, so that a successor can clean up."""

    enforces: frozenset[str]
    """Which of "cores", "cpu" (time), "memory" and "kill" are exact here, whatever a program does."""

    def session(self, name: str, marks: Sequence[str], memory_mib: int) -> Enclosure: ...

    def single(self, name: str, marks: Sequence[str]) -> Enclosure:
        """Around one action without a session."""

    async def clear(self, budget_s: float) -> bool: ...

    def remove(self) -> None:
        """Frees all; may block for a second."""
