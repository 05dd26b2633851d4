"""Actions on GPUs: on a copy that is there, on one that is busy yet, or where a copy is restored; by the rule of each policy."""

from collections.abc import Iterable
from itertools import pairwise

from tangram import messages as m
from tangram.scheduler.state import ActionId, HostKey, Phase
from tests.core.world import Worker, World

SECOND_US = 1_000_000


def service(restore_s: float, weights_mib: int = 100) -> m.Service:
    return m.Service(weights_mib=weights_mib, restore_us=int(restore_s * SECOND_US))


def lasting(seconds: float) -> m.Hint:
    """It gets no faster on more GPUs."""
    return m.Hint(duration_us=int(seconds * SECOND_US))


def gpu_world(
    gpus: Iterable[int], services: dict[str, m.Service], policy: str = "tangram", gpu_memory_mib: int = 100, **settings: int
) -> tuple[World, Worker]:
    world = World()
    world.lead(policy, learn=0, **settings)
    return world, world.join("e", key="gpu", gpus=gpus, gpu_memory_mib=gpu_memory_mib, services=services)


def ask(world: World, name: str = "", gpu: int | m.Demand = 1, seconds: float = 1, **spec: object) -> ActionId:
    return world.submit(key="gpu", service=name, gpu=gpu, hint=lasting(seconds), **spec)


def run_once(world: World, worker: Worker, name: str, gpu: int | m.Demand = 1) -> m.Start:
    """One action of a service, from submission to outcome."""
    action = ask(world, name, gpu)
    (start,) = world.decide()
    worker.finish(action)
    return start


def copies(world: World, host: str = "h1") -> list[tuple[str, int]]:
    pool = world.state.hosts[HostKey(host, f"machine-{host}")].gpus
    return [(copy.service, copy.gpus) for copy in pool.copies]


def test_an_idle_copy_is_used_before_another_is_restored() -> None:
    world, worker = gpu_world(range(4), {"s": service(2), "t": service(2)})
    first = run_once(world, worker, "s")
    run_once(world, worker, "t")
    again = run_once(world, worker, "s")
    assert again.gpus == first.gpus
    assert [name for name, _ in copies(world)] == ["s", "t"]


def test_a_busy_copy_is_waited_for_when_that_takes_less_than_a_restore() -> None:
    world, worker = gpu_world(range(2), {"s": service(60)})
    run_once(world, worker, "s")
    first = ask(world, "s")
    world.decide()
    second = ask(world, "s")
    assert world.decide() == []
    worker.finish(first)
    (start,) = world.decide()
    assert start.n == second.n
    assert len(copies(world)) == 1


def test_a_busy_copy_is_not_waited_for_when_a_restore_takes_less() -> None:
    world, worker = gpu_world(range(2), {"s": service(0.1)})
    run_once(world, worker, "s")
    ask(world, "s", seconds=30)
    world.decide()
    ask(world, "s", seconds=30)
    assert [start.gpus for start in world.decide()] == [(1,)]


def test_not_everybody_waits_for_the_same_copy_and_who_came_first_starts_first() -> None:
    world, worker = gpu_world(range(2), {"s": service(3)})
    run_once(world, worker, "s")
    ask(world, "s")
    world.decide()
    waiting = [ask(world, "s") for _ in range(8)]
    started = [start.n for start in world.decide()]
    assert started == [waiting[0].n], "one restores a second copy, the first that came, and the others wait for both"
    assert len(copies(world)) == 2


def test_the_copies_that_are_worth_least_make_room() -> None:
    world, worker = gpu_world(range(2), {"s": service(5), "t": service(5), "u": service(5)})
    for name in ("t", "s", "s", "s"):
        run_once(world, worker, name)
    start = run_once(world, worker, "u")
    assert [each.service for each in start.evicts] == ["t"]
    assert sorted(name for name, _ in copies(world)) == ["s", "u"]


def test_without_prices_the_copy_that_was_used_longest_ago_makes_room() -> None:
    world, worker = gpu_world(range(2), {"s": service(5), "t": service(5), "u": service(5)}, policy="fcfs-minimum")
    for name in ("s", "s", "s", "t"):
        run_once(world, worker, name)
        world.pass_time(1)
    assert [each.service for each in run_once(world, worker, "u").evicts] == ["s"]


def test_two_that_need_the_room_of_one_copy_both_name_it() -> None:
    """Only one of them may come to be: then it has made its room itself."""
    world, worker = gpu_world(range(2), {"s": service(1, 150), "t": service(1, 100)})
    run_once(world, worker, "s", 2)
    lost = ask(world, "t", seconds=60)
    ask(world, "t", seconds=60)
    world.plan([lost])
    (start,) = [start for start in world.deliver() if start.service == "t"]
    assert [each.service for each in start.evicts] == ["s"]
    assert copies(world) == [("t", 1 << start.gpus[0])]
    worker.read()  # it checks the memory of its GPUs


