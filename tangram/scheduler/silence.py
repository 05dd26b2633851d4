"""Who has not been heard of for too long. The shell says what it hears and asks now and then; it brings the time along."""

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

CHECK_S: Final = 1.0


class Silence(Generic[K]):
    """Times are monotonic seconds. Whoever is asked about for the first time counts as heard of then."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s, self._checked_s = limit_s, now_s
        self._heard_s: dict[K, float] = {}

    def heard(self, who: K, now_s: float) -> None:
        self._heard_s[who] = now_s

    def forget(self) -> None:
        """Nothing could be heard lately, so all start anew."""
        self._heard_s.clear()

    def due(self, now_s: float) -> bool:
        """Whether it is time to ask again, which is once a second."""
        since_s = now_s - self._checked_s
        if since_s < CHECK_S:
            return False
        self._checked_s = now_s
        if since_s - CHECK_S > self._limit_s / 2:  # we were stopped ourselves: what was said meanwhile is still unread
            self.forget()
        return True

    def silent(self, watched: Iterable[K], now_s: float) -> list[K]:
        """Those of `watched` that have been silent for too long; whoever is not among them is forgotten."""
        self._heard_s = {who: self._heard_s.get(who, now_s) for who in watched}
        return [who for who, heard_s in self._heard_s.items() if now_s - heard_s > self._limit_s]
