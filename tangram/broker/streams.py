"""Bringing a server's streams to what is declared: what differs, what that would cost, and doing it.

Never deletes a stream: what the server cannot change in place (storage, retention, deny_* once set) is an error that says
how to do it by hand, forced or not.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tangram.broker.connection import Broker
from tangram.broker.declared import StreamDeclaration, load_declared
from tangram.broker.errors import ApiError, BrokerError

_STREAM_NOT_FOUND = 10059
_NO_STORAGE = 10047
_UNCHANGEABLE: Final = frozenset({"storage", "retention"})
_IRREVERSIBLE: Final = frozenset({"deny_delete", "deny_purge"})
_RESERVE: Final = "tangram-max-bytes"
"""In the stream's metadata: its max_bytes without what was lent."""
_GIVEN: Final = "tangram-given-max-bytes"
_RECORDED: Final = "tangram-recorded-through"
"""Up to which sequence a stream holds what was recorded elsewhere."""
_UNLIMITED: Final = {"max_bytes": -1, "max_msgs": -1, "max_msgs_per_subject": -1, "max_age": 0}
"""Limits whose lowering deletes messages, and the value that means none."""
_ABSENT: Final[dict[str, object]] = {"republish": None, "description": "", "max_age": 0}
"""What the server leaves out when it is the default; anything else absent is False."""


class Difference(NamedTuple):
    """`field` is "" when the whole stream is missing. `destructive`: applying it may lose messages or durability, or refuse
    what is accepted now. `in_place`: the server can change it."""

    stream: str
    field: str
    declared: object
    actual: object
    destructive: bool
    in_place: bool = True

    def __str__(self) -> str:
        if not self.field:
            return f"{self.stream}: missing"
        note = "" if self.in_place else " (cannot be changed in place)"
        warning = " (destructive)" if self.destructive else ""
        return f"{self.stream}: {self.field} {self.actual!r} -> {self.declared!r}{warning}{note}"


class DestructiveChange(BrokerError):
    """Applying would lose messages or durability. `differences` are those in the way; nothing was changed."""

    def __init__(self, differences: list[Difference], advice: str) -> None:
        self.differences = differences
        super().__init__("; ".join(map(str, differences)) + f". {advice}")


async def diff(
    broker: Broker,
    *,
    declared: Sequence[StreamDeclaration] | None = None,
    replicas: int | None = None,
    max_bytes: Mapping[str, int] | None = None,
) -> list[Difference]:
    """What applying would change, by stream and field. `replicas` and `max_bytes` (bytes by stream) override the files, then
    and whenever it is applied without them.

    Raises DeclarationError, ApiError, BrokerUnavailable, BrokerTimeout.
    """
    found: list[Difference] = []
    for config in _wanted(declared, replicas, max_bytes):
        info = await _info(broker, config["name"])
        _keep_given_size(config, info, max_bytes)
        found += _differences(config, info)
    return found


async def apply(
    broker: Broker,
    *,
    force: bool = False,
    declared: Sequence[StreamDeclaration] | None = None,
    replicas: int | None = None,
    max_bytes: Mapping[str, int] | None = None,
) -> list[str]:
    """Makes what is missing, changes what differs; returns a line per stream. Applying twice says "unchanged".

    Looks at everything first: raises DestructiveChange, with nothing changed, for destructive differences unless `force`,
    and also with `force` for those that the server cannot change in place. Raises as `diff` otherwise.
    """
    plan: list[tuple[dict[str, Any], dict[str, Any] | None, list[Difference]]] = []
    for config in _wanted(declared, replicas, max_bytes):
        info = await _info(broker, config["name"])
        _keep_given_size(config, info, max_bytes)
        plan.append((config, info, _differences(config, info)))
    everything = [difference for _, _, differences in plan for difference in differences]
    impossible = [difference for difference in everything if not difference.in_place]
    if impossible:
        raise DestructiveChange(
            impossible,
            "The server cannot change this in place. Save what you need of the stream, delete it by hand, and apply again;"
            " nothing is deleted for you",
        )
    destructive = [difference for difference in everything if difference.destructive]
    if destructive and not force:
        raise DestructiveChange(destructive, "Use --force if you mean it")
    return [await _do(broker, config, info, differences) for config, info, differences in plan]


async def _do(broker: Broker, config: dict[str, Any], info: dict[str, Any] | None, differences: list[Difference]) -> str:
    name = config["name"]
    if not differences:
        return f"{name}: unchanged"
    try:
        if info is None:
            await broker.api(f"STREAM.CREATE.{name}", {key: value for key, value in config.items() if value is not None})
            return f"{name}: created"
        updated = {**info["config"], **config}
        if has_reserve(info):  # what is lent stays until it is taken back, to what the size is then
            updated["max_bytes"] = max(config["max_bytes"], info["config"]["max_bytes"])
            updated["metadata"] = {**updated["metadata"], _RESERVE: str(config["max_bytes"])}
        await broker.api(f"STREAM.UPDATE.{name}", {key: value for key, value in updated.items() if value is not None})
    except ApiError as error:
        if error.code == _NO_STORAGE:
            wanted = f"{config['max_bytes'] >> 20} MiB"
            raise ApiError(error.code, f"{name}: the server has no {wanted} to give; declare a smaller max_bytes") from error
        raise
    return f"{name}: changed " + ", ".join(difference.field for difference in differences)