def test_all_gpus_of_a_host_are_not_taken_away_from_a_wide_one_for_ever() -> None:
    """Though all that comes behind it says that it is short, and is not."""
    world, worker = gpu_world(range(8), {})
    lasts = {ask(world): 5 + n % 5 for n in range(8)}
    ends: dict[ActionId, float] = {}
    wide: ActionId | None = None
    for now in range(60):
        for start in world.decide():
            action = ActionId(start.task, start.client, start.n)
            ends[action] = now + lasts[action]
        if now == 2:
            wide = ask(world, gpu=8)
            lasts[wide] = 5
        for _ in range(2):
            lasts[ask(world)] = 5 + now % 5
        if wide in ends:
            assert now <= 35
            return
        for action in [each for each, end in ends.items() if end <= now]:
            del ends[action]
            worker.finish(action)
        world.pass_time(1)
    raise AssertionError("the wide one never starts")


def test_while_a_wide_one_waits_what_ends_before_it_could_begin_goes_on() -> None:
    world, _ = gpu_world(range(2), {})
    ask(world, seconds=10)
    world.decide()
    ask(world, gpu=2)
    short, long = ask(world, seconds=1), ask(world, seconds=30)
    assert [start.n for start in world.decide()] == [short.n]
    assert world.phase(long) is Phase.READY


def test_behind_a_wide_one_of_its_service_that_waits_elsewhere_a_narrow_one_starts() -> None:
    world, _ = gpu_world(range(2), {"s": service(1)})
    world.join("f", key="gpu", host="h2", gpus=range(1), services={"s": service(1)})
    ask(world, "s", seconds=30)
    ask(world, "s", seconds=30)
    world.decide()
    ask(world, "s", 2)
    narrow = ask(world, "s", seconds=30)
    assert [start.n for start in world.decide()] == [narrow.n]


def test_each_service_has_its_own_gpus_under_static_service() -> None:
    offers = {name: service(1) for name in ("s", "t", "u", "v", "w")}
    world, worker = gpu_world(range(8), offers, policy="static-service", static_units=2)
    any_size = m.Demand(low=1, high=8)
    actions = {name: [ask(world, name, any_size) for _ in range(2)] for name in offers}
    started = {start.service: start for start in world.decide()}
    assert {name: start.gpus for name, start in started.items()} == {"s": (0, 1), "t": (2, 3), "u": (4, 5), "v": (6, 7)}
    assert world.decide() == [], "each waits for its own, and the fifth service has none"
    worker.finish(actions["s"][0])
    (again,) = world.decide()
    assert (again.service, again.gpus, again.evicts) == ("s", (0, 1), ())


def test_a_static_size_that_is_no_chunk_is_the_next_smaller_one() -> None:
    world, _ = gpu_world(range(8), {"s": service(1)}, policy="static-service", static_units=3)
    ask(world, "s", m.Demand(low=1, high=8))
    assert [start.gpus for start in world.decide()] == [(0, 1)]


def test_a_service_that_nobody_has_never_fits() -> None:
    world, _ = gpu_world(range(2), {"s": service(1)})
    action = ask(world, "x")
    assert (world.outcome(action), reason(world, action)) == ("rejected", ("never_fits", "no executor serves x"))


def test_weights_that_fit_on_no_legal_chunk_never_fit() -> None:
    world, _ = gpu_world(range(2), {"s": service(1, 300)})
    action = ask(world, "s", m.Demand(low=1, high=8))
    assert (world.outcome(action), reason(world, action)[0]) == ("rejected", "never_fits")
    assert "memory for s" in reason(world, action)[1]


def test_a_chunk_that_no_host_has_never_fits() -> None:
    world, _ = gpu_world(range(1, 8), {"s": service(1)})
    action = ask(world, "s", 8)
    assert (world.outcome(action), reason(world, action)[0]) == ("rejected", "never_fits")
    assert world.outcome(ask(world, "s", 4)) == ""


def reason(world: World, action: ActionId) -> tuple[str, str]:
    result = world.result(action)
    assert result is not None
    return result.reason, result.detail


def test_the_least_that_has_room_for_the_weights_is_the_minimum() -> None:
    for policy in ("fcfs-minimum", "tangram"):
        world, _ = gpu_world(range(8), {"s": service(1, 240)}, policy, gpu_memory_mib=60)
        ask(world, "s", m.Demand(low=1, high=4))
        assert [start.gpus for start in world.decide()] == [(0, 1, 2, 3)]


