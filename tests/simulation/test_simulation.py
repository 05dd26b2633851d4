"""What the simulator promises: the product's own decisions, a closed loop to the nanosecond, nothing lost, nothing overbooked."""

import os
from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram import messages as m
from tangram.errors import TangramError
from tangram.scheduler.cores import MILLI, cores_of
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.state import State
from tangram.simulation import trace
from tangram.simulation.client import Done
from tangram.simulation.driver import Setup, Simulation
from tangram.simulation.pool import Machine
from tangram.simulation.report import figures
from tangram.simulation.work import Trajectory, Work
from tangram.simulation.workloads import WORKLOADS

MS = 1_000_000
SECOND = 1_000 * MS


def work(think_s: float, duration_s: float, low: int = 1, high: int = 0, parallel: float = 0.0, **rest: object) -> Work:
    duration_ns = round(duration_s * SECOND)
    scalable_ns = round(duration_ns * parallel)
    return Work("step", round(think_s * SECOND), duration_ns, scalable_ns, low, high or low, **rest)  # type: ignore[arg-type]


def ran(trajectories: Sequence[Trajectory], pool: Sequence[Machine], setup: Setup) -> Simulation:
    simulation = Simulation(trajectories, pool, setup)
    simulation.run()
    return simulation


def times(simulation: Simulation) -> dict[tuple[int, int], tuple[float, float, float]]:
    """(trajectory, step) -> arrived, started, finished in seconds."""
    return {
        (each.trajectory.number, each.step): (
            each.arrived_ns / SECOND,
            each.started_ns / SECOND,
            each.finished_ns / SECOND,
        )
        for each in simulation.done
    }


# --- exactness -----------------------------------------------------------------------------------------------------


def test_a_closed_loop_worked_out_by_hand() -> None:
    """Two cores. The second trajectory's action needs both, so it waits for the first one's; that one's next waits for it."""
    first = Trajectory(0, "job", 0, [work(1.0, 2.0), work(0.5, 1.0)])
    second = Trajectory(1, "job", 0, [work(1.0, 1.0, low=2)])
    simulation = ran([first, second], [Machine((2,))], Setup("fcfs-minimum", round_trip_ns=2 * MS))
    assert times(simulation) == {
        (0, 0): (1.0, 1.002, 3.002),
        (1, 0): (1.0, 3.004, 4.004),
        (0, 1): (3.502, 4.006, 5.006),
    }
    found = figures(simulation)
    assert found.mean_act_s == pytest.approx((2.002 + 3.004 + 1.504) / 3, abs=1e-6)
    assert found.mean_queue_s == pytest.approx((0.002 + 2.004 + 0.504) / 3, abs=1e-6)
    assert found.mean_run_s == pytest.approx(4 / 3, abs=1e-6)
    assert (found.p50_act_s, found.p95_act_s) == (2.002, 3.004)
    assert found.makespan_s == found.mean_step_s == 5.006
    assert found.unit_seconds_held == 2 + 1 + 2
    assert found.unit_seconds_at_one_unit == 4


def test_spare_cores_shorten_what_scales_up_to_its_maximum() -> None:
    simulation = ran([Trajectory(0, "job", 0, [work(1.0, 4.0, high=4, parallel=0.5)])], [Machine((16,))], Setup())
    (done,) = simulation.done
    assert done.units == 4
    assert done.finished_ns - done.started_ns == 2.5 * SECOND
    assert figures(simulation).unit_seconds_held == 10


def test_a_reservation_is_held_from_open_to_close_and_makes_others_wait() -> None:
    """One core, so the second pod opens when the first has closed: 2 ms for each of open, act and close."""
    both = [Trajectory(number, "job", 0, [work(1.0, 1.0)]) for number in range(2)]
    simulation = ran(both, [Machine((1,))], Setup("static-trajectory", round_trip_ns=2 * MS))
    assert times(simulation) == {(0, 0): (1.0, 1.002, 2.002), (1, 0): (1.0, 2.008, 3.008)}
    # opened at 0.002, closed at 2.004; opened at 2.006, closed at 3.010
    assert figures(simulation).unit_seconds_held == pytest.approx(2.002 + 1.004)


