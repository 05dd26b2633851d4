"""One example for each rule of the log, small enough to read. `World` is the log, the leader, the hosts and the clients."""

import pytest
from msgspec.structs import replace

from tangram import limits, subjects
from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.fold import NewerVersion, Record, step
from tangram.scheduler.state import ActionId, GrantKey, Phase, SessionPhase, State
from tests.core.world import MS, START_NS, Item, Worker, World, cores, fold_again

WHOLE = 1_000
BACKSTOP_S = (limits.TIMEOUT_MS_DEFAULT + limits.KILL_BUDGET_MS + limits.BACKSTOP_GRACE_MS) / 1_000 + 2
"""One core."""


def led(policy: str = "tangram", **settings: int) -> World:
    world = World()
    world.lead(policy, **settings)
    return world


def forge(world: World, action: ActionId, outcome: Outcome, *, nonce: bytes | None = None, attempt: int = 1) -> None:
    """An outcome from somebody whom the core does not know (any more)."""
    result = m.Result(nonce=nonce or world.nonces[action], attempt=attempt, outcome=outcome)
    message = m.ActionsFinished(
        executor="x", incarnation="unknown", k=1, ids=[action.n], results=[m.encode(result)], outputs=[b""]
    )
    world.put(subjects.completions(action.task, action.client), message)


def open_session(world: World, worker: Worker, **spec: object) -> ActionId:
    session = world.submit(kind="session.open", **{"memory": 256, **spec})  # type: ignore[arg-type]
    world.decide()
    worker.finish(session)
    return session


# --- outcomes ----------------------------------------------------------------------------------------------------


def test_an_action_that_ran_has_the_outcome_of_its_executor_and_its_units_are_back() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=2 * WHOLE, memory=100)
    (start,) = world.decide()
    assert (start.cores, start.amounts, world.free_cores(), world.used("memory")) == (
        (0, 1),
        {"cpu": 2000, "memory": 100},
        2,
        100,
    )
    worker.finish(action, Outcome.FAILED)
    assert world.outcome(action) == "failed"
    assert (world.free_cores(), world.used("memory")) == (4, 0)


def test_the_first_outcome_in_the_log_wins() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.read()
    world.pass_time(BACKSTOP_S)  # the backstop: the leader owes `lost`
    assert world.owed(action) == "lost"
    worker.finish(action, Outcome.OK)  # but the executor's own word gets into the log before
    assert world.outcome(action) == "ok"
    assert not world.state.owed


def test_a_ruling_wins_if_it_is_first_and_the_later_answer_only_gives_units_back() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.read()
    world.pass_time(BACKSTOP_S)
    world.rule()
    assert (world.phase(action), world.free_cores()) == (Phase.GONE, 3)
    worker.finish(action)
    assert (world.outcome(action), world.free_cores()) == ("lost", 4)


def test_an_outcome_without_the_nonce_is_none() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    forge(world, action, Outcome.OK, nonce=b"guessed!")
    assert world.phase(action) is Phase.DECIDED
    worker.finish(action, Outcome.FAILED)
    assert world.outcome(action) == "failed"


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.READY, Phase.DECIDED, Phase.OWED])
def test_an_outcome_with_the_nonce_counts_whoever_wrote_it_and_whatever_the_action_waits_for(phase: Phase) -> None:
    world = led()
    if phase is Phase.WAITING:
        world.submit(n=1, kind="session.open")
        action = world.submit(cpu=WHOLE, session=1)
    else:
        action = world.submit(cpu=WHOLE)
    if phase is Phase.DECIDED:
        worker = world.join()
        world.decide()
    if phase is Phase.OWED:
        world.cancel(action)
    assert world.phase(action) is phase
    forge(world, action, Outcome.OK)
    assert world.phase(action) is Phase.GONE
    assert world.result(action).outcome is Outcome.OK  # type: ignore[union-attr]
    if phase is Phase.DECIDED:  # the attempt that runs is called off, and holds its units until it answers
        assert (list(world.state.owed.cancels), world.free_cores()) == ([(worker.incarnation, GrantKey(action, 1))], 3)
        world.rule()
        worker.answer_all()
        assert world.free_cores() == 4
    assert not world.state.owed


# --- decisions that come too late ----------------------------------------------------------------------------------


def test_a_decision_after_the_loss_of_its_incarnation_is_void() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.plan()
    world.lose(worker)
    assert world.deliver() == []
    assert world.phase(action) is Phase.READY
    other = world.join("other", host="h2")
    assert world.free_cores("h2") == 4
    assert [start.attempt for start in world.decide()] == [1]
    other.finish(action)
    assert world.outcome(action) == "ok"


def test_a_decision_on_the_subject_of_another_executor_is_void() -> None:
    world = led()
    world.join("mine")
    action = world.submit(cpu=WHOLE)
    world.plan()
    ((_, message),) = world.in_flight
    world.put(subjects.decisions("cpu", "other"), message)
    assert (world.phase(action), world.free_cores()) == (Phase.READY, 4)


@pytest.mark.parametrize("overtaken_by", ["cancel", "deadline", "outcome", "outcome read"])
def test_an_overtaken_decision_grants_and_its_units_return_with_the_answer(overtaken_by: str) -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE, deadline_ms=1_000)
    world.plan()
    if overtaken_by == "cancel":
        world.cancel(action)
    elif overtaken_by == "deadline":
        world.pass_time(2)
    else:
        forge(world, action, Outcome.ERROR)
    (start,) = world.deliver()
    assert (start.n, world.free_cores()) == (action.n, 3)
    assert list(world.state.owed.cancels) == [(worker.incarnation, GrantKey(action, 1))]
    if overtaken_by == "outcome read":
        world.rule()
        assert not world.state.owed
    worker.answer_all()
    assert world.free_cores() == 4
    world.rule()
    expected = {"cancel": "cancelled", "deadline": "expired"}.get(overtaken_by, "error")
    if overtaken_by in ("cancel", "deadline"):
        expected = world.result(action).outcome.value  # type: ignore[union-attr]  # whichever came first
        assert expected in ("ok", "cancelled", "expired")
    assert world.outcome(action) == expected
    assert not world.state.owed


