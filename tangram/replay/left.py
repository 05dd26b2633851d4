"""Why a pass left a ready action behind, in one sentence. Pure."""

from collections.abc import Container
from itertools import islice
from typing import Final, NamedTuple

from tangram import messages as m
from tangram.replay.reasons import short
from tangram.replay.told import amount, count, ranges
from tangram.scheduler.candidates import Candidates, Decision, Room
from tangram.scheduler.policies import charge
from tangram.scheduler.quotas import FULL
from tangram.scheduler.state import Action, ActionId, HostKey, Incarnation, Phase, State
from tangram.scheduler.window import Window

NAMED_MAX: Final = 3
"""Of those that were before it."""
LOOKED_AT_MAX: Final = 1_000
"""Of a queue; a long one is gone through in every pass."""


class Left(NamedTuple):
    """Why a pass left a ready action behind. reason: executor (there is none that could ever run it), quota, evicted (so that the
    others get more), choice (another place is worth the waiting), short (there was no room), taken (by those of this pass), kept
    (for one before it that waits for more), or queue (it does not overtake those before it)."""

    reason: str
    text: str


def left_behind(state: State, window: Window, found: Candidates, action: Action) -> Left | None:
    """None if the pass started it. found: what it saw (`window.consider`)."""
    if any(decision.action is action for decision in window.decisions):
        return None
    cost = charge(state, action)
    on_gpus = "gpu" in cost
    if action.id in window.evicted:
        if on_gpus:
            return Left("choice", f"it could have started, but waits for a better place; {_before(state, window, action, None)}")
        more = [each for each in window.decisions if each.units > 1]
        wide = f": {', '.join(_named(each) for each in more[-NAMED_MAX:])}" if more else ""
        return Left("evicted", f"there was room for its minimum, but those before it end sooner with more{wide}")
    holders = _able(state, found, action, cost)
    if not holders:
        return Left("executor", f"no executor that lives could ever run it: it needs {_needs(cost)}")
    if not found.quotas.lets_through(cost):
        return Left("quota", f"{_quotas(state, cost)}; {_before(state, window, action, None)}")
    rooms = {holder.host: found.room(holder.host) for holder in holders}
    before = _before(state, window, action, rooms)
    lacking = {key: short(room.host, cost, state.quotas) for key, room in rooms.items()}
    if all(lacking.values()):
        best = max(lacking, key=lambda key: _free(rooms[key], cost))
        others = f", and no more on {count(len(rooms) - 1, 'other host')}" if len(rooms) > 1 else ""
        return Left("short", f"{lacking[best]} on {best.name}{others}; {before}")
    is_free = any(_has(rooms[holder.host], holder, cost, state.quotas) for holder in holders)
    is_open = any(found.has_room(action, holder, cost) for holder in holders)
    waiting = _first_waiting(state, window, action, rooms)
    if is_free and not is_open and waiting is not None:
        return Left("kept", f"what is free is kept for {waiting.id}, which waits for {_needs(charge(state, waiting))}; {before}")
    if not is_open:
        return Left("taken", f"it needs {_needs(cost)}, which this pass gave to those before it; {before}")
    return Left("queue", f"it does not overtake those before it that wait for the same; {before}")


def _able(state: State, found: Candidates, action: Action, cost: dict[str, m.Demand]) -> list[Incarnation]:
    if action.session is not None:
        bound = [state.incarnations[action.session.incarnation]] if action.session.incarnation in state.incarnations else []
    else:
        bound = found.takers_of(action)
    return [each for each in bound if found.could_run(each, action, cost)]


def _needs(cost: dict[str, m.Demand]) -> str:
    return ", ".join(amount(name, demand.low) for name, demand in cost.items()) or "nothing"


def _has(room: Room, holder: Incarnation, cost: dict[str, m.Demand], quotas: Container[str]) -> bool:
    """Whether all that it needs is free behind what the pass has started."""
    free_gpus = room.host.gpus.free.bit_count() - sum(len(each.gpus) for each in room.decisions)
    return all(
        room.pool.fits(demand.low, holder.cores_mask)
        if name == "cpu"
        else demand.low <= (free_gpus if name == "gpu" else room.free.get(name, 0))
        for name, demand in cost.items()
        if demand.low and name not in quotas
    )


def _free(room: Room, cost: dict[str, m.Demand]) -> int:
    host = room.host
    return host.gpus.free.bit_count() if "gpu" in cost else host.pool.free().bit_count()


def _quotas(state: State, cost: dict[str, m.Demand]) -> str:
    words = []
    for name, demand in cost.items():
        pool = state.quotas.get(name)
        if pool is None:
            continue
        limit = pool.limit
        if limit.concurrency:
            words.append(f"quota {name}: {pool.in_use} of {limit.concurrency} places taken")
        if limit.requests:
            made = f"{limit.burst} at once" if limit.burst else f"{len(pool.taken)} made"
            words.append(f"quota {name}: {limit.requests} requests in {limit.interval_ms / 1e3:g} s, {made}")
        if limit.tokens:
            words.append(f"quota {name}: needs {demand.low} tokens, {limit.tokens - pool.out} of {limit.tokens} left")
        if (share := pool.share_at(state.now_ns)) < FULL:
            words.append(f"quota {name}: {share / FULL:.0%} of that, since it was refused")
    return ", ".join(words)


def _before(state: State, window: Window, action: Action, rooms: dict[HostKey, Room] | None) -> str:
    """Who this pass started there, and who waits before it."""
    decided = [each for each in window.decisions if rooms is None or each.holder.host in rooms]
    waiting = [each for each in _waiting(state, window, action, rooms) if each is not action]
    more = " or more" if len(waiting) >= LOOKED_AT_MAX else ""
    started = f"{len(decided)} started ({', '.join(map(_named, decided[:NAMED_MAX]))})" if decided else "nobody started"
    names = ", ".join(str(each.id) for each in waiting[:NAMED_MAX]) + (", ..." if len(waiting) > NAMED_MAX else "")
    return f"{started}, {f'{len(waiting)}{more} before it wait ({names})' if waiting else 'nobody waits before it'}"


def _waiting(state: State, window: Window, action: Action, rooms: dict[HostKey, Room] | None) -> list[Action]:
    """READY, of its kind of executor, came before it, not started by this pass; on hosts that it could use. In arrival order."""
    started: set[ActionId] = {each.action.id for each in window.decisions}
    found = []
    for key, queue in state.queues.items():
        if key.key != action.key or (rooms is not None and key.host is not None and key.host not in rooms):
            continue
        for each in islice(queue, LOOKED_AT_MAX):
            if each.order >= action.order:
                break
            if each.id not in started and each.phase is Phase.READY:
                found.append(each)
    return sorted(found, key=lambda each: each.order)


def _first_waiting(state: State, window: Window, action: Action, rooms: dict[HostKey, Room]) -> Action | None:
    """The first before it that needs something that it needs too."""
    mine = charge(state, action)
    return next((each for each in _waiting(state, window, action, rooms) if mine.keys() & charge(state, each).keys()), None)


def _named(decision: Decision) -> str:
    start = decision.gpus or decision.cores
    if not start:
        return str(decision.action.id)
    return f"{decision.action.id}: {count(len(start), 'GPU' if decision.gpus else 'core')} {ranges(start)}"
