"""What has to hold after every record of the log, recounted the slow way."""

from collections import Counter
from fractions import Fraction

from tangram import limits
from tangram.messages import Demand
from tangram.scheduler.cores import cores_of, mask_of
from tangram.scheduler.policies import POLICIES, setting
from tangram.scheduler.quotas import GUARD_NS
from tangram.scheduler.state import Action, ActionId, GrantKey, Host, HostKey, Incarnation, Part, Phase, SessionPhase, State
from tangram.scheduler.window import Window
from tests.core.world import World

WHOLE = 1_000
NOTHING = Demand(low=0)


def check(world: World) -> None:
    state = world.state
    check_places(state)
    check_sessions(world)
    check_units(state)
    check_gpus(world)
    check_quotas(world)
    check_truth(world)
    check_clients(state)
    check_keys(state)
    check_owed(state)
    assert state.skipped == world.garbage
    assert state.payload_bytes == sum(action.payload_bytes for action in state.actions.values())


def check_places(state: State) -> None:
    """Every open action is in exactly one place, and queues hold nothing but READY actions in arrival order."""
    places: Counter[ActionId] = Counter()
    for queue_key, queue in state.queues.items():
        waiting = list(queue)
        assert waiting, f"{queue_key}: an empty queue is kept"
        assert len(waiting) == len(queue)
        assert [action.order for action in waiting] == sorted(action.order for action in waiting)
        for action in waiting:
            assert action.phase is Phase.READY, f"{action.id} is {action.phase.name} in a queue"
            assert action.queue == queue_key
            assert state.actions.get(action.id) is action, f"{action.id} is queued and not open"
            places[action.id] += 1
    for session in state.sessions.values():
        for action in session.waiting:
            assert action.phase is Phase.WAITING, f"{action.id} is {action.phase.name} in its session"
            assert action.session is session
            assert state.actions.get(action.id) is action, f"{action.id} waits in its session and is not open"
            places[action.id] += 1
    for key, client in state.clients.items():
        for bound in client.keys.values():
            ids = [ActionId(*key, n) for n in bound.waiting]
            places.update(each for each in ids if state.actions[each].phase is Phase.WAITING)
    for action in state.actions.values():
        if action.phase is Phase.DECIDED:
            places[action.id] += 1
        assert (action.id in state.owed.rulings) == (action.phase is Phase.OWED), f"{action.id}: {action.phase.name}"
    places.update(list(state.owed.rulings))
    places.update(key for _, keys in state.timers.pending() for kind, key in keys if kind == "again")
    assert places == Counter(list(state.actions)), f"in no place or in two: {places} {state.actions.keys()}"


def check_sessions(world: World) -> None:
    """A session takes one action at a time, and one that lives has a sandbox, or an opening that may still make one."""
    state = world.state
    inside: Counter[ActionId] = Counter()
    for incarnation in state.incarnations.values():
        for key in incarnation.grants:
            start = world.starts[(incarnation.id, key)]
            if start.session:
                inside[ActionId(start.task, start.client, start.session)] += 1
    for session in state.sessions.values():
        assert inside[session.id] <= 1, f"{session.id} takes {inside[session.id]} actions at a time"
        current = state.actions.get(session.current) if session.current is not None else None
        if session.phase is SessionPhase.OPENING:
            assert session.id in state.actions, f"{session.id} is being opened by nobody"
            assert session.current is None
        else:
            holder = state.incarnations[session.incarnation]
            assert holder.live, f"{session.id} lives on a lost incarnation"
            assert holder.sessions[session.id] is session
            assert session.grant is not None
            assert holder.grants[session.grant].holds_session
            if session.current is None:
                assert not session.waiting, f"{session.id} is free and lets its actions wait"
            elif current is None or current.phase not in (Phase.READY, Phase.DECIDED):
                assert inside[session.id], f"{session.id} is blocked by {session.current}, which holds nothing"
    for action in state.actions.values():
        if action.session is not None and action.phase in (Phase.WAITING, Phase.READY):
            assert state.sessions.get(action.session.id) is action.session, f"{action.id} waits in a session that is no more"
    for key, host in state.hosts.items():
        here = [s for i in state.incarnations.values() if i.host == key for s in i.sessions]
        assert host.sessions == len(here)


