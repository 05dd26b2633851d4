"""What an executor does with what it reads, in any order."""

import pytest

from tangram import messages as m
from tangram.executors import core as c
from tangram.executors.backend import ActionKey, SessionKey
from tangram.executors.core import Attempt, ExecutorCore
from tangram.outcomes import Outcome

NONCE = b"12345678"


@pytest.fixture
def core() -> ExecutorCore:
    return ExecutorCore("e", "me")


def start(n: int, *, kind: str = "run", session: int = 0, attempt: int = 1) -> m.Start:
    return m.Start(task="t", client="c", n=n, attempt=attempt, nonce=NONCE, kind=kind, session=session, timeout_ms=1000)


def decided(number: int, *items: m.Item, incarnation: str = "me", epoch: int = 1) -> m.DecisionsMade:
    return m.DecisionsMade(
        epoch=epoch, incarnation=incarnation, number=number, window=1, through_seq=1, digest=b"", items=list(items)
    )


def read(core: ExecutorCore, message: m.DecisionsMade, seq: int = 100) -> list[c.Instruction]:
    return core.decisions(message, seq)


def attempt(n: int, number: int = 1) -> Attempt:
    return Attempt(ActionKey("t", "c", n), number)


def result(outcome: Outcome = Outcome.OK) -> m.Result:
    return m.Result(nonce=NONCE, outcome=outcome)


def begun(instructions: list[c.Instruction]) -> list[int]:
    return [i.start.n for i in instructions if isinstance(i, c.Begin)]


def open_session(core: ExecutorCore, n: int, number: int) -> None:
    read(core, decided(number, start(n, kind="session.open")))
    core.ended(attempt(n), result(), None)


def test_a_start_is_begun_once_however_often_it_is_delivered(core: ExecutorCore) -> None:
    assert begun(read(core, decided(1, start(1)))) == [1]
    assert read(core, decided(1, start(1))) == []
    core.ended(attempt(1), result(), None)
    assert read(core, decided(1, start(1))) == []


def test_what_follows_a_hole_waits_until_it_is_filled(core: ExecutorCore) -> None:
    assert read(core, decided(3, start(3))) == []
    assert read(core, decided(2, start(2))) == []
    assert begun(read(core, decided(1, start(1)))) == [1, 2, 3]


def test_an_empty_message_fills_a_hole(core: ExecutorCore) -> None:
    read(core, decided(2, start(2)))
    assert begun(read(core, decided(1))) == [2]


def test_decisions_for_another_incarnation_are_dropped(core: ExecutorCore) -> None:
    assert read(core, decided(1, start(1), incarnation="other")) == []
    assert begun(read(core, decided(1, start(2)))) == [2]


def test_a_number_of_an_older_leader_fills_the_hole_behind_a_newer_ones(core: ExecutorCore) -> None:
    """Redelivered late: it stands before the newer record, so it counts."""
    core.led(4)
    core.led(20)
    assert read(core, decided(2, start(2), epoch=20), seq=21) == []
    assert begun(read(core, decided(1, start(1), epoch=4), seq=19)) == [1, 2]


@pytest.mark.parametrize("epoch", [0, 4, 100, 1 << 61])
def test_what_no_leader_has_decided_is_not_begun_and_uses_up_no_number(core: ExecutorCore, epoch: int) -> None:
    core.led(4)
    core.led(20)
    assert read(core, decided(1, start(1), epoch=epoch), seq=30) == []
    assert begun(read(core, decided(1, start(2), epoch=20), seq=31)) == [2]


def test_after_its_loss_nothing_is_begun(core: ExecutorCore) -> None:
    lost = m.ExecutorLost(epoch=1, executor="e", incarnation="me", reason="silent")
    assert core.clock(lost) == [c.Abandon("silent")]
    assert core.clock(lost) == []
    assert read(core, decided(1, start(1))) == []


def test_another_loss_is_no_business_of_it(core: ExecutorCore) -> None:
    assert core.clock(m.ExecutorLost(epoch=1, executor="e", incarnation="other")) == []
    assert begun(read(core, decided(1, start(1)))) == [1]


def test_a_join_under_its_name_replaces_it(core: ExecutorCore) -> None:
    """The scheduler gives what was on its way to it to the successor: it must not begin that too."""

    def joined(incarnation: str) -> m.ExecutorJoined:
        return m.ExecutorJoined(incarnation=incarnation, key="cpu", host="h", machine_id="m", boot_id="b")

    assert core.joined(joined("me")) == []
    assert [type(i) for i in core.joined(joined("successor"))] == [c.Abandon]
    assert read(core, decided(1, start(1))) == []


