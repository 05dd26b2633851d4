"""Limits of something outside that all hosts share: so many at a time, so many tokens in any interval, or both."""

from collections import deque
from dataclasses import dataclass, field

from tangram.messages import Quota


@dataclass(slots=True, eq=False)
class QuotaPool:
    """in_use: actions that run under it. taken: (log time at which they come back, tokens), in that order; `out` is their sum."""

    limit: Quota
    in_use: int = 0
    out: int = 0
    taken: "deque[tuple[int, int]]" = field(default_factory=deque)

    def fits(self, tokens: int, more: int = 1) -> bool:
        """Whether `more` further actions that take `tokens` together can start."""
        limit = self.limit
        if limit.concurrency and self.in_use + more > limit.concurrency:
            return False
        return not limit.tokens or self.out + tokens <= limit.tokens

    def take(self, tokens: int, now_ns: int) -> None:
        self.in_use += 1
        if self.limit.tokens and tokens:
            self.out += tokens
            self.taken.append((now_ns + self.limit.interval_ms * 1_000_000, tokens))

    def give(self) -> None:
        """An action has ended; its tokens come back in their own time."""
        self.in_use -= 1
        assert self.in_use >= 0, "a place given back twice"

    def refill(self, now_ns: int) -> int | None:
        """Takes back what is due. Returns when the next tokens are; None if none are out."""
        while self.taken and self.taken[0][0] <= now_ns:
            self.out -= self.taken.popleft()[1]
        return self.taken[0][0] if self.taken else None


def largest(limit: Quota) -> int | None:
    """The most tokens that one action could ever take; None: there is no such limit."""
    return limit.tokens or None
