"""The state as bytes and back, so that the log behind it can go: `load(dump(state))` folds on as `state` would. Pure.

Every field of the dataclasses in `state` is written; objects that hold one another are written once, by their id. Dicts
keep their order, because the core walks them. A field added later gets its default from an older checkpoint.
"""

from dataclasses import MISSING, fields
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from tangram.errors import TangramError
from tangram.scheduler import parts
from tangram.scheduler import state as s
from tangram.scheduler.cores import CorePool
from tangram.scheduler.ready import ReadyQueue
from tangram.scheduler.timers import Key, Timers

FORMAT: Final = 1
"""Rises when an older version could not read what `dump` writes."""


class UnreadableCheckpoint(TangramError):
    """Not a checkpoint, or not one of this format."""


class _Pool(msgspec.Struct, array_like=True):
    nodes: list[bytes]
    used: bytes
    shared: dict[int, int]


class _Queue(msgspec.Struct, array_like=True):
    key: s.QueueKey
    actions: list[s.ActionId]


class _Bucket(msgspec.Struct, array_like=True):
    bucket: int
    keys: list[tuple[str, Any]]


def _saved(cls: type[Any], **stands_for: Any) -> Any:
    """A struct with the fields of a dataclass, some with another type; None leaves one out."""
    hints = get_type_hints(cls, vars(s))
    columns: list[tuple[str, Any, Any]] = []
    for each in fields(cls):
        kind = stands_for.get(each.name, hints[each.name])
        if kind is None:
            continue
        if each.default_factory is not MISSING:
            columns.append((each.name, kind, msgspec.field(default_factory=each.default_factory)))
        else:
            columns.append((each.name, kind, msgspec.NODEFAULT if each.default is MISSING else each.default))
    return msgspec.defstruct(f"Saved{cls.__name__}", columns, kw_only=True, omit_defaults=True)


_Action: Any = _saved(s.Action, session=s.ActionId | None, opens=s.ActionId | None)
_Session: Any = _saved(s.Session, waiting=list[s.ActionId])
_Grant: Any = _saved(s.Grant, session=s.ActionId | None)
_Incarnation: Any = _saved(s.Incarnation, nodes=list[bytes], cores_mask=bytes, grants=list[_Grant], sessions=list[s.ActionId])
_Host: Any = _saved(s.Host, pool=_Pool, live=list[str])
_State: Any = _saved(
    s.State,
    actions=list[_Action],
    sessions=list[s.ActionId],
    incarnations=list[_Incarnation],
    hosts=list[_Host],
    queues=list[_Queue],
    timers=list[_Bucket],
    tasks=None,
    story=None,
)


_Checkpoint: Any = msgspec.defstruct("Checkpoint", [("format", int), ("state", _State), ("sessions", list[_Session])])
"""`sessions` are all that anything still refers to, among them ended ones."""


class _Head(msgspec.Struct):
    format: int = 0


# --- writing -----------------------------------------------------------------------------------------------------


def dump(state: s.State) -> bytes:
    """The bytes of one state, between two steps."""
    sessions: dict[s.ActionId, s.Session] = dict(state.sessions)
    for action in state.actions.values():
        for session in (action.session, action.opens):
            if session is not None:
                sessions.setdefault(session.id, session)
    for holder in state.incarnations.values():
        for grant in holder.grants.values():
            if grant.session is not None:
                sessions.setdefault(grant.session.id, grant.session)
    saved = _State(
        **_plain(state, "actions", "sessions", "incarnations", "hosts", "queues", "timers", "tasks", "story"),
        actions=[
            _Action(**_plain(action, "session", "opens"), session=_id(action.session), opens=_id(action.opens))
            for action in state.actions.values()
        ],
        sessions=list(state.sessions),
        incarnations=[_incarnation(holder) for holder in state.incarnations.values()],
        hosts=[
            _Host(**_plain(host, "pool", "live"), pool=_pool(host.pool), live=[holder.id for holder in host.live])
            for host in state.hosts.values()
        ],
        queues=[_Queue(key, [action.id for action in queue]) for key, queue in state.queues.items()],
        timers=[_Bucket(bucket, keys) for bucket, keys in state.timers.pending()],
    )
    waiting = [
        _Session(**_plain(session, "waiting"), waiting=[action.id for action in session.waiting]) for session in sessions.values()
    ]
    return msgspec.msgpack.encode(_Checkpoint(format=FORMAT, state=saved, sessions=waiting))


