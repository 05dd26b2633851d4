"""A closed loop: so many callers, each starting its next call when the last one has ended."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple


class Figures(NamedTuple):
    """Rate in calls/s, latencies in milliseconds."""

    per_s: float
    p50_ms: float
    p99_ms: float


async def closed_loop(call: Callable[[], Awaitable[object]], in_flight: int, seconds: float, warm_s: float) -> Figures:
    """Runs `in_flight` callers for `warm_s` + `seconds`; what ended in the last `seconds` counts."""
    taken_s: list[float] = []
    begin_s = time.perf_counter() + warm_s
    end_s = begin_s + seconds

    async def caller() -> None:
        while (start_s := time.perf_counter()) < end_s:
            await call()
            now_s = time.perf_counter()
            if begin_s <= now_s < end_s:
                taken_s.append(now_s - start_s)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return Figures(len(taken_s) / seconds, 1e3 * percentile(taken_s, 50), 1e3 * percentile(taken_s, 99))


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank; nan for no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
