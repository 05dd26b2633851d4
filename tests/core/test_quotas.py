"""Limits of something outside: so many at a time, so many tokens in any interval, over all hosts."""

from random import Random

from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.state import ActionId, Phase
from tests.core.world import Worker, World

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


def test_tokens_come_back_an_interval_after_they_were_taken_in_log_time() -> None:
    world, _ = limited(TOKENS)
    world.submit(api=6)
    assert len(begun(world)) == 1
    world.pass_time(2)
    world.submit(api=4)
    assert len(begun(world)) == 1
    third = world.submit(api=5)
    world.pass_time(2.9)
    assert begun(world) == [], "4.9 s after the first"
    world.pass_time(0.1)
    assert begun(world) == [third.n]
    fourth = world.submit(api=6)
    world.pass_time(1.9)
    assert begun(world) == []
    world.pass_time(0.1)
    assert begun(world) == [], "4 are back, 5 are out"
    world.pass_time(3)
    assert begun(world) == [fourth.n]


def test_log_time_goes_on_until_tokens_are_back_though_nothing_is_open() -> None:
    """Else whoever comes after an idle hour would wait for tokens that its provider has long forgotten."""
    world, worker = limited(TOKENS)
    action = world.submit(api=10)
    world.decide()
    worker.finish(action)
    assert not world.state.actions
    assert world.state.wants_ticks
    world.pass_time(5)
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
    world.pass_time(5)
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
    world.pass_time(5)
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
        world.pass_time(5)
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
    world.pass_time(5)
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
    world.pass_time(5)
    assert begun(world) == [following.n]
    worker.finish(ActionId(*action))
    assert world.state.quotas["api"].in_use == 1
