"""Changes of the configuration while the scheduler leads. Pure."""

from tangram import limits
from tangram import messages as m
from tangram.scheduler.state import State


class CannotChange(ValueError):
    """What is asked for cannot be; the message says why."""


def settings_for(state: State, control: m.Control) -> m.Settings:
    """What the leader has to store for a request. Raises CannotChange."""
    unlimited = [name for name, pool in state.quotas.items() if pool.limit == m.Quota(interval_ms=pool.limit.interval_ms)]
    if unknown := [name for name in control.without if name not in state.quotas or name in unlimited]:
        raise CannotChange(f"there is no quota {', '.join(unknown)}")
    left = {name: pool.limit for name, pool in state.quotas.items() if name not in (*control.without, *unlimited)}
    quotas = left | control.quotas
    if len(quotas) > limits.QUOTAS_MAX:
        raise CannotChange(f"there can be {limits.QUOTAS_MAX} quotas")
    return m.Settings(epoch=state.epoch, quotas=quotas)
