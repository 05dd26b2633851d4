"""Bytes that were once written stay readable: logs outlive versions.

When a test here fails, stored logs of earlier versions have become unreadable or mean something else. Do not change
golden.json; make the new field optional, or give the new shape a new type. A new type or field needs a new entry: add it
to golden_values.py and run `python -m tests.messages.golden_values`.
"""

import inspect
import json
from typing import Any

import msgspec
import pytest

from tangram import messages as m
from tangram.messages import codec
from tests.messages.golden_values import DECODERS, GOLDEN_FILE, SUBJECTS, VALUES, VERSION, golden

BASES = {m.Event, m.Request, m.Payload}
STRUCTS = [
    kind
    for _, kind in inspect.getmembers(m, inspect.isclass)
    if issubclass(kind, msgspec.Struct) and kind.__module__.startswith(m.__name__) and kind not in BASES
]
GOLDEN = golden()


def decode(name: str, raw: bytes) -> Any:
    """By the way these bytes really take: the subject's decoder, or one of the named ones, or inside another message."""
    kind = type(VALUES[name])
    for subject, kinds in SUBJECTS.items():
        if kind in kinds:
            return m.decode(subject, raw)[1]
    for decoder, kinds in DECODERS.values():
        if kind in kinds:
            return decoder(raw)
    if kind in m.Item.__args__:
        return msgspec.msgpack.decode(raw, type=m.Item)
    return msgspec.msgpack.decode(raw, type=kind)


def test_the_file_is_of_this_version() -> None:
    assert json.loads(GOLDEN_FILE.read_text())["version"] == VERSION


def test_the_file_holds_exactly_the_known_names() -> None:
    assert set(GOLDEN) == set(VALUES), "run `python -m tests.messages.golden_values`, and never remove a name"


@pytest.mark.parametrize("name", sorted(VALUES))
def test_golden_bytes_mean_what_they_meant(name: str) -> None:
    value = decode(name, GOLDEN[name])
    assert type(value) is type(VALUES[name])
    assert value == VALUES[name]


@pytest.mark.parametrize("name", sorted(VALUES))
def test_what_is_written_is_what_was_written(name: str) -> None:
    assert m.encode(VALUES[name]).hex() == GOLDEN[name].hex()


@pytest.mark.parametrize("name", sorted(VALUES))
def test_decoding_and_encoding_again_changes_nothing(name: str) -> None:
    assert m.encode(decode(name, GOLDEN[name])).hex() == GOLDEN[name].hex()


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_type_is_covered(kind: type[msgspec.Struct]) -> None:
    assert any(type(value) is kind for value in VALUES.values()), f"golden_values.py has no {kind.__name__}"


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_covered(kind: type[msgspec.Struct]) -> None:
    """By a value other than its default, since defaults are left out of the bytes."""
    values = [value for value in VALUES.values() if type(value) is kind]
    for field in msgspec.structs.fields(kind):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        assert any(getattr(value, field.name) != default for value in values), f"{kind.__name__}.{field.name} has no golden bytes"


def test_every_type_of_the_log_has_a_subject() -> None:
    on_subjects = {kind for kinds in SUBJECTS.values() for kind in kinds}
    assert on_subjects == set(m.LogMessage.__args__)
    known = on_subjects | set(m.Item.__args__)
    assert {kind.__name__ for kind in known} <= codec._KNOWN_TYPES, "an unlisted type would stop every fold as a newer version's"


def test_every_payload_and_item_stands_in_its_union() -> None:
    assert {kind for kind in STRUCTS if issubclass(kind, m.Payload)} == set(m.AnyPayload.__args__)
    items = {type(item) for item in VALUES["DecisionsMade.full"].items}  # type: ignore[attr-defined]
    assert items == set(m.Item.__args__), "every item type stands in the golden decisions"


@pytest.mark.parametrize("kind", [k for k in STRUCTS if issubclass(k, m.Event)], ids=lambda kind: kind.__name__)
def test_events_tolerate_and_requests_refuse(kind: type[msgspec.Struct]) -> None:
    assert not kind.__struct_config__.forbid_unknown_fields
    assert kind.__struct_config__.tag == kind.__name__


@pytest.mark.parametrize("kind", [k for k in STRUCTS if issubclass(k, m.Request)], ids=lambda kind: kind.__name__)
def test_requests_refuse_unknown_fields(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_types_are_frozen_and_named_by_keyword(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.omit_defaults
    with pytest.raises(TypeError):
        kind("positional")


def test_equal_messages_give_equal_bytes() -> None:
    forward = m.Run(argv=("a",), env={"A": "1", "B": "2", "C": "3"})
    backward = m.Run(argv=("a",), env={"C": "3", "B": "2", "A": "1"})
    assert forward == backward
    assert m.encode(forward) == m.encode(backward)


def test_there_are_no_floats_on_the_wire() -> None:
    def floats(raw: object) -> bool:
        if isinstance(raw, dict):
            return any(floats(item) for pair in raw.items() for item in pair)
        return any(floats(item) for item in raw) if isinstance(raw, list) else isinstance(raw, float)

    assert not [name for name, raw in GOLDEN.items() if floats(msgspec.msgpack.decode(raw))]
    for kind in STRUCTS:
        assert "float" not in str(kind.__annotations__), f"{kind.__name__}: integers only"
