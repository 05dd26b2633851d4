"""Limits of something outside: so many at a time, so many tokens in any interval, over all hosts."""

from random import Random

from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.state import ActionId, GrantKey, Phase
from tests.core import invariants
from tests.core.world import MS, SECOND, Worker, World

TOKENS = m.Quota(tokens=10, interval_ms=5_000)


def limited(quota: m.Quota | None = None) -> tuple[World, Worker]:
    """A host with 4 cores and 1,024 MiB, and a quota called `api`."""
    world = World()
    world.lead(quotas={"api": quota} if quota is not None else None)
    return world, world.join("e")


def begun(world: World) -> list[int]:
    return [start.n for start in world.decide()]


def test_no_more_run_at_a_time_than_the_quota_has_places_whatever_the_hosts() -> None:
    world, _ = limited(m.Quota(concurrency=2))
    world.join("f", host="h2")
    first, second, third, fourth = (world.submit(api=1) for _ in range(4))
    assert begun(world) == [first.n, second.n]
    assert begun(world) == []
    ran = next(w for w in world.workers.values() if any(k.action == first for k in w.running) or w.unread)
    ran.answer_all()
    assert begun(world) in ([third.n], [third.n, fourth.n])


def test_a_place_comes_back_with_every_kind_of_end() -> None:
    for outcome in (Outcome.OK, Outcome.FAILED, Outcome.TIMED_OUT):
        world, worker = limited(m.Quota(concurrency=1))
        action, following = world.submit(api=0), world.submit(api=0)
        world.decide()
        worker.finish(action, outcome)
        assert begun(world) == [following.n]
    world, worker = limited(m.Quota(concurrency=1))
    action, following = world.submit(api=0), world.submit(api=0)
    world.decide()
    worker.refuse(action)
    assert begun(world) == [action.n], "it was given back and goes first again"
    world.lose(worker)
    worker.die()
    other = world.join("f")
    assert begun(world) == [], "what a lost executor runs may still run"
    other.find_dead([worker])
    other.send()
    assert begun(world) == [following.n]


def test_a_place_of_a_host_that_never_comes_back_is_free_when_what_it_ran_must_have_ended() -> None:
    """Its cores stay held for ever; what it has outside does not."""
    world, worker = limited(m.Quota(concurrency=1))
    world.submit(cpu=1_000, api=0, timeout_ms=60_000)
    world.decide()
    world.join("f", host="h2")
    following = world.submit(api=0)
    world.lose(worker)
    world.state = load(dump(world.state))
    world.pass_time(64.9)
    assert begun(world) == [], "its time-out and the budget for killing it"
    world.pass_time(0.1)
    assert begun(world) == [following.n]
    assert world.state.hosts[worker.host].pool.used
    invariants.check(world)


def test_tokens_come_back_an_interval_after_they_were_taken_in_log_time() -> None:
    world, _ = limited(TOKENS)
    world.submit(api=6)
    assert len(begun(world)) == 1
    world.pass_time(2)
    world.submit(api=4)
    assert len(begun(world)) == 1
    third = world.submit(api=5)
    world.pass_time(3)
    assert begun(world) == [], "5 s after the first, whose request may have been underway for longer than this would be"
    world.pass_time(0.025)
    assert begun(world) == [third.n]
    fourth = world.submit(api=6)
    world.pass_time(1.9)
    assert begun(world) == []
    world.pass_time(0.1)
    assert begun(world) == [], "4 are back, 5 are out"
    world.pass_time(3.1)
    assert begun(world) == [fourth.n]


def test_log_time_goes_on_until_tokens_are_back_though_nothing_is_open() -> None:
    """Else whoever comes after an idle hour would wait for tokens that its provider has long forgotten."""
    world, worker = limited(TOKENS)
    action = world.submit(api=10)
    world.decide()
    worker.finish(action)
    assert not world.state.actions
    assert world.state.wants_ticks
    world.pass_time(5.1)
    assert world.state.quotas["api"].out == 0
    assert not world.state.wants_ticks
    later = world.submit(api=10)
    assert begun(world) == [later.n]


