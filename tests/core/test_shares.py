"""Policies that share between tasks: `fair` and `split-by-task`."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram import messages as m
from tangram import subjects
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.shares import split
from tangram.scheduler.state import ActionId, HostKey
from tests.core.world import Worker, World, cores

WHOLE = 1_000


def led(policy: str, shares: dict[str, int] | None = None, count: int = 8, **settings: int) -> tuple[World, Worker]:
    """One host of `count` cores."""
    world = World()
    world.lead(policy, shares=shares, **settings)
    return world, world.join(nodes=cores(count), memory=1_000)


def flood(world: World, task: str, count: int, **cost: object) -> list[ActionId]:
    return [world.submit(task=task, client=f"of-{task}", **{"cpu": WHOLE, **cost}) for _ in range(count)]


def running(worker: Worker) -> dict[str, int]:
    """Cores by task."""
    worker.read()
    held: Counter[str] = Counter()
    for each in worker.running.values():
        held[each.start.task] += len(each.start.cores)
    return dict(held)


def end_one(worker: Worker, task: str) -> None:
    worker.read()
    worker.end(next(key for key in worker.running if key.action.task == task))
    worker.send()


# --- fair --------------------------------------------------------------------------------------------------------


def test_what_is_freed_goes_to_the_task_that_holds_least_until_it_has_its_share() -> None:
    world, worker = led("fair")
    flood(world, "a", 100)
    world.decide()
    assert running(worker) == {"a": 8}, "what nobody else wants is not left idle"
    mine = flood(world, "b", 6)
    seen = []
    for _ in range(6):
        end_one(worker, "a")
        seen += [(start.task, start.n) for start in world.decide()]
    assert seen[:4] == [("b", action.n) for action in mine[:4]]
    assert running(worker) == {"a": 4, "b": 4}


@pytest.mark.parametrize(("shares", "expected"), [({"a": 3}, {"a": 6, "b": 2}), ({"a": 1, "b": 3}, {"a": 2, "b": 6})])
def test_cores_are_held_by_weight(shares: dict[str, int], expected: dict[str, int]) -> None:
    world, worker = led("fair", shares)
    flood(world, "a", 100)
    flood(world, "b", 100)
    for _ in range(40):
        world.decide()
        worker.read()
        worker.end(next(iter(worker.running)))
        worker.send()
    world.decide()
    assert running(worker) == expected


def test_weights_change_while_it_runs() -> None:
    world, worker = led("fair")
    flood(world, "a", 100)
    flood(world, "b", 100)
    world.decide()
    assert running(worker) == {"a": 4, "b": 4}
    world.put(subjects.CLOCK, m.Settings(epoch=world.state.epoch, shares={"b": 7}))
    for _ in range(3):
        end_one(worker, "a")
        world.decide()
    assert running(worker) == {"a": 1, "b": 7}


@pytest.mark.parametrize("shares", [{"a": 0}, {"a": -1}, {"a*": 1}, {"a": 1_000_001}])
def test_weights_that_are_none_are_skipped_as_everybody_skips_them(shares: dict[str, int]) -> None:
    world, _ = led("fair", {"a": 3})
    message = m.Settings(epoch=world.state.epoch, shares=shares)
    world.put(subjects.CLOCK, m.encode(message), garbage=True)
    assert world.state.shares == {"a": 3}


def test_of_what_a_task_leaves_the_others_take_all_but_what_it_may_want_at_once() -> None:
    world, worker = led("fair", count=64)
    for _ in range(9):
        flood(world, "b", 1)
    world.decide()
    world.pass_time(30)
    flood(world, "a", 200)
    world.decide()
    # b holds 9 cores, as it did lately; with a margin of 2 * sqrt(9) it is left 15
    assert running(worker) == {"a": 49, "b": 9}
    assert len(flood(world, "b", 6)) == len(world.decide()), "it finds what was left for it"


def test_a_task_that_has_gone_leaves_everything() -> None:
    world, worker = led("fair")
    gone = flood(world, "b", 4)
    world.decide()
    world.pass_time(30)
    for action in gone:
        worker.finish(action)
    flood(world, "a", 100)
    world.decide()
    assert running(worker) == {"a": 4}, "it may come back"
    world.pass_time(61)
    world.decide()
    assert running(worker) == {"a": 8}


def test_extra_cores_come_out_of_a_tasks_own_share() -> None:
    """Idle cores that the other task may want are not handed out as extras."""
    world, worker = led("fair", count=16)
    scales = m.Hint(duration_us=10_000_000, parallel_ppm=990_000)
    flood(world, "b", 1, cpu=m.Demand(low=WHOLE, high=16 * WHOLE), hint=scales)
    flood(world, "a", 1, cpu=m.Demand(low=WHOLE, high=16 * WHOLE), hint=scales)
    world.decide()
    assert running(worker) == {"a": 8, "b": 8}


def test_an_action_wider_than_its_tasks_share_runs_when_the_others_have_let_it() -> None:
    world, worker = led("fair", {"b": 7}, patience_ms=0)
    flood(world, "b", 500)
    world.decide()
    (wide,) = flood(world, "a", 1, cpu=4 * WHOLE)  # the share of a is one core
    for _ in range(4):
        assert world.decide() == []
        end_one(worker, "b")
    assert [(start.task, start.n) for start in world.decide()] == [("a", wide.n)]


def test_within_a_task_arrival_order_decides_whatever_else_its_actions_need() -> None:
    world, worker = led("fair")
    flood(world, "a", 8)
    world.decide()
    first = flood(world, "a", 1, memory=900)
    later = flood(world, "a", 3)
    end_one(worker, "a")
    assert [start.n for start in world.decide()] == [first[0].n]
    end_one(worker, "a")
    assert [start.n for start in world.decide()] == [later[0].n]


def test_memory_that_comes_back_goes_to_the_task_that_holds_less_of_it() -> None:
    world, worker = led("fair")
    opens = [world.submit(task="a", client="x", kind="session.open", memory=100) for _ in range(30)]
    world.decide()
    worker.read()
    assert len(worker.running) == 10
    mine = world.submit(task="b", kind="session.open", memory=100)
    worker.finish(opens[0])
    world.cancel(opens[0])
    world.rule()
    worker.answer_all()
    world.decide()
    worker.read()
    assert mine in [key.action for key in worker.running], "it has waited behind twenty of another task"


def test_a_policy_that_shares_takes_over_what_waits_and_what_runs() -> None:
    world, worker = led("tangram")
    flood(world, "a", 100)
    world.decide()
    mine = flood(world, "b", 2)
    end_one(worker, "a")
    world.lead("fair")
    assert [(start.task, start.n) for start in world.decide()] == [("b", mine[0].n)]
    world.state = load(dump(world.state))
    end_one(worker, "a")
    assert [(start.task, start.n) for start in world.decide()] == [("b", mine[1].n)]
    world.lead("tangram")
    end_one(worker, "a")
    assert [start.task for start in world.decide()] == ["a"]


def test_a_checkpoint_of_a_version_that_did_not_count_by_task_is_counted_again() -> None:
    world, worker = led("fair")
    flood(world, "a", 3)
    world.decide()
    running(worker)
    (host,) = world.state.hosts.values()
    host.parts.clear()  # as that version left it
    restored = load(dump(world.state))
    assert restored.hosts[host.key].parts["a"].amounts == {"cpu": 3 * WHOLE}
    assert restored.tasks == {"a": 1}


def test_what_idle_tasks_had_is_forgotten() -> None:
    """Task names are the users': each may be used once."""
    world, worker = led("fair")
    for number in range(300):
        (action,) = flood(world, f"task{number}", 1)
        world.decide()
        worker.finish(action)
        world.pass_time(2)
    assert len(world.state.hosts[HostKey("h1", "machine-h1")].parts) <= 62


