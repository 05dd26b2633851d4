"""What is refused because there is too much, by rule of the core."""

from tangram import messages as m
from tangram import subjects
from tangram.outcomes import Outcome
from tests.core.world import World


def closed(world: World, yes: bool = True) -> None:
    world.put(subjects.CLOCK, m.Settings(epoch=world.state.epoch, admission_closed=yes))


def refusal(world: World, **spec: object) -> tuple[str, str, int]:
    action = world.submit(**spec)  # type: ignore[arg-type]
    assert world.owed(action) == "rejected", world.phase(action)
    result = world.state.owed.rulings[action]
    return result.reason, result.detail, result.retry_after_ms


def open_world() -> World:
    world = World()
    world.lead()
    return world


def test_while_admission_is_closed_new_actions_are_refused_with_a_time_to_come_back() -> None:
    world = open_world()
    world.join()
    closed(world)
    assert refusal(world, cpu=1_000) == ("over_limit", "the log is nearly full", 5_000)
    closed(world, False)
    assert world.outcome(world.submit(cpu=1_000)) == ""
    assert world.phase(max(world.state.actions)).name == "DECIDED"


def test_what_was_taken_in_before_goes_on_while_admission_is_closed() -> None:
    world = open_world()
    action = world.submit(cpu=1_000)
    closed(world)
    worker = world.join()
    world.decide()
    worker.finish(action)
    assert world.outcome(action) == "ok"


def test_an_open_session_can_go_on_and_be_closed_while_admission_is_closed() -> None:
    world = open_world()
    worker = world.join()
    session = world.submit(kind="session.open", memory=100)
    world.decide()
    worker.finish(session)
    closed(world)
    inside = world.submit(kind="run", cpu=1_000, session=session.n)
    world.decide()
    worker.finish(inside)
    assert world.outcome(inside) == "ok"
    closing = world.submit(kind="session.close", session=session.n)
    world.decide()
    worker.finish(closing)
    assert world.outcome(closing) == "ok"
    assert world.used("memory") == 0
    assert refusal(world, kind="session.open", memory=100)[0] == "over_limit"


def test_only_the_leader_of_now_closes_admission() -> None:
    world = open_world()
    world.put(subjects.CLOCK, m.Settings(epoch=world.state.epoch + 1_000, admission_closed=True))
    assert not world.state.admission_closed


def test_open_actions_are_bounded_by_a_setting() -> None:
    world = open_world()
    world.put(subjects.CLOCK, m.Settings(epoch=world.state.epoch, settings={"pending_max": 2}))
    first, second = world.submit(cpu=1_000), world.submit(cpu=1_000)
    assert refusal(world, cpu=1_000)[1] == "2 actions are open already"
    world.rule()
    world.cancel(first)
    world.rule()
    third = world.submit(cpu=1_000)
    assert [world.owed(action) for action in (second, third)] == ["", ""]


def test_payloads_that_are_open_are_bounded_by_a_setting() -> None:
    world = open_world()
    world.put(subjects.CLOCK, m.Settings(epoch=world.state.epoch, settings={"pending_mib_max": 1}))

    def send(n: int) -> m.Result | None:
        payload = m.encode(m.Run(argv=("cat",), stdin=bytes(300_000)))
        spec = m.ActionSpec(nonce=bytes([n] * 8), kind="run", cost={"cpu": m.Demand(low=1_000)})
        message = m.ActionsSubmitted(client="c", ids=[n], specs=[m.encode(spec)], payloads=[payload])
        world.put(subjects.actions("cpu", "t"), message)
        return next((r for a, r in world.state.owed.rulings.items() if a.n == n), None)

    assert [send(n) for n in range(1, 4)] == [None] * 3
    refused = send(4)
    assert refused is not None
    assert (refused.outcome, refused.reason) == (Outcome.REJECTED, "over_limit")
    assert "1 MiB" in refused.detail