def test_decisions_of_an_older_leader_change_nothing() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.plan()
    stale = list(world.in_flight)
    world.lead()
    for subject, message in stale:
        world.put(subject, message)
    for message in (
        m.ExecutorLost(epoch=1, executor=worker.executor, incarnation=worker.incarnation),
        m.Settings(epoch=1, settings={"static_units": 3}),
    ):
        world.put(subjects.CLOCK, message)
    result = m.Result(nonce=world.nonces[action], outcome=Outcome.LOST)
    ruling = m.ActionsFinished(epoch=1, ids=[action.n], results=[m.encode(result)], outputs=[b""])
    world.put(subjects.completions("t", "c"), ruling)
    assert (world.phase(action), world.free_cores(), world.state.settings) == (Phase.READY, 4, {})
    assert world.state.incarnations[worker.incarnation].live


# --- losses ------------------------------------------------------------------------------------------------------


def test_a_lost_one_shot_action_is_lost_and_its_units_stay_held_until_its_process_is_found_dead() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=3 * WHOLE, memory=100)
    world.decide()
    worker.read()
    world.lose(worker)
    assert world.outcome(action) == "lost"
    worker.die()
    second = world.join("second")
    assert (world.free_cores(), world.used("memory")) == (1, 100)
    world.lose(second)
    second.die()
    world.join("third", dead=[worker])
    assert (world.free_cores(), world.used("memory")) == (4, 0)


def test_an_action_of_a_session_that_is_lost_ends_environment_lost_whatever_its_retry_says() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    running = world.submit(cpu=WHOLE, session=session.n, retry="safe")
    waiting = world.submit(cpu=WHOLE, session=session.n, retry="safe")
    world.decide()
    world.lose(worker)
    assert [world.outcome(running), world.outcome(waiting)] == ["environment_lost"] * 2
    assert not world.state.sessions


def test_a_retry_safe_action_is_tried_again_elsewhere_and_at_most_three_times() -> None:
    world = led()
    workers = {"h1": world.join(host="h1", nodes=cores(8)), "h2": world.join(host="h2")}
    action = world.submit(cpu=WHOLE, retry="safe")
    for attempt, host in ((1, "h1"), (2, "h2"), (3, "h1")):  # the larger is preferred, but not by who lost it there
        (start,) = world.decide()
        assert (start.attempt, len(workers[host].unread)) == (attempt, 1)
        lost = workers[host]
        lost.die()
        workers[host] = world.join(host=host, nodes=lost.nodes, dead=[lost])
    assert world.outcome(action) == "lost"
    assert world.free_cores("h1") == 8


def test_the_host_of_a_loss_is_taken_again_when_there_is_no_other() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE, retry="safe")
    world.decide()
    worker.die()
    again = world.join(dead=[worker])
    (start,) = world.decide()
    assert start.attempt == 2
    again.finish(action)
    assert world.outcome(action) == "ok"


def test_a_late_outcome_of_an_earlier_attempt_counts_and_calls_the_later_one_off() -> None:
    world = led()
    first, second = world.join(host="h1"), world.join(host="h2")
    action = world.submit(cpu=WHOLE, retry="safe")
    world.decide()
    first, second = (first, second) if first.unread else (second, first)
    first.read()
    world.lose(first)
    world.decide()
    second.read()
    first.end(GrantKey(action, 1))
    first.send()
    assert world.phase(action) is Phase.GONE
    assert world.free_cores(first.host.name) == 0  # nobody offers that host's cores any more
    assert world.free_cores(second.host.name) == 3
    world.rule()
    second.answer_all()
    assert world.free_cores(second.host.name) == 4
    assert world.outcome(action) == "ok"
    assert world.result(action).attempt == 1  # type: ignore[union-attr]


def test_a_reboot_frees_all_that_ran_there() -> None:
    world = led()
    world.join()
    actions = [world.submit(cpu=WHOLE), world.submit(cpu=2 * WHOLE)]
    world.decide()
    worker = world.join(reboot=True)
    assert world.free_cores() == 4
    assert [world.outcome(action) for action in actions] == ["lost", "lost"]
    after = world.submit(cpu=4 * WHOLE)
    world.decide()
    worker.finish(after)
    assert world.outcome(after) == "ok"


def test_a_host_that_restarts_its_only_executor_takes_actions_again() -> None:
    world = led()
    worker = world.join()
    for _ in range(3):
        worker.die()
        worker = world.join(worker.executor, dead=[worker])
        action = world.submit(cpu=4 * WHOLE)
        world.decide()
        worker.finish(action)
        assert world.outcome(action) == "ok"


def test_only_its_own_host_can_call_an_incarnation_dead() -> None:
    world = led()
    worker = world.join(host="h1")
    world.submit(cpu=WHOLE)
    world.decide()
    world.lose(worker)
    other = world.join(host="h2", later=True)
    other.outbox.clear()
    message = m.ExecutorJoined(
        incarnation="liar", key="cpu", host="h2", machine_id="machine-h2", boot_id="b", cores=cores(4), dead=[worker.incarnation]
    )
    world.put(subjects.executors("liar"), message)
    assert worker.incarnation in world.state.incarnations
    assert world.state.incarnations[worker.incarnation].grants


def test_a_replaced_incarnation_is_told_and_never_becomes_current_again() -> None:
    world = led()
    old = world.join("e", host="h1")
    new = world.join("e", host="h2")
    assert world.state.executors == {"e": new.incarnation}
    world.rule()
    old.read()
    assert not old.alive
    world.put(*old.sent[0])  # its join, once more
    old.change(capacity={"memory": 9_999})
    old.send()
    assert world.state.executors == {"e": new.incarnation}
    assert "late join" in str(replay_story(world, old.sent[0]))
    world.submit(cpu=WHOLE)
    world.decide()
    assert (len(old.unread), len(new.unread)) == (0, 1)


def replay_story(world: World, sent: tuple[str, m.LogMessage]) -> list[object]:
    world.put(*sent)
    return list(world.state.story)


def test_a_lost_incarnation_stays_lost_when_its_join_comes_again() -> None:
    world = led()
    worker = world.join()
    world.lose(worker)
    world.put(*worker.sent[0])
    assert not world.state.incarnations[worker.incarnation].live
    worker.die()
    world.join(dead=[worker])
    world.put(*worker.sent[0])
    assert worker.incarnation not in world.state.incarnations


def test_a_join_that_comes_after_its_incarnation_was_found_dead_is_ignored() -> None:
    world = led()
    dead = world.join(later=True)
    dead.die()
    alive = world.join(dead=[dead])
    dead.send()
    assert list(world.state.incarnations) == [alive.incarnation]


