"""What is sent twice, under one key, one id or one name; and what a cancel does to each state. One example for each rule."""

from collections.abc import Callable

import pytest

from tangram import limits, subjects
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.compose import cancels_for
from tangram.scheduler.fold_clients import next_n
from tangram.scheduler.state import ActionId, Phase, SessionPhase
from tests.core.test_fold_rules import WHOLE, forge, led, open_session
from tests.core.world import Item, Worker, World

CLIENT = ("t", "c")


def what(world: World, action: ActionId, nonce: bytes | None = None) -> tuple[str, str]:
    """(outcome, reason) that the client reads."""
    world.rule()
    result = world.result(action, nonce)
    assert result is not None, f"{action} has no outcome"
    return result.outcome.value, result.reason


def shares(world: World, action: ActionId) -> int:
    """The number of the action whose outcome this one shares, having checked that it stands where the ruling says."""
    world.rule()
    result = world.result(action)
    assert result is not None
    first = ActionId(action.task, action.client, result.same_as)
    (record,) = [record for record in world.log if record.seq == result.at_seq]
    message = m.decode(record.subject, record.data)[1]
    assert isinstance(message, m.ActionsFinished)
    stored = m.decode_result(message.results[message.ids.index(first.n)])
    assert stored == world.result(first)
    assert stored.outcome is result.outcome
    return result.same_as


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.READY, Phase.DECIDED])
@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.FAILED, Outcome.TIMED_OUT])
def test_what_is_asked_for_again_under_its_key_runs_once_and_shares_the_outcome(phase: Phase, outcome: Outcome) -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    if phase is Phase.WAITING:
        world.submit(cpu=WHOLE, session=session.n)
    first = world.submit(cpu=WHOLE, session=session.n, own_key="k")
    if phase is Phase.DECIDED:
        world.decide()
    again, once_more = (world.submit(cpu=WHOLE, session=session.n, own_key="k") for _ in range(2))
    assert (world.phase(first), world.phase(again)) == (phase, Phase.WAITING)
    if phase is Phase.WAITING:
        world.decide()
        worker.answer_all()
    world.decide()
    worker.finish(first, outcome)
    assert world.outcome(first) == outcome.value
    assert [shares(world, each) for each in (again, once_more)] == [first.n, first.n]
    assert {key.action for key in world.granted}.isdisjoint({again, once_more})
    assert not world.state.actions


def test_a_key_is_remembered_after_the_end_and_free_again_after_its_time() -> None:
    world = led()
    worker = world.join()
    first = world.submit(cpu=WHOLE, own_key="k")
    world.decide()
    worker.finish(first, Outcome.FAILED)
    keep_awake = world.submit(kind="session.open", idle_ttl_ms=limits.DEADLINE_MS_MAX)
    world.decide()
    worker.finish(keep_awake)
    world.pass_time(limits.KEY_TTL_NS / 1e9 - 10)
    again = world.submit(cpu=WHOLE, own_key="k")
    assert shares(world, again) == first.n
    world.pass_time(20)
    anew = world.submit(cpu=WHOLE, own_key="k")
    assert [start.n for start in world.decide()] == [anew.n]


def test_a_key_of_a_session_is_remembered_as_long_as_it_lives() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker, idle_ttl_ms=limits.DEADLINE_MS_MAX)
    first = world.submit(cpu=WHOLE, session=session.n, own_key="k")
    world.decide()
    worker.finish(first)
    world.pass_time(2.5 * limits.KEY_TTL_NS / 1e9)
    assert shares(world, world.submit(cpu=WHOLE, session=session.n, own_key="k")) == first.n
    world.cancel(session)
    world.rule()
    worker.answer_all()
    assert "k" in world.state.clients[CLIENT].keys  # what was done in it stays done
    world.submit(kind="session.open", idle_ttl_ms=limits.DEADLINE_MS_MAX)
    world.decide()
    worker.answer_all()
    world.pass_time(limits.KEY_TTL_NS / 1e9 + 10)
    assert "k" not in world.state.clients[CLIENT].keys


