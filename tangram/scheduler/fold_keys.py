"""The caller's own keys: what is submitted again under one is not run again. Called by `fold.step` alone.

A key belongs to one client (task and name). It stands for the first action that was submitted with it: while that is open,
then KEY_TTL_NS longer, or as long as its session lives; that of a session.open exactly as long as the session. A rejected
action binds no key.
"""

import hashlib

from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.fold_actions import move, owe
from tangram.scheduler.state import Action, ActionId, Bound, Client, Phase, State


def body_of(action: Action, payload: m.Payload | None) -> bytes:
    """A hash of what is asked for, whoever asks and whenever. payload: None if it travels apart; the spec then names it."""
    spec = replace(action.spec, nonce=bytes(limits.NONCE_BYTES), traceparent="")
    return hashlib.blake2b(m.encode([action.key, spec, payload]), digest_size=16).digest()


def bind(state: State, client: Client, action: Action, payload: m.Payload | None) -> bool:
    """The first action of a key. Returns whether the client may have one more."""
    if len(client.keys) >= limits.KEYS_PER_CLIENT_MAX:
        return False
    client.keys[action.spec.key] = Bound(action.id.n, body_of(action, payload), action.spec.session)
    state.story.append(f"key bound {action.id}")
    return True


def follow(state: State, action: Action, first: Bound) -> None:
    """A later action of a key: it shares the outcome of the first, now or when there is one."""
    if first.seq:
        _share(state, action, first)
    else:
        move(action, Phase.WAITING)
        first.waiting[action.id.n] = None
        state.story.append(f"follows {action.id} {first.n}")


def _share(state: State, action: Action, first: Bound) -> None:
    owe(state, action, first.outcome)
    ruling = state.owed.rulings[action.id]
    state.owed.rulings[action.id] = replace(ruling, same_as=first.n, at_seq=first.seq)


def finished(state: State, action: Action, outcome: Outcome) -> None:
    """An action with a key has its outcome, in the message that is being folded."""
    task, name, n = action.id
    client = state.clients.get((task, name))
    first = client.keys.get(action.spec.key) if client is not None else None
    if client is None or first is None:
        return
    if first.n != n:
        first.waiting.pop(n, None)
        return
    first.seq, first.outcome = state.seq, outcome
    for later in first.waiting:
        following = state.actions.get(ActionId(task, name, later))
        if following is not None and following.phase is Phase.WAITING:  # else it was cancelled
            _share(state, following, first)
    first.waiting.clear()
    if outcome is Outcome.REJECTED or (action.opens is not None and action.id not in state.sessions):
        del client.keys[action.spec.key]
        state.story.append(f"key free {action.id}")
    elif action.opens is None:
        state.timers.set(("key", (task, name, action.spec.key)), state.now_ns + limits.KEY_TTL_NS)


def expired(state: State, task: str, name: str, key: str) -> None:
    """A key has been remembered for long enough, unless its session lives on."""
    client = state.clients[(task, name)]
    session = client.keys[key].session
    if session and ActionId(task, name, session) in state.sessions:
        state.timers.set(("key", (task, name, key)), state.now_ns + limits.KEY_TTL_NS)
    else:
        del client.keys[key]
        state.story.append("key free")
