"""Executors as the log shows them: joins, losses, deaths, and the units that a lost incarnation still holds."""

from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler import parts
from tangram.scheduler.cores import CorePool, mask_of
from tangram.scheduler.fold_actions import end_session, owe, release
from tangram.scheduler.fold_grants import again, returned, session_ended, units_back
from tangram.scheduler.load import observe_gpus
from tangram.scheduler.state import ActionId, GrantKey, Host, HostKey, Incarnation, Phase, State

_PAST_MAX: Final = 10_000


def joined(state: State, executor: str, message: m.ExecutorJoined) -> None:
    if message.incarnation in state.incarnations or message.incarnation in state.past:
        state.story.append(f"late join {message.incarnation}")
        return
    key = HostKey(message.host, message.machine_id)
    host = state.hosts.get(key)
    if host is None:
        host = state.hosts[key] = Host(key=key, boot_id=message.boot_id, pool=CorePool())
    elif host.boot_id != message.boot_id:
        # Another boot of the same machine: whatever ran there before is dead.
        host.boot_id = message.boot_id
        for other in [i for i in state.incarnations.values() if i.host == key]:
            lose(state, other, "the host was rebooted")
            bury(state, other)
    _bury_all(state, key, message.dead)
    current = state.incarnations.get(state.executors.get(executor, ""))
    if current is not None and current.live:
        lose(state, current, "replaced")
        state.owed.losses[current.id] = (executor, "replaced")
    holder = Incarnation(
        id=message.incarnation,
        executor=executor,
        key=message.key,
        host=key,
        nodes=tuple(mask_of(node) for node in message.cores),
        capacity=dict(message.capacity),
        joined_seq=state.seq,
        k=message.k,
        gpus_announced=mask_of(message.gpus),
        services=dict(message.services),
    )
    _costs(state, holder)
    state.incarnations[holder.id] = holder
    state.executors[executor] = holder.id
    state.hosts.setdefault(key, host)  # it was forgotten if all that was left of it was found dead just now
    host.live.append(holder)
    _measure(host, state.now_ns)
    state.story.append(f"joined {executor} {holder.id}")


def _costs(state: State, holder: Incarnation) -> None:
    for name, service in holder.services.items():
        state.service_costs.pop(name, None)
        if service.cost:
            state.service_costs[name] = {what: m.Demand(low=amount) for what, amount in service.cost.items()}
            if len(state.service_costs) > limits.SERVICES_MAX:
                del state.service_costs[next(iter(state.service_costs))]


def _measure(host: Host, now_ns: int) -> None:
    """A host's capacity is what its live executors announce; where they differ, the larger."""
    nodes: list[int] = []
    known = 0
    capacity: dict[str, int] = {}
    gpus, gpu_memory_mib = 0, 0
    for holder in host.live:  # weights stay in a process, and no other can drop them: a GPU is that of one, as long as it lives
        holder.gpus &= holder.gpus_announced
        gpus |= holder.gpus
    for holder in host.live:
        holder.gpus |= holder.gpus_announced & ~gpus
        gpus |= holder.gpus
        gpu_memory_mib = max(gpu_memory_mib, holder.capacity.get("gpu_memory", 0))
        holder.cores_mask = 0
        for index, mask in enumerate(holder.nodes):
            holder.cores_mask |= mask
            if index == len(nodes):
                nodes.append(0)
            nodes[index] |= mask & ~known  # no core lies in two nodes
            known |= mask
        for name, amount in holder.capacity.items():
            if name != "gpu_memory":
                capacity[name] = max(capacity.get(name, 0), amount)
    host.pool.announce(tuple(nodes))
    host.capacity = capacity
    observe_gpus(host, now_ns)
    host.gpus.all, host.gpus.memory_mib = gpus, gpu_memory_mib


def _bury_all(state: State, key: HostKey, dead: list[str]) -> None:
    for incarnation in dead:
        holder = state.incarnations.get(incarnation)
        if holder is None:
            _remember(state, incarnation)  # should its join still come, it comes from the dead
        elif holder.host == key:  # only its own host can testify
            lose(state, holder, "its process is dead")
            bury(state, holder)


