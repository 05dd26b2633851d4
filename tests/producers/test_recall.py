"""Looking outcomes up that this process did not ask for: whatever the scheduler answers, there is a result or a typed error."""

import asyncio
from collections.abc import Callable

import pytest

from tangram import messages as m
from tangram.broker import BrokerTimeout
from tangram.errors import ClientClosed, InvalidRequest, ResultGone, UnknownAction
from tangram.outcomes import Outcome
from tangram.producers.pending import Ledger
from tangram.producers.recall import Recall, checked_key, number_of
from tangram.producers.result import Result

NONCE = b"12345678"
STORED_SEQ = 50


class Scheduler:
    """Answers what a test says it knows. stored: completions by sequence."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.recall = Recall("t/c", self.ledger, self.ask, self.barrier)
        self.questions: list[m.Ask] = []
        self.knows: Callable[[m.Ask], m.Answer] = lambda ask: m.Answer(through_seq=9, unseen=ask.ids)
        self.stored: dict[int, bytes] = {}
        self.failures: list[Exception] = []

    async def ask(self, question: m.Ask) -> m.Answer:
        self.questions.append(question)
        if self.failures:
            raise self.failures.pop()
        if question.at_seq:
            found = [(seq, data) for seq, data in self.stored.items() if seq == question.at_seq]
            return m.Answer(through_seq=9, completions=found)
        return self.knows(question)

    async def barrier(self) -> int:
        return STORED_SEQ

    def store(self, seq: int, n: int, output: bytes = b"", **result: object) -> None:
        made = m.encode(m.Result(nonce=NONCE, **{"outcome": Outcome.OK, **result}))  # type: ignore[arg-type]
        wrote = m.encode(m.Output(stdout=output)) if output else b""
        self.stored[seq] = m.encode(m.ActionsFinished(executor="e", ids=[n], results=[made], outputs=[wrote]))


@pytest.fixture
async def scheduler() -> Scheduler:
    return Scheduler()


async def test_what_was_never_seen_is_asked_for_once_more_behind_all_that_is_stored(scheduler: Scheduler) -> None:
    with pytest.raises(UnknownAction, match="t/c/7"):
        await scheduler.recall.result(7, "")
    assert [ask.stored_seq for ask in scheduler.questions] == [0, STORED_SEQ]


async def test_what_has_ended_is_read_from_where_it_stands(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, outcomes=[(7, 5)])
    scheduler.store(5, 7, b"out", outcome=Outcome.FAILED, exit_code=3)
    result = await scheduler.recall.result(7, "")
    assert (result.id, result.outcome, result.exit_code, result.stdout) == ("t/c/7", Outcome.FAILED, 3, b"out")


async def test_a_key_is_resolved_to_what_it_stands_for(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, keys=[(ask.keys[0], 7)], outcomes=[(7, 5)])
    scheduler.store(5, 7)
    assert (await scheduler.recall.result(0, "mine")).id == "t/c/7"


@pytest.mark.parametrize("answer", [m.Answer(through_seq=9), m.Answer(through_seq=9, outcomes=[(7, 5)])])
async def test_what_is_no_longer_in_the_log_is_said_to_be_gone(scheduler: Scheduler, answer: m.Answer) -> None:
    scheduler.knows = lambda ask: answer
    with pytest.raises(ResultGone, match="t/c/7"):
        await scheduler.recall.result(7, "")


async def test_what_shares_an_outcome_has_the_result_of_what_ran(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, outcomes=[(8, 6)])
    scheduler.store(5, 7, b"out", run_ns=2_000_000_000)
    scheduler.store(6, 8, same_as=7, at_seq=5)
    result = await scheduler.recall.result(8, "")
    assert (result.id, result.stdout, result.run_s, result.act_s) == ("t/c/7", b"out", 2.0, 2.0)


async def test_what_shares_an_outcome_keeps_it_when_the_log_has_lost_what_was_written(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, outcomes=[(8, 6)])
    scheduler.store(6, 8, outcome=Outcome.FAILED, same_as=7, at_seq=5)
    result = await scheduler.recall.result(8, "")
    assert (result.id, result.outcome, result.stdout) == ("t/c/7", Outcome.FAILED, b"")
    assert "no longer in the log" in result.detail


async def test_an_open_action_is_waited_for_and_its_nonce_counts(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, open=[7], nonces=[NONCE])
    waiting = asyncio.create_task(scheduler.recall.result(7, ""))
    while not scheduler.ledger.recalled:
        await asyncio.sleep(0)
    for nonce, outcome in ((b"mistaken", Outcome.FAILED), (NONCE, Outcome.OK)):
        raw = m.encode(m.Result(nonce=nonce, outcome=outcome))
        scheduler.ledger.take(m.encode(m.ActionsFinished(ids=[7], results=[raw], outputs=[b""])))
    assert (await waiting).outcome is Outcome.OK
    assert not scheduler.ledger.recalled


async def test_an_outcome_that_nobody_brought_is_asked_for_again(scheduler: Scheduler) -> None:
    answers = [m.Answer(through_seq=9, outcomes=[(7, 5)]), m.Answer(through_seq=9, open=[7], nonces=[NONCE])]
    scheduler.knows = lambda ask: answers.pop()
    scheduler.store(5, 7)
    assert (await asyncio.wait_for(scheduler.recall.result(7, ""), 10)).ok


async def test_a_scheduler_that_is_away_is_asked_again(scheduler: Scheduler) -> None:
    scheduler.failures = [BrokerTimeout("away"), BrokerTimeout("away")]
    scheduler.knows = lambda ask: m.Answer(through_seq=9, outcomes=[(7, 5)])
    scheduler.store(5, 7)
    assert (await scheduler.recall.result(7, "")).ok


async def test_closing_the_client_ends_the_waiting(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, open=[7], nonces=[NONCE])
    waiting = asyncio.create_task(scheduler.recall.result(7, ""))
    while not scheduler.ledger.recalled:
        await asyncio.sleep(0)
    scheduler.recall.close(ClientClosed("closed"))
    with pytest.raises(ClientClosed):
        await waiting


async def test_who_stops_waiting_leaves_nothing_behind(scheduler: Scheduler) -> None:
    scheduler.knows = lambda ask: m.Answer(through_seq=9, open=[7], nonces=[NONCE])
    waits: list[asyncio.Task[Result]] = [asyncio.create_task(scheduler.recall.result(7, "")) for _ in range(2)]
    while len(scheduler.ledger.recalled.get(7, [])) < 2:
        await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.wait({waits[0]})
    assert len(scheduler.ledger.recalled[7]) == 1
    waits[1].cancel()
    await asyncio.wait({waits[1]})
    assert not scheduler.ledger.recalled


@pytest.mark.parametrize(("good", "n"), [(7, 7), ("7", 7), ("t/c/7", 7), (0, 0), (1 << 62, 1 << 62)])
def test_an_id_is_a_number_or_ends_in_one(good: int | str, n: int) -> None:
    assert number_of(good, "t", "c") == n


@pytest.mark.parametrize("bad", ["t/d/7", "c/7", "t/c/", "/7", "", "seven", -1, True, 1.5, None, "٣", (1 << 62) + 1, "9" * 5_000])
def test_another_id_is_named(bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        number_of(bad, "t", "c")  # type: ignore[arg-type]
    assert caught.value.field == "id"


@pytest.mark.parametrize("bad", [None, 5, b"k", "x" * 201, "\ud800"])
def test_a_key_that_cannot_be_one_is_named(bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_key(bad)  # type: ignore[arg-type]
    assert caught.value.field == "key"
