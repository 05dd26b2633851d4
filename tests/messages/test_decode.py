"""Bytes of the log that are not what their subject promises: nothing but Malformed (or MALFORMED of the plain decoders)
comes out, and the fold answers a bad request with a typed rejection."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tangram import limits
from tangram import messages as m
from tangram.errors import InvalidRequest
from tangram.outcomes import Outcome
from tangram.scheduler.fold import Folded, NewerVersion, Record, step
from tangram.scheduler.state import ActionId, State
from tangram.scheduler.window import plan
from tests.messages.golden_values import DECODERS, SPEC_FULL, SUBJECTS, VALUES, golden

GOLDEN = golden()
pack = msgspec.msgpack.encode


def raw(value: msgspec.Struct) -> dict[str, Any]:
    """A message as plain dicts and lists."""
    plain: dict[str, Any] = msgspec.msgpack.decode(m.encode(value))
    return plain


def malformed(subject: str, data: bytes) -> m.Malformed:
    with pytest.raises(m.Malformed) as caught:
        m.decode(subject, data)
    assert len(str(caught.value)) <= limits.DETAIL_LENGTH_MAX
    return caught.value


def ways() -> dict[str, tuple[Callable[[bytes], Any], tuple[type[msgspec.Struct], ...], tuple[type[BaseException], ...]]]:
    """Every way bytes are decoded: by what, to which types, and what may come out instead."""

    def by(subject: str) -> Callable[[bytes], Any]:
        return lambda data: m.decode(subject, data)[1]

    found: dict[str, Any] = {subject: (by(subject), kinds, (m.Malformed,)) for subject, kinds in SUBJECTS.items()}
    found.update({name: (decoder, kinds, m.MALFORMED) for name, (decoder, kinds) in DECODERS.items()})
    return found


WAYS = ways()
CASES = [(way, name) for way, (_, kinds, _) in WAYS.items() for name, value in VALUES.items() if type(value) in kinds]
FULL_CASES = [(way, name) for way, name in CASES if name.endswith(".full") or name.removesuffix("least") + "full" not in VALUES]


def attempt(way: str, data: bytes) -> Any:
    """Decodes; None for what may come out. What is taken can be written, and read again as the same."""
    decode, kinds, allowed = WAYS[way]
    try:
        value = decode(data)
    except allowed:
        return None
    assert isinstance(value, kinds)
    assert decode(m.encode(value)) == value
    return value


# --- which type stands where -------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("name", [name for name in VALUES if name.endswith("least") and isinstance(VALUES[name], m.Event)])
def test_the_subject_fixes_the_type(subject: str, name: str) -> None:
    if type(VALUES[name]) in SUBJECTS[subject]:
        assert m.decode(subject, GOLDEN[name])[1] == VALUES[name]
    else:
        malformed(subject, GOLDEN[name])


LOG_TYPES = {kind.__name__ for kind in m.LogMessage.__args__}
TAGGED = {name for name, value in VALUES.items() if value.__struct_config__.tag}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("name", sorted(name for name in TAGGED if name.endswith("least")))
def test_a_known_type_in_the_wrong_place_is_not_a_newer_versions(subject: str, name: str) -> None:
    if type(VALUES[name]) not in SUBJECTS[subject]:
        assert not malformed(subject, GOLDEN[name]).unknown_type


@pytest.mark.parametrize(
    "subject", ["", "tangram", "tangram..x", "$JS.API.STREAM.DELETE.TANGRAM", "tangram.ask.t.c", "tangram.dead.x"]
)
def test_what_is_not_of_the_log_is_malformed(subject: str) -> None:
    assert not malformed(subject, GOLDEN["Ticked.least"]).unknown_type


@pytest.mark.parametrize(("way", "name"), CASES)
def test_unknown_fields(way: str, name: str) -> None:
    """Tolerated in what was written down as a fact, so that older readers go on; refused in what somebody asked for."""
    decode, _, allowed = WAYS[way]
    data = pack({**raw(VALUES[name]), "added_later": {"deep": [1]}})
    if isinstance(VALUES[name], m.Request):
        with pytest.raises(allowed, match="added_later"):
            decode(data)
    else:
        assert decode(data) == VALUES[name]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_required_fields(way: str, name: str) -> None:
    decode, _, allowed = WAYS[way]
    required = [field.name for field in msgspec.structs.fields(VALUES[name]) if field.required]
    for field in required:
        fields = raw(VALUES[name])
        del fields[field]
        with pytest.raises(allowed, match=field):
            decode(pack(fields))


UNKNOWN = pack({"type": "WrittenByANewerVersion", "epoch": 1, "more": [1, 2]})
TRUSTED = [subject for subject in SUBJECTS if subject.split(".")[1] in ("executors", "decisions")]
UNTRUSTED = [subject for subject in SUBJECTS if subject not in TRUSTED]


@pytest.mark.parametrize("subject", TRUSTED)
def test_an_unknown_type_of_a_trusted_writer_stops_the_fold(subject: str) -> None:
    assert malformed(subject, UNKNOWN).unknown_type
    with pytest.raises(NewerVersion, match="sequence 1 on"):
        step(State(), Record(1, 1, subject, UNKNOWN))


@pytest.mark.parametrize("subject", UNTRUSTED)
def test_an_unknown_type_of_anybody_else_is_skipped(subject: str) -> None:
    assert not malformed(subject, UNKNOWN).unknown_type
    state = State()
    folded = step(state, Record(1, 1, subject, UNKNOWN))
    assert folded.skipped.startswith("malformed: ")
    assert (state.skipped, state.seq) == (1, 1)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(
    "body",
    [{}, {"type": 5}, {"type": None}, {"type": ["x"]}, {"typ": "New"}, [], ["New"], "New", None, 5, {5: "New"}, {"type": b"New"}],
    ids=repr,
)
def test_garbage_does_not_stop_the_fold(subject: str, body: object) -> None:
    assert not malformed(subject, pack(body)).unknown_type


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("cut", [UNKNOWN[:-1], UNKNOWN + b"\x00", b"", b"\xc1"], ids=["cut", "trailing", "empty", "never-used"])
def test_an_unknown_type_counts_only_if_it_is_well_formed(subject: str, cut: bytes) -> None:
    assert not malformed(subject, cut).unknown_type


def test_an_unknown_item_among_decisions_stops_the_fold_too() -> None:
    """A newer leader's new item: an older standby that skips the whole message would give the same cores out again."""
    decisions = raw(VALUES["DecisionsMade.full"])
    decisions["items"].append({"type": "NewItem", "n": 1})
    with pytest.raises(NewerVersion):
        step(State(), Record(1, 1, "tangram.decisions.cpu.e", pack(decisions)))