def test_a_program_gets_no_faster_on_more_cores_than_it_can_use() -> None:
    scales = Trajectory(0, "job", 0, [work(1.0, 4.0, high=2, parallel=1.0)])
    simulation = ran([scales], [Machine((8,))], Setup("static-trajectory", {"static_units": 8}))
    (done,) = simulation.done
    assert (done.units, done.finished_ns - done.started_ns) == (8, 2 * SECOND)


def test_what_happens_during_a_round_trip_is_one_window() -> None:
    """100 actions arrive one a millisecond; with 10 ms for a round trip about 10 are decided together."""
    many = [Trajectory(number, "job", 0, [work(1 + number / 1_000, 1.0)]) for number in range(100)]
    fast, slow = (ran(many, [Machine((100,))], Setup("fcfs-minimum", round_trip_ns=trip, one_shot=True)) for trip in (0, 10 * MS))
    assert len(fast.pass_ns) == 100
    assert len(slow.pass_ns) <= 13
    assert {each.started_ns - each.arrived_ns for each in fast.done} == {0}
    waited = [each.started_ns - each.arrived_ns for each in slow.done]
    assert min(waited) >= 10 * MS
    assert max(waited) <= 20 * MS


def test_a_step_is_what_starts_together() -> None:
    early = [Trajectory(number, "job", 0, [work(0.0, 1.0 + number)]) for number in range(2)]
    late = Trajectory(2, "job", 10 * SECOND, [work(0.0, 4.0)])
    other = Trajectory(3, "other", 0, [work(0.0, 3.0)])
    found = figures(ran([*early, late, other], [Machine((8,))], Setup(round_trip_ns=0)))
    assert found.mean_step_s == 3.0
    assert found.makespan_s == 14.0


# --- against an independent simulation -------------------------------------------------------------------------------


def fcfs(trajectories: Sequence[Trajectory], cores: int) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Rigid actions, first come first served, nobody overtakes; (trajectory, step) -> arrived, started, finished."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    events: list[tuple[int, int, int, int]] = []
    for trajectory in trajectories:
        heappush(events, (trajectory.start_ns + trajectory.work[0].think_ns, trajectory.number, 0, 0))
    waiting: list[tuple[int, int, int]] = []
    while events:
        now, number, step, freed = heappop(events)
        steps = trajectories[number].work
        cores += freed
        if not freed:
            waiting.append((now, number, step))
        elif step + 1 < len(steps):
            heappush(events, (now + steps[step + 1].think_ns, number, step + 1, 0))
        while waiting and trajectories[waiting[0][1]].work[waiting[0][2]].low <= cores:
            arrived, first, at = waiting.pop(0)
            taken = trajectories[first].work[at]
            cores -= taken.low
            found[(first, at)] = (arrived, now, now + taken.duration_ns)
            heappush(events, (now + taken.duration_ns, first, at, taken.low))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_rigid_actions_are_served_as_first_come_first_served(seed: int) -> None:
    random = Random(seed)
    trajectories = [
        Trajectory(
            number,
            "job",
            random.randrange(SECOND),
            [work(random.uniform(0.1, 2), random.expovariate(1), random.choice((1, 1, 2, 4))) for _ in range(8)],
        )
        for number in range(12)
    ]
    simulation = ran(trajectories, [Machine((8,))], Setup("fcfs-minimum", round_trip_ns=0, one_shot=True))
    assert {
        (each.trajectory.number, each.step): (each.arrived_ns, each.started_ns, each.finished_ns) for each in simulation.done
    } == fcfs(trajectories, 8)
    assert figures(simulation).mean_queue_s > 0.1, "the pool is too large to prove anything"


# --- conservation ------------------------------------------------------------------------------------------------