def test_a_fixed_size_is_the_nearest_that_the_executor_could_give() -> None:
    world, _ = gpu_world(range(4), {"s": service(1)}, "fixed-units", fixed_units=8)
    ask(world, "s", m.Demand(low=1, high=8))
    assert [len(start.gpus) for start in world.decide()] == [4]


def test_two_copies_that_fit_one_gpu_take_turns() -> None:
    world, worker = gpu_world(range(1), {"s": service(1, 40), "t": service(1, 40)})
    for name in ("s", "t", "s"):
        assert run_once(world, worker, name).evicts == ()
    assert len(copies(world)) == 2


def test_a_program_without_a_service_has_its_gpus_alone_and_leaves_nothing() -> None:
    world, worker = gpu_world(range(1), {"s": service(1, 40)})
    run_once(world, worker, "s")
    start = run_once(world, worker, "")
    assert [each.service for each in start.evicts] == ["s"]
    assert copies(world) == []


def test_what_it_needs_beside_gpus_is_kept_for_the_first_that_waits() -> None:
    world, worker = gpu_world(range(4), {})
    held = world.submit(key="gpu", gpu=1, memory=600)
    world.decide()
    large = world.submit(key="gpu", gpu=1, memory=700)
    small = world.submit(key="gpu", gpu=2, memory=300)
    assert world.decide() == [], "it would starve the one that came before"
    worker.finish(held)
    assert [start.n for start in world.decide()] == [large.n, small.n]


def test_equals_are_equal_in_all_they_ask_for() -> None:
    """One that waits by choice must not be started in the place of one that needs less memory."""
    world, worker = gpu_world(range(8), {"s": service(2.2)})
    run_once(world, worker, "s")
    ask(world, "s", memory=264)
    world.decide()
    asked = {ask(world, "s", memory=memory).n: memory for memory in (50, 700, *[100] * 10)}
    started = {start.n: start.amounts["memory"] for start in world.decide()}
    assert started == {n: asked[n] for n in started}
    assert sum(started.values()) <= 760
    assert len(started) > 1


def test_a_gpu_is_that_of_one_process_until_it_has_gone() -> None:
    world, worker = gpu_world(range(2), {"s": service(1)})
    other = world.join("f", key="gpu", gpus=range(4), services={"t": service(1)})
    run_once(world, worker, "s")
    ask(world, "t", 2)
    assert [start.gpus for start in world.decide()] == [(2, 3)]
    ask(world, "t", 2, deadline_ms=10_000)
    worker.leave()
    worker.send()
    assert [start.gpus for start in world.decide()] == [(0, 1)]
    assert world.state.incarnations[other.incarnation].gpus == 0b1111


def test_weights_of_a_lost_process_stay_until_it_is_found_dead() -> None:
    world, worker = gpu_world(range(1), {"s": service(1, 60)})
    run_once(world, worker, "s")
    world.lose(worker)
    other = world.join("f", key="gpu", gpus=range(1), services={"t": service(1, 60)})
    ask(world, "t")
    assert world.decide() == []
    worker.die()
    other.find_dead([worker])
    other.send()
    assert [start.service for start in world.decide()] == ["t"]


def test_gpus_of_a_lost_process_are_waited_for_by_nobody() -> None:
    world, worker = gpu_world(range(4), {})
    ask(world, gpu=2)
    world.decide()
    world.lose(worker)
    world.join("f", key="gpu", gpus=range(4))
    wide, narrow = ask(world, gpu=4, deadline_ms=600_000), ask(world, gpu=2)
    assert [start.n for start in world.decide()] == [narrow.n]
    world.pass_time(30)
    another = ask(world, gpu=1)
    assert world.phase(wide) is Phase.READY
    assert world.decide() == []
    assert world.phase(another) is Phase.READY


def test_a_sandbox_keeps_its_gpus_and_nobody_waits_for_its_end() -> None:
    world, worker = gpu_world(range(2), {})
    opened = world.submit(key="gpu", kind="session.open", gpu=1)
    world.decide()
    worker.finish(opened)
    world.pass_time(1)
    ask(world)
    assert [start.gpus for start in world.decide()] == [(1,)]


def test_gpus_that_an_executor_has_no_more_are_not_used_though_a_copy_was_there() -> None:
    world, worker = gpu_world(range(2), {"s": service(1)})
    run_once(world, worker, "s")
    worker.change(gpus=(1,))
    worker.send()
    ask(world, "s")
    assert [start.gpus for start in world.decide()] == [(1,)]