# --- lists that run in parallel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "name"), [("tangram.actions.cpu.t", "ActionsSubmitted.full"), ("tangram.completions.t.c", "ActionsFinished.full")]
)
@pytest.mark.parametrize("change", ["less", "more"])
def test_lists_that_do_not_run_in_parallel(subject: str, name: str, change: str) -> None:
    fields = raw(VALUES[name])
    for field in [field for field, value in fields.items() if isinstance(value, list)]:
        items = fields[field]
        uneven = {**fields, field: items[:-1] if change == "less" else [*items, items[-1]]}
        assert "differ in number" in str(malformed(subject, pack(uneven)))
        assert step(State(), Record(1, 1, subject, pack(uneven))).skipped.startswith("malformed: ")


# --- wrong types -------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `path`."""
    if not path:
        return new
    if isinstance(value, dict):
        return {key: changed(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    return [changed(item, path[1:], new) if index == path[0] else item for index, item in enumerate(value)]


NOT_AN_INT = [math.nan, math.inf, -math.inf, 1.0, 1.5, -0.0, 1e300, True, False, "1", "", b"\x01", [], {}, [1]]
TOO_LARGE = [1 << 63, (1 << 64) - 1]
UNBOUNDED = {"settings", "evicted", "exit_code", "completions"}
"""Plain ints: what cannot be a sequence, an amount or a time."""
NOT_A_TEXT = [1, 1.5, True, b"text", [], {}, ["text"]]
NOT_BYTES = [1, 1.5, False, "text", [], {}]
NOT_A_BOOL = [0, 1, "true", b"", 1.0, []]
OPTIONAL = {"exit_code", "hint", "note", "cores", "capacity", "residency", "admission_closed"}


@pytest.mark.parametrize(("way", "name"), FULL_CASES)
def test_nothing_is_coerced(way: str, name: str) -> None:
    """NaN, a float, a bool or a text for an int; a number for a text; null for anything: refused in every place."""
    decode, _, allowed = WAYS[way]
    plain = raw(VALUES[name])
    taken: list[tuple[Any, ...]] = []
    for path, leaf in leaves(plain):
        if isinstance(leaf, bool):
            wrong: list[Any] = NOT_A_BOOL
        elif isinstance(leaf, int):
            wrong = [*NOT_AN_INT, *([] if UNBOUNDED & set(path) else TOO_LARGE)]
        else:
            wrong = NOT_A_TEXT if isinstance(leaf, str) else NOT_BYTES
        for new in [*wrong, *([] if path[-1] in OPTIONAL else [None])]:
            try:
                decode(pack(changed(plain, path, new)))
            except allowed:
                continue
            if not (path[-1] == "type" and new is None):
                taken.append((*path, new))
    assert not taken, "these were taken for what they are not"


@pytest.mark.parametrize(("way", "name"), FULL_CASES)
def test_lists_and_dicts_are_not_coerced(way: str, name: str) -> None:
    decode, _, allowed = WAYS[way]
    plain = raw(VALUES[name])
    for field, value in plain.items():
        if isinstance(value, list | dict):
            for new in (5, "x", b"x", True, 1.5, {"x": 1} if isinstance(value, list) else [1]):
                with pytest.raises(allowed):
                    decode(pack({**plain, field: new}))


@pytest.mark.parametrize(("way", "name"), FULL_CASES)
def test_names_are_tokens_wherever_they_stand(way: str, name: str) -> None:
    """What reaches a subject, a path or a cgroup is checked where it is read."""
    decode, _, allowed = WAYS[way]
    plain = raw(VALUES[name])
    tokens = {"client", "incarnation", "key", "host", "machine_id", "boot_id", "leader", "executor", "task", "service"}
    free = {("ActionSpec", "key"), ("ActionsFinished", "executor"), ("ActionsFinished", "incarnation")}
    for path, leaf in leaves(plain):
        if path[-1] in tokens and isinstance(leaf, str) and (type(VALUES[name]).__name__, path[-1]) not in free:
            for new in ("", "a.b", "*", ">", "a b", "a\n", "é", "a/b", "a\x00", "a" * 65):
                with pytest.raises(allowed):
                    decode(pack(changed(plain, path, new)))


@pytest.mark.parametrize(
    ("way", "field", "body"),
    [
        ("payload", "argv", {"type": "Run", "argv": ["a\x00b"]}),
        ("payload", "cwd", {"type": "Run", "argv": ["a"], "cwd": "\x00"}),
        ("payload", "env", {"type": "Run", "argv": ["a"], "env": {"A\x00": "b"}}),
        ("payload", "env", {"type": "Run", "argv": ["a"], "env": {"A": "b\x00"}}),
        ("payload", "env", {"type": "SessionOpen", "env": {"A\x00": "b"}}),
        ("payload", "image", {"type": "SessionOpen", "image": "a\x00"}),
        ("payload", "path", {"type": "FileRead", "path": "a\x00"}),
        ("payload", "path", {"type": "FileWrite", "path": "\x00", "data": b""}),
        ("payload", "path", {"type": "FileRead", "path": ""}),
        ("payload", "mode", {"type": "FileWrite", "path": "a", "data": b"", "mode": 0o4755}),
        ("payload", "argv", {"type": "Run", "argv": []}),
        ("payload", "argv", {"type": "Run", "argv": ["a"] * 4_097}),
        ("payload", "argv", {"type": "Run", "argv": ["a" * (limits.ARGUMENT_BYTES_MAX + 1)]}),
        ("payload", "env", {"type": "Run", "argv": ["a"], "env": {f"A{i}": "" for i in range(101)}}),
        ("payload", "image", {"type": "SessionOpen", "image": "a" * 257}),
        ("spec", "nonce", {"nonce": b"short", "kind": "run"}),
        ("spec", "cost", {"nonce": bytes(8), "kind": "run", "cost": {f"r{i}": {"low": 1} for i in range(9)}}),
        ("spec", "legal", {"nonce": bytes(8), "kind": "run", "cost": {"cpu": {"low": 1, "legal": [1] * 33}}}),
        ("spec", "table_us", {"nonce": bytes(8), "kind": "run", "hint": {"table_us": dict.fromkeys(range(1, 34), 1)}}),
    ],
)
def test_bounds(way: str, field: str, body: dict[str, Any]) -> None:
    decode, _, allowed = WAYS[way]
    with pytest.raises(allowed, match=field):
        decode(pack(body))


def test_more_items_than_an_envelope_may_hold_are_refused() -> None:
    """ENVELOPE_ITEMS_MAX keeps one fold step short; whoever writes more than that is not one of ours."""
    count = limits.ENVELOPE_ITEMS_MAX + 1
    body = {
        "type": "ActionsSubmitted",
        "client": "c",
        "ids": list(range(count)),
        "specs": [b""] * count,
        "payloads": [b""] * count,
    }
    malformed("tangram.actions.cpu.t", pack(body))


# --- bombs and garbage -------------------------------------------------------------------------------------------

DEPTH = 100_000
BOMBS = {
    "arrays": b"\x91" * DEPTH + b"\xc0",
    "maps": b"\x81\xa1a" * DEPTH + b"\xc0",
    "map keys": b"\x81" * DEPTH + b"\xc0",
    "in an unknown field": b"\x82\xa4type\xa3New\xa1x" + b"\x91" * DEPTH + b"\xc0",
    "arrays unclosed": b"\x91" * DEPTH,
    "4 G items": b"\xdd\xff\xff\xff\xff",
    "4 G pairs": b"\xdf\xff\xff\xff\xff",
    "4 G bytes": b"\xc6\xff\xff\xff\xff",
    "4 G characters": b"\xdb\xff\xff\xff\xff",
    "4 G of an extension": b"\xc9\xff\xff\xff\xff\x01",
    "timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "extension as type": b"\x81\xa4type\xd4\x05\x00",
    "not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "not UTF-8 as key": b"\x81\xa2\xff\xfe\xa1a",
    "surrogate": b"\x81\xa4type\xa3\xed\xa0\x80",
    "empty": b"",
    "JSON": b'{"type":"Ticked","epoch":1}',
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(way: str, bomb: str) -> None:
    value = attempt(way, BOMBS[bomb])
    if any(field.required for kind in WAYS[way][1] for field in msgspec.structs.fields(kind)):
        assert value is None  # what needs no field ignores all of them


@pytest.mark.parametrize(("way", "name"), FULL_CASES)
@pytest.mark.parametrize("bomb", [bomb for bomb in BOMBS if bomb not in ("empty", "JSON")])
def test_bombs_inside_a_message(way: str, name: str, bomb: str) -> None:
    """As an unknown field: skipped over, or refused, without a crash."""
    fields = raw(VALUES[name])
    data = pack(fields)
    assert data[0] & 0xF0 == 0x80, "a map of at most 15 fields"
    size = data[0] & 0x0F
    head = bytes([0x80 | size + 1]) if size < 15 else b"\xde\x00\x10"
    attempt(way, head + data[1:] + b"\xa1x" + BOMBS[bomb])


@pytest.mark.parametrize(("way", "name"), CASES)
def test_truncated_or_trailing_bytes(way: str, name: str) -> None:
    decode, _, allowed = WAYS[way]
    data = GOLDEN[name]
    for end in range(len(data)):
        with pytest.raises(allowed):
            decode(data[:end])
    with pytest.raises(allowed):
        decode(data + b"\x00")


@settings(max_examples=150)
@given(st.binary(max_size=200))
@example(b"\x80")
def test_any_bytes(data: bytes) -> None:
    for way in WAYS:
        attempt(way, data)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=12)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """Golden bytes with some of them changed, cut out or put in."""
    way, name = draw(st.sampled_from(CASES))
    data = bytearray(GOLDEN[name])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 2)):
            case 0 if data:
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case _:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
    return way, bytes(data)