def check_capacity(state: State) -> None:
    """No core is granted twice, none that its host does not have, and no more memory than there is."""
    for key, host in state.hosts.items():
        granted: list[int] = []
        memory = 0
        for incarnation in state.incarnations.values():
            for grant in incarnation.grants.values() if incarnation.host == key else ():
                granted += grant.cores if grant.amounts.get("cpu") else ()
                memory += grant.amounts.get("memory", 0)
                assert grant.amounts.get("cpu", 0) in (0, len(grant.cores) * MILLI)
        assert len(granted) == len(set(granted))
        assert sorted(granted) == list(cores_of(host.pool.used))
        assert host.pool.used & ~host.pool.all == 0
        assert memory == host.used.get("memory", 0) <= host.capacity["memory"]


def check_use(done: Sequence[Done], cores: dict[str, int]) -> None:
    """From when each ran and on how many cores, whatever the core believes."""
    changes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for each in done:
        changes[each.host] += [(each.started_ns, each.units), (each.finished_ns, -each.units)]
    for host, of_host in changes.items():
        used = 0
        for _, units in sorted(of_host):
            used += units
            assert used <= cores[host]


works = st.builds(
    lambda think, duration, low, more, parallel, memory: work(think, duration, low, low + more, parallel, memory_mib=memory),
    st.floats(0, 3), st.floats(0, 5), st.integers(1, 3), st.integers(0, 6), st.floats(0, 1), st.sampled_from((0, 0, 512)),
)  # fmt: skip


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    loads=st.lists(st.tuples(st.floats(0, 2), st.lists(works, min_size=1, max_size=6)), min_size=1, max_size=8),
    pool=st.lists(st.lists(st.integers(2, 4), min_size=2, max_size=3), min_size=1, max_size=3),
    policy=st.sampled_from(list(POLICIES)),
    trip_ms=st.sampled_from((0, 2, 700)),
    one_shot=st.booleans(),
    oracle=st.booleans(),
)
def test_every_action_ends_once_in_its_order_within_the_capacity(
    loads: list[tuple[float, list[Work]]],
    pool: list[list[int]],
    policy: str,
    trip_ms: int,
    one_shot: bool,
    oracle: bool,
) -> None:
    tasks = 1 if POLICIES[policy].splits else 2  # what is wider than its task's part waits for good
    trajectories = [
        Trajectory(number, f"job{number % tasks}", round(start_s * SECOND), steps)
        for number, (start_s, steps) in enumerate(loads)
    ]
    machines = [Machine(tuple(nodes), 1_024) for nodes in pool]
    simulation = Simulation(trajectories, machines, Setup(policy, {}, trip_ms * MS, one_shot, oracle))
    while simulation.advance():
        check_capacity(simulation.state)
    state = simulation.state
    assert not any((state.actions, state.sessions, state.queues, state.owed))
    assert not any(host.pool.used or any(host.used.values()) for host in state.hosts.values())
    done = {(each.trajectory.number, each.step): each for each in simulation.done}
    assert len(done) == len(simulation.done) == sum(len(trajectory.work) for trajectory in trajectories)
    for trajectory in trajectories:
        ended_ns = trajectory.start_ns
        for step, asked in enumerate(trajectory.work):
            each = done[(trajectory.number, step)]
            assert each.arrived_ns == ended_ns + asked.think_ns
            assert each.started_ns >= each.arrived_ns + trip_ms * MS
            assert each.finished_ns == each.started_ns + asked.run_ns(each.units)
            ended_ns = each.finished_ns
    if not POLICIES[policy].reserves:
        assert all(each.work.low <= each.units <= each.work.high for each in simulation.done)
        check_use(simulation.done, {f"h{number}": machine.cores for number, machine in enumerate(machines)})
        assert figures(simulation).unit_seconds_held == pytest.approx(
            sum(each.units * (each.finished_ns - each.started_ns) for each in simulation.done) / SECOND, abs=1e-5
        )
    if not one_shot:
        for trajectory in trajectories:
            assert len({done[(trajectory.number, step)].host for step in range(len(trajectory.work))}) == 1


