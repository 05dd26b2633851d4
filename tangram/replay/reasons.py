"""Why an action waited, and why an executor is gone, as far as the state and one message tell. Pure."""

from collections.abc import Container

from tangram import messages as m
from tangram.scheduler.cores import MILLI
from tangram.scheduler.policies import charge
from tangram.scheduler.state import Action, Host, State


def why_gone(message: m.ExecutorMessage | m.ExecutorLost, executor: str) -> tuple[str, str]:
    """(what, why) of an executor that is no longer there after this message."""
    match message:
        case m.ExecutorLeft():
            return "left", "it left in order"
        case m.ExecutorLost():
            return "lost", message.reason or "lost"
        case m.ExecutorJoined() if executor and message.dead:
            return "lost", "its process is dead"
        case m.ExecutorJoined():
            return "lost", "replaced, or its host was rebooted"
        case _:
            return "lost", "its process is dead"


def lacks(state: State, action: Action) -> str:
    """What keeps a ready action from starting at once, as far as one resource can be named; "" if it has room."""
    cost = charge(state, action)
    if action.session is not None and action.session.host is not None:
        hosts = [host for host in [state.hosts.get(action.session.host)] if host is not None]
    else:
        hosts = [host for host in state.hosts.values() if any(holder.key == action.key for holder in host.live)]
    if not hosts:
        return "no executor"
    found = [short(host, cost, state.quotas) for host in hosts]
    return "" if "" in found else found[0]


def short(host: Host, cost: dict[str, m.Demand], quotas: Container[str]) -> str:
    """What a host has too little of for this cost, apart from what is a quota; "" if it has room."""
    for name, demand in cost.items():
        if name in quotas:
            continue
        if name == "cpu":
            if not host.pool.fits(demand.low):
                free = host.pool.free().bit_count()
                return f"cores: needs {demand.low / MILLI:g}, {free} of {host.pool.all.bit_count()} free"
        elif name == "gpu":
            if host.gpus.free.bit_count() < demand.low:
                return f"GPUs: needs {demand.low}, {host.gpus.free.bit_count()} of {host.gpus.all.bit_count()} free"
        elif host.capacity.get(name, 0) - host.used.get(name, 0) < demand.low:
            free = host.capacity.get(name, 0) - host.used.get(name, 0)
            return f"{name}: needs {demand.low}, {free} of {host.capacity.get(name, 0)} free"
    return ""