@settings(max_examples=600)
@given(mutated())
def test_mutated_bytes(case: tuple[str, bytes]) -> None:
    way, data = case
    attempt(way, data)
    if way in SUBJECTS and way not in TRUSTED:
        with suppress(NewerVersion):  # one letter of an outcome makes it another's
            assert not step(State(), Record(1, 1, way, data)).skipped.startswith("broken")


@settings(max_examples=300)
@given(st.sampled_from(FULL_CASES), st.data())
def test_mutated_values(case: tuple[str, str], data: st.DataObject) -> None:
    way, name = case
    plain = raw(VALUES[name])
    if not plain:
        return
    path, _ = data.draw(st.sampled_from(list(leaves(plain))))
    cut = data.draw(st.integers(1, len(path)))
    attempt(way, pack(changed(plain, path[:cut], data.draw(ANYTHING))))


# --- a bad request in the fold -----------------------------------------------------------------------------------

SUBJECT = "tangram.actions.cpu.t"
RUN = m.encode(m.Run(argv=("true",)))
SPEC = raw(SPEC_FULL) | {"payload_blob": "", "session": 0}


def cluster() -> State:
    """A leader and one executor with four cores."""
    state = State()
    assert not step(state, Record(1, 1, "tangram.decisions.leader", GOLDEN["LeaderStarted.least"])).skipped
    assert not step(state, Record(2, 2, "tangram.executors.e", GOLDEN["ExecutorJoined.full"])).skipped
    return state


