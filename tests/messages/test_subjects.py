"""Nothing but a token reaches a subject, and every stored subject can be taken apart again."""

import re
import string
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tangram import limits, subjects
from tangram import messages as m
from tangram.errors import InvalidRequest
from tangram.rules import broken_rule

ALPHABET = string.ascii_letters + string.digits + "_-"
TOKENS = st.text(alphabet=ALPHABET, min_size=1, max_size=limits.NAME_LENGTH_MAX)
GOOD = re.compile(r"[A-Za-z0-9_-]{1,64}")

STORED: dict[str, tuple[Callable[..., str], int]] = {
    "actions": (subjects.actions, 2),
    "cancels": (subjects.cancels, 1),
    "executors": (subjects.executors, 1),
    "completions": (subjects.completions, 2),
    "decisions": (subjects.decisions, 2),
}
NOT_STORED: dict[str, tuple[Callable[..., str], int]] = {
    "results": (subjects.results, 2),
    "ask": (subjects.ask, 2),
    "heartbeats": (subjects.heartbeats, 1),
    "client_heartbeats": (subjects.client_heartbeats, 2),
    "output": (subjects.output, 2),
    "dead": (subjects.dead, 1),
}
OTHERS: dict[str, tuple[Callable[..., str], int]] = {
    "actions_of": (subjects.actions_of, 1),
    "decisions_of": (subjects.decisions_of, 1),
    "consumer": (subjects.consumer, 1),
}
BUILDERS = {**STORED, **NOT_STORED, **OTHERS}

BAD_NAMES = [
    "", " ", "a b", "a.b", ".", "..", ".a", "a.", "*", ">", "a*", "a\n", "\n", "a\r\n", "a\t", "a\x00", "é", "é", "\u0430",
    "\u0661", "a/b", "a\\b", "$JS", "a" * 65, "a" * 5_000, "\ud800", "a:b", "a,b", "a+b", "{a}", "a\u200b", "a\x85", "a\u2028",
]  # fmt: skip


@given(TOKENS)
def test_a_token_is_returned_as_it_is(name: str) -> None:
    assert subjects.token(name) == name


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_known_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        subjects.token(name, "task")
    assert caught.value.field == "task"
    assert "[A-Za-z0-9_-]{1,64}" in caught.value.rule
    assert len(caught.value.value) <= 100


@pytest.mark.parametrize("name", [None, 1, True, b"a", ["a"], 1.5, object()], ids=lambda name: type(name).__name__)
def test_what_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(InvalidRequest):
        subjects.token(name)


@given(
    st.text() | TOKENS.map(lambda name: name + "\n") | st.tuples(TOKENS, st.sampled_from(".*> \t\r\n/\\\0é"), TOKENS).map("".join)
)
@example("a\n")
def test_a_name_passes_only_if_it_is_a_token(name: str) -> None:
    if GOOD.fullmatch(name):
        assert subjects.token(name) == name
    else:
        with pytest.raises(InvalidRequest):
            subjects.token(name)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("bad", ["a.b", "*", ">", "", "a\n", "a b", "é"], ids=ascii)
def test_every_builder_refuses_a_bad_name_in_every_place(builder: str, bad: str) -> None:
    build, places = BUILDERS[builder]
    for place in range(places):
        names = ["good"] * places
        names[place] = bad
        with pytest.raises(InvalidRequest):
            build(*names)


@given(st.sampled_from(sorted(STORED)), TOKENS, TOKENS)
@example("decisions", "leader", "clock")
@example("actions", "a" * 64, "b" * 64)
def test_parse_is_the_inverse_of_every_builder(role: str, first: str, second: str) -> None:
    build, places = STORED[role]
    names = (first, second)[:places]
    subject = build(*names)
    assert subjects.parse(subject) == subjects.Address(role, first, second if places == 2 else "")
    assert len(subject) < 300
    assert all(part for part in subject.split("."))


@given(st.sampled_from(sorted(NOT_STORED)), TOKENS, TOKENS)
def test_what_is_not_stored_is_no_subject_of_the_log(role: str, first: str, second: str) -> None:
    build, places = NOT_STORED[role]
    assert subjects.parse(build(*(first, second)[:places])) is None