def test_a_session_is_opened_once_under_its_key_while_it_lives() -> None:
    world = led()
    worker = world.join()
    first = open_session(world, worker, own_key="box")
    again = world.submit(kind="session.open", memory=256, own_key="box")
    assert shares(world, again) == first.n
    assert world.used("memory") == 256
    world.cancel(first)
    anew = world.submit(kind="session.open", memory=256, own_key="box")
    assert [start.n for start in world.decide()] == [anew.n]


@pytest.mark.parametrize(
    ("kind", "outcome"), [("session.open", Outcome.ERROR), ("session.open", Outcome.LOST), ("run", Outcome.REJECTED)]
)
def test_what_came_to_nothing_frees_its_key_and_who_had_asked_before_shares_it(kind: str, outcome: Outcome) -> None:
    """A sandbox that was not made, or a program that its executor would not start."""
    world = led()
    worker = world.join()
    first, again = world.submit(kind=kind, own_key="k"), world.submit(kind=kind, own_key="k")
    world.decide()
    worker.finish(first, outcome)
    assert shares(world, again) == first.n
    anew = world.submit(kind=kind, own_key="k")
    assert [start.n for start in world.decide()] == [anew.n]


def test_a_rejected_submission_binds_no_key() -> None:
    world = led()
    world.join()
    assert what(world, world.submit(cpu=99 * WHOLE, own_key="k")) == ("rejected", "never_fits")
    assert what(world, world.submit(cpu=1_500, own_key="k")) == ("rejected", "invalid")
    assert world.phase(world.submit(cpu=WHOLE, own_key="k")) is Phase.READY


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("other", [{"cpu": 2 * WHOLE}, {"cpu": WHOLE, "timeout_ms": 5}, {"cpu": WHOLE, "kind": "noop"}])
def test_something_else_under_a_key_is_a_conflict(other: dict[str, object], ended: bool) -> None:
    world = led()
    worker = world.join()
    first = world.submit(cpu=WHOLE, own_key="k")
    if ended:
        world.decide()
        worker.finish(first)
    second = world.submit(own_key="k", **other)  # type: ignore[arg-type]
    assert what(world, second) == ("rejected", "conflict")
    if not ended:
        worker.finish(first)
    assert world.outcome(first) == "ok"


def test_another_payload_under_a_key_is_a_conflict_and_another_trace_is_not() -> None:
    world = led()
    world.join()
    first = world.submit(cpu=WHOLE, own_key="k", traceparent="00-01")
    other = ActionId(*CLIENT, first.n + 1)
    spec = m.ActionSpec(nonce=world.nonce(other), kind="run", cost={"cpu": m.Demand(low=WHOLE)}, key="k")
    world.send_actions(*CLIENT, [Item(other.n, m.encode(spec), m.encode(m.Run(argv=("false",))))])
    assert what(world, other) == ("rejected", "conflict")
    assert world.phase(world.submit(cpu=WHOLE, own_key="k", traceparent="00-02")) is Phase.WAITING


def test_a_key_belongs_to_one_client() -> None:
    world = led()
    world.join()
    mine, theirs = world.submit(cpu=WHOLE, own_key="k"), world.submit(client="d", cpu=2 * WHOLE, own_key="k")
    assert [start.client for start in world.decide()] == [mine.client, theirs.client]


def test_cancelling_what_shares_an_outcome_leaves_the_first_alone() -> None:
    world = led()
    worker = world.join()
    first = world.submit(cpu=WHOLE, own_key="k")
    again = world.submit(cpu=WHOLE, own_key="k")
    world.cancel(again)
    assert what(world, again) == ("cancelled", "")
    worker.finish(first)
    assert world.outcome(first) == "ok"