def submit(state: State, *specs: bytes, payloads: tuple[bytes, ...] = (), first: int = 1) -> Folded:
    ids = list(range(first, first + len(specs)))
    message = m.ActionsSubmitted(client="c", ids=ids, specs=list(specs), payloads=list(payloads or [RUN] * len(specs)))
    return step(state, Record(state.seq + 1, state.seq + 1, SUBJECT, m.encode(message)))


def ruling(state: State, n: int = 1) -> m.Result | None:
    return state.owed.rulings.get(ActionId("t", "c", n))


def check(state: State, folded: Folded, field: str, spec: bytes, payload: bytes = RUN) -> None:
    """Accepted if it is valid, else rejected as invalid with the field's name; never skipped. Then a pass can be made."""
    assert folded.skipped == ""
    assert ActionId("t", "c", 1) in state.actions, "an action that was sent is never just forgotten"
    result = ruling(state)
    try:
        m.decode_spec(spec)
        m.decode_payload(payload)
    except m.MALFORMED:
        assert result is not None
        assert (result.outcome, result.reason) == (Outcome.REJECTED, "invalid")
        assert field in result.detail, result.detail
        assert len(result.detail) <= limits.DETAIL_LENGTH_MAX
    else:
        if result is not None and result.reason == "invalid":
            assert ": " in result.detail, "names the field and the rule"
    if result is not None:
        assert m.decode_result(m.encode(result)) == result, "what is owed can be written"
    plan(state)
    assert ruling(state) == result