def test_the_end_of_an_action_gives_no_tokens_back() -> None:
    world, worker = limited(TOKENS)
    action = world.submit(api=10)
    world.decide()
    worker.finish(action)
    world.submit(api=1)
    assert begun(world) == []


def test_no_interval_ever_sees_more_tokens_than_the_limit() -> None:
    for seed in range(10):
        random = Random(seed)
        world, worker = limited(TOKENS)
        started: list[tuple[int, int]] = []
        for _ in range(200):
            if random.random() < 0.4:
                world.submit(api=random.randint(0, 10), deadline_ms=600_000)
            started += [(world.state.now_ns, start.amounts["api"]) for start in world.decide()]
            worker.answer_all()
            world.after(random.choice((0, 7, 130, 900, 2_500)))
            world.tick()
        for at_ns, _ in started:
            within = sum(tokens for other_ns, tokens in started if at_ns <= other_ns < at_ns + 5_000_000_000)
            assert within <= 10
        assert sum(tokens for _, tokens in started) > 100, "hardly anything was let through"


def test_the_smaller_does_not_overtake_the_larger() -> None:
    world, _ = limited(TOKENS)
    world.submit(api=6)
    large, small = world.submit(api=5), world.submit(api=1)
    world.decide()
    assert begun(world) == []
    world.pass_time(5.1)
    assert begun(world) == [large.n, small.n]


def test_who_does_not_name_the_quota_does_not_wait_for_it() -> None:
    world, _ = limited(m.Quota(concurrency=1))
    world.submit(cpu=1_000, api=0)
    waits = world.submit(cpu=1_000, api=0)
    free = world.submit(cpu=1_000)
    assert waits.n not in begun(world)
    assert world.phase(free) is Phase.DECIDED


def test_who_waits_for_cores_keeps_its_place_of_the_quota() -> None:
    world, worker = limited(m.Quota(concurrency=2))
    running = world.submit(cpu=4_000, api=0)
    world.decide()
    wide = world.submit(cpu=4_000, api=0)
    small = world.submit(memory=100, api=0)
    assert begun(world) == [], "else those behind it could have the quota whenever there are cores"
    worker.finish(running)
    assert begun(world) == [wide.n, small.n]


def test_what_nothing_could_run_holds_nobody_up() -> None:
    world, _ = limited(m.Quota(concurrency=1, tokens=10))
    elsewhere = world.submit(key="gpu", gpu=1, api=10)
    here = world.submit(api=10)
    assert begun(world) == [here.n]
    assert world.phase(elsewhere) is Phase.READY


def test_more_tokens_than_the_limit_never_fit() -> None:
    world, _ = limited(TOKENS)
    action = world.submit(api=11)
    assert world.outcome(action) == "rejected"
    result = world.result(action)
    assert result is not None
    assert result.reason == "never_fits"
    assert "api 10" in result.detail


def test_a_limit_lowered_below_what_somebody_takes_lets_the_others_through() -> None:
    world, _ = limited(m.Quota(tokens=20))
    world.submit(api=20)
    world.decide()
    large, small = world.submit(api=15), world.submit(api=5)
    world.set_quotas({"api": TOKENS})
    world.pass_time(5.1)
    assert begun(world) == [small.n]
    assert world.phase(large) is Phase.READY
    world.set_quotas({"api": m.Quota(tokens=20, interval_ms=5_000)})
    assert begun(world) == [large.n]


def test_a_lower_limit_lets_nobody_start_while_more_run() -> None:
    world, worker = limited(m.Quota(concurrency=3))
    running = [world.submit(api=0) for _ in range(3)]
    world.decide()
    waits = world.submit(api=0)
    world.set_quotas({"api": m.Quota(concurrency=1)})
    for action in running:
        assert begun(world) == []
        worker.finish(action)
    assert begun(world) == [waits.n]