def lose(state: State, holder: Incarnation, reason: str) -> None:
    """From here on in the log this incarnation gets nothing. What it ran is owed an outcome or another attempt; what it
    holds stays held until somebody on its host states that it is dead."""
    if not holder.live:
        return
    holder.live = False
    state.story.append(f"lost {holder.executor} {holder.id}")
    host = state.hosts[holder.host]
    host.live.remove(holder)
    _measure(host, state.now_ns)
    _remember(state, holder.id)
    if state.executors.get(holder.executor) == holder.id:
        del state.executors[holder.executor]
    owed = state.owed
    owed.dismissals.pop(holder.id, None)
    for cancel in [c for c in owed.cancels if c[0] == holder.id]:
        del owed.cancels[cancel]
    for end in [e for e in owed.ends if e[0] == holder.id]:
        del owed.ends[end]
    for filler in [f for f in owed.fillers if f[0] == holder.id]:
        del owed.fillers[filler]
    for grant in list(holder.grants.values()):
        host.gpus.copies += grant.evicted  # it may never come to make that room
        grant.evicted = []
        if grant.quotas and state.behaviour >= 7:
            state.timers.set(("permit", (holder.id, *grant.key.action, grant.key.attempt)), grant.until_ns)
        action = state.actions.get(grant.key.action)
        if action is None or action.phase is not Phase.DECIDED or action.attempt != grant.key.attempt:
            continue
        state.timers.cancel(("backstop", action.id))
        if action.session is not None:
            owe(state, action, Outcome.ENVIRONMENT_LOST, detail=reason)
        elif action.cancelled:
            owe(state, action, Outcome.CANCELLED, detail=reason)
        elif action.spec.retry == "safe" and action.attempt < limits.ATTEMPTS_MAX:
            action.attempt += 1
            action.avoid = (*action.avoid, holder.host)
            again(state, action)
        else:
            owe(state, action, Outcome.LOST, detail=reason)
    host.gpus.copies += holder.fetch_evicted
    holder.fetch_evicted = []
    for session in list(holder.sessions.values()):
        end_session(state, session)


def _remember(state: State, incarnation: str) -> None:
    state.past[incarnation] = None
    if len(state.past) > _PAST_MAX:
        del state.past[next(iter(state.past))]


def bury(state: State, holder: Incarnation) -> None:
    """A lost incarnation is proven dead: its units come back."""
    for grant in list(holder.grants.values()):
        release(state, grant)
        units_back(state, grant)
    del state.incarnations[holder.id]
    state.owed.losses.pop(holder.id, None)
    state.story.append(f"dead {holder.id}")
    host = state.hosts[holder.host]
    host.gpus.copies = [each for each in host.gpus.copies if each.holder != holder.id]
    if not host.live and not any(i.host == host.key for i in state.incarnations.values()):
        del state.hosts[host.key]


def give_up_quotas(state: State, incarnation: str, task: str, client: str, n: int, attempt: int) -> None:
    """What a lost incarnation ran must have ended by now, wherever it is: its places of quotas are free. All else of its host
    stays held until somebody there has looked."""
    holder = state.incarnations.get(incarnation)
    grant = holder.grants.get(GrantKey(ActionId(task, client, n), attempt)) if holder is not None else None
    if grant is None:
        return
    for name in grant.quotas:
        state.quotas[name].give()
    parts.gave(state, state.hosts[grant.host], task, {name: grant.amounts[name] for name in grant.quotas})
    grant.amounts = {name: amount for name, amount in grant.amounts.items() if name not in grant.quotas}
    grant.quotas = ()
    state.story.append(f"quotas given up {task}/{client}/{n}#{attempt}")


def changed(state: State, holder: Incarnation, message: m.ExecutorChanged) -> None:
    if message.cores is not None:
        holder.nodes = tuple(mask_of(node) for node in message.cores)
    if message.capacity is not None:
        holder.capacity = dict(message.capacity)
    if message.gpus is not None:
        holder.gpus_announced = mask_of(message.gpus)
        busy = {(grant.service, grant.gpus) for grant in holder.grants.values()}
        pool = state.hosts[holder.host].gpus
        for copy in [each for each in pool.copies if each.holder == holder.id and each.gpus & ~holder.gpus_announced]:
            if (copy.service, copy.gpus) not in busy:
                pool.drop(copy.service, copy.gpus, holder.id)
    if message.services is not None:
        holder.services = dict(message.services)
        _costs(state, holder)
    if holder.live:
        _measure(state.hosts[holder.host], state.now_ns)
    _bury_all(state, holder.host, message.dead)


def draining(state: State, holder: Incarnation) -> None:
    holder.draining = True
    state.story.append(f"draining {holder.id}")
    if holder.live and not holder.grants:
        state.owed.dismissals[holder.id] = "drained"


def left(state: State, holder: Incarnation) -> None:
    """It said itself that it runs nothing any more."""
    lose(state, holder, "the executor left")
    bury(state, holder)


def event(state: State, executor: str, message: m.ExecutorMessage) -> None:
    if isinstance(message, m.ExecutorJoined):
        joined(state, executor, message)
        return
    holder = state.incarnations.get(message.incarnation)
    if holder is None or holder.executor != executor or message.k <= holder.k:
        state.story.append(f"stale {message.incarnation} {message.k}")
        return
    holder.k = message.k
    match message:
        case m.ExecutorChanged():
            changed(state, holder, message)
        case m.ExecutorDraining():
            draining(state, holder)
        case m.ActionsReturned():
            for item in message.returned:
                returned(state, holder, item)
            for ended in message.ended:
                session_ended(state, holder, ActionId(ended.task, ended.client, ended.session))
        case m.ExecutorLeft():
            left(state, holder)