@pytest.mark.parametrize("field", sorted(SPEC))
@pytest.mark.parametrize(
    "value",
    [
        None, True, -1, 1.5, math.nan, math.inf, (1 << 64) - 1, 1 << 62, "", "x", "\x00", "é" * 300, b"", b"12345678", [], [1],
        {}, {"cpu": 1}, {"cpu": {}}, {"cpu": {"low": -1}}, {"cpu": {"low": 1.5}}, {"cpu": {"low": 1500}},
        {"cpu": {"low": 1, "hihg": 2}}, {"a.b": {"low": 1}},
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_a_bad_field_is_a_typed_rejection(field: str, value: object) -> None:
    state = cluster()
    spec = pack({**SPEC, field: value})
    check(state, submit(state, spec), field, spec)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("session", {"kind": "file.read"}),
        ("session", {"kind": "session.close"}),
        ("session", {"kind": "session.open", "session": 1}),
        ("payload", {"kind": "noop"}),
        ("cost.cpu.high", {"cost": {"cpu": {"low": 2000, "high": 1000}}}),
        ("cost.memory", {"cost": {"memory": {"low": 1, "high": 2}}}),
        ("cost.cpu.legal", {"cost": {"cpu": {"low": 1000, "high": 2000, "legal": [2000, 1000]}}}),
        ("cost.cpu", {"cost": {"cpu": {"low": 1500}}}),
        ("cost.cpu", {"cost": {"cpu": {"low": 5}}}),
        ("timeout_ms", {"timeout_ms": 0}),
        ("timeout_ms", {"timeout_ms": limits.TIMEOUT_MS_MAX + 1}),
        ("deadline_ms", {"deadline_ms": limits.DEADLINE_MS_MAX + 1}),
        ("retry", {"retry": "always"}),
        ("nonce", {"nonce": b""}),
        ("kind", {"kind": "Run"}),
        ("priority", {"priority": 5}),
    ],
)
def test_each_rule_is_named(field: str, spec: dict[str, Any]) -> None:
    state = cluster()
    payloads = {"file.read": m.FileRead(path="a"), "session.close": m.SessionClose(), "session.open": m.SessionOpen()}
    payload = payloads.get(spec.get("kind", "run"), m.Run(argv=("true",)))
    assert submit(state, pack({**SPEC, **spec}), payloads=(m.encode(payload),)).skipped == ""
    result = ruling(state)
    assert result is not None
    assert (result.outcome, result.reason) == (Outcome.REJECTED, "invalid")
    assert field in result.detail