def check_units(state: State) -> None:
    """What a host counts as used is the sum of its grants, and no core is given twice."""
    for key, host in state.hosts.items():
        used: Counter[str] = Counter()
        whole: Counter[int] = Counter()
        shared: Counter[int] = Counter()
        for incarnation in state.incarnations.values():
            for grant in incarnation.grants.values() if incarnation.host == key else ():
                assert (grant.incarnation, grant.host) == (incarnation.id, key)
                for name, amount in grant.amounts.items():
                    if name == "gpu" or name in grant.quotas:
                        continue
                    if name != "cpu":
                        used[name] += amount
                    elif amount < WHOLE:
                        shared[grant.cores[0]] += amount
                    else:
                        assert len(grant.cores) * WHOLE == amount, f"{grant.key} is charged {amount} for {grant.cores}"
                        whole.update(grant.cores)
        assert +Counter(host.used) == +used, f"{key.name}: {host.used} used, {used} granted"
        assert all(count == 1 for count in whole.values()), f"{key.name}: {whole}"
        assert sorted(whole) == list(cores_of(host.pool.used))
        assert host.pool.shared == dict(+shared)
        assert all(amount <= WHOLE for amount in shared.values()), f"{key.name}: {shared}"
        assert not whole.keys() & shared.keys()
        assert [i for i in state.incarnations.values() if i.live and i.host == key] == sorted(
            host.live, key=lambda i: i.joined_seq
        )
        check_parts(state, host)
    for incarnation in state.incarnations.values():
        assert incarnation.host in state.hosts, f"{incarnation.id} is on a host that was forgotten"


def check_parts(state: State, host: Host) -> None:
    """What each task is said to hold of a host is what its grants hold, and its sessions are those there."""
    held: dict[str, Counter[str]] = {}
    sessions: Counter[str] = Counter()
    for incarnation in state.incarnations.values():
        if incarnation.host == host.key:
            for grant in incarnation.grants.values():
                held.setdefault(grant.key.action.task, Counter()).update(grant.amounts)
            sessions.update(session.task for session in incarnation.sessions)
    assert {task: part.amounts for task, part in host.parts.items() if part.amounts} == {
        task: dict(+amounts) for task, amounts in held.items() if +amounts
    }
    assert {task: part.sessions for task, part in host.parts.items() if part.sessions} == dict(sessions)


