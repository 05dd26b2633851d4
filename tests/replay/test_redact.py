"""Without payloads a log is decided as with them, and has nothing of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram import messages as m
from tangram import subjects
from tangram.outcomes import Outcome
from tangram.replay.redact import Redaction
from tangram.rules import broken_payload_rule
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State
from tests.core.world import World, cores
from tests.replay.synthetic import busy_log

REDACTION = Redaction(b"secret")
text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
runs = st.builds(
    m.Run,
    argv=st.lists(text, min_size=1, max_size=4).map(tuple),
    stdin=st.binary(max_size=300),
    env=st.dictionaries(names, text, max_size=3),
    cwd=text,
    output_max=st.integers(0, 1 << 20),
)
writes = st.builds(m.FileWrite, path=text.filter(bool), data=st.binary(max_size=100), mode=st.integers(0, 0o777))
payloads = st.one_of(runs, writes, st.builds(m.SessionOpen, image=text, env=st.dictionaries(names, text, max_size=2)))


@given(payloads)
def test_a_payload_keeps_its_form_and_loses_its_words(payload: m.AnyPayload) -> None:
    raw = m.encode(payload)
    masked = REDACTION.payload(raw)
    found = m.decode_payload(masked)
    assert (len(masked), type(found)) == (len(raw), type(payload))
    for kind in ("run", "file.write", "session.open"):
        assert broken_payload_rule(kind, found) == broken_payload_rule(kind, payload)
    if isinstance(payload, m.Run) and isinstance(found, m.Run):
        assert [len(each.encode()) for each in found.argv] == [len(each.encode()) for each in payload.argv]
        assert (set(found.env), found.output_max) == (set(payload.env), payload.output_max)


encoded = payloads.map(m.encode)


@given(st.binary(max_size=80) | encoded.map(lambda raw: raw[:-1]) | encoded.map(lambda raw: raw + b"\0"))
def test_what_is_no_payload_stays_none(raw: bytes) -> None:
    def reads(data: bytes) -> bool:
        try:
            m.decode_payload(data)
        except m.MALFORMED:
            return False
        return True

    masked = REDACTION.payload(raw)
    assert (reads(masked), len(masked)) == (reads(raw), len(raw))


def test_equal_ones_stay_equal_and_nobody_can_guess_them() -> None:
    one, other = (m.encode(m.Run(argv=("rm", "-rf", name), stdin=b"s" * 500)) for name in ("abcdefgh", "abcdefgi"))
    assert REDACTION.payload(one) == Redaction(b"secret").payload(one)
    assert REDACTION.payload(one) != REDACTION.payload(other)
    assert REDACTION.payload(one) != Redaction(b"another").payload(one)


SECRET = "hunter2-hunter2"


def test_nothing_of_what_programs_were_given_and_wrote_is_left() -> None:
    world = World()
    world.lead()
    world.join("cpu-0", nodes=cores(2))
    run = m.Run(argv=("sh", "-c", SECRET), stdin=SECRET.encode(), env={"TOKEN": SECRET}, cwd=SECRET)
    spec = m.ActionSpec(nonce=b"n" * 8, kind="run", cost={"cpu": m.Demand(low=1000)})
    submitted = m.ActionsSubmitted(client="c", ids=[1], specs=[m.encode(spec)], payloads=[m.encode(run)])
    world.put(subjects.actions("cpu", "t"), submitted)
    start = m.Start(task="t", client="c", n=1, nonce=b"n" * 8, kind="run", timeout_ms=1, payload=m.encode(run))
    decided = m.DecisionsMade(
        epoch=1, incarnation="i", number=1, window=1, through_seq=3, digest=b"", items=[start, m.Dismiss(reason="r")]
    )
    result = m.Result(nonce=b"n" * 8, outcome=Outcome.OK, detail=SECRET)
    output = m.encode(m.Output(stdout=SECRET.encode()))
    finished = m.ActionsFinished(executor="e", incarnation="i", k=9, ids=[1], results=[m.encode(result)], outputs=[output])
    subjects_and_messages: list[tuple[str, m.LogMessage]] = [
        (subjects.actions("cpu", "t"), submitted),
        (subjects.decisions("cpu", "e"), decided),
        (subjects.completions("t", "c"), finished),
    ]
    for subject, message in subjects_and_messages:
        record = Record(9, 9, subject, m.encode(message))
        assert SECRET.encode() in record.data
        masked = REDACTION.record(record)
        assert SECRET.encode() not in masked.data
        assert b"TOKEN" in masked.data or not isinstance(message, m.ActionsSubmitted)
    broken = Record(9, 9, subjects.actions("cpu", "t"), SECRET.encode())
    assert SECRET.encode() not in REDACTION.record(broken).data


@pytest.mark.parametrize("seed", [1, 2])
def test_a_log_without_payloads_folds_to_the_same_state(seed: int) -> None:
    log = busy_log(300, seed=seed)
    state, other = State(), State()
    for record in log:
        step(state, record)
        step(other, REDACTION.record(record))
        assert (other.digest, other.payload_bytes) == (state.digest, state.payload_bytes)