def test_a_sandbox_of_a_lost_incarnation_holds_its_memory_even_if_its_opening_is_reported_late() -> None:
    world = led()
    worker = world.join()
    session = world.submit(kind="session.open", memory=700)
    world.decide()
    worker.read()
    world.lose(worker)
    worker.end(GrantKey(session, 1))
    worker.send()  # the sandbox is there, and nobody has ended it yet
    second = world.join("second")
    assert world.used("memory") == 700
    worker.die()
    second.find_dead([worker])
    second.send()
    assert world.used("memory") == 0


def test_a_session_whose_opening_is_reported_only_after_the_loss_does_not_live() -> None:
    world = led()
    worker = world.join()
    session = world.submit(kind="session.open", memory=100)
    inside = world.submit(cpu=WHOLE, session=session.n)
    world.decide()
    worker.read()
    world.lose(worker)
    worker.end(GrantKey(session, 1))
    worker.send()
    assert world.outcome(session) == "ok"
    assert world.outcome(inside) == "environment_lost"
    assert not world.state.sessions


# --- numbered words of executors -----------------------------------------------------------------------------------


def test_words_of_an_incarnation_that_are_not_above_its_last_are_skipped() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.read()
    worker.change(capacity={"memory": 10})
    worker.end(GrantKey(action, 1))
    earlier, later = worker.outbox
    world.put(*later)
    for again in (earlier, later):
        world.put(*again)
        assert str(world.state.story[0]).startswith("stale")
    worker.drain()
    worker.outbox.popleft()
    worker.outbox.popleft()
    worker.send()
    world.put(*worker.sent[-1])
    assert str(world.state.story[0]).startswith("stale")
    assert world.state.hosts[worker.host].capacity == {"memory": 1_024}
    assert world.outcome(action) == "ok"
    assert world.free_cores() == 4


def test_words_on_the_subject_of_another_executor_are_not_taken() -> None:
    world = led()
    worker = world.join("mine")
    action = world.submit(cpu=WHOLE)
    world.decide()
    world.put(subjects.executors("other"), m.ExecutorLeft(incarnation=worker.incarnation, k=9))
    assert world.state.incarnations[worker.incarnation].live
    assert world.phase(action) is Phase.DECIDED


def test_a_returned_action_is_decided_again_with_the_same_attempt() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.refuse(action)
    assert (world.phase(action), world.free_cores()) == (Phase.READY, 4)
    (start,) = world.decide()
    assert start.attempt == 1
    worker.finish(action)
    assert world.outcome(action) == "ok"


def test_a_return_of_another_decision_is_not_taken() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.refuse(action)
    returned = worker.sent[-1][1]
    world.decide()
    assert isinstance(returned, m.ActionsReturned)
    again = m.ActionsReturned(incarnation=worker.incarnation, k=99, returned=returned.returned)
    world.put(subjects.executors(worker.executor), again)
    assert (world.phase(action), world.free_cores()) == (Phase.DECIDED, 3)


def test_a_start_that_was_answered_cannot_be_returned_or_answered_again() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker, memory=300)
    result = m.Result(nonce=world.nonces[session], outcome=Outcome.FAILED)
    world.put(
        subjects.completions("t", "c"),
        m.ActionsFinished(incarnation=worker.incarnation, k=98, ids=[session.n], results=[m.encode(result)], outputs=[b""]),
    )
    assert (world.used("memory"), list(world.state.sessions)) == (300, [session])
    item = m.Returned(task="t", client="c", n=session.n, attempt=1, number=1)
    world.put(subjects.executors(worker.executor), m.ActionsReturned(incarnation=worker.incarnation, k=99, returned=[item]))
    assert world.used("memory") == 300


def test_a_returned_action_waits_for_its_deadline_again_and_not_for_its_time_out() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE, timeout_ms=1_000, deadline_ms=1_000_000)
    world.decide()
    worker.refuse(action)
    world.pass_time(100)
    assert world.phase(action) is Phase.READY
    world.pass_time(901)
    assert world.outcome(action) == "expired"


def test_refusals_are_bounded() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    for _ in range(20):
        world.decide()
        worker.refuse(action)
    assert world.outcome(action) == "error"
    assert world.free_cores() == 4


def test_an_action_that_is_returned_after_its_session_ended_is_not_decided_again() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    action = world.submit(cpu=WHOLE, session=session.n)
    world.decide()
    worker.read()
    del worker.sandboxes[session]
    worker.say_ended(session, "the container died")
    worker.send()
    worker.refuse(action)
    assert world.outcome(action) == "environment_lost"
    assert world.free_cores() == 4


# --- cancels -----------------------------------------------------------------------------------------------------


def test_a_cancel_that_comes_before_its_action_ends_it() -> None:
    world = led()
    world.join()
    action = ActionId("t", "c", 5)
    world.nonce(action)
    world.cancel(action)
    assert world.state.clients[("t", "c")].cancelled_early == {5}
    world.submit(n=5, cpu=WHOLE)
    assert world.outcome(action) == "cancelled"
    assert world.state.clients[("t", "c")].cancelled_early == set()


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.READY, Phase.OWED])
def test_a_cancel_of_what_has_not_started_needs_no_executor(phase: Phase) -> None:
    world = led()
    if phase is Phase.WAITING:
        world.submit(n=1, kind="session.open")
        action = world.submit(cpu=WHOLE, session=1)
    else:
        action = world.submit(cpu=WHOLE, deadline_ms=0 if phase is Phase.OWED else 1_000)
    assert world.phase(action) is phase
    world.cancel(action)
    world.cancel(action)
    assert world.outcome(action) == ("expired" if phase is Phase.OWED else "cancelled")


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.OK])
def test_a_cancel_of_what_runs_is_owed_and_the_executor_has_the_last_word(outcome: Outcome) -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    world.cancel(action)
    world.cancel(action)
    assert list(world.state.owed.cancels) == [(worker.incarnation, GrantKey(action, 1))]
    world.rule()
    worker.read()
    assert [running.cancelled for running in worker.running.values()] == [True]
    assert world.free_cores() == 3
    worker.finish(action, outcome)
    assert (world.outcome(action), world.free_cores()) == (outcome.value, 4)


def test_a_cancelled_action_is_not_decided_again_when_it_is_returned_or_lost() -> None:
    world = led()
    worker = world.join()
    returned, lost = world.submit(cpu=WHOLE), world.submit(cpu=WHOLE, retry="safe")
    world.decide()
    world.cancel(returned, lost)
    worker.refuse(returned)
    assert world.outcome(returned) == "cancelled"
    world.lose(worker)
    assert world.outcome(lost) == "cancelled"