def test_cores_beside_gpus_are_no_elastic_units() -> None:
    world, _ = gpu_world(range(2), {"s": service(1)})
    world.join("c")
    ask(world, "s", m.Demand(low=1, high=2), cpu=2_000)
    for _ in range(2):
        world.submit(cpu=m.Demand(low=1_000, high=4_000))
    gpu = [start for start in world.decide() if start.gpus]
    assert [(start.amounts["cpu"], start.amounts["gpu"], start.units) for start in gpu] == [
        (2_000, len(start.gpus), len(start.gpus)) for start in gpu
    ]
    assert len(gpu) == 1


def test_what_takes_few_gpus_breaks_no_larger_group_where_it_need_not() -> None:
    world, worker = gpu_world(range(4), {})
    singles = [ask(world, seconds=60) for _ in range(4)]
    of_gpu = {start.gpus: start.n for start in world.decide()}
    for gpu in (0, 1, 2):
        worker.finish(next(each for each in singles if each.n == of_gpu[(gpu,)]))
    ask(world, seconds=60)
    assert [start.gpus for start in world.decide()] == [(2,)]
    ask(world, gpu=2, seconds=60)
    assert [start.gpus for start in world.decide()] == [(0, 1)]


def test_what_a_lost_process_was_told_to_evict_may_be_there_still() -> None:
    world, worker = gpu_world(range(2), {"s": service(1, 120), "t": service(1)})
    run_once(world, worker, "s", 2)
    ask(world, "t", seconds=60)
    (start,) = world.decide()
    assert [each.service for each in start.evicts] == ["s"]
    world.lose(worker)
    other = world.join("f", key="gpu", gpus=range(2), services={"t": service(1)})
    ask(world, "t")
    assert world.decide() == [], "60 MiB may lie on the other GPU"
    worker.die()
    other.find_dead([worker])
    other.send()
    assert len(world.decide()) == 1


def test_when_many_wait_for_a_service_chunks_are_small_at_once() -> None:
    """However idle the GPUs were until now: what does not scale fully does more work on smaller ones."""
    hint = m.Hint(duration_us=4 * SECOND_US, parallel_ppm=900_000)
    world, worker = gpu_world(range(8), {"s": service(0.1, weights_mib=10)})
    alone = world.submit(key="gpu", service="s", gpu=m.Demand(low=1, high=8), hint=hint)
    (start,) = world.decide()
    assert len(start.gpus) == 8
    worker.finish(alone)
    ask(world, "s", gpu=4)
    world.decide()
    for _ in range(40):
        world.submit(key="gpu", service="s", gpu=m.Demand(low=1, high=8), hint=hint)
    sizes = [len(start.gpus) for start in world.decide()]
    assert sum(sizes) == 4
    assert max(sizes) <= 2


def test_replicated_weights_lie_whole_on_each_gpu() -> None:
    whole = m.Service(weights_mib=80, restore_us=SECOND_US, is_replicated=True)
    world, worker = gpu_world(range(2), {"s": whole, "split": service(1, weights_mib=80), "t": service(1, weights_mib=30)})
    run_once(world, worker, "split", 2)
    run_once(world, worker, "t")
    assert copies(world) == [("split", 0b11), ("t", 0b01)]  # 40 MiB of 100 on each, and 30 beside it
    world, worker = gpu_world(range(2), {"s": whole, "t": service(1, weights_mib=30)})
    run_once(world, worker, "s", 2)
    run_once(world, worker, "t")
    assert ("s", 0b11) not in copies(world)  # 80 and 30 MiB do not fit on one


def test_a_service_runs_on_the_sizes_that_it_can_be_served_on() -> None:
    world, worker = gpu_world(range(4), {"s": m.Service(weights_mib=1, units=(1, 2))})
    assert len(run_once(world, worker, "s", m.Demand(low=2, high=4, legal=(2, 4))).gpus) == 2
    ask(world, "s", 4)
    assert world.decide() == []


def test_a_restore_is_taken_to_last_what_it_was_seen_to_last() -> None:
    """A busy copy is waited for only while that takes less than a restore elsewhere."""
    declared = m.Service(weights_mib=1, restore_us=60 * SECOND_US)
    seen = m.Service(weights_mib=1, restore_us=60 * SECOND_US, restored_us=((1, 1_000),))
    for offer, starts in ((declared, 0), (seen, 1)):
        world, worker = gpu_world(range(2), {"s": offer})
        run_once(world, worker, "s")
        ask(world, "s")
        world.decide()
        ask(world, "s")
        assert len(world.decide()) == starts