def test_a_deadline_of_nothing_expires_at_once() -> None:
    state = cluster()
    assert submit(state, pack({**SPEC, "deadline_ms": 0})).skipped == ""
    result = ruling(state)
    assert result is not None
    assert result.outcome is Outcome.EXPIRED


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", BOMBS["arrays"], BOMBS["4 G items"], pack(None), pack([])], ids=lambda raw: raw[:4].hex()
)
@pytest.mark.parametrize("part", ["spec", "payload"])
def test_a_bad_item_costs_itself_and_not_its_neighbours(bad: bytes, part: str) -> None:
    state = cluster()
    good = pack(SPEC)
    specs = (good, bad if part == "spec" else good, good)
    folded = submit(state, *specs, payloads=(RUN, bad if part == "payload" else RUN, RUN))
    assert folded.skipped == ""
    result = ruling(state, 2)
    assert result is not None
    assert (result.outcome, result.reason) == (Outcome.REJECTED, "invalid")
    assert ruling(state, 1) is None
    assert ruling(state, 3) is None


@settings(max_examples=250)
@given(st.sampled_from(sorted(SPEC)), ANYTHING)
def test_any_value_of_a_field(field: str, value: Any) -> None:
    state = cluster()
    spec = pack({**SPEC, field: value})
    check(state, submit(state, spec), field, spec)