def test_a_cancel_of_a_finished_action_does_nothing() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.finish(action)
    world.cancel(action)
    assert not world.state.owed
    assert not world.state.clients[("t", "c")].cancelled_early


# --- time --------------------------------------------------------------------------------------------------------


def test_a_deadline_of_zero_expires_at_once() -> None:
    world = led()
    world.join()
    action = world.submit(cpu=WHOLE, deadline_ms=0)
    assert world.decide() == []
    assert world.outcome(action) == "expired"


def test_a_deadline_passes_while_queued_but_not_while_running() -> None:
    world = led()
    worker = world.join()
    running = world.submit(cpu=4 * WHOLE, deadline_ms=3_000)
    world.decide()
    queued = world.submit(cpu=WHOLE, deadline_ms=3_000)
    world.pass_time(2)
    assert world.phase(queued) is Phase.READY
    world.pass_time(2)
    assert world.outcome(queued) == "expired"
    assert world.phase(running) is Phase.DECIDED
    worker.finish(running)
    assert world.outcome(running) == "ok"


def test_the_deadline_counts_again_from_submission_when_an_action_is_returned() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE, deadline_ms=3_000)
    world.decide()
    world.pass_time(10)
    worker.refuse(action)
    assert world.outcome(action) == "expired"


def test_an_executor_that_never_answers_leaves_the_action_lost_and_its_units_held() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE, timeout_ms=2_000)
    world.decide()
    worker.read()
    patience_s = 2 + (limits.KILL_BUDGET_MS + limits.BACKSTOP_GRACE_MS) / 1_000
    world.pass_time(patience_s - 1)
    assert world.phase(action) is Phase.DECIDED
    world.pass_time(2)
    assert list(world.state.owed.cancels) == [(worker.incarnation, GrantKey(action, 1))]
    assert world.outcome(action) == "lost"
    assert world.free_cores() == 3
    worker.answer_all()
    assert (world.outcome(action), world.free_cores()) == ("lost", 4)


def test_opening_a_session_that_is_never_answered_ends_with_its_time_out_and_grace() -> None:
    world = led()
    worker = world.join()
    session = world.submit(kind="session.open", timeout_ms=1_000)
    world.decide()
    world.pass_time(1 + (limits.KILL_BUDGET_MS + limits.BACKSTOP_GRACE_MS) / 1_000 + 1)
    world.rule()
    assert world.outcome(session) == "lost"
    worker.finish(session)
    assert world.used("memory") == 0 or world.state.owed.ends


def test_log_time_goes_on_by_at_most_two_seconds_a_message_and_never_back() -> None:
    world = led()
    seen = []
    for ms in (500, 3_600_000, -7_200_000, 500, 3_600_000):
        world.after(ms)
        world.tick()
        seen.append(world.state.now_ns // MS)
    assert seen == [500, 2_500, 2_500, 2_500, 2_500]
    world.after(3_599_501)  # a millisecond above the highest stamp so far
    world.tick()
    assert world.state.now_ns // MS == 2_501


# --- sessions ----------------------------------------------------------------------------------------------------


def test_open_run_and_close_can_be_sent_before_anything_is_answered() -> None:
    world = led()
    worker = world.join()
    session = world.submit(kind="session.open", memory=300)
    actions = [world.submit(cpu=WHOLE, session=session.n), world.submit(kind="file.write", session=session.n)]
    close = world.submit(kind="session.close", session=session.n)
    ran = []
    while world.state.actions:
        (start,) = world.decide()  # one at a time, whatever is free
        ran.append(start.n)
        assert world.used("memory") == 300
        worker.answer_all()
    assert ran == [session.n, *(action.n for action in actions), close.n]
    assert [world.outcome(action) for action in (session, *actions, close)] == ["ok"] * 4
    assert (world.used("memory"), world.state.sessions, worker.sandboxes) == (0, {}, {})


def test_an_opening_that_fails_loses_what_waits_for_it() -> None:
    world = led()
    worker = world.join()
    session = world.submit(kind="session.open", memory=300)
    waiting = [world.submit(cpu=WHOLE, session=session.n), world.submit(kind="session.close", session=session.n)]
    world.decide()
    worker.finish(session, Outcome.ERROR)
    assert [world.outcome(action) for action in waiting] == ["environment_lost"] * 2
    assert world.outcome(session) == "error"
    assert world.used("memory") == 0
    late = world.submit(cpu=WHOLE, session=session.n)
    assert world.outcome(late) == "environment_lost"


def test_a_cancelled_opening_loses_what_waits_for_it_and_a_sandbox_that_came_all_the_same_is_ended() -> None:
    world = led()
    worker = world.join()
    session = world.submit(kind="session.open", memory=300)
    waiting = world.submit(cpu=WHOLE, session=session.n)
    world.plan()
    world.cancel(session)
    world.deliver()
    world.rule()
    worker.finish(session)  # the cancel was too late
    assert (world.outcome(session), world.outcome(waiting)) == ("cancelled", "environment_lost")
    assert world.used("memory") == 300
    world.rule()
    worker.answer_all()
    assert (world.used("memory"), worker.sandboxes, world.state.sessions) == (0, {}, {})


def test_an_idle_session_is_ended_by_the_leader_and_frees_its_memory_when_the_executor_says_so() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker, idle_ttl_ms=5_000, memory=300)
    world.pass_time(3)
    action = world.submit(cpu=WHOLE, session=session.n)
    world.decide()
    world.pass_time(20)  # not idle while an action runs
    worker.finish(action)
    world.pass_time(4)
    assert not world.state.owed
    world.pass_time(2)
    assert list(world.state.owed.ends) == [(worker.incarnation, session)]
    late = world.submit(cpu=WHOLE, session=session.n)
    assert world.outcome(late) == "environment_lost"
    assert world.used("memory") == 300
    worker.answer_all()
    assert (world.used("memory"), world.state.sessions, worker.sandboxes) == (0, {}, {})
    assert not world.state.wants_ticks


def test_a_sandbox_that_dies_takes_its_waiting_actions_with_it() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    running, waiting = (world.submit(cpu=WHOLE, session=session.n) for _ in range(2))
    world.decide()
    worker.read()
    worker.end_session(session, "out of memory")
    worker.send()
    assert [world.outcome(running), world.outcome(waiting)] == ["environment_lost"] * 2
    assert (world.used("memory"), world.free_cores()) == (0, 4)