def check_gpus(world: World) -> None:
    """GPUs are those of one live executor and are given once, in aligned chunks; weights fit, and those of what runs stay."""
    state = world.state
    for key, host in state.hosts.items():
        owned = given = 0
        for holder in host.live:
            assert not holder.gpus & owned, f"GPUs {holder.gpus & owned:b} of {key.name} have two executors"
            assert not holder.gpus & ~holder.gpus_announced
            owned |= holder.gpus
        announced = [holder.gpus_announced for holder in host.live]
        assert owned == host.gpus.all == sum({1 << gpu for mask in announced for gpu in cores_of(mask)})
        for holder in state.incarnations.values():
            for grant in holder.grants.values() if holder.host == key else ():
                assert grant.gpus.bit_count() == grant.amounts.get("gpu", 0)
                assert not grant.gpus & given, f"GPUs {grant.gpus & given:b} of {key.name} are given twice"
                given |= grant.gpus
                if grant.gpus:
                    assert is_chunk(grant.gpus)
                    there = any(
                        c.holder == holder.id and (c.service, c.gpus) == (grant.service, grant.gpus) for c in host.gpus.copies
                    )
                    assert there, f"{grant.key} runs on weights that are not there"
        assert given == host.gpus.used
        names = [(copy.service, copy.gpus, copy.holder) for copy in host.gpus.copies]
        assert len(names) == len(set(names))
        for copy in host.gpus.copies:
            assert state.incarnations[copy.holder].host == key, f"{copy} is kept by nobody here"
        if host.gpus.memory_mib:
            for gpu in cores_of(host.gpus.all):
                here = [copy for copy in host.gpus.copies if copy.gpus >> gpu & 1]
                if not all(state.incarnations[copy.holder].live for copy in here):
                    continue  # who was lost may have or have not made the room that it was asked for
                weights = sum(copy.mib for copy in here)
                assert weights <= host.gpus.memory_mib, f"GPU {gpu} of {key.name}: {weights} MiB"
    for worker in world.workers.values():
        if not worker.gone and worker.incarnation in state.incarnations:
            known_as = {
                (c.service, cores_of(c.gpus)) for c in state.hosts[worker.host].gpus.copies if c.holder == worker.incarnation
            }
            holder = state.incarnations[worker.incarnation]
            lost = {each for each in worker.resident if mask_of(each[1]) & ~holder.gpus_announced}
            unheard = holder.live and (not worker.alive or bool(worker.outbox) or bool(worker.held) or bool(worker.unread))
            assert unheard or worker.resident.keys() - lost <= known_as, (
                f"{worker.resident} of {worker.incarnation}, not {known_as}"
            )
    assert len(state.uses) <= limits.SERVICES_MAX
    assert len(state.models) <= limits.MODELS_MAX


def is_chunk(mask: int) -> bool:
    size, first = mask.bit_count(), cores_of(mask)[0]
    return size in (1, 2, 4, 8) and first % size == 0 and cores_of(mask) == tuple(range(first, first + size))


def check_quotas(world: World) -> None:
    """Places are those of the grants; tokens are out as long as they were taken within the interval."""
    state = world.state
    held: Counter[str] = Counter()
    for holder in state.incarnations.values():
        for grant in holder.grants.values():
            assert set(grant.quotas) <= grant.amounts.keys()
            held.update(grant.quotas)
    assert +held == +Counter({name: pool.in_use for name, pool in state.quotas.items()})
    for name, pool in state.quotas.items():
        assert pool.out == sum(tokens for _, tokens in pool.taken)
        assert pool.taken == sorted(pool.taken, key=lambda each: each[0])
        counted = sum(amount for _, amount in world.tokens[name])
        assert pool.out >= counted, f"{name}: {pool.out} tokens out, {counted} counted"
        late_ns = pool.limit.interval_ms * 1_000_000 + GUARD_NS
        assert all(at_ns + late_ns > state.now_ns for at_ns, _ in pool.taken), f"{name}: tokens do not come back"


def check_quotas_of(world: World, window: Window) -> None:
    """What starts leaves every quota within its limit, counted as a provider would."""
    for name, pool in world.state.quotas.items():
        taken = [decision.amounts[name] for decision in window.decisions if name in decision.amounts]
        if taken and pool.limit.concurrency:
            assert pool.in_use + len(taken) <= pool.limit.concurrency, f"{name}: {pool.in_use} in use, {len(taken)} start"
        if sum(taken) and pool.limit.tokens:
            out = sum(amount for _, amount in world.tokens[name])
            assert out + sum(taken) <= pool.limit.tokens, f"{name}: {out} tokens within its interval, {taken} taken"
        if taken and pool.limit.requests and not pool.limit.burst:
            made = len(world.requests[name])
            assert made + len(taken) <= pool.limit.requests, f"{name}: {made} requests within its interval, {len(taken)} start"