# --- split-by-task -----------------------------------------------------------------------------------------------


@given(st.integers(0, 5_000), st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 1_000_000), min_size=1))
def test_parts_are_whole_and_make_up_the_host(count: int, weights: dict[str, int]) -> None:
    parts = split(count, weights)
    assert sum(parts.values()) == count
    for task, weight in weights.items():
        assert abs(parts[task] - Fraction(count * weight, sum(weights.values()))) < 1


def test_a_task_keeps_to_its_part_and_waits_in_it_alone() -> None:
    world, worker = led("split-by-task", {"a": 1, "b": 3})
    flood(world, "a", 100)
    world.decide()
    assert running(worker) == {"a": 2}, "the rest is of b, whether b is there or not"
    mine = flood(world, "b", 7)
    assert [start.n for start in world.decide()] == [action.n for action in mine[:6]]
    end_one(worker, "b")
    assert [start.task for start in world.decide()] == ["b"]


def test_without_weights_the_tasks_that_are_known_have_equal_parts() -> None:
    world, worker = led("split-by-task", count=9)
    for task in ("a", "b", "c"):
        flood(world, task, 20)
    world.decide()
    assert running(worker) == {"a": 3, "b": 3, "c": 3}


def test_extra_cores_come_out_of_the_part() -> None:
    world, worker = led("split-by-task", {"a": 1, "b": 1}, count=16)
    flood(world, "a", 1, cpu=m.Demand(low=WHOLE, high=16 * WHOLE), hint=m.Hint(duration_us=10_000_000, parallel_ppm=990_000))
    world.decide()
    assert running(worker) == {"a": 8}