def test_an_overtaken_action_of_a_session_still_has_it_to_itself() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    first, second = (world.submit(cpu=WHOLE, session=session.n) for _ in range(2))
    world.plan()
    world.cancel(first)  # overtakes the decision: the second one may not start beside it
    assert [start.n for start in world.deliver()] == [first.n]
    world.rule()
    assert [start.n for start in world.decide()] == []
    worker.read()
    assert len(worker.running) == 1
    worker.answer_all()
    assert [start.n for start in world.decide()] == [second.n]
    worker.finish(second)
    assert world.outcome(second) == "ok"


def test_nobody_but_its_executor_can_say_that_a_session_has_ended() -> None:
    world = led()
    worker, other = world.join(), world.join()
    session = open_session(world, worker)
    other.say_ended(session, "wrong")
    other.send()
    assert session in world.state.sessions
    assert world.used("memory") == 256


def test_a_session_is_free_again_only_when_the_units_of_its_lost_action_are_back() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    first, second = (world.submit(cpu=WHOLE, session=session.n, timeout_ms=1_000) for _ in range(2))
    world.decide()
    worker.read()
    world.pass_time(BACKSTOP_S)
    assert world.outcome(first) == "lost"
    assert world.phase(second) is Phase.WAITING
    worker.answer_all()
    assert [start.n for start in world.decide()] == [second.n]


def test_static_trajectory_reserves_cores_for_the_life_of_the_session() -> None:
    world = led("static-trajectory", static_units=2)
    worker = world.join()
    session = open_session(world, worker)
    assert world.free_cores() == 2
    action = world.submit(cpu=m.Demand(low=WHOLE, high=4 * WHOLE), session=session.n)
    (start,) = world.decide()
    assert (start.cores, start.units, start.amounts) == ((0, 1), 2, {})
    worker.finish(action)
    assert world.free_cores() == 2
    close = world.submit(kind="session.close", session=session.n)
    world.decide()
    worker.finish(close)
    assert world.free_cores() == 4


def test_a_session_that_a_static_policy_opened_keeps_its_cores_under_the_next_policy() -> None:
    world = led("static-trajectory", static_units=2)
    worker = world.join()
    session = open_session(world, worker)
    world.lead("marginal-gain")
    inside = world.submit(cpu=WHOLE, session=session.n)
    outside = world.submit(cpu=m.Demand(low=WHOLE, high=4 * WHOLE))
    inner, outer = world.decide()
    assert (inner.n, inner.cores, outer.n, outer.cores) == (inside.n, (0, 1), outside.n, (2, 3))


# --- what is refused ---------------------------------------------------------------------------------------------


def test_what_no_host_could_ever_hold_is_refused_and_the_largest_is_named() -> None:
    world = led()
    early = world.submit(cpu=64 * WHOLE, deadline_ms=1_000)
    assert world.phase(early) is Phase.READY  # nobody has joined yet, so nobody knows
    world.join(host="h1", nodes=cores(8), memory=100)
    world.join(host="h2", nodes=cores(4), memory=2_000)
    assert world.phase(world.submit(cpu=4 * WHOLE, memory=2_000)) is Phase.READY
    action = world.submit(cpu=8 * WHOLE, memory=101)
    assert world.outcome(action) == "rejected"
    result = world.result(action)
    assert result is not None
    assert (result.reason, result.detail) == ("never_fits", "at most cpu 8000, memory 2000 on one executor")


def test_a_reservation_that_no_host_could_ever_hold_is_refused() -> None:
    world = led("static-trajectory", static_units=5)
    world.join(nodes=cores(4))
    session = world.submit(kind="session.open")
    assert world.outcome(session) == "rejected"
    assert world.result(session).detail == "at most cpu 4000 on one executor"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "spec", "says"),
    [
        ("session.close", {}, "session"),
        ("session.open", {"session": 1}, "session"),
        ("run", {"cpu": 1_500}, "whole cores"),
        ("run", {"cpu": 5}, "fraction of 10"),
        ("run", {"memory": m.Demand(low=1, high=2)}, "only the key resource"),
        ("run", {"cpu": m.Demand(low=2_000, high=1_000)}, "must not be below low"),
        ("run", {"cpu": m.Demand(low=1_000, high=4_000, legal=(1_000, 3_000, 2_000, 4_000))}, "must rise"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_as_invalid(kind: str, spec: dict[str, object], says: str) -> None:
    world = led()
    world.join()
    action = world.submit(kind=kind, **spec)  # type: ignore[arg-type]
    assert world.outcome(action) == "rejected"
    result = world.result(action)
    assert result is not None
    assert result.reason == "invalid"
    assert says in result.detail


def test_a_bad_item_costs_only_itself() -> None:
    world = led()
    worker = world.join()
    good = [ActionId("t", "c", n) for n in (1, 4)]
    spec = {action: m.ActionSpec(nonce=world.nonce(action), kind="run", cost={"cpu": m.Demand(low=WHOLE)}) for action in good}
    bad = [ActionId("t", "c", n) for n in (2, 3)]
    for action in bad:
        world.nonce(action)
    items = [
        world.item(good[0], spec[good[0]]),
        Item(2, b"\xc1 no msgpack", b""),
        Item(3, m.encode(replace(spec[good[0]], nonce=world.nonce(bad[1]))), b"\x81\xa4type\xa4Walk"),
        world.item(good[1], spec[good[1]]),
    ]
    world.send_actions("t", "c", items)
    assert sorted(start.n for start in world.decide()) == [1, 4]
    worker.answer_all()
    assert [world.outcome(action) for action in (*good, *bad)] == ["ok", "ok", "rejected", "rejected"]


def test_a_bad_result_costs_only_itself() -> None:
    world = led()
    worker = world.join()
    actions = [world.submit(cpu=WHOLE), world.submit(cpu=WHOLE)]
    world.decide()
    worker.read()
    result = m.encode(m.Result(nonce=world.nonces[actions[1]], outcome=Outcome.OK))
    message = m.ActionsFinished(
        executor=worker.executor, incarnation=worker.incarnation, k=9, ids=[1, 2], results=[b"\xc1", result], outputs=[b"", b""]
    )
    world.put(subjects.completions("t", "c"), message)
    assert [world.phase(action) for action in actions] == [Phase.DECIDED, Phase.GONE]
    assert world.state.skipped == 0


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("tangram.actions.cpu.t", b"\xc1"),
        ("tangram.actions.cpu.t", m.encode(m.Ticked(epoch=1))),
        ("tangram.actions.cpu.t", m.encode(m.ActionsSubmitted(client="c", ids=[1, 2], specs=[b""], payloads=[b"", b""]))),
        ("tangram.actions.cpu.t", b"\x91" * 50_000),
        ("tangram.cancels.t", m.encode(m.CancelsRequested(client="c", ids=[1]))[:-1]),
        ("tangram.completions.t.c", b""),
        ("tangram.elsewhere", m.encode(m.Ticked(epoch=1))),
        ("tangram.decisions.cpu.e", m.encode(m.Ticked(epoch=1))),
    ],
)
def test_garbage_is_skipped_counted_and_folded_alike(subject: str, data: bytes) -> None:
    world = led()
    folded = world.put(subject, data, garbage=True)
    assert folded.skipped.startswith("malformed: ")
    assert world.state.skipped == 1
    assert fold_again(world.log) == world.digests