async def purge(broker: Broker, stream: str, *, before_seq: int | None = None, subject: str | None = None) -> int:
    """Deletes what stands before a sequence, or on a subject (may have wildcards); returns how many messages went.

    Raises ApiError and as `Broker.request`.
    """
    body = {"seq": before_seq, "filter": subject}
    answer = await broker.api(f"STREAM.PURGE.{stream}", {key: value for key, value in body.items() if value is not None})
    return int(answer["purged"])


async def begin_recorded(broker: Broker, stream: str, first_seq: int, through_seq: int) -> None:
    """Makes an empty stream begin at a sequence, for messages from elsewhere that keep their stamps (`recorded_ns`).

    Raises ApiError and as `Broker.request`.
    """
    config = dict((await broker.api(f"STREAM.INFO.{stream}"))["config"])
    config["metadata"] = {**config.get("metadata", {}), _RECORDED: str(through_seq)}
    await broker.api(f"STREAM.UPDATE.{stream}", config)
    if first_seq > 1:
        await purge(broker, stream, before_seq=first_seq)


def recorded_through(info: Mapping[str, Any]) -> int:
    """The last sequence of a stream (`info` is its STREAM.INFO) that was recorded elsewhere; 0 if none was."""
    return int((info["config"].get("metadata") or {}).get(_RECORDED, 0))


async def lend_reserve(broker: Broker, info: Mapping[str, Any], reserve_bytes: int) -> None:
    """Makes a stream (`info` is its STREAM.INFO) larger for a while; 0 takes the reserve back.

    What it had before stands in its metadata, so whoever comes next knows. Raises ApiError (no storage left) and as
    `Broker.request`.
    """
    config = dict(info["config"])
    own_bytes = bytes_limit(info)
    metadata = {key: value for key, value in config.get("metadata", {}).items() if key != _RESERVE}
    if reserve_bytes:
        metadata[_RESERVE] = str(own_bytes)
    config |= {"max_bytes": own_bytes + reserve_bytes, "metadata": metadata}
    await broker.api(f"STREAM.UPDATE.{config['name']}", config)


def bytes_limit(info: Mapping[str, Any]) -> int:
    """max_bytes of a stream without what was lent; -1 if it has no limit."""
    config = info["config"]
    return int(config.get("metadata", {}).get(_RESERVE, config["max_bytes"]))


def has_reserve(info: Mapping[str, Any]) -> bool:
    return _RESERVE in info["config"].get("metadata", {})


def _wanted(
    declared: Sequence[StreamDeclaration] | None, replicas: int | None, max_bytes: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    configs = [declaration.config() for declaration in (load_declared() if declared is None else declared)]
    unknown = set(max_bytes or ()) - {str(config["name"]) for config in configs}
    if unknown:
        raise BrokerError(f"max_bytes given for streams that are not declared: {', '.join(sorted(unknown))}")
    for config in configs:
        if replicas is not None:  # else what the server has stays
            config["num_replicas"] = replicas
        if max_bytes is not None and config["name"] in max_bytes:
            config["max_bytes"] = max_bytes[str(config["name"])]
    return configs


def _keep_given_size(config: dict[str, Any], info: dict[str, Any] | None, max_bytes: Mapping[str, int] | None) -> None:
    """A size that was given by hand is noted in the stream's metadata, and stays when it is applied without one."""
    metadata = {} if info is None else dict(info["config"].get("metadata") or {})
    given = (max_bytes or {}).get(config["name"])
    if given is not None:
        config["metadata"] = {**metadata, _GIVEN: str(given)}
    elif _GIVEN in metadata:
        config["max_bytes"] = int(metadata[_GIVEN])


async def _info(broker: Broker, name: str) -> dict[str, Any] | None:
    try:
        return await broker.api(f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.code == _STREAM_NOT_FOUND:
            return None
        raise


def _differences(config: dict[str, Any], info: dict[str, Any] | None) -> list[Difference]:
    name = config["name"]
    if info is None:
        return [Difference(name, "", config, None, destructive=False)]
    found = []
    for field, declared in config.items():
        if field == "metadata":
            continue
        actual: Any = bytes_limit(info) if field == "max_bytes" else _actual(info["config"], field)
        if field == "subjects":
            if sorted(declared) != sorted(actual):
                found.append(Difference(name, field, declared, actual, destructive=bool(set(actual) - set(declared))))
        elif declared != actual:
            in_place = field not in _UNCHANGEABLE and not (field in _IRREVERSIBLE and actual)
            keeps = field == "max_bytes" and has_reserve(info)  # it stays as large as it is until the reserve is taken back
            destructive = not in_place or (not keeps and _is_destructive(field, declared, actual, info["state"]))
            found.append(Difference(name, field, declared, actual, destructive, in_place))
    return found


def _actual(config: dict[str, Any], field: str) -> Any:
    if field == "republish" and config.get("republish"):
        return {"src": config["republish"].get("src", ""), "dest": config["republish"]["dest"]}
    return config.get(field, _ABSENT.get(field, False))


def _is_destructive(field: str, declared: Any, actual: Any, state: dict[str, Any]) -> bool:
    if field == "max_bytes":  # lowering it above what is in use deletes nothing
        return bool(declared != -1 and declared < state["bytes"])
    if field == "max_msgs":
        return bool(declared != -1 and declared < state["messages"])
    if field in _UNLIMITED:
        none = _UNLIMITED[field]
        return bool(declared != none and (actual == none or declared < actual))
    if field == "num_replicas":
        return bool(declared < actual)
    if field == "republish":
        return actual is not None  # somebody may be subscribed there
    if field == "max_msg_size":
        return bool(declared != -1 and (actual == -1 or declared < actual))
    return bool(field == "discard" and declared == "old")