def test_a_quota_that_is_set_again_knows_what_was_taken_of_it() -> None:
    for by_leader in (False, True):
        both = m.Quota(concurrency=1, tokens=10, interval_ms=5_000)
        world, worker = limited(both)
        action = world.submit(api=10)
        world.decide()
        for quotas in ({}, {"api": both}):
            if by_leader:
                world.lead(quotas=quotas)
            else:
                world.set_quotas(quotas)
        following = world.submit(api=1)
        assert begun(world) == [], "its place is held"
        worker.finish(action)
        world.set_quotas({})
        world.set_quotas({"api": both})
        assert begun(world) == [], "its tokens are out"
        world.pass_time(5.1)
        assert begun(world) == [following.n]


def test_without_the_quota_its_name_limits_nothing_and_is_forgotten() -> None:
    world, worker = limited(m.Quota(concurrency=1, tokens=1, interval_ms=1_000))
    first = world.submit(api=1)
    world.decide()
    world.set_quotas({})
    world.submit(api=0)
    assert len(begun(world)) == 1
    worker.answer_all()
    world.pass_time(2)
    world.set_quotas({})
    assert world.state.quotas == {}
    assert world.phase(first) is Phase.GONE


def test_an_interval_that_changes_counts_for_what_is_out() -> None:
    world, _ = limited(m.Quota(tokens=10, interval_ms=60_000))
    world.submit(api=10)
    world.decide()
    action = world.submit(api=1)
    world.pass_time(5.1)
    assert begun(world) == []
    world.set_quotas({"api": TOKENS})
    assert begun(world) == [action.n]


def test_cores_and_gpus_cannot_be_made_a_quota() -> None:
    world, _ = limited()
    world.set_quotas({"cpu": m.Quota(concurrency=1), "gpu": m.Quota(concurrency=1)})
    for _ in range(2):
        world.submit(cpu=2_000)
    assert [start.cores for start in world.decide()] == [(0, 1), (2, 3)]


def test_a_session_has_its_actions_under_a_quota_one_by_one() -> None:
    world, worker = limited(m.Quota(concurrency=1))
    opened = world.submit(kind="session.open")
    world.decide()
    worker.finish(opened)
    busy = world.submit(api=0)
    inside = world.submit(api=0, session=opened.n)
    assert begun(world) == [busy.n]
    worker.finish(busy)
    assert begun(world) == [inside.n]


def test_a_checkpoint_carries_places_and_tokens() -> None:
    world, worker = limited(m.Quota(concurrency=2, tokens=10, interval_ms=5_000))
    action = world.submit(api=10)
    world.decide()
    world.state = load(dump(world.state))
    following = world.submit(api=1)
    assert begun(world) == []
    world.pass_time(5.1)
    assert begun(world) == [following.n]
    worker.finish(ActionId(*action))
    assert world.state.quotas["api"].in_use == 1


# --- requests ----------------------------------------------------------------------------------------------------


def test_requests_and_tokens_and_places_of_one_pool() -> None:
    world, worker = limited(m.Quota(concurrency=3, requests=4, tokens=10, interval_ms=5_000))
    for tokens in (1, 1, 1):
        world.submit(api=tokens)
    assert len(begun(world)) == 3
    fourth, fifth = world.submit(api=7), world.submit(api=0)
    assert begun(world) == [], "no place"
    worker.answer_all()
    assert begun(world) == [fourth.n], "four requests, ten tokens"
    worker.answer_all()
    assert begun(world) == []
    world.pass_time(5.1)
    assert begun(world) == [fifth.n]