@pytest.mark.parametrize("subject", ["tangram.decisions.clock", "tangram.decisions.leader", "tangram.executors.e"])
def test_a_type_that_a_newer_version_wrote_stops_the_fold(subject: str) -> None:
    with pytest.raises(NewerVersion):
        step(State(), Record(1, START_NS, subject, b"\x81\xa4type\xaaFromFuture"))


def test_a_policy_that_only_a_newer_version_knows_stops_the_fold() -> None:
    data = m.encode(m.LeaderStarted(leader="s", behaviour=1, policy="from-the-future"))
    with pytest.raises(NewerVersion, match="from-the-future"):
        step(State(), Record(1, START_NS, subjects.LEADER, data))


def test_a_producer_cannot_stop_the_fold_with_a_type_nobody_knows() -> None:
    led().put("tangram.actions.cpu.t", b"\x81\xa4type\xaaFromFuture", garbage=True)


def test_records_that_do_not_rise_are_an_error_of_the_caller() -> None:
    world = led()
    with pytest.raises(ValueError, match="record 1 after 1"):
        step(world.state, world.log[0])


# --- ids of clients ----------------------------------------------------------------------------------------------


def test_an_action_that_is_sent_twice_runs_once() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.submit(n=action.n, cpu=WHOLE)
    assert len(world.decide()) == 1
    worker.finish(action)
    world.submit(n=action.n, cpu=WHOLE)
    assert world.decide() == []
    assert not world.state.actions


def test_ids_below_done_below_are_known_without_being_remembered() -> None:
    world = led()
    for n in (0, 7, 3):
        world.submit(n=n, cpu=WHOLE)
    client = world.state.clients[("t", "c")]
    assert (client.contiguous, client.sparse) == (1, {3, 7})
    world.send_actions("t", "c", [], done_below=8)
    assert (client.done_below, client.contiguous, client.sparse) == (8, 8, set())
    world.submit(n=5, cpu=WHOLE)
    assert ActionId("t", "c", 5) not in world.state.actions
    assert len(world.state.actions) == 3


def test_what_was_seen_joins_on_to_done_below() -> None:
    world = led()
    for n in (5, 6):
        world.submit(n=n, cpu=WHOLE)
    world.send_actions("t", "c", [], done_below=5)
    client = world.state.clients[("t", "c")]
    assert (client.contiguous, client.sparse) == (7, set())


def test_an_id_too_far_above_done_below_is_refused_and_may_come_again() -> None:
    world = led()
    action = world.submit(n=limits.CLIENT_SEEN_WIDTH_MAX, cpu=WHOLE)
    assert world.outcome(action) == "rejected"
    assert world.result(action).reason == "over_limit"  # type: ignore[union-attr]
    world.send_actions("t", "c", [], done_below=1)
    world.submit(n=action.n, cpu=WHOLE)
    assert world.phase(action) is Phase.READY


def test_what_is_refused_and_comes_again_before_its_ruling_is_refused_once() -> None:
    world = led()
    action = world.submit(n=limits.CLIENT_SEEN_WIDTH_MAX, cpu=WHOLE)
    world.send_actions("t", "c", [], done_below=1)
    world.submit(n=action.n, cpu=WHOLE)
    assert world.outcome(action) == "rejected"
    assert not world.state.actions
    assert world.state.clients[("t", "c")].open == 0


