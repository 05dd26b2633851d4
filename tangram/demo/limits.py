"""How a provider counts requests: a bucket that fills evenly, or a sliding window. Both on the caller's clock, in seconds."""

from collections import deque
from typing import Final, Protocol


class Limit(Protocol):
    def takes(self, now_s: float) -> bool:
        """Whether one more request is within the limit now; if so it is counted."""


class Bucket:
    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at_s = float(burst), 0.0

    def takes(self, now_s: float) -> bool:
        self._level = min(float(self._burst), self._level + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Until the next would be taken."""
        level = min(float(self._burst), self._level + (now_s - self._at_s) * self._rate)
        return max(0.0, (1 - level) / self._rate)


class Window:
    def __init__(self, rate: float, seconds: float = 1.0) -> None:
        self._most, self._seconds = round(rate * seconds), seconds
        self._taken: deque[float] = deque()

    def takes(self, now_s: float) -> bool:
        while self._taken and self._taken[0] <= now_s - self._seconds:
            self._taken.popleft()
        if len(self._taken) >= self._most:
            return False
        self._taken.append(now_s)
        return True


KINDS: Final = ("bucket", "window")


def made(kind: str, rate: float, burst: int) -> Limit:
    return Bucket(rate, burst) if kind == "bucket" else Window(rate)
