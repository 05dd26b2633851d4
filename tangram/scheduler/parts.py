"""What each task holds of each host: kept in the fold under every policy, so that one that shares by task can take over."""

from typing import Final

from tangram.scheduler.load import TAU_NS, share, take_in
from tangram.scheduler.state import Host, Part, State

IDLE_NS: Final = TAU_NS
"""A task that has held nothing on a host for so long is forgotten there, and counts with nobody's share."""


def took(state: State, host: Host, task: str, amounts: dict[str, int]) -> None:
    part = _observed(state, host, task)
    for name, amount in amounts.items():
        if amount:
            part.amounts[name] = part.amounts.get(name, 0) + amount


def gave(state: State, host: Host, task: str, amounts: dict[str, int]) -> None:
    part = _observed(state, host, task)
    for name, amount in amounts.items():
        left = part.amounts.pop(name, 0) - amount
        assert left >= 0, f"{name} of {task} given back twice"
        if left:
            part.amounts[name] = left


def opened(state: State, host: Host, task: str) -> None:
    _observed(state, host, task).sessions += 1


def closed(state: State, host: Host, task: str) -> None:
    _observed(state, host, task).sessions -= 1


def is_idle(state: State, part: Part) -> bool:
    """By log time, or by the server's clock: while nothing is open nobody ticks, and log time stands still."""
    if part.amounts or part.sessions:
        return False
    return max(state.now_ns - part.load.at_ns, state.stamp_ns - part.stamp_ns) >= IDLE_NS


def mean_cores(part: Part, now_ns: int) -> float:
    """How many cores it had in use lately."""
    return share(part.load, part.cores, now_ns)


def _observed(state: State, host: Host, task: str) -> Part:
    """The task's part, with its load up to now: to be called before it changes. Looks at one other part and forgets it if it is
    idle, so that all are looked at in turn."""
    part = host.parts.get(task)
    if part is None:
        part = host.parts[task] = Part()
    take_in(part.load, part.cores, state.now_ns)
    part.stamp_ns = state.stamp_ns
    oldest = next(iter(host.parts))
    if oldest != task:
        other = host.parts.pop(oldest)
        if not is_idle(state, other):
            host.parts[oldest] = other
    return part


def recount(state: State) -> None:
    """For a state of a version that did not count by task."""
    for holder in state.incarnations.values():
        host = state.hosts[holder.host]
        for grant in holder.grants.values():
            took(state, host, grant.key.action.task, grant.amounts)
        for session in holder.sessions:
            opened(state, host, session.task)