def test_a_cancelled_first_cancels_those_that_share_its_outcome() -> None:
    world = led()
    first, again = world.submit(cpu=WHOLE, own_key="k"), world.submit(cpu=WHOLE, own_key="k")
    world.cancel(first)
    assert (what(world, first), shares(world, again), world.outcome(again)) == (("cancelled", ""), first.n, "cancelled")


def test_keys_are_bounded_and_known_ones_still_answer() -> None:
    world = led()
    items = []
    for n in range(1, limits.KEYS_PER_CLIENT_MAX + 1):
        items.append(world.item(ActionId(*CLIENT, n), m.ActionSpec(nonce=n.to_bytes(8, "big"), kind="run", key=f"k{n}")))
        if len(items) == limits.ENVELOPE_ITEMS_MAX:
            world.send_actions(*CLIENT, items, done_below=items[0].n)
            items.clear()
    world.send_actions(*CLIENT, items, done_below=1_000)
    over = world.submit(n=limits.KEYS_PER_CLIENT_MAX + 1, own_key="one more")
    known = world.submit(n=limits.KEYS_PER_CLIENT_MAX + 2, own_key="k7")
    assert world.state.owed.rulings[over].reason == "over_limit"
    assert world.phase(known) is Phase.WAITING


def test_what_shares_an_outcome_waits_and_is_bounded_as_all_that_waits_is() -> None:
    world = led(pending_max=2)
    world.join()
    first = world.submit(cpu=WHOLE, own_key="k")
    world.submit(cpu=WHOLE, own_key="k")
    over = world.submit(cpu=WHOLE, own_key="k")
    assert what(world, over) == ("rejected", "over_limit")
    assert world.state.clients[CLIENT].keys["k"].n == first.n


def test_a_forgotten_client_leaves_no_key_behind() -> None:
    world = led()
    worker = world.join()
    first = world.submit(cpu=WHOLE, own_key="k")
    world.decide()
    worker.finish(first)
    for kind, key in [key for _, keys in world.state.timers._buckets.items() for key in keys]:
        if kind == "client":
            world.state.timers.set((kind, key), world.state.now_ns)
    world.pass_time(1)
    assert not world.state.clients
    assert not len(world.state.timers)


# --- conflicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DECIDED, Phase.OWED])
def test_another_action_under_an_open_id_is_refused_and_the_first_is_untouched(phase: Phase) -> None:
    world = led()
    worker = world.join()
    first = world.submit(cpu=WHOLE, deadline_ms=0 if phase is Phase.OWED else 60_000)
    if phase is Phase.DECIDED:
        world.decide()
    second = world.impostor(first)
    assert world.phase(first) is phase
    assert what(world, first, second) == ("rejected", "conflict")
    if phase is not Phase.OWED:
        worker.finish(first)
    assert world.outcome(first) == ("expired" if phase is Phase.OWED else "ok")
    assert not world.state.owed


def test_a_repetition_is_no_conflict() -> None:
    world = led()
    action = world.submit(cpu=WHOLE, instance=5)
    world.submit(n=action.n, cpu=WHOLE, instance=5)
    assert not world.state.owed
    assert list(world.state.actions) == [action]


def test_a_conflict_is_owed_until_it_is_in_the_log_whoever_leads() -> None:
    world = led()
    action = world.submit(cpu=WHOLE)
    nonce = world.impostor(action)
    world.plan()
    world.lead()  # what the first leader had on its way is refused
    assert list(world.state.owed.conflicts) == [(action, nonce)]
    assert what(world, action, nonce) == ("rejected", "conflict")
    assert not world.state.owed


