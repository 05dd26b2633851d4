"""Whatever a caller gives for whatever option: sent as it is, or an InvalidRequest that names the option. And whatever the client
accepts the fold accepts, and the other way round."""

import array
import datetime
import decimal
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tangram
from tangram import limits
from tangram import messages as m
from tangram.errors import InvalidRequest
from tangram.outcomes import Outcome, RejectReason
from tangram.producers import build, request
from tangram.producers.options import RunOptions, SessionOptions
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import ActionId, State
from tests.messages.golden_values import golden

GOLDEN = golden()
TRACE = "0" * 32


class Text(str):
    """As numpy and pandas have their own."""

    __slots__ = ()


class Colour(enum.Enum):
    RED = "red"


class Broken:
    """Compares and prints with an exception, as a table does that is asked for its truth."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, -0.0, 1e-300, 1e308, math.nan, math.inf, -math.inf, 10**400, 10**5_000, -(1 << 64), 1 << 63,
    "", "x", "a\0b", "\ud800", "*", ">", "a.b", "a b", "\r\nNats-Msg-Id: x", "é", "$JS.API.STREAM.DELETE.X", "x" * 1_000_000,
    b"", b"x", b"\0", b"\xff", bytearray(b"x"), memoryview(b"abcd")[::2], array.array("i", [1]),
    [], [1], ["A"], [None], [("A", "b")], [["A", "b"]],
    (), (1,), (1, 2), (2, 1), ("A",), ("a\0",), ("\ud800",), set(), {1, 2}, {"A"},
    {}, {"A": "b"}, {"A": 1}, {"A": None}, {1: "a"}, {"A": "\ud800"}, {"\ud800": "a"}, {"A\0": "x"}, {"A": "x\0"}, {"A=B": "x"},
    {1: 1.0}, {1: math.nan}, {1: "x"}, {10**30: 1},
    range(3), range(10**12), range(10**30), iter([1]), (x for x in "ab"), object(), type, lambda: 1, 1 + 2j,
    decimal.Decimal(1), decimal.Decimal("sNaN"), datetime.datetime(2026, 1, 1), datetime.timedelta(seconds=1), Colour.RED,
    Text("x"), Text("run"), Broken(), nested(100_000), {"a": nested(100_000)}, CYCLE, m.Noop(), m.Demand(low=1),
]  # fmt: skip

ANY = (
    st.sampled_from(NASTY)
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.text(st.sampled_from("*>. \t\r\n\0/\\$é\ud800"), max_size=9)
    | st.binary(max_size=20)
    | st.lists(st.integers() | st.floats() | st.text(max_size=3) | st.none(), max_size=4)
    | st.dictionaries(st.text(max_size=3) | st.integers(), st.text(max_size=3) | st.integers() | st.floats(), max_size=3)
)

RUN_OPTIONS = tuple(RunOptions.__annotations__)
SESSION_OPTIONS = tuple(SessionOptions.__annotations__)


def program(option: str, value: Any) -> request.Wire:
    return request.wire("cpu", *build.program("true", TRACE, **{option: value}))


def command(_: str, value: Any) -> request.Wire:
    return request.wire("cpu", *build.program(value, TRACE))


def opening(option: str, value: Any) -> request.Wire:
    return request.wire("cpu", *build.opening(TRACE, **{option: value}))


def kinds_of_file(option: str, value: Any) -> request.Wire:
    fields: dict[str, Any] = {"path": "a", "data": b"", option: value}
    return request.wire("cpu", build.spec(TRACE, kind="file.write", session=1), m.FileWrite(**fields))


def reading(option: str, value: Any) -> request.Wire:
    fields: dict[str, Any] = {"path": "a", option: value}
    return request.wire("cpu", build.spec(TRACE, kind="file.read", session=1), m.FileRead(**fields))


CALLS: list[tuple[Callable[[str, Any], request.Wire], str, tuple[str, ...]]] = [
    *((program, option, (option,)) for option in RUN_OPTIONS),
    (command, "command", ("command", "argv")),
    *((opening, option, (option,)) for option in SESSION_OPTIONS),
    *((kinds_of_file, option, (option,)) for option in ("path", "data", "mode")),
    *((reading, option, (option,)) for option in ("path", "size_max")),
]
IDS = [f"{call.__name__}-{option}" for call, option, _ in CALLS]


Call = Callable[[str, Any], request.Wire]


def sent_or_refused(call: Call, option: str, names: Sequence[str], value: Any) -> None:
    """What is sent a reader takes for the same; what is refused is refused with the name of its option."""
    refusal = None
    try:
        wire = call(option, value)
    except InvalidRequest as error:
        refusal = error
    if refusal is not None:
        assert refusal.field.startswith(tuple(names)), f"{option} is called {refusal.field}: {refusal.rule}"
        assert refusal.rule
        assert len(refusal.value) <= 100
        assert len(str(refusal)) <= limits.DETAIL_LENGTH_MAX + 300
        return
    assert m.decode_spec(wire.spec_bytes) == wire.spec
    if wire.large is None:
        assert m.encode(m.decode_payload(wire.payload_bytes)) == wire.payload_bytes


@pytest.mark.parametrize(("call", "option", "names"), CALLS, ids=IDS)
def test_known_nasty_values_of_every_option(
    call: Callable[[str, Any], request.Wire], option: str, names: tuple[str, ...]
) -> None:
    for value in NASTY:
        sent_or_refused(call, option, names, value)


@settings(max_examples=300)
@given(st.sampled_from(CALLS), ANY)
def test_any_value_of_any_option(case: tuple[Call, str, tuple[str, ...]], value: Any) -> None:
    sent_or_refused(*case, value)


@pytest.mark.parametrize("env", [0, False, "", [], (), [("A", "b")], {"A"}, "AB"], ids=repr)
def test_what_only_looks_like_an_environment_is_not_taken_for_one(env: Any) -> None:
    for call in (program, opening):
        with pytest.raises(InvalidRequest, match=r"^env: "):
            call("env", env)


@pytest.mark.parametrize(
    ("option", "value"),
    [("cwd", decimal.Decimal(1)), ("cwd", Colour.RED), ("cwd", datetime.date(2026, 1, 1)), ("kind", Colour.RED)],
    ids=["decimal", "enum", "date", "kind"],
)
def test_what_would_travel_as_something_else_is_refused(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{option}: "):
        program(option, value)


@pytest.mark.parametrize("call", [build.program, build.opening])
def test_an_option_that_there_is_not_is_a_mistake_in_the_call(call: Callable[..., object]) -> None:
    positional = ("true",) if call is build.program else ()
    with pytest.raises(TypeError, match="priority"):
        call(*positional, TRACE, priority=5)


@pytest.mark.parametrize("value", NASTY, ids=range(len(NASTY)))
def test_the_arguments_of_a_client(value: Any) -> None:
    for name in ("task", "name", "url", "connect_timeout"):
        try:
            tangram.Client(**{"task": "t", name: value})
        except InvalidRequest as error:
            assert error.field == name  # noqa: PT017  # most values are refused, and none otherwise


# --- the client and the fold say the same ------------------------------------------------------------------------

KINDS = ["run", "noop", "session.open", "session.close", "file.read", "file.write", "my.kind", "Run", ""]
AMOUNTS = st.sampled_from([0, 1, 10, 500, 999, 1000, 1500, 2000, 4000]) | st.integers(-1, limits.AMOUNT_MAX + 1)
DEMANDS = st.builds(
    m.Demand, low=AMOUNTS, high=AMOUNTS | st.just(0), legal=st.lists(AMOUNTS, max_size=3).map(tuple) | st.just(())
)  # fmt: skip
COUNTS = st.integers(-1, 5) | st.sampled_from([1 << 62, (1 << 62) + 1, 1 << 63])
TEXTS = st.sampled_from(["", "a", "a/b", "é" * 3_000, "x" * 5_000, "a\0", "*"]) | st.text(max_size=8)
SPECS = st.builds(
    m.ActionSpec,
    nonce=st.binary(min_size=7, max_size=9) | st.just(bytes(8)),
    kind=st.sampled_from(KINDS) | st.just("run"),
    cost=st.dictionaries(st.sampled_from(["cpu", "memory", "gpu", "a.b", ""]), DEMANDS, max_size=3),
    timeout_ms=st.just(1_000) | st.integers(-1, limits.TIMEOUT_MS_MAX + 1),
    deadline_ms=st.just(1_000) | st.integers(-1, limits.DEADLINE_MS_MAX + 1),
    retry=st.sampled_from(["never", "safe", "always"]),
    session=st.just(0) | COUNTS,
    idle_ttl_ms=st.just(1_000) | COUNTS,
    hint=st.none()
    | st.builds(
        m.Hint,
        duration_us=COUNTS,
        parallel_ppm=st.integers(-1, 1_000_001),
        table_us=st.lists(st.tuples(COUNTS, COUNTS), max_size=3),
    ),
    key=TEXTS,
    traceparent=st.sampled_from(["", "00-ab", "x"]),
)  # fmt: skip
ENVIRONMENTS = st.dictionaries(st.sampled_from(["A", "LD_PRELOAD", "A B", ""]) | st.text(max_size=3), TEXTS, max_size=2)
PAYLOADS = (
    st.builds(m.Run, argv=st.lists(TEXTS, max_size=3).map(tuple), stdin=st.binary(max_size=9), env=ENVIRONMENTS, cwd=TEXTS)
    | st.builds(m.FileWrite, path=TEXTS, data=st.binary(max_size=9), mode=st.integers(-1, 0o1000))
    | st.builds(m.FileRead, path=TEXTS, size_max=COUNTS)
    | st.builds(m.SessionOpen, image=TEXTS, env=ENVIRONMENTS)
    | st.sampled_from([m.SessionClose(), m.Noop(), m.Run(argv=("true",))])
)


def leading() -> State:
    state = State()
    assert not step(state, Record(1, 1, "tangram.decisions.leader", GOLDEN["LeaderStarted.least"])).skipped
    return state


def by_the_fold(spec: bytes, payload: bytes) -> str:
    """Why the fold calls it invalid, or ''."""
    state = leading()
    submitted = m.ActionsSubmitted(client="c", ids=[1], specs=[spec], payloads=[payload])
    assert not step(state, Record(2, 2, "tangram.actions.cpu.t", m.encode(submitted))).skipped
    assert ActionId("t", "c", 1) in state.actions
    ruling = state.owed.rulings.get(ActionId("t", "c", 1))
    if ruling is None or ruling.reason != RejectReason.INVALID:
        return ""
    assert ruling.outcome is Outcome.REJECTED
    return ruling.detail


def by_the_client(spec: m.ActionSpec, payload: m.Payload) -> str:
    try:
        request.wire("cpu", spec, payload)
    except InvalidRequest as error:
        return f"{error.field}: {error.rule}"
    return ""


@settings(max_examples=500)
@given(SPECS, PAYLOADS)
@example(m.ActionSpec(nonce=bytes(8), kind="run"), m.Run(argv=("true",)))
def test_the_client_and_the_fold_have_one_verdict(spec: m.ActionSpec, payload: m.Payload) -> None:
    client = by_the_client(spec, payload)
    fold = by_the_fold(m.encode(spec), m.encode(payload))
    assert bool(client) == bool(fold), (client, fold)
    if client:
        field = client.partition(":")[0].partition("[")[0].rpartition(".")[2]
        assert field in fold or field == "request", (client, fold)


# --- past the client -----------------------------------------------------------------------------------------------

PLAIN = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
    | st.sampled_from(["\0", "a\0b", b"\xff", math.nan, math.inf, -0.0, [], {}, [[]], ["\0"], {"\0": ""}, {"A": 1}])
    | st.lists(st.integers(-(1 << 63), 1 << 63) | st.text(max_size=3), max_size=3)
)  # fmt: skip
WHOLE: dict[str, tuple[dict[str, Any], m.Payload]] = {
    "Run": ({"kind": "run"}, m.Run(argv=("true",))),
    "FileWrite": ({"kind": "file.write", "session": 1}, m.FileWrite(path="a", data=b"")),
    "FileRead": ({"kind": "file.read", "session": 1}, m.FileRead(path="a")),
    "SessionOpen": ({"kind": "session.open"}, m.SessionOpen()),
    "SessionClose": ({"kind": "session.close", "session": 1}, m.SessionClose()),
    "Noop": ({"kind": "noop"}, m.Noop()),
}
FIELDS = [(name, field) for name, (_, payload) in WHOLE.items() for field in (*payload.__struct_fields__, "privileged")]
DEMAND_FIELDS = [("cost", f) for f in m.Demand.__struct_fields__] + [("hint", f) for f in m.Hint.__struct_fields__]


def check_past_the_client(spec: dict[str, Any], payload: dict[str, Any], field: str) -> None:
    """Rejected with the field's name if it does not decode; and then its neighbours go on."""
    state = leading()
    good = m.encode(m.ActionSpec(nonce=bytes(8), kind="noop"))
    raw_spec, raw_payload = msgspec.msgpack.encode(spec), msgspec.msgpack.encode(payload)
    noop = m.encode(m.Noop())
    submitted = m.ActionsSubmitted(client="c", ids=[1, 2, 3], specs=[good, raw_spec, good], payloads=[noop, raw_payload, noop])
    assert not step(state, Record(2, 2, "tangram.actions.cpu.t", m.encode(submitted))).skipped
    ruling = state.owed.rulings.get(ActionId("t", "c", 2))
    try:
        m.decode_spec(raw_spec)
        m.decode_payload(raw_payload)
    except m.MALFORMED:
        assert ruling is not None
        assert (ruling.outcome, ruling.reason) == (Outcome.REJECTED, RejectReason.INVALID)
        assert field in ruling.detail, ruling.detail
        assert len(ruling.detail) <= limits.DETAIL_LENGTH_MAX
    assert [n for n in (1, 3) if ActionId("t", "c", n) in state.owed.rulings] == []
    assert len(state.actions) == 3


@settings(max_examples=400)
@given(st.sampled_from(FIELDS), PLAIN)
def test_any_value_of_any_field_of_a_payload_past_the_client(case: tuple[str, str], value: Any) -> None:
    name, field = case
    spec, payload = WHOLE[name]
    plain: dict[str, Any] = msgspec.msgpack.decode(m.encode(payload))
    check_past_the_client({"nonce": bytes(8), **spec}, {**plain, field: value}, field)


@settings(max_examples=300)
@given(st.sampled_from(DEMAND_FIELDS), PLAIN)
def test_any_value_of_any_field_of_a_demand_or_a_hint_past_the_client(case: tuple[str, str], value: Any) -> None:
    part, field = case
    inner = {"low": 1000, field: value} if part == "cost" else {field: value}
    spec = {"nonce": bytes(8), "kind": "run", part: {"cpu": inner} if part == "cost" else inner}
    check_past_the_client(spec, {"type": "Run", "argv": ["true"]}, field)