def _plain(thing: Any, *leave_out: str) -> dict[str, Any]:
    return {each.name: getattr(thing, each.name) for each in fields(thing) if each.name not in leave_out}


def _id(session: s.Session | None) -> s.ActionId | None:
    return None if session is None else session.id


def _incarnation(holder: s.Incarnation) -> Any:
    return _Incarnation(
        **_plain(holder, "nodes", "cores_mask", "grants", "sessions"),
        nodes=[_bytes(node) for node in holder.nodes],
        cores_mask=_bytes(holder.cores_mask),
        grants=[_Grant(**_plain(grant, "session"), session=_id(grant.session)) for grant in holder.grants.values()],
        sessions=list(holder.sessions),
    )


def _pool(pool: CorePool) -> _Pool:
    return _Pool([_bytes(node) for node in pool.nodes], _bytes(pool.used), pool.shared)


def _bytes(mask: int) -> bytes:
    """msgpack's integers have 64 bits; a host may have more cores."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


# --- reading -----------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    actions: dict[s.ActionId, s.Action]
    sessions: dict[s.ActionId, s.Session]


def load(data: bytes) -> s.State:
    """The state that `dump` has written. Raises UnreadableCheckpoint."""
    try:
        written = msgspec.msgpack.decode(data, type=_Head).format
        if written != FORMAT:
            raise UnreadableCheckpoint(f"it has format {written}, this version reads {FORMAT}")
        return _load(msgspec.msgpack.decode(data, type=_Checkpoint))
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise UnreadableCheckpoint(f"it cannot be read: {type(error).__name__}: {error}") from None


def _load(saved: Any) -> s.State:
    sessions = {each.id: s.Session(**_fields(each, "waiting")) for each in saved.sessions}
    actions = {
        each.id: s.Action(
            **_fields(each, "session", "opens"),
            session=sessions[each.session] if each.session is not None else None,
            opens=sessions[each.opens] if each.opens is not None else None,
        )
        for each in saved.state.actions
    }
    known = _Known(actions, sessions)
    for each in saved.sessions:
        sessions[each.id].waiting.extend(actions[n] for n in each.waiting)
    incarnations = {each.id: _read_incarnation(each, known) for each in saved.state.incarnations}
    queues: dict[s.QueueKey, ReadyQueue[s.Action]] = {}
    for queue in saved.state.queues:
        made = queues[queue.key] = ReadyQueue()
        for n in queue.actions:
            made.add(actions[n].order, actions[n])
    state = s.State(
        **_fields(saved.state, "actions", "sessions", "incarnations", "hosts", "queues", "timers"),
        actions=actions,
        sessions={n: sessions[n] for n in saved.state.sessions},
        incarnations=incarnations,
        hosts={each.key: _read_host(each, incarnations) for each in saved.state.hosts},
        queues=queues,
        timers=Timers.restored([(each.bucket, [_timer(*key) for key in each.keys]) for each in saved.state.timers]),
    )
    for task, _ in state.clients:
        state.tasks[task] = state.tasks.get(task, 0) + 1
    if not any(host.parts for host in state.hosts.values()):
        parts.recount(state)
    return state


def _fields(saved: Any, *leave_out: str) -> dict[str, Any]:
    return {name: getattr(saved, name) for name in saved.__struct_fields__ if name not in leave_out}


def _read_incarnation(saved: Any, known: _Known) -> s.Incarnation:
    grants = [
        s.Grant(**_fields(each, "session"), session=known.sessions[each.session] if each.session is not None else None)
        for each in saved.grants
    ]
    return s.Incarnation(
        **_fields(saved, "nodes", "cores_mask", "grants", "sessions"),
        nodes=tuple(int.from_bytes(node, "little") for node in saved.nodes),
        cores_mask=int.from_bytes(saved.cores_mask, "little"),
        grants={grant.key: grant for grant in grants},
        sessions={n: known.sessions[n] for n in saved.sessions},
    )


def _read_host(saved: Any, incarnations: dict[str, s.Incarnation]) -> s.Host:
    nodes = tuple(int.from_bytes(node, "little") for node in saved.pool.nodes)
    pool = CorePool(nodes, int.from_bytes(saved.pool.used, "little"), saved.pool.shared)
    return s.Host(**_fields(saved, "pool", "live"), pool=pool, live=[incarnations[n] for n in saved.live])


def _timer(kind: str, key: Any) -> Key:
    """Ids travel as lists, and are looked up by tuples."""
    return kind, s.ActionId(*key) if len(key) == len(s.ActionId._fields) else tuple(key)