def test_a_process_that_comes_back_takes_over_the_name_and_the_earlier_one_is_told() -> None:
    world = led()
    worker = world.join()
    old = [world.submit(cpu=WHOLE, instance=5) for _ in range(2)]
    world.decide()
    worker.finish(old[0])
    new = world.submit(n=next_n(world.state.clients[CLIENT]), cpu=WHOLE, instance=9)
    late = ActionId(*CLIENT, new.n + 1)
    nonce = world.impostor(late, instance=5)
    assert what(world, late, nonce) == ("rejected", "conflict")
    mine = world.submit(n=late.n, cpu=WHOLE, instance=9)  # its number is free for the process that has the name
    world.decide()
    worker.answer_all()
    assert [world.outcome(action) for action in (*old, new, mine)] == ["ok"] * 4


def test_numbers_that_an_earlier_process_used_meanwhile_are_refused_and_not_swallowed() -> None:
    """It asked where to go on, and then the earlier one sent some more."""
    world = led()
    worker = world.join()
    theirs = [world.submit(cpu=WHOLE, instance=5) for _ in range(2)]
    world.decide()
    worker.finish(theirs[0])
    told = [world.impostor(action, instance=9) for action in theirs]  # one has ended, one is open
    assert [what(world, action, nonce) for action, nonce in zip(theirs, told, strict=True)] == [("rejected", "conflict")] * 2
    worker.finish(theirs[1])
    assert [world.outcome(action) for action in theirs] == ["ok", "ok"]


def test_what_a_replaced_process_says_of_its_numbers_is_not_about_those_of_the_next() -> None:
    world = led()
    world.submit(cpu=WHOLE, instance=5)
    world.submit(cpu=WHOLE, instance=9)
    world.put(subjects.cancels("t"), m.CancelsRequested(client="c", ids=[7], done_below=7, instance=5))
    client = world.state.clients[CLIENT]
    assert (client.done_below, client.cancelled_early) == (0, set())
    theirs = world.submit(n=3, cpu=WHOLE, instance=9)
    assert world.phase(theirs) is Phase.READY
    world.put(subjects.cancels("t"), m.CancelsRequested(client="c", ids=[1, theirs.n], instance=5))  # it thinks 3 is its own
    assert (world.phase(ActionId(*CLIENT, 1)), world.phase(theirs)) == (Phase.OWED, Phase.READY)


# --- what was not read ---------------------------------------------------------------------------------------------


def test_it_is_known_where_the_outcomes_stand_that_a_producer_may_not_have_read() -> None:
    world = led()
    worker = world.join()
    actions = [world.submit(cpu=WHOLE, instance=5) for _ in range(3)]
    world.decide()
    stood = {}
    for action in actions:
        worker.finish(action)
        stood[action.n] = world.state.seq
    client = world.state.clients[CLIENT]
    assert client.ended == stood
    world.send_actions(*CLIENT, [], instance=5, done_below=actions[2].n)  # it goes on, and has read two
    assert client.ended == {actions[2].n: stood[actions[2].n]}
    late = world.submit(cpu=WHOLE, instance=5)
    world.decide()
    world.send_actions(*CLIENT, [], instance=9, done_below=99)  # the next process has its own numbers in mind
    worker.finish(late)
    assert client.ended == {actions[2].n: stood[actions[2].n], late.n: world.state.seq}


def test_a_producer_that_skips_ever_so_many_numbers_costs_no_time() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.finish(action)
    world.send_actions(*CLIENT, [], done_below=1 << 60)
    assert world.state.clients[CLIENT].ended == {}


# --- cancels -------------------------------------------------------------------------------------------------------


def _early(world: World, worker: Worker) -> ActionId:
    action = ActionId(*CLIENT, 5)
    world.nonce(action)
    world.cancel(action)
    return world.submit(n=5, cpu=WHOLE)


def _queued(world: World, worker: Worker) -> ActionId:
    return world.submit(cpu=WHOLE)


def _behind(world: World, worker: Worker) -> ActionId:
    session = open_session(world, worker)
    world.submit(cpu=WHOLE, session=session.n)
    return world.submit(cpu=WHOLE, session=session.n)