def test_the_leaders_own_subjects() -> None:
    assert subjects.parse(subjects.LEADER) == subjects.Address("decisions", "leader", "")
    assert subjects.parse(subjects.CLOCK) == subjects.Address("decisions", "clock", "")


NOT_OF_THE_LOG = [
    "", "tangram", "tangram.", "tangram..x", ".tangram", "tangram.actions", "tangram.actions.", "tangram.actions..x",
    "tangram.actions.cpu", "tangram.actions.cpu.", "tangram.actions.cpu.t.", "tangram.actions.cpu.t.u", "tangram.actions.*.t",
    "tangram.actions.cpu.>", "tangram.cancels", "tangram.cancels.t.u", "tangram.cancels.*", "tangram.executors",
    "tangram.executors.e.f", "tangram.completions.t", "tangram.completions.t.c.d", "tangram.decisions",
    "tangram.decisions.cpu.e.f", "tangram.decisions.*.e", "tangram.unknown.a", "tangram.unknown.a.b", "tangram.blobs.t.h.0",
    "tangram.checkpoints.a", "$JS.API.STREAM.DELETE.TANGRAM", "$JS.API.STREAM.INFO.TANGRAM", "$SYS.REQ", "_INBOX.a.b",
    "Tangram.cancels.t", "TANGRAM.cancels.t", "tangram.Cancels.t", "tangram.cancels.t\n", "tangram.cancels. t",
    "tangram.cancels.é", "x.tangram.cancels.t", "tangram.cancels." + "a" * 65, "tangram.cancels.t\x00",
]  # fmt: skip


@pytest.mark.parametrize("subject", NOT_OF_THE_LOG, ids=ascii)
def test_other_subjects_are_not_of_the_log(subject: str) -> None:
    assert subjects.parse(subject) is None


@given(st.text() | st.lists(st.text(alphabet="ab.*>$ ") | st.sampled_from(["tangram", *STORED]), max_size=6).map(".".join))
def test_parse_is_total_and_says_what_it_took(subject: str) -> None:
    address = subjects.parse(subject)
    if address is not None:
        parts = [part for part in address if part]
        assert subject == ".".join(["tangram", *parts])
        assert all(GOOD.fullmatch(part) for part in parts)


def test_a_consumers_name_needs_no_quoting() -> None:
    assert GOOD.fullmatch(subjects.consumer("e-1"))


SHA256S = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(SHA256S, st.integers(1, limits.BLOB_BYTES_MAX), st.integers(1, limits.BLOB_PIECES_MAX))
def test_the_name_of_a_blob(sha256: str, size: int, pieces: int) -> None:
    name = subjects.BlobName(sha256, size, min(pieces, size))
    assert subjects.parse_blob(str(name)) == name
    assert len(str(name)) <= 128  # of `payload_blob`
    for index in (0, name.pieces - 1):
        subject = subjects.blob("t", name.sha256, index)
        assert subject == f"tangram.blobs.t.{sha256}.{index}"
        assert subjects.parse(subject) is None


A = "0a" * 32
NO_BLOBS = [
    "", "sha256-abc", A, f"{A}-1", f"{A}-0-1", f"{A}-1-0", f"{A}-1-2", f"{A}-01-1", f"{A}-1-01", f"{A}-1-1\n", f" {A}-1-1",
    f"{A.upper()}-1-1", f"{A[:-1]}-1-1", f"{A}0-1-1", f"{A}--1-1", f"{A}-1-1-1", f"{A}-+1-1", f"{A}-1_0-1", f"{A}-\u0661-1",
    f"{A}-{limits.BLOB_BYTES_MAX + 1}-160", f"{A}-{limits.BLOB_BYTES_MAX}-{limits.BLOB_PIECES_MAX + 1}", f"{A}-{'9' * 40}-1",
    f"../{A}-1-1", f"other.{A}-1-1", "*-1-1",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_BLOBS, ids=ascii)
def test_what_is_no_name_of_a_blob(text: str) -> None:
    assert subjects.parse_blob(text) is None
    spec = m.ActionSpec(nonce=bytes(8), kind="run", payload_blob=text[:128])
    assert (broken_rule("cpu", spec, None) == "") == (text == "")


@given(st.text())
def test_parsing_a_blobs_name_is_total(text: str) -> None:
    name = subjects.parse_blob(text)
    assert name is None or str(name) == text
