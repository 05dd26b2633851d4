"""Changes of the configuration while the scheduler leads. Pure."""

from tangram import limits
from tangram import messages as m
from tangram.scheduler.state import State


class CannotChange(ValueError):
    """What is asked for cannot be; the message says why."""


def settings_for(state: State, control: m.Control) -> m.Settings:
    """What the leader has to store for a request. A limit that is taken away leaves the name, so that what takes of it still
    runs. Raises CannotChange."""
    if unknown := [name for name in control.without if name not in state.quotas]:
        raise CannotChange(f"there is no quota {', '.join(unknown)}")
    quotas = {name: pool.limit for name, pool in state.quotas.items()}
    quotas |= {**control.quotas, **dict.fromkeys(control.without, m.Quota())}
    if len(quotas) > limits.QUOTAS_MAX:
        raise CannotChange(f"there can be {limits.QUOTAS_MAX} quotas")
    return m.Settings(epoch=state.epoch, quotas=quotas)
