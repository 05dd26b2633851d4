"""Limits of something outside that all hosts share: so many at a time, so many requests and so many tokens in any interval, any
of them together.

What a decision takes is counted at its log time; the provider counts when the request arrives. Between the two lies a way that is
longer for one and shorter for another, so a little is kept back: intervals are longer by GUARD_NS, and of a bucket as much as
comes in that time is not used.

A provider that refuses makes a pool smaller: to half of what was used of it, and to nothing when that falls below SHARE_MIN, for
as long as it says; after that the pool grows by a quarter a second (additive increase, multiplicative decrease).
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tangram.messages import Demand, Quota

GUARD_NS: Final = 25_000_000
"""By how much the ways of two requests to their provider may differ; in an interval below a second, a fortieth of that."""
PACE_PERCENT: Final = 101
"""Of the time between two requests that a bucket allows: what clocks and ways took of it comes back."""
SPREAD_MS: Final = 2_000
SPREAD_PERCENT: Final = 50
"""Requests of an interval as short as that go a fifth of them at once, the others at twice the rate: a crowd that goes together
is on its way for long, and meets the next one."""
FULL: Final = 1_000_000
SHARE_MIN: Final = FULL // 16
RECOVERY_NS: Final = 4_000_000_000
"""From nothing to all of a pool."""


@dataclass(slots=True, eq=False)
class QuotaPool:
    """in_use: actions that run under it. taken: (log time, tokens) of those that have not come back yet, in that order; `out` is
    the sum of the tokens. full_ns: when the bucket of requests is full again. share_ppm: of the limits, since a refusal at
    shrunk_ns; it grows from recovers_ns on."""

    limit: Quota
    in_use: int = 0
    out: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
    full_ns: int = 0
    share_ppm: int = FULL
    shrunk_ns: int = -1
    recovers_ns: int = 0

    def fits(self, tokens: int, now_ns: int, more: int = 1) -> bool:
        """Whether `more` further actions that take `tokens` together can start."""
        limit, share = self.limit, self.share_at(now_ns)
        if not share or (limit.concurrency and self.in_use + more > _part(limit.concurrency, share)):
            return False
        if limit.requests and not limit.burst and len(self.taken) + more > _part(limit.requests, share):
            return False
        if self._has_bucket:
            owed_ns = max(self.full_ns - now_ns, 0) + more * self._pace_ns(share)
            if owed_ns > self._bucket_ns(share):
                return False
        # One that takes more than the part that is left goes when it has all of that to itself.
        return not limit.tokens or self.out + tokens <= (_part(limit.tokens, share) if self.out else limit.tokens)

    def take(self, tokens: int, now_ns: int) -> None:
        limit = self.limit
        self.in_use += 1
        if self._has_bucket:
            self.full_ns = max(self.full_ns, now_ns) + self._pace_ns(self.share_at(now_ns) or SHARE_MIN)
        if (limit.tokens and tokens) or (limit.requests and not limit.burst):
            self.out += tokens
            self.taken.append((now_ns, tokens))

    def give(self) -> None:
        """An action has ended; what it took of an interval comes back in its own time."""
        self.in_use -= 1
        assert self.in_use >= 0, "a place given back twice"

    def correct(self, taken_ns: int, tokens: int, really: int, now_ns: int) -> None:
        """What was taken then as `tokens` was more, or less; nothing if its interval is over."""
        if not self.limit.tokens or taken_ns + self._interval_ns(GUARD_NS) <= now_ns:
            return
        at = bisect_left(self.taken, (taken_ns, 0))
        while at < len(self.taken) and self.taken[at][0] == taken_ns:
            if self.taken[at][1] == tokens:
                self.taken[at] = (taken_ns, really)
                self.out += really - tokens
                return
            at += 1
        if not tokens:  # of which no note was made
            self.taken.insert(at, (taken_ns, really))
            self.out += really

    def refill(self, now_ns: int, guard_ns: int = 0) -> int | None:
        """Takes back what is due by the interval of now, which may have changed. Returns when the next is due; None if none is
        out."""
        interval_ns = self._interval_ns(guard_ns)
        back = 0
        while back < len(self.taken) and self.taken[back][0] + interval_ns <= now_ns:
            self.out -= self.taken[back][1]
            back += 1
        del self.taken[:back]
        return self.taken[0][0] + interval_ns if self.taken else None

    def next_ns(self, now_ns: int) -> int | None:
        """When it lets through more than now, at the earliest; None if nothing is out. `refill` is up to date."""
        share = self.share_at(now_ns)
        if not share:
            return self.recovers_ns + 1
        found = [self.taken[0][0] + self._interval_ns(GUARD_NS)] if self.taken else []
        if self._has_bucket:
            found.append(self.full_ns + self._pace_ns(share) - self._bucket_ns(share))
        return min((at for at in found if at > now_ns), default=None)

    def is_out(self, now_ns: int) -> bool:
        """Whether there will be more of it when time goes on."""
        return bool(self.taken) or self.full_ns > now_ns or self.share_at(now_ns) < FULL

    def refuse(self, started_ns: int, now_ns: int, retry_after_ns: int) -> None:
        """The provider takes no more for so long. What was on its way together counts as one refusal."""
        if started_ns > self.shrunk_ns:
            share = min(self.share_at(now_ns), self._used_ppm()) // 2
            self.share_ppm = share if share >= SHARE_MIN else 0
            self.shrunk_ns = now_ns
        self.recovers_ns = max(self.recovers_ns, now_ns + retry_after_ns)

    def share_at(self, now_ns: int) -> int:
        """Millionths of its limits."""
        if self.share_ppm >= FULL:
            return FULL
        return min(FULL, self.share_ppm + max(0, now_ns - self.recovers_ns) * FULL // RECOVERY_NS)

    def _used_ppm(self) -> int:
        limit = self.limit
        used = [FULL] if limit.burst else []
        if limit.concurrency:
            used.append(self.in_use * FULL // limit.concurrency)
        if limit.tokens:
            used.append(self.out * FULL // limit.tokens)
        if limit.requests:
            used.append(len(self.taken) * FULL // limit.requests)
        return max(used, default=FULL)

    def _interval_ns(self, guard_ns: int) -> int:
        interval_ns = self.limit.interval_ms * 1_000_000
        return interval_ns + min(guard_ns, interval_ns // 40)

    @property
    def _has_bucket(self) -> bool:
        return bool(self.limit.requests) and (bool(self.limit.burst) or self.limit.interval_ms <= SPREAD_MS)

    def _pace_ns(self, share: int) -> int:
        """Between two requests, in the long run."""
        percent = PACE_PERCENT if self.limit.burst else SPREAD_PERCENT
        return self.limit.interval_ms * 10_000 * percent // self.limit.requests * FULL // share

    def _bucket_ns(self, share: int) -> int:
        """As many requests as can go at once, at that pace: of a provider's bucket what it has, less what is kept back."""
        pace_ns, burst = self._pace_ns(FULL), self.limit.burst
        most = burst - min(burst - 1, -(-GUARD_NS // max(pace_ns, 1))) if burst else -(-self.limit.requests // 5)
        return most * self._pace_ns(share)


def _part(limit: int, share: int) -> int:
    return max(1, limit * share // FULL)


class QuotaGate:
    """What the quotas let through in one pass, in its order. Costs may name other resources, too."""

    def __init__(self, pools: Mapping[str, QuotaPool], now_ns: int) -> None:
        self._pools, self._now_ns = pools, now_ns
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
                if count < 0 or not self._pools[name].fits(tokens + demand.low, self._now_ns, count + 1):
                    lacks.append(name)
        return lacks