def test_a_cancel_ends_what_runs_and_nothing_else(core: ExecutorCore) -> None:
    read(core, decided(1, start(1)))
    cancel = m.Cancel(task="t", client="c", n=1)
    assert read(core, decided(2, cancel)) == [c.Kill(attempt(1))]
    core.ended(attempt(1), result(Outcome.CANCELLED), None)
    assert read(core, decided(3, cancel)) == []
    assert read(core, decided(4, m.Cancel(task="t", client="c", n=9))) == []


def test_a_cancel_names_its_attempt(core: ExecutorCore) -> None:
    read(core, decided(1, start(1, attempt=2)))
    assert read(core, decided(2, m.Cancel(task="t", client="c", n=1, attempt=1))) == []


def test_an_ending_is_reported_with_its_output(core: ExecutorCore) -> None:
    read(core, decided(1, start(1)))
    output = m.Output(stdout=b"x")
    assert core.ended(attempt(1), result(), output) == [c.Finish(ActionKey("t", "c", 1), result(), output)]
    with pytest.raises(KeyError):
        core.ended(attempt(1), result(), None)


def test_a_session_is_there_from_its_opening_to_its_closing(core: ExecutorCore) -> None:
    open_session(core, 1, 1)
    assert begun(read(core, decided(2, start(2, session=1)))) == [2]
    core.ended(attempt(2), result(), None)
    read(core, decided(3, start(3, kind="session.close", session=1)))
    core.ended(attempt(3), result(), None)
    assert core.is_idle
    (finish,) = read(core, decided(4, start(4, session=1)))
    assert isinstance(finish, c.Finish)
    assert finish.result.outcome is Outcome.ENVIRONMENT_LOST


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.ERROR])
def test_an_opening_that_failed_made_no_session(core: ExecutorCore, outcome: Outcome) -> None:
    read(core, decided(1, start(1, kind="session.open")))
    core.ended(attempt(1), result(outcome), None)
    assert core.sessions == {}


def test_a_lost_sandbox_is_no_session_any_more(core: ExecutorCore) -> None:
    open_session(core, 1, 1)
    read(core, decided(2, start(2, session=1)))
    core.ended(attempt(2), result(Outcome.ENVIRONMENT_LOST), None, session_lost=True)
    assert core.sessions == {}


def test_ending_a_session_is_answered_whether_or_not_it_exists(core: ExecutorCore) -> None:
    open_session(core, 1, 1)
    assert read(core, decided(2, m.EndSession(task="t", client="c", session=1))) == [c.CloseSession(SessionKey("t", "c", 1))]
    (report,) = core.session_closed(SessionKey("t", "c", 1), "closed")
    assert isinstance(report, c.Report)
    (again,) = read(core, decided(3, m.EndSession(task="t", client="c", session=1)))
    assert isinstance(again, c.Report)


def test_draining_returns_what_is_new_and_goes_on_with_its_sessions(core: ExecutorCore) -> None:
    open_session(core, 1, 1)
    core.draining = True
    instructions = read(core, decided(2, start(2), start(3, session=1), start(4, kind="session.open")))
    assert begun(instructions) == [3]
    returned = [i.item for i in instructions if isinstance(i, c.Return)]
    assert [(item.n, item.number) for item in returned] == [(2, 2), (4, 2)]


def test_a_probe_is_answered_and_a_dismissal_is_obeyed(core: ExecutorCore) -> None:
    assert read(core, decided(1, m.Probe(number=7), m.Dismiss(reason="drained"))) == [c.Answer(7), c.Leave()]


def test_items_for_other_kinds_of_executor_do_no_harm(core: ExecutorCore) -> None:
    items = (m.Resize(task="t", client="c", n=1), m.Prefetch(service="s"), m.Evict(service="s"), start(1))
    assert begun(read(core, decided(1, *items))) == [1]


def test_what_cannot_be_begun_is_given_back_with_the_number_of_its_decision_and_can_come_again(core: ExecutorCore) -> None:
    (begin,) = read(core, decided(1, start(1)))
    assert isinstance(begin, c.Begin)
    assert begin.number == 1
    (given_back,) = core.refused(begin.attempt, begin.number, "no descriptors")
    assert given_back == c.Return(m.Returned(task="t", client="c", n=1, attempt=1, number=1, reason="no descriptors"))
    assert core.is_idle
    assert begun(read(core, decided(2, start(1)))) == [1]


def test_a_refusal_of_what_does_not_run_is_a_bug(core: ExecutorCore) -> None:
    with pytest.raises(KeyError):
        core.refused(attempt(1), 1, "x")