def test_a_bucket_never_gets_more_than_it_holds_and_nearly_all_of_that() -> None:
    """However much the ways of requests differ, within the guard."""
    rate, burst = 50, 5
    for seed in range(5):
        random = Random(seed)
        world, worker = limited(m.Quota(requests=rate, interval_ms=1_000, burst=burst))
        for _ in range(1_200):
            world.submit(api=0, deadline_ms=600_000)
        started: list[int] = []
        while world.state.now_ns < 20 * SECOND:
            started += [world.state.now_ns for _ in world.decide()]
            worker.answer_all()
            world.after(random.choice((1, 5, 20, 20, 20)))
            world.tick()
        arrived = sorted(at_ns + random.randrange(25 * MS) for at_ns in started)
        level, last_ns = float(burst), 0
        for at_ns in arrived:
            level = min(burst, level + (at_ns - last_ns) * rate / SECOND) - 1
            last_ns = at_ns
            assert level >= 0, f"the provider refuses at {at_ns}"
        assert len(arrived) >= 0.95 * rate * 20


def test_log_time_has_steps_that_are_fine_enough_for_a_bucket_only_while_somebody_waits() -> None:
    world, worker = limited(m.Quota(requests=50, interval_ms=1_000, burst=3))
    world.submit(api=0)
    world.decide()
    worker.answer_all()
    now_ns = world.state.now_ns
    assert world.state.next_tick_ns(now_ns) == now_ns + SECOND
    for _ in range(3):
        world.submit(api=0)
    world.decide()
    assert world.state.next_tick_ns(now_ns) <= now_ns + 30 * MS


# --- refusals ----------------------------------------------------------------------------------------------------


def test_a_refusal_makes_the_pool_smaller_and_the_action_comes_again_with_its_attempt_unused() -> None:
    world, worker = limited(m.Quota(concurrency=8))
    actions = [world.submit(api=0) for _ in range(12)]
    assert len(begun(world)) == 8
    for action in actions[:8]:  # on their way together: one refusal
        worker.refuse(action, 3_000)
    assert begun(world) == [action.n for action in actions[8:]], "half of it, and those who were refused wait"
    assert world.phase(actions[0]) is Phase.WAITING
    worker.answer_all()
    world.pass_time(3.1)
    assert begun(world) == [action.n for action in actions[:4]]
    assert world.state.actions[actions[0]].attempt == 1
    worker.answer_all()
    world.pass_time(5)
    assert begun(world) == [action.n for action in actions[4:8]]
    assert world.state.quotas["api"].share_at(world.state.now_ns) == 1_000_000


def test_a_provider_that_refuses_everything_is_left_alone_for_as_long_as_it_says() -> None:
    world, worker = limited(m.Quota(concurrency=8))
    for _ in range(100):
        world.submit(api=0)
    asked = 0
    for _ in range(60):
        for start in world.decide():
            asked += 1
            worker.refuse(ActionId("t", "c", start.n), 10_000)
        world.pass_time(0.2)
    assert asked <= 8 + 4 + 2 + 1 + 4, "12 s: halved until nothing is left, then tried again"


def test_refusals_are_bounded_and_say_when_to_come_again() -> None:
    world, worker = limited(m.Quota(concurrency=1))
    action = world.submit(api=0)
    for _ in range(20):
        world.pass_time(4)
        world.decide()
        worker.refuse(action, 2_000)
    world.decide()
    result = world.result(action)
    assert result is not None
    assert (result.outcome, result.reason, result.retry_after_ms) == ("rejected", "over_limit", 2_000)


def test_what_waits_after_a_refusal_can_be_cancelled_and_expires() -> None:
    world, worker = limited(m.Quota(concurrency=2))
    first, second = world.submit(api=0), world.submit(api=0, deadline_ms=2_000)
    world.decide()
    worker.refuse(first, 60_000)
    worker.refuse(second, 60_000)
    world.state = load(dump(world.state))
    world.cancel(first)
    assert world.outcome(first) == "cancelled"
    world.pass_time(3)
    assert world.outcome(second) == "expired"
    world.pass_time(60)
    assert not world.state.actions
    assert begun(world) == []