def test_what_never_fits_its_tasks_part_is_refused_at_once() -> None:
    world, _ = led("split-by-task", {"a": 1, "b": 3})
    too_wide, fits = world.submit(task="a", cpu=3 * WHOLE), world.submit(task="b", cpu=6 * WHOLE)
    stranger = world.submit(task="c", cpu=WHOLE)
    assert world.outcome(too_wide) == "rejected"
    result = world.result(too_wide)
    assert result is not None
    assert (result.reason, result.detail) == ("never_fits", "at most cpu 2000 of one host are the part of task a")
    assert world.outcome(fits) == ""
    assert world.outcome(stranger) == "rejected"


def test_without_weights_what_is_wider_than_its_part_now_waits_and_holds_nobody_back() -> None:
    world, worker = led("split-by-task")
    flood(world, "a", 1)
    wide, narrow = world.submit(task="b", cpu=6 * WHOLE), world.submit(task="b", cpu=WHOLE)
    assert {(start.task, start.n) for start in world.decide()} == {("a", 1), ("b", narrow.n)}
    assert world.outcome(wide) == ""
    assert running(worker) == {"a": 1, "b": 1}


def on_gpus(hosts: int, shares: dict[str, int] | None = None) -> World:
    """Hosts with four GPUs each, which serve s."""
    world = World()
    world.lead("split-by-task", shares=shares, learn=0)
    for number in range(hosts):
        services = {"s": m.Service(weights_mib=10, restore_us=1_000)}
        world.join(f"e{number}", key="gpu", host=f"h{number}", gpus=range(4), services=services)
    return world


def wanted_gpus(world: World, task: str, count: int, gpu: int | m.Demand = 1) -> list[ActionId]:
    hint = m.Hint(duration_us=1_000_000)
    return [world.submit(task=task, client=f"of-{task}", key="gpu", service="s", gpu=gpu, hint=hint) for _ in range(count)]


def gpus_by_task(world: World) -> dict[str, list[tuple[str, int]]]:
    held: dict[str, list[tuple[str, int]]] = {}
    for each in world.state.incarnations.values():
        for key, grant in each.grants.items():
            held.setdefault(key.action.task, []).extend((each.host.name, gpu) for gpu in range(4) if grant.gpus >> gpu & 1)
    return {task: sorted(each) for task, each in held.items()}


def test_gpus_are_split_over_the_whole_pool_one_task_behind_the_other() -> None:
    world = on_gpus(2, {"a": 3, "b": 5})
    wanted_gpus(world, "a", 20)
    world.decide()
    first = [("h0", 0), ("h0", 1), ("h0", 2)]
    assert gpus_by_task(world) == {"a": first}, "the rest is of b, whether b is there or not"
    wanted_gpus(world, "b", 20)
    world.decide()
    assert gpus_by_task(world) == {"a": first, "b": [("h0", 3), *(("h1", gpu) for gpu in range(4))]}


def test_chunks_of_a_part_are_aligned_and_who_finds_none_that_large_is_refused() -> None:
    world = on_gpus(2, {"a": 3, "b": 5})
    (pair,) = wanted_gpus(world, "a", 1, gpu=2)
    (four,) = wanted_gpus(world, "b", 1, gpu=4)
    (too_large,) = wanted_gpus(world, "a", 1, gpu=4)
    world.decide()
    assert gpus_by_task(world) == {"a": [("h0", 0), ("h0", 1)], "b": [("h1", gpu) for gpu in range(4)]}
    assert (world.outcome(pair), world.outcome(four)) == ("", "")
    result = world.result(too_large)
    assert result is not None
    assert (result.reason, result.detail) == ("never_fits", "the part of task a are 3 of the GPUs")


def test_a_task_does_not_use_a_copy_that_lies_on_another_tasks_gpus() -> None:
    world = on_gpus(1)
    (mine,) = wanted_gpus(world, "a", 1, gpu=4)
    world.decide()
    assert len(gpus_by_task(world)["a"]) == 4, "alone it has them all"
    world.workers["i1"].finish(mine)
    wanted_gpus(world, "b", 1, gpu=m.Demand(low=1, high=4))
    wanted_gpus(world, "a", 1, gpu=m.Demand(low=1, high=4))
    world.decide()
    held = gpus_by_task(world)
    assert set(held["a"]) <= {("h0", 0), ("h0", 1)}
    assert set(held["b"]) <= {("h0", 2), ("h0", 3)}