def test_the_copy_of_less_idle_value_makes_room() -> None:
    for poor in ("s", "t"):
        offers = {
            name: m.Service(weights_mib=50, restore_us=SECOND_US, idle_value_ppm=1_000 if name == poor else 1_000_000)
            for name in ("s", "t", "u")
        }
        world, worker = gpu_world([0], offers)
        for name in ("s", "t", "s", "t", "u"):
            run_once(world, worker, name)
        assert [name for name, _ in copies(world)] == [name for name in ("s", "t") if name != poor] + ["u"]


def test_services_without_gpus_of_their_own_share_those_of_others_where_that_is_set() -> None:
    offers = {name: service(1) for name in ("s", "t", "u")}
    world, worker = gpu_world(range(2), offers, policy="static-service")
    ask(world, "u")
    assert world.decide() == []
    world, worker = gpu_world(range(2), offers, policy="static-service", static_shared=1)
    assert run_once(world, worker, "u").gpus == run_once(world, worker, "s").gpus
    assert run_once(world, worker, "t").gpus != run_once(world, worker, "s").gpus


def test_two_services_that_take_turns_on_one_gpu_both_go_on_and_swap_seldom() -> None:
    """Thrash is bounded: of two queues that need each other's memory, a copy serves several actions before it makes room."""
    world, worker = gpu_world([0], {"s": service(1, weights_mib=80), "t": service(1, weights_mib=80)})
    for _ in range(20):
        ask(world, "s", seconds=0.1)
        ask(world, "t", seconds=0.1)
    served: list[str] = []
    while starts := world.decide():
        for start in starts:
            served.append(start.service)
            worker.finish(ActionId(start.task, start.client, start.n))
    assert sorted(served) == ["s"] * 20 + ["t"] * 20
    swaps = sum(a != b for a, b in pairwise(served))
    assert swaps <= 10


# --- weights ahead of those that wait ----------------------------------------------------------------------------


def quota_world(*, places: int = 1, gpus: int = 2, memory_mib: int = 100) -> tuple[World, Worker]:
    world = World()
    world.lead(quotas={"api": m.Quota(concurrency=places)}, learn=0)
    services = {name: service(2) for name in ("s", "t", "u")}
    return world, world.join("e", key="gpu", gpus=range(gpus), gpu_memory_mib=memory_mib, services=services)


def test_weights_come_onto_an_idle_gpu_for_one_that_waits_for_something_else() -> None:
    world, worker = quota_world()
    first, second = ask(world, "s", api=0), ask(world, "t", api=0)
    (start,) = world.decide()
    assert start.n == first.n
    assert dict(copies(world)).keys() == {"s", "t"}
    worker.read()
    assert {name for name, _ in worker.resident} == {"s", "t"}
    worker.finish(first)
    (start,) = world.decide()
    assert (start.n, start.predicted_us) == (second.n, SECOND_US), "nothing is restored"
    assert world.decide() == []


def test_what_makes_room_for_it_is_wanted_by_nobody() -> None:
    world, worker = quota_world(gpus=2)
    run_once(world, worker, "u")
    world.submit(key="gpu", service="s", gpu=1, hint=lasting(9), api=0)
    world.submit(key="gpu", service="t", gpu=1, hint=lasting(1), api=0)
    world.decide()
    assert dict(copies(world)).keys() == {"s", "t"}, "u makes room"
    waits = ask(world, "u", api=0)
    assert world.decide() == []
    assert dict(copies(world)).keys() == {"s", "t"}, "t is waited for, and s runs"
    assert world.phase(waits) is Phase.READY


def test_a_prefetch_that_its_executor_never_reads_gives_back_what_it_took() -> None:
    world, worker = quota_world()
    run_once(world, worker, "u")
    ask(world, "s", api=0), ask(world, "t", api=0)
    world.decide()
    assert "u" not in dict(copies(world))
    world.lose(worker)
    assert "u" in dict(copies(world)), "it may be there yet"
    worker.die()
    other = world.join("f", key="gpu", gpus=range(2), gpu_memory_mib=100, services=worker.services)
    other.find_dead([worker])
    other.send()
    assert copies(world) == []


def test_nothing_is_fetched_onto_a_gpu_that_somebody_waits_for() -> None:
    world, _ = quota_world()
    busy = ask(world, "s", seconds=1)
    world.decide()
    ask(world, "t", gpu=2, seconds=1)  # begins when both are free
    ask(world, "u", seconds=5)
    world.decide()
    assert dict(copies(world)).keys() == {"s"}
    assert world.phase(busy) is Phase.DECIDED