def check_truth(world: World) -> None:
    """What processes really use on a host is granted to them, and never more than the host has ever had."""
    spent: dict[HostKey, Counter[str]] = {}
    for worker in world.workers.values():
        known = world.state.incarnations.get(worker.incarnation)
        for start in worker.uses():
            key = GrantKey(ActionId(start.task, start.client, start.n), start.attempt)
            assert known is not None, f"{worker.incarnation} is forgotten and still runs {key}"
            assert key in known.grants, f"{worker.incarnation} runs {key} and holds no grant for it"
            grant = known.grants[key]
            assert (mask_of(start.gpus), start.service) == (grant.gpus, grant.service)
            amounts = {name: amount for name, amount in start.amounts.items() if name in ("cpu", "memory")}
            spent.setdefault(worker.host, Counter()).update(amounts)
    for host, amounts in spent.items():
        for name, amount in amounts.items():
            assert amount <= world.largest[host][name], f"{host.name}: {amount} of {name} in use"


def check_clients(state: State) -> None:
    assert state.tasks == Counter(task for task, _ in state.clients)
    for key, client in state.clients.items():
        open_ = sum(1 for action in state.actions if action[:2] == key)
        assert client.open == open_, f"{key}: {client.open} open, {open_} counted"
        assert all(n > client.contiguous for n in client.sparse)
        assert all(n >= client.done_below for n in client.cancelled_early)
        assert all(n >= client.done_below or n < client.others_below for n in client.ended)
        assert all(ActionId(*key, n) not in state.actions for n in client.ended)


def check_keys(state: State) -> None:
    """A key stands for an open action, for a session that lives, or for one that has ended not too long ago."""
    timers = {key for _, keys in state.timers._buckets.items() for kind, key in keys if kind == "key"}
    kept: set[tuple[str, str, str]] = set()
    for (task, name), client in state.clients.items():
        for key, bound in client.keys.items():
            first = ActionId(task, name, bound.n)
            assert (first in state.actions) == (bound.seq == 0), f"{key} of {first}: {bound}"
            if bound.seq == 0:
                assert state.actions[first].spec.key == key
            else:
                assert not bound.waiting
                if first in state.sessions:
                    assert state.sessions[first].phase is SessionPhase.OPEN
                else:
                    kept.add((task, name, key))
            for n in bound.waiting:
                assert state.actions[ActionId(task, name, n)].spec.key == key
    assert timers == kept


def check_owed(state: State) -> None:
    owed = state.owed
    for (action_id, nonce), result in owed.conflicts.items():
        assert result.nonce == nonce
        assert action_id not in state.actions or state.actions[action_id].spec.nonce != nonce, f"{action_id} is told off"
    for incarnation, key in owed.cancels:
        assert state.incarnations[incarnation].live
        assert key in state.incarnations[incarnation].grants, f"a cancel is owed for {key}, which holds nothing"
        assert not state.incarnations[incarnation].grants[key].holds_session, f"a cancel is owed for {key}, which has ended"
    for incarnation, _ in owed.ends:
        assert state.incarnations[incarnation].live
    for incarnation in owed.dismissals:
        holder = state.incarnations[incarnation]
        assert holder.live
        assert holder.draining
        assert not holder.grants, f"{incarnation} is to be dismissed and holds {list(holder.grants)}"
    for incarnation in owed.losses:
        assert not state.incarnations[incarnation].live


