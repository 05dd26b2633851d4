"""From what a caller writes to what travels: pure, and every mistake is an InvalidRequest that names its field."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Final, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.errors import InvalidRequest
from tangram.rules import HOST_RESOURCES, broken_rule
from tangram.subjects import token

Units = int | float | tuple[int, int] | Set[int]
"""Whole cores; a fraction below 1; (least, most); or a set of legal amounts."""
Parallel = float | Mapping[int, float] | Callable[[int], float]
"""The part of the run time that scales (0 to 1); seconds by units; or what says the seconds for a number of units."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_MILLI: Final = 1000
_HEAVY_FIELD_BYTES: Final = 64
"""More than a field's name and the length of its bytes take."""
_HEAVY: Final[dict[type[m.Payload], str]] = {
    m.Run: "stdin",
    m.FileWrite: "data",
    m.Score: "batch",
    m.Call: "body",
}
"""The field of a payload that can be large."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|[KMGT]i?B?|[kmgt])")
_MIB_OF: Final = {"": 1.0, "k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024.0}


def memory_mib(value: int | str) -> int:
    """MiB from an int (MiB) or a text such as "512MiB", "2GiB", "1.5g". Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest("memory", 'must be MiB or a text such as "2GiB"', value)
    if isinstance(value, int):
        mib = float(value) if 0 <= value <= limits.AMOUNT_MAX else -1.0 if value < 0 else math.inf
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise InvalidRequest("memory", 'must be MiB or a text such as "2GiB"', value)
        mib = float(match[1]) * _MIB_OF[match[2][:1].lower()]
    if not 1 <= mib <= limits.AMOUNT_MAX:
        raise InvalidRequest("memory", f"must be 1 to {limits.AMOUNT_MAX} MiB", value)
    return -int(-mib // 1)


def quotas(value: object) -> dict[str, m.Demand]:
    """The demands of {name: tokens}. Raises InvalidRequest."""
    if not isinstance(value, Mapping):
        raise InvalidRequest("quotas", "must be a dict of tokens by name", value)
    found = {}
    for name, tokens in value.items():
        token(name, "quotas")
        if name in HOST_RESOURCES:
            raise InvalidRequest("quotas", f"{name} is no quota", value)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= limits.AMOUNT_MAX:
            raise InvalidRequest("quotas", f"the tokens of {name} must be a whole number, 0 to {limits.AMOUNT_MAX}", tokens)
        found[name] = m.Demand(low=tokens)
    if len(found) > limits.RESOURCES_PER_ACTION_MAX - 2:  # beside cpu and memory
        raise InvalidRequest("quotas", f"must be at most {limits.RESOURCES_PER_ACTION_MAX - 2}", value)
    return found


def cpu(units: Units) -> m.Demand | None:
    """The demand in millicores; None for no cpu at all. Raises InvalidRequest."""
    if isinstance(units, bool):
        _bad_units(units)
    if isinstance(units, int):
        if not 0 <= units <= limits.AMOUNT_MAX // _MILLI:
            _bad_units(units)
        return m.Demand(low=units * _MILLI) if units else None
    if isinstance(units, float):
        if not (0.01 <= units < 1 or (1 <= units <= limits.AMOUNT_MAX / _MILLI and units.is_integer())):
            _bad_units(units)
        return m.Demand(low=min(round(units * _MILLI), _MILLI - 1) if units < 1 else int(units) * _MILLI)
    if not isinstance(units, Collection) or isinstance(units, str | bytes | Mapping):
        _bad_units(units)
    _check_length("units", units, limits.LEGAL_AMOUNTS_MAX)
    amounts = list(units)
    if not amounts or any(
        isinstance(a, bool) or not isinstance(a, int) or not 1 <= a <= limits.AMOUNT_MAX // _MILLI for a in amounts
    ):
        _bad_units(units)
    if isinstance(units, list):
        raise InvalidRequest("units", "must be a tuple for a range, (least, most), or a set of legal amounts", units)
    if isinstance(units, tuple):
        if len(amounts) != 2 or amounts[0] > amounts[1]:
            _bad_units(units)
        return m.Demand(low=amounts[0] * _MILLI, high=amounts[1] * _MILLI)
    legal = sorted(set(amounts))
    if len(legal) == 1:
        return m.Demand(low=legal[0] * _MILLI)
    return m.Demand(low=legal[0] * _MILLI, high=legal[-1] * _MILLI, legal=tuple(a * _MILLI for a in legal))


def gpus(units: Units) -> m.Demand:
    """The demand in GPUs. Raises InvalidRequest."""
    demand = None if isinstance(units, float) else cpu(units)
    if demand is None:
        raise InvalidRequest("units", "must be 1, 2, 4 or 8 GPUs, or (least, most) or a set of them", units)
    return m.Demand(
        low=demand.low // _MILLI, high=demand.high // _MILLI, legal=tuple(amount // _MILLI for amount in demand.legal)
    )


def arguments(value: Mapping[str, object] | None) -> bytes:
    """What a call says, as it travels. Raises InvalidRequest."""
    if value is None:
        return m.Call().arguments
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequest("arguments", "must be a dict of values by name", value)
    try:
        return msgspec.msgpack.encode(dict(value))
    except _NOT_ENCODED as error:
        raise InvalidRequest("arguments", f"cannot be sent: {error}"[: limits.DETAIL_LENGTH_MAX]) from None


def batch(items: Sequence[object]) -> bytes:
    """What is to be scored, as it travels. Raises InvalidRequest."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | bytearray | memoryview):
        raise InvalidRequest("batch", "must be a list of what the service scores", items)
    try:
        return msgspec.msgpack.encode(list(items))
    except _NOT_ENCODED as error:
        raise InvalidRequest("batch", f"cannot be sent: {error}"[: limits.DETAIL_LENGTH_MAX]) from None


def _check_length(field: str, values: Collection[object], most: int) -> None:
    """Before they are gone through: a range can have any number of them."""
    try:
        if len(values) <= most:
            return
    except OverflowError:
        pass
    raise InvalidRequest(field, f"must be at most {most}", values)


def _bad_units(units: object) -> NoReturn:
    raise InvalidRequest("units", "must be whole cores, a fraction of 0.01 to 0.99, (least, most), or a set of amounts", units)


def milliseconds(field: str, seconds: float, low: int = 0, high: int = limits.DEADLINE_MS_MAX) -> int:
    """Whole milliseconds, rounded up. Raises InvalidRequest if they are not `low` to `high`."""
    if _is_number(seconds) and 0 <= seconds <= high / 1000:  # nan fails this too
        rounded = -int(-seconds * 1000 // 1)
        if low <= rounded:
            return rounded
    raise InvalidRequest(field, f"must be {low / 1000:g} to {high / 1000:g} seconds", seconds)


def hint(parallel: float | Mapping[int, float] | None, duration: float | None) -> m.Hint | None:
    """parallel: the fraction of the run time that scales (0 to 1), or seconds by units. duration: seconds on one unit."""
    if parallel is None and duration is None:
        return None
    if isinstance(parallel, Mapping):
        return m.Hint(table_us=_table(parallel))
    if parallel is not None and not (_is_number(parallel) and 0 <= parallel <= 1):
        raise InvalidRequest("parallel", "must be a fraction of 0 to 1, or seconds by units", parallel)
    duration_us = milliseconds("duration", duration) * 1000 if duration is not None else 0
    return m.Hint(duration_us=duration_us, parallel_ppm=round((parallel or 0.0) * 1_000_000))


def _table(seconds_by_units: Mapping[int, float]) -> tuple[tuple[int, int], ...]:
    _check_length("parallel", seconds_by_units, limits.LEGAL_AMOUNTS_MAX)
    rows = list(seconds_by_units.items())
    most = limits.AMOUNT_MAX // _MILLI
    if not rows or not all(_is_number(units) and isinstance(units, int) and 1 <= units <= most for units, _ in rows):
        raise InvalidRequest("parallel", "must be a fraction of 0 to 1, or seconds by units", seconds_by_units)
    return tuple(sorted((units, milliseconds("parallel", seconds, 1) * 1000) for units, seconds in rows))


def tabulated(seconds: Callable[[int], float], demand: m.Demand | None) -> tuple[m.Demand, dict[int, float]]:
    """The durations that a callable of the caller's says, at each amount of cores that the demand allows. Of a wide range those
    amounts become the only legal ones, each larger than the one before in about the same ratio. Raises InvalidRequest."""
    if demand is None or demand.low < _MILLI:
        raise InvalidRequest("parallel", "must be a fraction where units are no whole cores: there is nothing to ask it for")
    if not demand.legal and demand.high - demand.low >= limits.LEGAL_AMOUNTS_MAX * _MILLI:
        low, steps = demand.low // _MILLI, limits.LEGAL_AMOUNTS_MAX - 1
        ratio = demand.high / demand.low
        legal = sorted({round(low * ratio ** (step / steps)) * _MILLI for step in range(steps + 1)})
        demand = m.Demand(low=demand.low, high=demand.high, legal=tuple(legal))
    amounts = demand.legal or range(demand.low, max(demand.low, demand.high) + 1, _MILLI)
    return demand, {amount // _MILLI: _seconds_of(seconds, amount // _MILLI) for amount in amounts}


def _seconds_of(seconds: Callable[[int], float], units: int) -> float:
    try:
        found = seconds(units)
    except Exception as error:
        raise InvalidRequest("parallel", f"must say the seconds on {units} units, and raised {type(error).__name__}") from error
    try:
        milliseconds("parallel", found, 1)
    except InvalidRequest as error:
        raise InvalidRequest("parallel", f"{error.rule} on {units} units", found) from None
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def argv(command: str | Sequence[str]) -> tuple[str, ...]:
    """A text is a shell command; a sequence is a program and its arguments. Raises InvalidRequest."""
    if isinstance(command, str):
        return ("/bin/sh", "-c", command)
    if not isinstance(command, Sequence) or isinstance(command, bytes | bytearray | memoryview):
        raise InvalidRequest("command", "must be a text for the shell, or a program and its arguments", command)
    _check_length("command", command, limits.ARGUMENTS_COUNT_MAX)
    return tuple(command)


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Raises InvalidRequest; pairs, or an empty text, are no environment."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidRequest("env", "must be texts by name", env)
    return dict(env)


def content(field: str, value: bytes | str) -> bytes:
    """Bytes as they are, a text as UTF-8. Raises InvalidRequest."""
    try:
        return value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"must be text that UTF-8 can hold, or bytes: {error.reason}") from None


class Wire(NamedTuple):
    """An action ready to travel; one with a `large` payload when that is stored as a blob (see `with_blob`)."""

    key: str
    spec: m.ActionSpec
    spec_bytes: bytes
    payload_bytes: bytes
    large: m.Payload | None = None


def wire(key: str, spec: m.ActionSpec, payload: m.Payload) -> Wire:
    """Encodes, and checks by the same rules as the scheduler will. A large payload is not encoded yet, so that of many only
    those on their way take memory. Raises InvalidRequest."""
    if spec.payload_blob:
        raise InvalidRequest("payload_blob", "is for the client to set", spec.payload_blob)
    light, heavy = _apart(payload)
    spec_bytes, payload_bytes = _encoded(spec), _encoded(light)
    size = len(payload_bytes) + sum(map(len, heavy.values()))
    if size > limits.BLOB_BYTES_MAX - _HEAVY_FIELD_BYTES:
        raise InvalidRequest("payload", f"must be at most {limits.BLOB_BYTES_MAX - _HEAVY_FIELD_BYTES} bytes", size)
    spec = _as_read(spec, spec_bytes, m.decode_spec)
    payload = replace(_as_read(light, payload_bytes, m.decode_payload), **heavy)
    if broken := broken_rule(key, spec, payload):
        field, _, rule = broken.partition(": ")
        raise InvalidRequest(field, rule)
    if size > limits.ITEM_BYTES_MAX:
        return Wire(key, spec, spec_bytes, b"", payload)
    return Wire(key, spec, spec_bytes, payload_bytes)


_NOT_ENCODED: Final = (TypeError, ValueError, OverflowError, RecursionError, BufferError)


def _encoded(value: m.Request) -> bytes:
    try:
        return m.encode(value)
    except _NOT_ENCODED as error:
        for field in value.__struct_fields__:
            try:
                m.encode(getattr(value, field))
            except _NOT_ENCODED as why:
                raise InvalidRequest(field, f"cannot be sent: {why}"[: limits.DETAIL_LENGTH_MAX]) from None
        raise InvalidRequest("request", f"cannot be sent: {error}"[: limits.DETAIL_LENGTH_MAX]) from None


def _as_read(given: _Struct, data: bytes, decode: Callable[[bytes], _Struct]) -> _Struct:
    """What a reader will see, which has to be what was given: encoding turns a Decimal into a text."""
    try:
        read = decode(data)
    except msgspec.ValidationError as error:
        rule, at, path = str(error).rpartition(" - at ")
        field = path.removeprefix("`key` in ").strip("`").removeprefix("$.") if at else ""
        raise InvalidRequest(field or "request", rule or str(error)) from None
    except m.MALFORMED as error:
        raise InvalidRequest("request", str(error)) from None
    if read != given:
        for field in read.__struct_fields__:
            if not _alike(getattr(given, field), getattr(read, field)):
                value = getattr(given, field)
                raise InvalidRequest(field, f"must be of the type it has: a {type(value).__name__} is another", value)
    return read


def _alike(given: object, read: object) -> bool:
    """Equal, but that a list may stand for a tuple."""
    if isinstance(read, tuple):
        return isinstance(given, list | tuple) and len(given) == len(read) and all(map(_alike, given, read))
    if isinstance(read, dict):
        return isinstance(given, dict) and given.keys() == read.keys() and all(_alike(given[key], read[key]) for key in read)
    if isinstance(read, m.Request):
        return type(given) is type(read) and all(_alike(getattr(given, f), getattr(read, f)) for f in read.__struct_fields__)
    return given == read


def with_blob(wire: Wire, name: str) -> Wire:
    """The action whose large payload is stored under `name`."""
    spec = replace(wire.spec, payload_blob=name)
    return Wire(wire.key, spec, m.encode(spec), b"")


def _apart(payload: m.Payload) -> tuple[m.Payload, dict[str, bytes]]:
    """The payload without the bytes of a field that alone are too many for the log, and those bytes as they are now."""
    field = next((name for kind, name in _HEAVY.items() if isinstance(payload, kind)), "")
    value = getattr(payload, field) if field else b""
    if isinstance(value, memoryview):
        value = value.tobytes()
        payload = replace(payload, **{field: value})
    if not isinstance(value, bytes | bytearray) or len(value) <= limits.ITEM_BYTES_MAX:
        return payload, {}
    return replace(payload, **{field: b""}), {field: bytes(value)}
