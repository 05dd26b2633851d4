"""From what a caller writes to what travels: every mistake is an InvalidRequest that names its field and its rule, before
anything is sent."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tangram import limits
from tangram import messages as m
from tangram.errors import InvalidRequest
from tangram.producers import build, request
from tangram.rules import broken_rule

NONCE = bytes(8)
NAN, INF = float("nan"), float("inf")
LONG_INT = 10**5_000
"""Python refuses to print it: repr() of an int of more than 4,300 digits is a ValueError."""

ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.lists(st.integers() | st.none() | st.floats() | st.booleans(), max_size=4)
    | st.tuples(st.integers(), st.integers())
    | st.sets(st.integers(), max_size=4)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3)
    | st.builds(object)
)


def check(error: InvalidRequest) -> InvalidRequest:
    """It names a field and a rule, and repeats at most 100 characters of what it got."""
    assert error.field
    assert error.rule
    assert len(error.value) <= 100
    return error


def refused(field: str, call: Callable[..., object], *arguments: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(*arguments)
    assert caught.value.field == field, f"names {caught.value.field!r}, not {field!r}"
    return check(caught.value)


def only_invalid_requests(call: Callable[..., object], *arguments: Any) -> Any:
    """The result, or None if the call refused as it should."""
    try:
        return call(*arguments)
    except InvalidRequest as error:
        check(error)
        return None


# --- units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "demand"),
    [
        (0, None),
        (1, m.Demand(low=1000)),
        (64, m.Demand(low=64_000)),
        (2.0, m.Demand(low=2000)),
        (0.5, m.Demand(low=500)),
        (0.01, m.Demand(low=10)),
        (0.99, m.Demand(low=990)),
        ((1, 8), m.Demand(low=1000, high=8000)),
        ((3, 3), m.Demand(low=3000, high=3000)),
        ({1, 2, 4}, m.Demand(low=1000, high=4000, legal=(1000, 2000, 4000))),
        ({4, 1, 2}, m.Demand(low=1000, high=4000, legal=(1000, 2000, 4000))),
        (frozenset({4}), m.Demand(low=4000)),
        (range(1, 4), m.Demand(low=1000, high=3000, legal=(1000, 2000, 3000))),
    ],
    ids=repr,
)
def test_units(units: Any, demand: m.Demand | None) -> None:
    assert request.cpu(units) == demand


@pytest.mark.parametrize(
    "units",
    [
        -1, True, False, None, "2", b"2", 0.0, -0.0, 1e-300, 0.0005, 0.009, 1.5, -0.5, NAN, INF, -INF, 1e308, (), [], set(),
        (1,), (1, 2, 3), (2, 1), (0, 2), (True, 2), (1.0, 2), (1, None), {0}, {-1, 2}, {1, "2"}, {1: 2}, {}, object(),
        1 << 60, 1 + 2j,
    ],
    ids=repr,
)  # fmt: skip
def test_units_that_are_none(units: Any) -> None:
    refused("units", request.cpu, units)


@given(ODD)
@example(0.9999)
def test_any_units_are_a_demand_or_refused(units: Any) -> None:
    demand = only_invalid_requests(request.cpu, units)
    if demand is not None:
        assert isinstance(demand, m.Demand)
        assert demand.low >= 10


@pytest.mark.parametrize("units", [0.9999, 0.995001], ids=repr)
def test_a_fraction_is_never_rounded_up_to_a_whole_core(units: float) -> None:
    demand = only_invalid_requests(request.cpu, units)
    assert demand is None or demand.low < 1000


@pytest.mark.parametrize("units", [(1, 1 << 62), {1, 1 << 80}, set(range(1, 100))], ids=["range", "set", "many"])
def test_units_beyond_every_bound_are_refused_by_name(units: Any) -> None:
    """By `cpu` itself or at the latest by `wire`, and either way with a name that the caller knows."""

    def send() -> None:
        demand = request.cpu(units)
        assert demand is not None
        wire({"cost": {"cpu": demand}})

    with pytest.raises(InvalidRequest) as caught:
        send()
    assert caught.value.field.startswith(("units", "cost"))


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "mib"),
    [
        (1, 1), (512, 512), ("1", 1), ("512", 512), ("512M", 512), ("512MB", 512), ("512MiB", 512), ("512 MiB", 512),
        (" 2GiB ", 2048), ("2G", 2048), ("2g", 2048), ("1.5g", 1536), ("1T", 1 << 20), ("2048K", 2), ("2048KiB", 2),
        ("1025K", 2), ("1.001M", 2),
    ],
    ids=repr,
)  # fmt: skip
def test_memory(value: int | str, mib: int) -> None:
    """Parts of a MiB are rounded up."""
    assert request.memory_mib(value) == mib


@pytest.mark.parametrize(
    "value",
    [
        0, -1, True, None, 1.5, NAN, b"1", "", " ", "0", "0.5M", "1K", "-1G", "+1G", "1e3", "nan", "inf", "1,5G", "1 G B", "G",
        "1X", "1GB/s", "0x10", "1_000", "\u0661G", "1..5G", ".5G", "5.G", "1\x00", (1 << 40) + 1, "9" * 400, [1],
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_memory_that_is_none(value: Any) -> None:
    refused("memory", request.memory_mib, value)


def test_too_much_memory_is_not_called_too_little() -> None:
    assert "at least" not in refused("memory", request.memory_mib, "9999999999T").rule


@given(ODD | st.from_regex(r"[0-9]{1,40}(\.[0-9]{1,40})? ?[KMGTkmgt]?i?B?", fullmatch=True))
def test_any_memory_is_an_amount_or_refused(value: Any) -> None:
    mib = only_invalid_requests(request.memory_mib, value)
    assert mib is None or (type(mib) is int and 1 <= mib <= limits.AMOUNT_MAX)


# --- times -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "ms"), [(0, 0), (1, 1000), (0.5, 500), (0.0001, 1), (1.0001, 1001), (86_400, 86_400_000)], ids=repr
)
def test_seconds(seconds: float, ms: int) -> None:
    """Parts of a millisecond are rounded up: a time-out never becomes none."""
    assert request.milliseconds("timeout", seconds) == ms


@pytest.mark.parametrize(
    "seconds", [-1, -1e-9, NAN, INF, -INF, True, None, "1", b"1", [1], 1e12, 10**400], ids=lambda s: repr(s)[:20]
)
def test_seconds_that_are_none(seconds: Any) -> None:
    refused("timeout", request.milliseconds, "timeout", seconds)


@given(ODD)
def test_any_seconds_are_a_time_or_refused(seconds: Any) -> None:
    ms = only_invalid_requests(request.milliseconds, "timeout", seconds)
    assert ms is None or (type(ms) is int and ms >= 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_ms", 0), ("timeout_ms", -1), ("timeout_ms", limits.TIMEOUT_MS_MAX + 1), ("deadline_ms", -1),
        ("deadline_ms", limits.DEADLINE_MS_MAX + 1), ("idle_ttl_ms", 0), ("idle_ttl_ms", limits.DEADLINE_MS_MAX + 1),
    ],
)  # fmt: skip
def test_times_out_of_bounds_are_refused_and_not_clamped(field: str, value: int) -> None:
    refused(field, wire, {field: value})


# --- hints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "duration", "hint"),
    [
        (None, None, None),
        (None, 2, m.Hint(duration_us=2_000_000)),
        (0.5, None, m.Hint(parallel_ppm=500_000)),
        (0, 1.5, m.Hint(duration_us=1_500_000)),
        (1, 1, m.Hint(duration_us=1_000_000, parallel_ppm=1_000_000)),
        ({1: 8, 4: 2.5}, None, m.Hint(table_us=((1, 8_000_000), (4, 2_500_000)))),
    ],
    ids=repr,
)
def test_hints(parallel: Any, duration: Any, hint: m.Hint | None) -> None:
    assert request.hint(parallel, duration) == hint


@pytest.mark.parametrize("parallel", [-0.1, 1.1, NAN, INF, True, 2], ids=repr)
def test_fractions_that_are_none(parallel: Any) -> None:
    refused("parallel", request.hint, parallel, None)


@pytest.mark.parametrize("parallel", ["0.5", b"x", [0.5], object()], ids=lambda p: type(p).__name__)
def test_a_fraction_of_a_wrong_type(parallel: Any) -> None:
    refused("parallel", request.hint, parallel, None)


@pytest.mark.parametrize("duration", [-1, NAN, True, "1"], ids=repr)
def test_durations_that_are_none(duration: Any) -> None:
    refused("duration", request.hint, None, duration)


@pytest.mark.parametrize("parallel", [{1: -1}, {1: NAN}, {1: "x"}, {1: None}], ids=repr)
def test_tables_of_what_is_no_time(parallel: Any) -> None:
    refused("parallel", request.hint, parallel, None)


@pytest.mark.parametrize("parallel", [{0: 1}, {-1: 1}, {1.5: 1}, {"1": 1}, {True: 1}, {None: 1}, {1: 0}, {1 << 70: 1}], ids=repr)
def test_tables_of_what_is_no_amount_are_refused_before_they_are_sent(parallel: Any) -> None:
    with pytest.raises(InvalidRequest):
        wire({"hint": request.hint(parallel, None)})


def test_a_table_of_durations_travels() -> None:
    hint = request.hint({1: 8, 4: 2.5}, None)
    sent = wire({"hint": hint})
    assert m.decode_spec(sent.spec_bytes).hint == hint


def test_equal_tables_give_equal_bytes() -> None:
    forward, backward = (wire({"hint": request.hint(table, None)}) for table in ({1: 8, 4: 2}, {4: 2, 1: 8}))
    assert forward.spec_bytes == backward.spec_bytes


# --- callables that say the seconds --------------------------------------------------------------------------------


def asked(units: Any, parallel: Any) -> m.ActionSpec:
    return build.spec("0" * 32, kind="run", units=units, parallel=parallel)


@pytest.mark.parametrize(
    ("units", "table"),
    [
        (2, ((2, 3_000_000),)),
        ((1, 3), ((1, 6_000_000), (2, 3_000_000), (3, 2_000_000))),
        ({8, 1, 4}, ((1, 6_000_000), (4, 1_500_000), (8, 750_000))),
    ],
    ids=repr,
)
def test_a_callable_is_asked_at_each_legal_amount(units: Any, table: tuple[tuple[int, int], ...]) -> None:
    spec = asked(units, lambda amount: 6 / amount)
    assert spec.hint == m.Hint(table_us=table)
    assert spec.cost["cpu"] == request.cpu(units)


def test_a_callable_means_what_the_same_table_means() -> None:
    spec, same = asked((1, 4), lambda amount: 1 + 2 / amount), asked((1, 4), {amount: 1 + 2 / amount for amount in range(1, 5)})
    assert (spec.hint, spec.cost) == (same.hint, same.cost)


@given(st.integers(1, 1_000), st.integers(0, 100_000))
def test_of_a_range_too_wide_for_a_table_some_amounts_are_legal(low: int, width: int) -> None:
    spec = asked((low, low + width), lambda amount: 1 + 60 / amount)
    assert spec.hint is not None
    asked_at = [amount for amount, _ in spec.hint.table_us]
    assert (asked_at[0], asked_at[-1]) == (low, low + width)
    assert len(asked_at) <= limits.LEGAL_AMOUNTS_MAX
    if width < limits.LEGAL_AMOUNTS_MAX:
        assert asked_at == list(range(low, low + width + 1))
    else:
        assert spec.cost["cpu"].legal == tuple(1_000 * amount for amount in asked_at)
        grows = (1 + width / low) ** (1 / (limits.LEGAL_AMOUNTS_MAX - 1))
        assert all(high <= low * grows + 2 for low, high in pairwise(asked_at)), "about the same ratio from each to the next"
    assert not broken_rule("cpu", spec, m.Run(argv=("true",)))


def raises(units: int) -> float:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda units: 0, "on 1 units"),
        (lambda units: 1 if units < 2 else -1, "on 2 units"),
        (lambda units: NAN, "on 1 units"),
        (lambda units: INF, "on 1 units"),
        (lambda units: None, "on 1 units"),
        (lambda units: "1", "on 1 units"),
        (lambda units: True, "on 1 units"),
        (lambda units: LONG_INT, "on 1 units"),
        (lambda: 1.0, "TypeError"),
        (raises, "ZeroDivisionError"),
    ],
)
def test_a_callable_that_says_no_time_is_refused_with_where(answer: Any, says: str) -> None:
    assert says in refused("parallel", asked, (1, 4), answer).rule


def test_what_a_callable_raised_is_the_cause() -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(1, raises)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("units", [0, 0.5], ids=repr)
def test_a_callable_needs_whole_cores(units: Any) -> None:
    refused("parallel", asked, units, lambda amount: 1.0)


@given(ODD, ODD)
def test_any_hint_is_one_or_refused(parallel: Any, duration: Any) -> None:
    only_invalid_requests(request.hint, parallel, duration)


# --- numbers that cannot even be printed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("units", request.cpu),
        ("memory", request.memory_mib),
        ("timeout", lambda value: request.milliseconds("timeout", value)),
        ("parallel", lambda value: request.hint(value, None)),
    ],
)
@pytest.mark.parametrize("value", [10**400, LONG_INT], ids=["beyond-floats", "beyond-repr"])
def test_huge_numbers_are_refused_like_others(field: str, call: Callable[[Any], object], value: int) -> None:
    refused(field, call, value)


# --- commands ----------------------------------------------------------------------------------------------------


def test_a_text_is_for_the_shell_and_a_sequence_is_not() -> None:
    assert request.argv("echo $A") == ("/bin/sh", "-c", "echo $A")
    assert request.argv(["echo", "$A"]) == ("echo", "$A")


@pytest.mark.parametrize("command", [None, 5, True, 1.5, object()], ids=lambda c: type(c).__name__)
def test_a_command_that_is_none(command: Any) -> None:
    with pytest.raises(InvalidRequest):
        wire(payload=m.Run(argv=request.argv(command)))


@pytest.mark.parametrize("command", [b"echo", [1], ["a", None], [b"a"], [], [""], ["", "a"], [["a"]], ["\ud800"]], ids=repr)
def test_a_command_of_wrong_parts(command: Any) -> None:
    with pytest.raises(InvalidRequest):
        wire(payload=m.Run(argv=request.argv(command)))


# --- the whole request -------------------------------------------------------------------------------------------


def wire(spec: dict[str, Any] | None = None, payload: m.Payload | None = None, *, key: str = "cpu") -> request.Wire:
    fields: dict[str, Any] = {"nonce": NONCE, "kind": "run", **(spec or {})}
    return request.wire(key, m.ActionSpec(**fields), m.Run(argv=("true",)) if payload is None else payload)


def test_what_is_sent_is_what_was_asked() -> None:
    spec = m.ActionSpec(nonce=NONCE, kind="run", cost={"cpu": m.Demand(low=1000, high=4000), "memory": m.Demand(low=1)})
    payload = m.Run(argv=("a", "é", "\n"), env={"A": "b\n"}, stdin=b"\0")
    sent = request.wire("cpu", spec, payload)
    assert (sent.key, sent.spec) == ("cpu", spec)
    assert m.decode_spec(sent.spec_bytes) == spec
    assert m.decode_payload(sent.payload_bytes) == payload


NUL = "a\x00b"


@pytest.mark.parametrize(
    ("field", "spec", "payload"),
    [
        ("argv", {}, m.Run(argv=("a", NUL))),
        ("cwd", {}, m.Run(argv=("a",), cwd=NUL)),
        ("env", {}, m.Run(argv=("a",), env={"A": NUL})),
        ("env", {}, m.Run(argv=("a",), env={NUL: "a"})),
        ("image", {"kind": "session.open"}, m.SessionOpen(image=NUL)),
        ("env", {"kind": "session.open"}, m.SessionOpen(env={"A": NUL})),
        ("path", {"kind": "file.write", "session": 1}, m.FileWrite(path=NUL, data=b"")),
        ("path", {"kind": "file.read", "session": 1}, m.FileRead(path=NUL)),
        ("path", {"kind": "file.read", "session": 1}, m.FileRead(path="a\x00")),
    ],
)
def test_nul_is_refused(field: str, spec: dict[str, Any], payload: m.Payload) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire(spec, payload)
    assert field in str(caught.value)


@pytest.mark.parametrize("name", ["", "1A", "A=B", "A B", "A-B", "A.B", "é", "A\n", "=", "A" * 129], ids=ascii)
def test_names_of_the_environment(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire(payload=m.Run(argv=("a",), env={name: ""}))
    assert "env" in str(caught.value)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "a", "_", "A" * 128])
def test_what_a_variable_does_is_for_the_executor_to_judge(name: str) -> None:
    sent = wire(payload=m.Run(argv=("a",), env={name: "x"}))
    assert m.decode_payload(sent.payload_bytes) == m.Run(argv=("a",), env={name: "x"})


@pytest.mark.parametrize("kind", ["", "Run", "1", "a b", "a/b", "a\n", ".a", "-a", "a" * 65, "é", "a\x00", "a*"], ids=ascii)
def test_kinds(kind: str) -> None:
    refused("kind", wire, {"kind": kind})


@pytest.mark.parametrize("kind", ["a", "my.kind", "a-b_c.9", "a" * 64])
def test_kinds_of_the_users_own(kind: str) -> None:
    assert wire({"kind": kind}).spec.kind == kind


@pytest.mark.parametrize(
    ("kind", "payload"),
    [("noop", m.Run(argv=("a",))), ("run", m.Noop()), ("my.kind", m.Noop()), ("session.open", m.Run(argv=("a",)))],
)
def test_a_payload_must_suit_its_kind(kind: str, payload: m.Payload) -> None:
    refused("payload", wire, {"kind": kind}, payload)


@pytest.mark.parametrize("retry", ["", "always", "Safe", "safe\n", 3, None, True, 1.0, b"safe"], ids=repr)
def test_retry_values(retry: Any) -> None:
    refused("retry", wire, {"retry": retry})


@pytest.mark.parametrize("nonce", [b"", bytes(7), bytes(9), 5, None], ids=repr)
def test_nonces(nonce: Any) -> None:
    refused("nonce", wire, {"nonce": nonce})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", -1), ("session", True), ("session", 1.0), ("session", NAN), ("session", "1"), ("session", 1 << 63),
        ("timeout_ms", NAN), ("timeout_ms", True), ("timeout_ms", "1"), ("timeout_ms", None), ("key", "a" * 201), ("key", 5),
        ("traceparent", "a" * 65), ("payload_blob", "a" * 129), ("hint", 5), ("cost", []), ("cost", None),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_other_fields(field: str, value: Any) -> None:
    refused(field, wire, {field: value})


@pytest.mark.parametrize(("field", "spec"), [
    ("session", {"kind": "file.read"}),
    ("session", {"kind": "session.open", "session": 1}),
])  # fmt: skip
def test_sessions_where_they_do_not_belong(field: str, spec: dict[str, Any]) -> None:
    payload = m.FileRead(path="a") if spec["kind"] == "file.read" else m.SessionOpen()
    refused(field, wire, spec, payload)


@pytest.mark.parametrize(
    "cost",
    [
        {"cpu": 1},
        {"a b": m.Demand(low=1)},
        {"": m.Demand(low=1)},
        {"a.b": m.Demand(low=1)},
        {"cpu": m.Demand(low=-1)},
        {"cpu": m.Demand(low=limits.AMOUNT_MAX + 1)},
        {"cpu": m.Demand(low=1500)},
        {"cpu": m.Demand(low=5)},
        {"cpu": m.Demand(low=500, high=900)},
        {"cpu": m.Demand(low=2000, high=1000)},
        {"cpu": m.Demand(low=1000, high=4000, legal=(1000, 2000))},
        {"cpu": m.Demand(low=1000, high=4000, legal=(1000, 3000, 2000, 4000))},
        {"cpu": m.Demand(low=1000, high=4000, legal=(1000, 1000, 4000))},
        {"cpu": m.Demand(low=1000, high=4000, legal=(1000, 1500, 4000))},
        {"memory": m.Demand(low=1, high=2)},
        {"cpu": m.Demand(low=1000, high=33_000, legal=tuple(range(1000, 34_000, 1000)))},
        {f"r{i}": m.Demand(low=1) for i in range(limits.RESOURCES_PER_ACTION_MAX + 1)},
    ],
    ids=lambda cost: str(cost)[:40],
)
def test_costs(cost: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire({"cost": cost})
    assert caught.value.field.startswith("cost")


# --- sizes -------------------------------------------------------------------------------------------------------


def test_an_argument_of_the_largest_size_passes() -> None:
    wire(payload=m.Run(argv=("a" * limits.ARGUMENT_BYTES_MAX,)))


@pytest.mark.parametrize("character", ["a", "é", "€", "\U0001f600"], ids=["1-byte", "2-bytes", "3-bytes", "4-bytes"])
def test_an_argument_is_measured_in_bytes(character: str) -> None:
    """Linux counts bytes, and what is too long for it looks like a program that failed."""
    count = limits.ARGUMENT_BYTES_MAX // len(character.encode()) + 1
    with pytest.raises(InvalidRequest) as caught:
        wire(payload=m.Run(argv=("a", character * count)))
    assert "argv" in caught.value.field


@pytest.mark.parametrize("character", ["a", "€"], ids=["1-byte", "3-bytes"])
def test_a_path_is_measured_in_bytes(character: str) -> None:
    count = limits.PATH_BYTES_MAX // len(character.encode()) + 1
    refused("path", wire, {"kind": "file.read", "session": 1}, m.FileRead(path=character * count))


@pytest.mark.parametrize(
    ("field", "payload"),
    [
        ("argv", m.Run(argv=("a",) * 4_097)),
        ("argv", m.Run(argv=())),
        ("env", m.Run(argv=("a",), env={f"A{i}": "" for i in range(limits.ENVIRONMENT_COUNT_MAX + 1)})),
        ("cwd", m.Run(argv=("a",), cwd="a" * (limits.PATH_BYTES_MAX + 1))),
    ],
    ids=["argv", "no-argv", "env", "cwd"],
)
def test_too_many(field: str, payload: m.Payload) -> None:
    refused(field, wire, {}, payload)


@pytest.mark.parametrize(
    "payload",
    [
        m.Run(argv=("a",), stdin=bytes(limits.ITEM_BYTES_MAX)),
        m.Run(argv=("a" * limits.ARGUMENT_BYTES_MAX,) * 10),
        m.Run(argv=("a" * limits.ARGUMENT_BYTES_MAX,), stdin=bytes(range(256)) * 4_096),
        m.FileWrite(path="a", data=bytes(limits.ITEM_BYTES_MAX)),
        m.FileWrite(path="a", data=bytes(limits.FILE_BYTES_MAX)),
        m.FileWrite(path="a", data=bytearray(1 << 20)),
        m.FileWrite(path="a", data=memoryview(bytes(1 << 20)).cast("I")),
    ],
    ids=["stdin", "argv", "both", "file", "largest", "bytearray", "memoryview"],
)
def test_a_payload_that_no_item_holds_is_for_a_blob(payload: m.Payload) -> None:
    kind = {"kind": "file.write", "session": 1} if isinstance(payload, m.FileWrite) else {}
    made = wire(kind, payload)
    assert made.payload_bytes == b""
    assert m.decode_payload(m.encode(made.large)) == m.decode_payload(m.encode(payload))
    name = f"{'0a' * 32}-{len(m.encode(payload))}-{limits.BLOB_PIECES_MAX}"
    named = request.with_blob(made, name)
    assert (named.payload_bytes, named.large) == (b"", None)
    spec = m.decode_spec(named.spec_bytes)
    assert spec.payload_blob == name
    assert broken_rule("cpu", spec, None) == ""


@pytest.mark.parametrize(
    ("field", "payload"),
    [
        ("payload", m.Run(argv=("a",), stdin=bytes(limits.BLOB_BYTES_MAX))),
        ("data", m.FileWrite(path="a", data=bytes(limits.FILE_BYTES_MAX + 1))),
        ("argv", m.Run(argv=("a" * limits.ARGUMENT_BYTES_MAX,) * 17)),
        ("path", m.FileWrite(path="", data=bytes(1 << 20))),
        ("data", m.FileWrite(path="a", data="x" * (1 << 20))),  # type: ignore[arg-type]
    ],
    ids=["stdin", "file", "argv", "path", "text"],
)
def test_a_payload_that_no_blob_holds(field: str, payload: m.Payload) -> None:
    kind = {"kind": "file.write", "session": 1} if isinstance(payload, m.FileWrite) else {}
    refused(field, wire, kind, payload)


def test_a_large_payload_is_what_it_was_at_the_call() -> None:
    data = bytearray(1 << 20)
    made = wire({"kind": "file.write", "session": 1}, m.FileWrite(path="a", data=data))
    data[0] = 1
    assert m.decode_payload(m.encode(made.large)) == m.FileWrite(path="a", data=bytes(1 << 20))


@pytest.mark.parametrize("name", ["x", f"{'0a' * 32}-1-1"])
def test_a_blob_is_not_for_callers_to_name(name: str) -> None:
    refused("payload_blob", wire, {"payload_blob": name})


def test_an_environment_that_the_executor_would_refuse_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire(payload=m.Run(argv=("a",), env={"A": "x" * (limits.ENVIRONMENT_BYTES_MAX + 1)}))
    assert "env" in caught.value.field


def test_a_message_for_people_stays_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire(payload=m.Run(argv=("a",), env={"x " * 10_000: ""}))
    assert len(str(caught.value)) <= limits.DETAIL_LENGTH_MAX + 200


# --- anything at all ---------------------------------------------------------------------------------------------

SPEC_FIELDS = ("nonce", "kind", "cost", "timeout_ms", "deadline_ms", "retry", "session", "idle_ttl_ms", "hint", "key")
DEMANDS = st.builds(m.Demand, low=ODD, high=ODD | st.just(0), legal=ODD | st.just(()))
HINTS = st.builds(m.Hint, duration_us=ODD, parallel_ppm=ODD, table_us=ODD | st.lists(st.tuples(st.integers(), st.integers())))
VALUES = ODD | st.dictionaries(st.text(max_size=3) | st.just("cpu"), DEMANDS, max_size=3) | HINTS
PAYLOADS = (
    st.builds(m.Run, argv=ODD | st.just(("a",)), stdin=ODD, env=ODD, cwd=ODD, stream=ODD)
    | st.builds(m.FileWrite, path=ODD, data=ODD, mode=ODD)
    | st.builds(m.FileRead, path=ODD, size_max=ODD)
    | st.builds(m.SessionOpen, image=ODD, env=ODD)
    | st.just(m.Run(argv=("true",)))
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(SPEC_FIELDS), VALUES, max_size=2), PAYLOADS)
def test_any_request_is_sent_whole_or_refused(fields: dict[str, Any], payload: m.Payload) -> None:
    sent = only_invalid_requests(wire, fields, payload)
    if sent is not None:
        assert m.encode(m.decode_spec(sent.spec_bytes)) == sent.spec_bytes
        assert m.encode(m.decode_payload(sent.payload_bytes)) == sent.payload_bytes