def check_window(world: World, window: Window) -> None:
    """What a pass has decided fits beside what is held, and follows arrival order between equals."""
    state = world.state
    check_quotas_of(world, window)
    check_chunks(state, window)
    free = {key: _free(state, host) for key, host in state.hosts.items()}
    taken: dict[HostKey, Counter[int]] = {key: _cores_taken(state, key) for key in state.hosts}
    seen: set[ActionId] = set()
    for decision in window.decisions:
        action, holder = decision.action, decision.holder
        assert action.id not in seen
        seen.add(action.id)
        assert holder.live
        assert state.incarnations[holder.id] is holder
        if action.session is not None:
            assert action.session.incarnation == holder.id
        else:
            assert holder.key == action.key
            assert not holder.draining, f"{action.id} is decided for {holder.id}, which drains"
        for name, amount in decision.amounts.items():
            if name == "cpu":
                assert all(holder.cores_mask >> core & 1 for core in decision.cores), "cores that it never offered"
                assert len(set(decision.cores)) == max(amount // WHOLE, 1)
                taken[holder.host].update(dict.fromkeys(decision.cores, min(amount, WHOLE)))
            elif name != "gpu" and name not in state.quotas:
                free[holder.host][name] -= amount
                assert free[holder.host][name] >= 0, f"{name} of {holder.host.name} is given beyond what there is"
        assert all(amount <= WHOLE for amount in taken[holder.host].values()), f"{taken[holder.host]}"
        check_amounts(decision.amounts, action)
    host_of = {decision.action.id: decision.holder.host for decision in window.decisions}
    evicted = set(window.evicted)
    assert not evicted & host_of.keys()
    for key, queue in state.queues.items():
        waiting: set[HostKey] = set()
        equals: set[object] = set()
        for action in queue:
            if "gpu" in key.resources:  # a chunk of another size may be free; between equals nobody overtakes
                equal = (action.spec.kind, tuple(action.spec.cost.items()), action.spec.hint, action.avoid, action.id.task)
                if action.id in host_of:
                    assert equal not in equals, f"{action.id} overtakes an equal"
                else:
                    equals.add(equal)
            elif action.id in host_of:
                assert host_of[action.id] not in waiting, f"{action.id} overtakes an equal"
            elif action.id not in evicted and not may_be_overtaken(state, action):
                # evicted: those were chosen for one host, and only there nothing overtakes them
                waiting |= {holder.host for holder in places(state, action)}


def may_be_overtaken(state: State, action: Action) -> bool:
    """A wide one that has not waited for long."""
    wide = action.spec.cost.get("cpu", NOTHING).low > WHOLE
    return (
        wide and POLICIES[state.policy].backfills and state.now_ns - action.ready_ns < setting(state, "patience_ms") * 1_000_000
    )


def check_chunks(state: State, window: Window) -> None:
    """GPUs that are given are free, aligned and the executor's own; the weights fit behind the evictions, one by one, and what
    runs or was just placed keeps its own."""
    used = {key: host.gpus.used for key, host in state.hosts.items()}
    copies = {key: {(c.service, c.gpus, c.holder): c.mib for c in host.gpus.copies} for key, host in state.hosts.items()}
    before = {key: set(names) for key, names in copies.items()}
    runs = {(g.service, g.gpus, i.id) for i in state.incarnations.values() for g in i.grants.values() if g.gpus}
    for decision in window.decisions:
        spec, holder = decision.action.spec, decision.holder
        key, mask = holder.host, mask_of(decision.gpus)
        assert ("gpu" in spec.cost) == bool(mask)
        if not mask:
            assert not decision.evicts
            continue
        demand = spec.cost["gpu"]
        assert is_chunk(mask)
        assert decision.units == decision.amounts["gpu"] == len(decision.gpus)
        assert demand.low <= len(decision.gpus) <= max(demand.low, demand.high)
        assert not demand.legal or len(decision.gpus) in demand.legal
        allowed = gpu_part(state, holder, decision.action.id.task)
        assert not mask & ~allowed, f"{decision.gpus} are not those of {holder.id}, or of the task"
        assert not mask & used[key], f"{decision.gpus} are in use"
        used[key] |= mask
        assert not spec.service or spec.service in holder.services
        made_room = 0  # what made room for an earlier start may be named again
        for each in decision.evicts:
            copy = (each.service, mask_of(each.gpus), holder.id)
            assert copy not in runs, f"{copy} runs and is evicted"
            assert copy in before[key]
            made_room += copies[key].pop(copy, None) is not None
        own = (spec.service, mask, holder.id)
        assert own not in copies[key] or not made_room, f"{own} is there and others make room"
        size, memory_mib = len(decision.gpus), state.hosts[key].gpus.memory_mib
        weights = -(-holder.services[spec.service].weights_mib // size) if spec.service else memory_mib
        copies[key].setdefault(own, weights)
        runs.add(own)
        for gpu in decision.gpus:
            full = sum(mib for (_, where, _), mib in copies[key].items() if where >> gpu & 1)
            assert full <= memory_mib, f"GPU {gpu} of {key.name} gets {full} MiB"


def check_amounts(amounts: dict[str, int], action: Action) -> None:
    for name, demand in action.spec.cost.items():
        got = amounts.get(name, 0)
        if name == "cpu" and action.session is not None and action.session.cores:
            assert not got
        elif name != "cpu" or action.opens is None:
            assert got == 0 or demand.low <= got <= max(demand.high, demand.low)
            assert not demand.legal or got in demand.legal


def _free(state: State, host: Host) -> Counter[str]:
    free = Counter(host.capacity)
    for incarnation in state.incarnations.values():
        if incarnation.host == host.key:
            for grant in incarnation.grants.values():
                names = grant.amounts.keys() - {"cpu", "gpu", *grant.quotas}
                free.subtract({name: grant.amounts[name] for name in names})
    return free


def _cores_taken(state: State, key: HostKey) -> Counter[int]:
    taken: Counter[int] = Counter()
    for incarnation in state.incarnations.values():
        for grant in incarnation.grants.values() if incarnation.host == key else ():
            if "cpu" in grant.amounts:
                taken.update(dict.fromkeys(grant.cores, min(grant.amounts["cpu"], WHOLE)))
    return taken


def places(state: State, action: Action) -> list[Incarnation]:
    """Live executors that have enough of all it asks for, were it alone there: its session's, or any that takes new work, on
    hosts that have not lost it if there are such."""
    found = []
    for holder in state.incarnations.values():
        new = action.session is None
        right = holder.key == action.key and not holder.draining if new else holder.id == action.session.incarnation
        capacity = Counter(state.hosts[holder.host].capacity)
        capacity.update({name: pool.limit.tokens or 1 << 40 for name, pool in state.quotas.items()})
        mine = part(state, state.hosts[holder.host], action.id.task)
        enough = fits(action, min(mine, holder.cores_mask.bit_count() * WHOLE), capacity, state)
        if holder.live and right and enough and ("gpu" not in action.spec.cost or chunks_for(state, holder, action)):
            found.append(holder)
    return [holder for holder in found if holder.host not in action.avoid] or found


def gpu_part(state: State, holder: Incarnation, task: str) -> int:
    """The GPUs of an executor that a task may have."""
    if not POLICIES[state.policy].splits:
        return holder.gpus
    counts = [host.gpus.all.bit_count() for host in state.hosts.values()]
    parts = parts_of(state, sum(counts))
    names = sorted(parts)
    owners = iter([name for name in names for _ in range(parts[name])])
    return holder.gpus & mask_of(
        [
            gpu
            for host in state.hosts.values()
            for gpu in cores_of(host.gpus.all)
            if next(owners) == task and host.key == holder.host
        ]
    )


def chunks_for(state: State, holder: Incarnation, action: Action) -> list[tuple[int, ...]]:
    """Where on the GPUs of an executor that are its task's an action could ever run."""
    own = gpu_part(state, holder, action.id.task)
    demand, service = action.spec.cost["gpu"], action.spec.service
    sizes = [size for size in (1, 2, 4, 8) if demand.low <= size <= max(demand.low, demand.high)]
    memory_mib = state.hosts[holder.host].gpus.memory_mib
    found = []
    for size in sizes:
        weights = -(-holder.services[service].weights_mib // size) if service in holder.services else 1 << 40 if service else 0
        if (not demand.legal or size in demand.legal) and weights <= memory_mib:
            every = [tuple(range(at, at + size)) for at in range(0, 64, size)]
            found += [chunk for chunk in every if not mask_of(chunk) & ~own]
    return found


def fits(action: Action, millicores: int, free: Counter[str], state: State) -> bool:
    cost = {name: demand.low for name, demand in action.spec.cost.items()}
    if action.session is not None and action.session.cores:
        cost.pop("cpu", None)
    if action.opens is not None and state.policy == "static-trajectory":
        cost["cpu"] = state.settings.get("static_units", 1) * WHOLE
    cost.pop("gpu", None)
    if any(name not in ("cpu", "memory") and name not in free for name in cost):
        return False  # a quota that is no more
    return all(low <= (millicores if name == "cpu" else free[name]) for name, low in cost.items())


def part(state: State, host: Host, task: str) -> int:
    """Millicores that the task may have there at most."""
    cores = host.pool.all.bit_count()
    if not POLICIES[state.policy].splits:
        return cores * WHOLE
    return parts_of(state, cores).get(task, 0) * WHOLE


def parts_of(state: State, units: int) -> dict[str, int]:
    """Whole units by weight, by task."""
    weights = state.shares or dict.fromkeys((task for task, _ in state.clients), 1)
    exact = {name: Fraction(units * weight, sum(weights.values())) for name, weight in weights.items()}
    over = sorted(exact, key=lambda name: (-(exact[name] % 1), name))[: units - sum(int(each) for each in exact.values())]
    return {name: int(each) + (name in over) for name, each in exact.items()}


def check_nothing_stalls(world: World) -> None:
    """At rest, the action that has waited longest for anything on an executor cannot have it now. (Services that own GPUs own
    those alone.)"""
    state = world.state
    assert not state.owed
    claimed: set[tuple[HostKey | None, str]] = set()
    for action in sorted((a for queue in state.queues.values() for a in queue), key=lambda a: a.order):
        limited = action.spec.cost.keys() & state.quotas.keys()
        names = {name for name, demand in action.spec.cost.items() if demand.low and name not in limited}
        if action.opens is not None:
            names |= {"cpu"}
        wants = {(None, name) for name in limited}
        found = places(state, action)
        for holder in found:
            if not others_wait(state, action) and not claimed & (wants | {(holder.host, name) for name in names}):
                assert not is_idle(state, holder, action), f"{action.id} waits beside idle {holder.id}"
        claimed |= {(holder.host, name) for holder in found for name in names}
        claimed |= wants if found else set()


def others_wait(state: State, action: Action) -> bool:
    """Whether others may go first, though they came later."""
    waiting = (other.id.task for queue in state.queues.values() for other in queue)
    return POLICIES[state.policy].by_task and any(task != action.id.task for task in waiting)


def is_idle(state: State, holder: Incarnation, action: Action) -> bool:
    """Whether an executor could begin an action now."""
    host = state.hosts[holder.host]
    free = _free(state, host)
    for name in action.spec.cost.keys() & state.quotas.keys():
        free[name] = (1 << 40) if state.quotas[name].fits(action.spec.cost[name].low, state.now_ns) else -1
    left = part(state, host, action.id.task) - host.parts.get(action.id.task, Part()).amounts.get("cpu", 0)
    if not fits(action, min(left, host.pool.free(holder.cores_mask).bit_count() * WHOLE), free, state):
        return False
    if "gpu" not in action.spec.cost:
        return True
    if state.policy == "static-service" and action.spec.service:
        return False
    others = {gpu for copy in host.gpus.copies if copy.holder != holder.id for gpu in cores_of(copy.gpus)}
    found = chunks_for(state, holder, action)
    if state.policy == "fixed-units":
        wanted = state.settings.get("fixed_units", 4)
        size = min((len(chunk) for chunk in found), key=lambda size: (abs(size - wanted), size), default=0)
        found = [chunk for chunk in found if len(chunk) == size]
    return any(not mask_of(chunk) & host.gpus.used and not others & set(chunk) for chunk in found)