def test_a_live_change_ends_what_refusals_have_done() -> None:
    world, worker = limited(m.Quota(concurrency=4))
    for _ in range(3):
        refused = world.submit(api=0)
        world.decide()
        worker.refuse(refused, 60_000)
        world.pass_time(1)
    waits = world.submit(api=0)
    assert begun(world) == [], "hardly anything was used of it, and that was refused"
    world.set_quotas({"api": m.Quota(concurrency=5)})
    assert begun(world) == [waits.n]


def test_a_failure_that_may_be_tried_again_takes_an_attempt() -> None:
    for retry, attempts in (("safe", 3), ("never", 1)):
        world, worker = limited(m.Quota(concurrency=1))
        action = world.submit(api=0, retry=retry)
        for number in range(attempts):
            (start,) = world.decide()
            assert start.attempt == number + 1
            worker.refuse(action, failed=True)
        world.decide()
        result = world.result(action)
        assert result is not None
        assert (result.outcome, result.reason, result.detail) == ("error", "upstream", "busy")
        assert world.state.quotas["api"].in_use == 0


# --- what was really taken ---------------------------------------------------------------------------------------


def test_tokens_are_corrected_by_what_the_answer_says() -> None:
    world, worker = limited(TOKENS)
    small, large = world.submit(api=8), world.submit(api=2)
    world.decide()
    worker.finish(small, spent={"api": 3})
    assert world.state.quotas["api"].out == 5
    worker.finish(large, spent={"api": 20})
    assert world.state.quotas["api"].out == 23
    following = world.submit(api=1)
    assert begun(world) == []
    world.pass_time(5.1)
    assert begun(world) == [following.n]
    assert world.state.quotas["api"].out == 1


def test_what_was_declared_as_nothing_is_counted_when_it_is_told() -> None:
    world, worker = limited(TOKENS)
    first, second = world.submit(api=0), world.submit(api=0)
    world.decide()
    worker.finish(first, spent={"api": 7})
    worker.finish(second, spent={"api": 2})
    assert world.state.quotas["api"].out == 9
    invariants.check(world)
    world.pass_time(5.1)
    assert world.state.quotas["api"].out == 0


def test_a_correction_that_comes_after_the_interval_changes_nothing() -> None:
    world, worker = limited(TOKENS)
    action = world.submit(api=8)
    world.decide()
    world.pass_time(6)
    worker.finish(action, spent={"api": 100})
    assert world.state.quotas["api"].out == 0


# --- endpoints ---------------------------------------------------------------------------------------------------


def test_what_an_endpoint_takes_is_charged_whoever_calls_it() -> None:
    world = World()
    world.lead(quotas={"api": m.Quota(requests=2, tokens=10, interval_ms=5_000)})
    search = m.Service(cost={"api": 1, "calls": 1})
    world.join("e", key="api", nodes=[], services={"search": search}, calls=100)
    world.join("f", key="api", nodes=[], services={"search": search, "judge": m.Service(cost={"calls": 1})}, host="h2", calls=2)
    first = world.submit(key="api", service="search")
    more = world.submit(key="api", service="search", api=9)
    waits = world.submit(key="api", service="search")
    judge, second = (world.submit(key="api", service="judge") for _ in range(2))
    starts = {start.n: start for start in world.decide()}
    assert starts.keys() == {first.n, more.n, judge.n}
    assert starts[first.n].amounts == {"api": 1, "calls": 1}
    assert starts[more.n].amounts == {"api": 9, "calls": 1}
    assert world.state.incarnations["i2"].grants.keys() == {GrantKey(more, 1), GrantKey(judge, 1)}, "only it serves that"
    assert world.phase(waits) is Phase.READY
    assert world.phase(second) is Phase.READY, "two calls at a time there"
    unknown = world.submit(key="api", service="news")
    world.decide()
    result = world.result(unknown)
    assert result is not None
    assert (result.outcome, result.detail) == ("rejected", "no executor serves news")