def _decided(world: World, worker: Worker) -> ActionId:
    action = world.submit(cpu=WHOLE)
    world.decide()
    return action


def _running(world: World, worker: Worker) -> ActionId:
    action = _decided(world, worker)
    worker.read()
    return action


def _finished(world: World, worker: Worker) -> ActionId:
    action = _decided(world, worker)
    worker.finish(action)
    return action


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        (_early, "cancelled"), (_queued, "cancelled"), (_behind, "cancelled"), (_decided, "cancelled"), (_running, "cancelled"),
        (_finished, "ok"),
    ],
)  # fmt: skip
def test_a_cancel_in_each_state_gives_exactly_one_outcome(state: Callable[[World, Worker], ActionId], outcome: str) -> None:
    world = led()
    worker = world.join()
    action = state(world, worker)
    world.cancel(action)
    world.cancel(action)
    for _ in range(4):
        world.rule()
        worker.answer_all()
    assert world.outcome(action) == outcome
    assert world.finishes[action] == 1
    assert not world.state.owed
    assert world.free_cores() == 4


def test_a_cancel_of_what_opened_a_session_ends_the_session() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker, memory=300)
    runs, ready = world.submit(cpu=WHOLE, session=session.n), world.submit(cpu=WHOLE, session=session.n)
    world.decide()
    world.cancel(session)
    assert world.state.sessions[session].phase is SessionPhase.ENDING
    assert list(world.state.owed.ends) == [(worker.incarnation, session)]
    assert world.outcome(ready) == "environment_lost"  # it will not start any more
    assert world.used("memory") == 300
    worker.answer_all()
    world.rule()
    worker.answer_all()
    assert world.outcome(runs) in ("ok", "environment_lost")
    assert (world.used("memory"), world.state.sessions, worker.sandboxes) == (0, {}, {})
    assert world.outcome(session) == "ok"
    assert not world.state.owed


def test_a_cancel_of_a_session_ends_what_is_ready_in_it() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    ready = world.submit(cpu=WHOLE, session=session.n)
    assert world.phase(ready) is Phase.READY
    world.cancel(session)
    assert world.owed(ready) == "environment_lost"
    forge(world, ready, Outcome.ENVIRONMENT_LOST)  # nobody but its executor can say that the sandbox is gone
    assert world.state.sessions[session].phase is SessionPhase.ENDING
    world.rule()
    worker.answer_all()
    assert not world.state.sessions


def test_all_that_a_client_has_open_ends_with_it_and_nothing_of_others() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker, memory=300)
    inside, runs, queued = world.submit(cpu=WHOLE, session=session.n), world.submit(cpu=3 * WHOLE), world.submit(cpu=WHOLE)
    other = world.submit(client="d", cpu=WHOLE)
    world.decide()
    world.disconnect(*CLIENT)
    assert cancels_for(world.state, *CLIENT) == []  # it is not asked twice
    for _ in range(3):
        world.rule()
        worker.answer_all()
    assert [world.outcome(action) for action in (inside, runs, queued)] == ["cancelled"] * 3
    assert (world.used("memory"), world.state.sessions) == (0, {})
    assert world.outcome(other) == "ok"


def test_a_client_says_with_what_it_submits_that_it_wants_to_be_watched() -> None:
    world = led()
    item = world.item(ActionId(*CLIENT, 1), m.ActionSpec(nonce=world.nonce(ActionId(*CLIENT, 1)), kind="noop"))
    world.send_actions(*CLIENT, [item], instance=5, cancel_on_disconnect=True)
    assert world.state.clients[CLIENT].cancel_on_disconnect
    world.send_actions(*CLIENT, [], instance=3)  # one that was replaced has no say
    assert world.state.clients[CLIENT].cancel_on_disconnect
    world.send_actions(*CLIENT, [], instance=7)
    assert not world.state.clients[CLIENT].cancel_on_disconnect