AMOUNTS = st.sampled_from([0, 1, 10, 500, 999, 1000, 2000, 4000, 8000, limits.AMOUNT_MAX]) | st.integers(0, limits.AMOUNT_MAX)
DEMANDS = st.builds(
    m.Demand, low=AMOUNTS, high=AMOUNTS | st.just(0), legal=st.lists(AMOUNTS, max_size=4).map(tuple) | st.just(())
)
COUNTS = st.integers(1, 1 << 62)
TABLES = st.lists(st.tuples(COUNTS, COUNTS), max_size=4)
HINTS = st.builds(m.Hint, duration_us=COUNTS, parallel_ppm=st.integers(0, 1_000_000), table_us=TABLES)
SPECS = st.builds(
    m.ActionSpec,
    nonce=st.binary(min_size=8, max_size=8),
    kind=st.sampled_from(["run", "noop", "session.open", "session.close", "file.read", "file.write", "my.kind"]),
    cost=st.dictionaries(st.sampled_from(["cpu", "memory", "gpu"]), DEMANDS, max_size=3),
    timeout_ms=st.integers(1, limits.TIMEOUT_MS_MAX),
    deadline_ms=st.integers(0, limits.DEADLINE_MS_MAX),
    retry=st.sampled_from(["never", "safe"]),
    session=st.just(0) | COUNTS | st.integers(0, 4),
    idle_ttl_ms=st.integers(1, limits.DEADLINE_MS_MAX),
    hint=st.none() | HINTS,
)  # fmt: skip
PAYLOADS = st.sampled_from(
    [m.Run(argv=("true",)), m.Noop(), m.SessionOpen(), m.SessionClose(), m.FileRead(path="a"), m.FileWrite(path="a", data=b"")]
)


@settings(max_examples=250)
@given(st.lists(st.tuples(SPECS, PAYLOADS), min_size=1, max_size=6))
def test_any_request_of_right_types(requests: list[tuple[m.ActionSpec, m.Payload]]) -> None:
    """The rules across fields: nothing that passes the types makes the fold or a pass raise."""
    state = cluster()
    specs, payloads = [pack(spec) for spec, _ in requests], tuple(m.encode(payload) for _, payload in requests)
    assert submit(state, *specs, payloads=payloads).skipped == ""
    assert len(state.actions) == len(requests)
    for result in state.owed.rulings.values():
        assert result.outcome is not Outcome.REJECTED or result.detail
    plan(state)


@settings(max_examples=150)
@given(
    st.sampled_from([s for s in SUBJECTS if s not in TRUSTED]),
    ANYTHING | st.fixed_dictionaries({"type": st.sampled_from(sorted(LOG_TYPES))}),
)
def test_a_producer_cannot_break_the_fold(subject: str, body: Any) -> None:
    state = cluster()
    folded = step(state, Record(3, 3, subject, pack(body)))
    assert not folded.skipped.startswith("broken")


@pytest.mark.parametrize("core", [1 << 62, 1 << 33], ids=["2**62", "2**33"])
def test_a_core_id_that_no_host_has_is_refused(core: int) -> None:
    """A set of cores is an integer with one bit a core: an id of 2**33 would be a gibibyte of memory."""
    joined = pack({**raw(VALUES["ExecutorJoined.least"]), "cores": [[core]]})
    malformed("tangram.executors.e", joined)


def test_malformed_is_no_invalid_request() -> None:
    """Whoever catches what a caller did wrong does not swallow what the log has wrong."""
    assert not issubclass(m.Malformed, InvalidRequest)
    assert issubclass(m.Malformed, ValueError)
