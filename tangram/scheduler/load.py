"""How busy a host was lately, which prices its units, and how often a service was wanted, which says what its copies are worth.
Kept in the fold, read by a pass."""

from typing import Final

from tangram.scheduler.state import Host, Load, Use

TAU_NS: Final = 60_000_000_000
"""Between 20 s and 200 s it makes a few percent of difference (measured in simulation)."""


def observe(host: Host, now_ns: int) -> None:
    """Takes in how busy its cores were since the last call; to be called before its pool changes."""
    if now_ns > host.load.at_ns:
        take_in(host.load, _busy_cores(host), now_ns)


def observe_gpus(host: Host, now_ns: int) -> None:
    """The same for its GPUs."""
    take_in(host.gpu_load, _busy_gpus(host), now_ns)


def utilisation(host: Host, now_ns: int) -> float:
    """0..1, of its cores. Normalised by the weight, so that a new host counts what it did since, and not idle time before."""
    return share(host.load, _busy_cores(host), now_ns)


def gpu_utilisation(host: Host, now_ns: int) -> float:
    """0..1, of its GPUs."""
    return share(host.gpu_load, _busy_gpus(host), now_ns)


def wanted(use: Use, now_ns: int) -> None:
    """A service is used once more."""
    use.count = rate(use, now_ns) * (TAU_NS / 1e9) + 1
    use.at_ns = max(now_ns, use.at_ns)


def rate(use: Use, now_ns: int) -> float:
    """Uses a second."""
    return use.count * TAU_NS / (TAU_NS + max(0, now_ns - use.at_ns)) / (TAU_NS / 1e9)


def _busy_cores(host: Host) -> float:
    pool = host.pool
    cores = pool.all.bit_count()
    return min(1.0, (pool.used.bit_count() + len(pool.shared)) / cores) if cores else 0.0


def _busy_gpus(host: Host) -> float:
    gpus = host.gpus.all.bit_count()
    return min(1.0, host.gpus.used.bit_count() / gpus) if gpus else 0.0


def take_in(load: Load, busy: float, now_ns: int) -> None:
    load.used, load.weight = _until(load, busy, now_ns)
    load.at_ns = now_ns


def share(load: Load, busy: float, now_ns: int) -> float:
    used, weight = _until(load, busy, now_ns)
    return used / weight if weight > 0 else 0.0


def _until(load: Load, busy: float, now_ns: int) -> tuple[float, float]:
    elapsed_ns = now_ns - load.at_ns
    if elapsed_ns <= 0:
        return load.used, load.weight
    step = elapsed_ns / (TAU_NS + elapsed_ns)
    return load.used + step * (busy - load.used), load.weight + step * (1.0 - load.weight)