# --- what the scheduler is told --------------------------------------------------------------------------------------


def test_only_the_oracle_tells_how_much_of_an_action_scales() -> None:
    serial = [Trajectory(0, "job", 0, [work(1.0, 4.0, high=8, parallel=0.0)])]
    pool = [Machine((8,))]
    assert ran(serial, pool, Setup()).done[0].units > 1, "the scheduler knew that more is of no use"
    assert ran(serial, pool, Setup(oracle=True)).done[0].units == 1


def test_what_a_user_declares_is_believed_and_does_not_change_the_truth() -> None:
    says = m.Hint(duration_us=1_000_000, parallel_ppm=0)
    declared = [Trajectory(0, "job", 0, [work(1.0, 4.0, high=8, parallel=1.0, hint=says)])]
    (done,) = ran(declared, [Machine((8,))], Setup()).done
    assert (done.units, done.finished_ns - done.started_ns) == (1, 4 * SECOND)


# --- what cannot go well ---------------------------------------------------------------------------------------------


def test_an_action_that_fits_nowhere_ends_the_simulation_with_its_reason() -> None:
    with pytest.raises(TangramError, match=r"action job/t0/\d+ was not run: rejected never_fits"):
        ran([Trajectory(0, "job", 0, [work(1.0, 1.0, low=5)])], [Machine((4,))], Setup())


def test_waiting_for_ever_is_noticed() -> None:
    with pytest.raises(TangramError, match="nothing runs"):
        ran([Trajectory(0, "job", 0, [work(1.0, 1.0)])], [], Setup())


def test_a_long_silence_does_not_stop_the_log_time_that_deadlines_count() -> None:
    """A day of thinking in an open sandbox, then a day of running: longer than any time that one message may move."""
    day = 86_400.0
    simulation = ran([Trajectory(0, "job", 0, [work(day, day), work(0.0, 1.0)])], [Machine((1,))], Setup())
    assert simulation.done[-1].finished_ns == pytest.approx((2 * day + 1) * SECOND, abs=10 * MS)
    assert simulation.state.now_ns == pytest.approx((2 * day + 1) * SECOND, abs=10 * MS)


# --- workloads -----------------------------------------------------------------------------------------------------


def test_coding_has_the_papers_means() -> None:
    coding = WORKLOADS["coding"]
    steps = [each for trajectory in coding.trajectories(1_000, 3) for each in trajectory.work]
    assert len(steps) == 1_000 * coding.actions
    run_s = sum(each.run_ns(each.high) for each in steps) / len(steps) / SECOND
    think_s = sum(each.think_ns for each in steps) / len(steps) / SECOND
    assert run_s == pytest.approx(0.975, rel=0.05)
    assert run_s / (run_s + think_s) == pytest.approx(0.47, abs=0.02)


def test_a_seed_gives_the_same_trajectories_and_another_one_others() -> None:
    coding = WORKLOADS["coding"]
    assert coding.trajectories(3, 1) == coding.trajectories(4, 1)[:3]
    assert coding.trajectories(3, 1) != coding.trajectories(3, 2)


@pytest.mark.skipif("TANGRAM_TRACES" not in os.environ, reason="TANGRAM_TRACES names no folder of traces")
def test_a_recorded_trace_loses_no_row_and_gains_nothing_if_rigid() -> None:
    path = Path(os.environ["TANGRAM_TRACES"]) / "swe-haiku.jsonl"
    trajectories = trace.load(path, {})
    by_policy = {policy: figures(ran(trajectories, [Machine((24,))], Setup(policy))) for policy in ("tangram", "fcfs-minimum")}
    rows = sum(1 for line in path.read_text().splitlines() if line.strip())
    assert {found.actions for found in by_policy.values()} == {rows}
    assert by_policy["tangram"].mean_act_s == by_policy["fcfs-minimum"].mean_act_s
