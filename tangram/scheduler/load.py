"""How busy a host was lately, which prices its units. Kept in the fold, read by a pass."""

from typing import Final

from tangram.scheduler.state import Host, Load

TAU_NS: Final = 60_000_000_000
"""Between 20 s and 200 s it makes a few percent of difference (measured in simulation)."""


def observe(host: Host, now_ns: int) -> None:
    """Takes in how busy it was since the last call; to be called before its pool changes."""
    host.load.used, host.load.weight = advance(host.load, _busy(host), now_ns)
    host.load.at_ns = now_ns


def utilisation(host: Host, now_ns: int) -> float:
    """0..1. Normalised by the weight, so that a host that is new counts what it did since, and not idle time before."""
    used, weight = advance(host.load, _busy(host), now_ns)
    return used / weight if weight > 0 else 0.0


def advance(load: Load, value: float, now_ns: int) -> tuple[float, float]:
    """The mean and its weight, if it was `value` since it was last looked at."""
    elapsed_ns = now_ns - load.at_ns
    if elapsed_ns <= 0:
        return load.used, load.weight
    step = elapsed_ns / (TAU_NS + elapsed_ns)
    return load.used + step * (value - load.used), load.weight + step * (1.0 - load.weight)


def _busy(host: Host) -> float:
    cores = host.pool.all.bit_count()
    return min(1.0, (host.pool.used.bit_count() + len(host.pool.shared)) / cores) if cores else 0.0
