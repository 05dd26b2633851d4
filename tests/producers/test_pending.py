"""What a client knows of its open actions, whatever arrives in whatever order."""

from dataclasses import dataclass, field

import pytest

from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.producers import request
from tangram.producers.pending import Ledger, Pending

NONCE = b"12345678"
SPEC = m.ActionSpec(nonce=NONCE, kind="noop")
WIRE = request.wire("cpu", SPEC, m.Noop())


@dataclass
class Waiter:
    results: list[m.Result] = field(default_factory=list)

    def settle(self, result: m.Result, output: m.Output, executor: str) -> None:
        self.results.append(result)

    def fail(self, error: Exception) -> None:
        raise error


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def add(ledger: Ledger, *, stored: bool = True) -> tuple[int, Waiter]:
    waiter = Waiter()
    pending = Pending(ledger.next_n, WIRE, waiter, asked_s=0.0, patience_s=5.0, after_seq=0, stored=stored)
    ledger.add(pending)
    return pending.n, waiter


def finished(*ids: int, nonce: bytes = NONCE, outcome: Outcome = Outcome.OK) -> bytes:
    result = m.encode(m.Result(nonce=nonce, outcome=outcome))
    return m.encode(m.ActionsFinished(ids=list(ids), results=[result] * len(ids), outputs=[b""] * len(ids)))


def test_the_first_outcome_settles_and_the_second_changes_nothing(ledger: Ledger) -> None:
    n, waiter = add(ledger)
    ledger.live(5, 0, finished(n))
    ledger.live(6, 5, finished(n, outcome=Outcome.LOST))
    assert [result.outcome for result in waiter.results] == [Outcome.OK]
    assert not ledger.open


def test_an_outcome_without_the_nonce_is_ignored(ledger: Ledger) -> None:
    n, waiter = add(ledger)
    ledger.live(5, 0, finished(n, nonce=b"notmynon"))
    assert waiter.results == []
    assert n in ledger.open


def test_a_rejection_needs_the_nonce_too(ledger: Ledger) -> None:
    """Otherwise anybody could end anybody's action."""
    n, waiter = add(ledger)
    ledger.take(finished(n, nonce=bytes(8), outcome=Outcome.REJECTED))
    assert waiter.results == []


@pytest.mark.parametrize("data", [b"", b"\xc1", finished(1)[:-3], m.encode(m.Ticked(epoch=1))])
def test_bad_bytes_settle_nothing(ledger: Ledger, data: bytes) -> None:
    add(ledger)
    ledger.take(data)
    assert list(ledger.open) == [1]


def test_done_below_follows_the_oldest_open_action(ledger: Ledger) -> None:
    first, _ = add(ledger)
    second, _ = add(ledger)
    assert ledger.done_below == first
    ledger.take(finished(second))
    assert ledger.done_below == first
    ledger.take(finished(first))
    assert ledger.done_below == ledger.next_n == 3


def test_a_missed_completion_makes_everything_doubtful(ledger: Ledger) -> None:
    ledger.read_seq = 10
    first, _ = add(ledger)
    second, _ = add(ledger, stored=False)
    third, _ = add(ledger)
    ledger.live(20, 10, finished(third))
    assert not ledger.behind
    ledger.live(40, 30, finished(99))  # 30 was never seen
    assert ledger.behind
    assert ledger.doubtful(0.0) == [first, second]


def test_patience_is_for_stored_actions_and_grows_while_they_are_open(ledger: Ledger) -> None:
    stored, _ = add(ledger)
    add(ledger, stored=False)
    assert ledger.doubtful(4.9) == []
    assert ledger.doubtful(5.0) == [stored]
    assert ledger.answered([stored], m.Answer(through_seq=9, open=[stored]), 5.0, 60.0) == []
    assert ledger.doubtful(14.9) == []
    assert ledger.doubtful(15.0) == [stored]


def test_an_answer_settles_what_it_brings_and_names_what_to_send_again(ledger: Ledger) -> None:
    ended, waiter = add(ledger)
    lost, _ = add(ledger)
    on_its_way, _ = add(ledger, stored=False)
    answer = m.Answer(through_seq=9, unseen=[lost, on_its_way], completions=[(8, finished(ended))])
    assert ledger.answered([ended, lost, on_its_way], answer, 0.0, 60.0) == [lost]
    assert [result.outcome for result in waiter.results] == [Outcome.OK]


def test_an_action_of_an_earlier_process_is_settled_by_its_nonce_alone(ledger: Ledger) -> None:
    right, wrong, later = Waiter(), Waiter(), Waiter()
    ledger.recalled = {7: [(NONCE, right), (b"notmynon", wrong)], 8: [(NONCE, later)]}
    ledger.live(5, 0, finished(7, outcome=Outcome.FAILED))
    assert ([r.outcome for r in right.results], wrong.results, later.results) == ([Outcome.FAILED], [], [])
    assert list(ledger.recalled) == [8]
    assert ledger.done_below == 1  # it says nothing about our own numbers


def test_an_own_action_that_is_recalled_too_settles_both(ledger: Ledger) -> None:
    n, waiter = add(ledger)
    recalled = Waiter()
    ledger.recalled = {n: [(NONCE, recalled)]}
    ledger.take(finished(n))
    assert [len(each.results) for each in (waiter, recalled)] == [1, 1]
    assert (ledger.open, ledger.recalled) == ({}, {})


def test_what_shares_an_outcome_is_handed_on_to_be_read(ledger: Ledger) -> None:
    n, waiter = add(ledger)
    shared: list[tuple[object, int, int]] = []
    ledger.on_shared = lambda who, result: shared.append((who, result.same_as, result.at_seq))
    ruling = m.encode(m.Result(nonce=NONCE, outcome=Outcome.OK, same_as=3, at_seq=8))
    ledger.take(m.encode(m.ActionsFinished(ids=[n], results=[ruling], outputs=[b""])))
    assert shared == [(waiter, 3, 8)]
    assert (waiter.results, ledger.open) == ([], {})


def test_an_open_action_of_our_number_and_not_of_ours_is_a_conflict(ledger: Ledger) -> None:
    mine, mine_waiter = add(ledger)
    theirs, their_waiter = add(ledger)
    on_its_way, _ = add(ledger, stored=False)
    answer = m.Answer(through_seq=9, open=[mine, theirs, on_its_way], nonces=[NONCE, b"notmynon", b"notmynon"])
    assert ledger.answered([mine, theirs, on_its_way], answer, 0.0, 60.0) == []
    assert mine_waiter.results == []
    assert [(r.outcome, r.reason) for r in their_waiter.results] == [(Outcome.REJECTED, "conflict")]
    assert list(ledger.open) == [mine, on_its_way]


def test_an_older_scheduler_names_no_nonces(ledger: Ledger) -> None:
    n, waiter = add(ledger)
    ledger.answered([n], m.Answer(through_seq=9, open=[n]), 0.0, 60.0)
    assert (list(ledger.open), waiter.results) == ([n], [])