def test_a_client_is_forgotten_after_a_day_and_then_an_old_name_is_told_apart_by_its_birth() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.decide()
    worker.finish(action)
    world.cancel(ActionId("t", "only-cancels", 3))
    assert len(world.state.clients) == 2
    for _ in range(limits.CLIENT_TTL_NS // limits.LOG_TIME_STEP_NS_MAX + 1):
        step(world.state, Record(world.state.seq + 1, world.state.stamp_ns + 2_000_000_000, subjects.CLOCK, TICK))
    assert not world.state.clients
    world.stamp_ns = world.state.stamp_ns
    horizon = world.state.client_horizon_seq
    assert horizon == 1  # one above the birth of the forgotten: who connected since, and thinks first, is not refused
    old = ActionId("t", "c", 9)
    world.send_actions("t", "c", [world.item(old, m.ActionSpec(nonce=world.nonce(old), kind="run"))], born=horizon - 1)
    assert world.owed(old) == "rejected"
    assert not world.state.clients
    new = ActionId("t", "new", 1)
    world.send_actions("t", "new", [world.item(new, m.ActionSpec(nonce=world.nonce(new), kind="run"))], born=horizon)
    assert world.phase(new) is Phase.READY
    later = ActionId("t", "c", 2)  # the old name again, born anew, while the refusal is still on its way
    world.send_actions("t", "c", [world.item(later, m.ActionSpec(nonce=world.nonce(later), kind="run"))], born=horizon)
    world.cancel(later)
    world.cancel(new)
    world.rule()
    assert not world.state.actions
    assert [client.open for client in world.state.clients.values()] == [0, 0]


TICK = m.encode(m.Ticked(epoch=1))


# --- draining ----------------------------------------------------------------------------------------------------


def test_a_draining_executor_is_dismissed_only_when_it_holds_nothing() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    running = world.submit(cpu=WHOLE)
    world.decide()
    worker.drain()
    worker.send()
    queued = world.submit(cpu=WHOLE)
    inside = world.submit(cpu=WHOLE, session=session.n)
    assert [start.n for start in world.decide()] == [inside.n]  # nothing new, but its sessions go on
    worker.answer_all()
    assert not world.state.owed
    close = world.submit(kind="session.close", session=session.n)
    world.decide()
    worker.finish(close)
    assert list(world.state.owed.dismissals) == [worker.incarnation]
    world.rule()
    worker.answer_all()
    assert not world.state.incarnations
    assert world.phase(queued) is Phase.READY
    assert world.outcome(running) == "ok"


def test_an_executor_that_drains_while_a_start_is_on_its_way_is_not_dismissed_before_it_has_answered() -> None:
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.plan()
    worker.drain()
    worker.send()
    world.deliver()
    world.rule()
    worker.read()  # a worker that is dismissed while it runs something fails
    assert list(worker.running) == [GrantKey(action, 1)]
    worker.answer_all()
    world.rule()
    worker.read()
    assert not worker.alive
    assert world.outcome(action) == "ok"


# --- the pass ----------------------------------------------------------------------------------------------------


def test_arrival_order_decides_between_equals() -> None:
    world = led()
    worker = world.join(nodes=cores(1))
    actions = [world.submit(cpu=WHOLE, client=client) for client in "abcab"]
    ran = []
    for _ in actions:
        (start,) = world.decide()
        ran.append((start.client, start.n))
        worker.answer_all()
    assert ran == [(action.client, action.n) for action in actions]


def test_new_sessions_spread_over_hosts_even_within_one_window() -> None:
    world = led()
    first, second = world.join(host="h1"), world.join(host="h2")
    for _ in range(4):
        world.submit(cpu=WHOLE)
    world.decide()
    first.answer_all()  # now h2 has more to do, but no sandbox either
    for _ in range(2):
        world.submit(kind="session.open")
    world.decide()
    assert (len(first.unread), len(second.unread)) == (1, 2)


def test_two_executors_of_one_host_never_get_the_same_core() -> None:
    world = led()
    first, second = world.join(), world.join()
    for _ in range(6):
        world.submit(cpu=WHOLE)
    starts = world.decide()
    assert sorted(core for start in starts for core in start.cores) == [0, 1, 2, 3]
    assert (len(first.unread), len(second.unread)) == (1, 1)
    first.read()
    second.read()


def test_two_cores_that_are_free_by_two_fifths_are_not_four_fifths() -> None:
    world = led()
    worker = world.join(nodes=cores(2))
    for amount in (600, 600, 800):
        world.submit(cpu=amount)
    assert [start.cores for start in world.decide()] == [(0,), (1,)]
    small = world.submit(cpu=200, client="small")
    assert world.decide() == []  # it would fit, but it came after one that waits for the same resource
    worker.answer_all()
    assert [start.cores for start in world.decide()] == [(0,), (0,)]  # 800 and 200 share what is one core
    assert world.free_cores() == 1
    worker.finish(small)


def test_a_wide_action_is_not_starved_by_narrow_ones() -> None:
    world = led(patience_ms=0)
    worker = world.join()
    narrow = [world.submit(cpu=WHOLE) for _ in range(3)]
    world.decide()
    wide = world.submit(cpu=4 * WHOLE)
    later = [world.submit(cpu=WHOLE, client="later") for _ in range(3)]
    assert world.decide() == []  # one core is free, and kept for the wide one
    for action in narrow:
        worker.finish(action)
    assert [start.n for start in world.decide()] == [wide.n]
    worker.finish(wide)
    assert [(start.client, start.n) for start in world.decide()] == [("later", action.n) for action in later]


def test_what_waits_for_one_resource_does_not_hold_back_those_that_need_another() -> None:
    world = led()
    world.join(memory=1_000)
    world.submit(cpu=3 * WHOLE)
    world.decide()
    world.submit(cpu=4 * WHOLE, memory=400)  # waits for cores, and its memory is kept for it
    memory = [world.submit(kind="session.open", memory=300) for _ in range(3)]
    assert [start.n for start in world.decide()] == [memory[0].n, memory[1].n]


def test_what_is_kept_for_one_that_waits_is_kept_once_on_a_host_of_two_executors() -> None:
    world = led()
    world.join(memory=1_000)
    world.join(memory=1_000)
    world.submit(cpu=3 * WHOLE)
    world.decide()
    world.submit(cpu=4 * WHOLE, memory=400)
    session = world.submit(kind="session.open", memory=600)
    assert [start.n for start in world.decide()] == [session.n]


def test_one_that_waits_for_a_host_holds_back_its_equals_there_and_nowhere_else() -> None:
    world = led()
    large, small = world.join(host="h1", nodes=cores(8)), world.join(host="h2", nodes=cores(2))
    world.submit(cpu=8 * WHOLE)
    world.decide()
    wide = world.submit(cpu=6 * WHOLE)
    narrow = [world.submit(cpu=WHOLE) for _ in range(3)]
    assert [start.n for start in world.decide()] == [narrow[0].n, narrow[1].n]
    assert (len(large.unread), len(small.unread)) == (1, 1)
    large.answer_all()
    assert [start.n for start in world.decide()] == [wide.n, narrow[2].n]


def test_a_session_waits_only_for_its_own_host() -> None:
    world = led()
    here = world.join(host="h1")
    session = open_session(world, here)
    there = world.join(host="h2")
    inside = world.submit(cpu=4 * WHOLE, session=session.n)
    world.decide()
    outside = world.submit(cpu=4 * WHOLE)
    assert [start.n for start in world.decide()] == [outside.n]
    there.finish(outside)
    here.finish(inside)
    assert world.outcome(inside) == "ok"


def test_what_fits_on_no_host_that_is_left_holds_nobody_back() -> None:
    world = led()
    large = world.join(host="h1", nodes=cores(8))
    world.join(host="h2", nodes=cores(4))
    wide = world.submit(cpu=8 * WHOLE)
    world.lose(large)
    narrow = world.submit(cpu=WHOLE)
    assert [start.n for start in world.decide()] == [narrow.n]
    assert world.phase(wide) is Phase.READY


def test_an_action_that_cannot_ever_fit_beside_its_session_holds_nobody_back() -> None:
    world = led()
    small = world.join(host="h1", nodes=cores(2))
    session = open_session(world, small)
    world.join(host="h2", nodes=cores(8), memory=1)
    inside = world.submit(cpu=4 * WHOLE, session=session.n, deadline_ms=5_000)
    world.decide()
    filler = world.submit(cpu=8 * WHOLE)
    world.decide()
    outside = world.submit(cpu=WHOLE)
    assert filler.n not in [start.n for start in world.decide()]
    assert world.phase(outside) is Phase.DECIDED
    assert world.outcome(inside) in ("", "rejected")


def test_spare_units_go_to_the_action_that_gains_more() -> None:
    world = led("marginal-gain")
    world.join(nodes=cores(8))
    range_ = m.Demand(low=WHOLE, high=8 * WHOLE)
    serial = world.submit(cpu=range_, hint=m.Hint(duration_us=1_000_000, parallel_ppm=100_000))
    parallel = world.submit(cpu=range_, hint=m.Hint(duration_us=1_000_000, parallel_ppm=950_000))
    units = {start.n: start.units for start in world.decide()}
    assert sum(units.values()) == 8
    assert units[parallel.n] > units[serial.n] >= 1


def test_only_legal_amounts_are_given() -> None:
    world = led("marginal-gain")
    world.join(nodes=cores(8))
    legal = m.Demand(low=WHOLE, high=8 * WHOLE, legal=(WHOLE, 3 * WHOLE, 8 * WHOLE))
    hint = m.Hint(duration_us=1_000_000, parallel_ppm=1_000_000)
    for _ in range(2):
        world.submit(cpu=legal, hint=hint)
    starts = world.decide()
    assert sorted(start.units for start in starts) == [3, 3]
    assert all(len(start.cores) == start.units and start.amounts["cpu"] == 1_000 * start.units for start in starts)


def test_a_declared_table_replaces_the_law() -> None:
    world = led()
    world.join(nodes=cores(8))
    flat = world.submit(cpu=m.Demand(low=WHOLE, high=8 * WHOLE), hint=m.Hint(table_us=((1, 100), (2, 50), (3, 50))))
    (start,) = world.decide()
    assert (start.n, start.units, start.predicted_us) == (flat.n, 2, 50)


def test_nobody_gets_spare_units_while_something_waits_for_cores() -> None:
    world = led()
    world.join(nodes=cores(8))
    for _ in range(2):
        world.submit(cpu=m.Demand(low=WHOLE, high=8 * WHOLE))
    world.submit(cpu=7 * WHOLE)
    assert [start.units for start in world.decide()] == [1, 1]


def test_fcfs_minimum_gives_no_extras() -> None:
    world = led("fcfs-minimum")
    world.join(nodes=cores(8))
    world.submit(cpu=m.Demand(low=2 * WHOLE, high=8 * WHOLE))
    assert [start.units for start in world.decide()] == [2]


def test_cores_come_from_one_numa_node_where_possible() -> None:
    world = led()
    world.join(nodes=cores(8, nodes=2))
    world.submit(cpu=3 * WHOLE)
    world.submit(cpu=3 * WHOLE)
    assert sorted(start.cores for start in world.decide()) == [(0, 1, 2), (4, 5, 6)]


def test_executors_that_see_their_nodes_differently_still_get_as_many_cores_as_they_are_charged() -> None:
    world = led()
    world.join(nodes=[[0, 1, 2], [3]])
    world.join(nodes=[[0], [1, 2, 3]])
    world.submit(cpu=4 * WHOLE)
    (start,) = world.decide()
    assert start.cores == (0, 1, 2, 3)


def test_an_action_whose_payload_is_gone_is_ruled_an_error() -> None:
    world = led()
    world.join()
    action = world.submit(cpu=WHOLE)
    world.plan(without_payload=[action])
    assert world.deliver() == []
    assert world.outcome(action) == "error"
    assert world.free_cores() == 4


def test_a_window_that_does_not_fit_one_message_goes_out_in_several_with_rising_numbers() -> None:
    world = led()
    worker = world.join()
    items = []
    for n in range(1, 6):
        action = ActionId("t", "c", n)
        spec = m.ActionSpec(nonce=world.nonce(action), kind="run")
        items.append(world.item(action, spec)._replace(payload=m.encode(m.Run(argv=("cat",), stdin=bytes(200_000)))))
    for item in items:
        world.send_actions("t", "c", [item])
    world.plan()
    messages = [message for _, message in world.in_flight if isinstance(message, m.DecisionsMade)]
    assert [(message.number, len(message.items)) for message in messages] == [(1, 2), (2, 2), (3, 1)]
    assert all(len(m.encode(message)) < limits.ENVELOPE_BYTES_MAX + 10_000 for message in messages)
    assert [message.note is None for message in messages] == [False, True, True]
    world.deliver()
    worker.answer_all()
    assert [world.outcome(ActionId("t", "c", n)) for n in range(1, 6)] == ["ok"] * 5


def test_messages_of_a_window_that_were_stored_in_another_order_are_followed_by_a_new_number() -> None:
    world = led()
    worker = world.join()
    for n in range(1, 4):
        action = ActionId("t", "c", n)
        item = world.item(action, m.ActionSpec(nonce=world.nonce(action), kind="run"))
        world.send_actions("t", "c", [item._replace(payload=m.encode(m.Run(argv=("cat",), stdin=bytes(300_000))))])
    world.plan()
    world.in_flight.rotate(-1)
    world.deliver()
    last = world.submit()
    world.decide()
    worker.finish(last)
    assert world.outcome(last) == "ok"


def test_many_rulings_go_out_in_several_messages() -> None:
    world = led()
    actions = [world.submit(deadline_ms=0) for _ in range(limits.ENVELOPE_ITEMS_MAX + 1)]
    world.plan()
    assert [len(message.ids) for _, message in world.in_flight if isinstance(message, m.ActionsFinished)] == [500, 500, 1]
    world.deliver()
    assert not world.state.owed
    assert world.outcome(actions[-1]) == "expired"


def test_an_open_session_shows_as_open_and_belongs_to_its_incarnation() -> None:
    world = led()
    worker = world.join()
    session = open_session(world, worker)
    found = world.state.sessions[session]
    assert (found.phase, found.incarnation) == (SessionPhase.OPEN, worker.incarnation)


# --- numbers that a leader gave up on ------------------------------------------------------------------------------------


def test_a_number_that_was_never_stored_is_filled_so_that_the_executor_goes_on() -> None:
    """A leader gave up on message 1 while message 2 was stored: the executor waits for 1 before it looks at 2."""
    world = led()
    worker = world.join()
    action = world.submit(cpu=WHOLE)
    world.plan()
    ((subject, message),) = world.in_flight
    assert isinstance(message, m.DecisionsMade)
    world.in_flight.clear()
    world.put(subject, replace(message, number=2))
    assert world.phase(action) is Phase.DECIDED
    assert list(world.state.owed.fillers) == [(worker.incarnation, 1)]
    world.plan()
    ((_, filler),) = world.in_flight
    assert isinstance(filler, m.DecisionsMade)
    assert (filler.number, filler.items) == (1, [])
    world.deliver()
    assert not world.state.owed.fillers
    assert world.state.incarnations[worker.incarnation].next_number == 3
