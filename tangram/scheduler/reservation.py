"""Backfilling behind a wide action (EASY): while it has not waited for long, a later one may start on cores that it cannot use
yet, if that one is predicted to end before the wide one's predicted start, or needs only cores that it will leave over.

After its patience nobody overtakes it: with heavy tails predictions alone protect it no better than none. An action that needs
one core or less starts with the next core that comes back, so there nothing is gained by overtaking.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tangram import limits


@dataclass(slots=True, eq=False)
class Reservation:
    """start_us: when the first that waits is predicted to have its cores, from now; spare: cores it leaves over then."""

    start_us: float
    spare: int
    looked_at: int = 0

    @property
    def is_open(self) -> bool:
        return self.looked_at < limits.BACKFILL_MAX

    def admits(self, cores: int, duration_us: float) -> bool:
        """Looks at one more action."""
        if not self.is_open:
            return False
        self.looked_at += 1
        return duration_us <= self.start_us or cores <= self.spare

    def take(self, cores: int, duration_us: float) -> None:
        if duration_us > self.start_us:
            self.spare -= cores


@dataclass(frozen=True, slots=True)
class Release:
    """Cores that come back: when, in microseconds from now; how many of those that the first one may use; and how many of them
    count with what its task may have."""

    at_us: float
    cores: int
    own: int


def reserve(need: int, free: int, allowed: int, releases: Iterable[Release]) -> Reservation | None:
    """For an action that needs so many cores. allowed: cores that its task may still take. None if what is predicted to come
    back is not enough."""
    for each in sorted(releases, key=lambda each: each.at_us):
        free += each.cores
        allowed += each.own
        if free >= need and allowed >= need:
            return Reservation(each.at_us, min(free, allowed) - need)
    return None
