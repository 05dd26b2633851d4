"""Limits of something outside that all hosts share: so many at a time, so many tokens in any interval, or both."""

from dataclasses import dataclass, field

from tangram.messages import Quota


@dataclass(slots=True, eq=False)
class QuotaPool:
    """in_use: actions that run under it. taken: (log time, tokens) of those that have not come back yet, in that order; `out` is
    their sum."""

    limit: Quota
    in_use: int = 0
    out: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)

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
            self.taken.append((now_ns, tokens))

    def give(self) -> None:
        """An action has ended; its tokens come back in their own time."""
        self.in_use -= 1
        assert self.in_use >= 0, "a place given back twice"

    def refill(self, now_ns: int) -> int | None:
        """Takes back what is due by the interval of now, which may have changed. Returns when the next tokens are due; None if
        none are out."""
        interval_ns = self.limit.interval_ms * 1_000_000
        back = 0
        while back < len(self.taken) and self.taken[back][0] + interval_ns <= now_ns:
            self.out -= self.taken[back][1]
            back += 1
        del self.taken[:back]
        return self.taken[0][0] + interval_ns if self.taken else None
