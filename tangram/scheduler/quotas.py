"""Limits of something outside that all hosts share: so many at a time, so many tokens in any interval, or both."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tangram.messages import Demand, Quota


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


class QuotaGate:
    """What the quotas let through in one pass, in its order. Costs may name other resources, too."""

    def __init__(self, pools: Mapping[str, QuotaPool]) -> None:
        self._pools = pools
        self._let_through: dict[str, tuple[int, int]] = {}
        """Starts of this pass, and their tokens; (-1, 0) once one waits."""

    def is_beyond(self, cost: Mapping[str, Demand]) -> bool:
        """Whether a quota was made smaller than what this takes: it waits for another change, and holds nobody up."""
        pools = self._pools
        return bool(pools) and any(0 < pools[name].limit.tokens < demand.low for name, demand in cost.items() if name in pools)

    def lets_through(self, cost: Mapping[str, Demand]) -> bool:
        return not self._lacking(cost)

    def is_closed(self, cost: Mapping[str, Demand]) -> bool:
        """Whether somebody waits for one of its quotas, and so all others of its queue do."""
        return any(self._let_through.get(name, (0, 0))[0] < 0 for name in cost)

    def close(self, cost: Mapping[str, Demand]) -> None:
        """This waits for what it lacks, and nobody behind it gets that."""
        self._let_through.update(dict.fromkeys(self._lacking(cost), (-1, 0)))

    def take(self, cost: Mapping[str, Demand]) -> None:
        for name, demand in cost.items() if self._pools else ():
            if name in self._pools:
                count, tokens = self._let_through.get(name, (0, 0))
                self._let_through[name] = (count + 1, tokens + demand.low)

    def _lacking(self, cost: Mapping[str, Demand]) -> list[str]:
        lacks = []
        for name, demand in cost.items() if self._pools else ():
            if name in self._pools:
                count, tokens = self._let_through.get(name, (0, 0))
                if count < 0 or not self._pools[name].fits(tokens + demand.low, count + 1):
                    lacks.append(name)
        return lacks
