"""What a recording would have come to otherwise: arrivals move with what they waited for, thinking and durations stay."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tangram import messages as m
from tangram import subjects
from tangram.cli.main import main
from tangram.errors import ConfigError
from tangram.outcomes import Outcome
from tangram.replay.logfile import LogWriter
from tangram.replay.otherwise import Column, figures, played, recorded, setup_of, with_settings
from tangram.replay.recording import Recording
from tangram.scheduler.checkpoint import dump, load
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import ActionId, State
from tangram.simulation.driver import Setup, Simulation
from tangram.simulation.pool import Machine, parse
from tangram.simulation.work import Trajectory, Work
from tests.core.world import MS, Worker, World, cores
from tests.replay.record import FOLDER

SECOND = 1_000_000_000
DEMO = max(FOLDER.glob("behaviour-*-demo.log"))


def simulated(trajectories: list[Trajectory], pool: str, setup: Setup | None = None) -> list[Record]:
    log: list[Record] = []
    Simulation(trajectories, parse(pool), setup or Setup(), observe=log.append).run()
    return log


def recording_of(log: list[Record], state: State | None = None) -> Recording:
    found = Recording() if state is None else Recording(state)
    for record in log:
        found.add(record)
    return found


def steps(number: int, count: int, think_s: float = 2, run_s: float = 3, parallel: float = 0, high: int = 1) -> Trajectory:
    work = Work("run", int(think_s * SECOND), int(run_s * SECOND), int(run_s * parallel * SECOND), high=high)
    return Trajectory(number, "job", 0, [work] * count)


def by_client(column: Column, client: str) -> list[tuple[str, int, int]]:
    return [(each.kind, each.arrived_ns, each.ended_ns) for each in column.ran if each.id.client == client]


def test_a_recording_again_is_as_it_was() -> None:
    recording = recording_of(simulated([steps(n, 6) for n in range(8)], "cpu=4"))
    was, again = recorded(recording), played(recording, list(recording.machines.values()), setup_of(recording))
    assert figures(was)["actions"] == figures(again)["actions"] == 8 * 8  # with opening and closing
    for name in ("mean_act_s", "mean_queue_s", "makespan_s", "unit_seconds"):
        assert figures(again)[name] == pytest.approx(figures(was)[name], rel=0.02, abs=0.01), name


def test_thinking_is_kept_and_arrivals_move() -> None:
    recording = recording_of(simulated([steps(n, 4) for n in range(4)], "cpu=4"))
    narrow = played(recording, parse("cpu=1"), setup_of(recording))
    assert figures(narrow)["makespan_s"] >= 4 * 4 * 3  # one after the other on one core
    for client in {each.id.client for each in narrow.ran}:
        runs = [(arrived, ended) for kind, arrived, ended in by_client(narrow, client) if kind == "run"]
        for (_, ended), (arrived, _) in pairwise(runs):
            assert arrived - ended == pytest.approx(2 * SECOND, abs=10 * MS)


def test_more_cores_make_elastic_actions_faster_by_the_curve_that_was_learnt() -> None:
    recording = recording_of(simulated([steps(n, 12, parallel=0.9, high=4) for n in range(8)], "cpu=8"))
    wide = played(recording, parse("cpu=32"), setup_of(recording))
    assert figures(wide)["mean_act_s"] < 0.8 * figures(recorded(recording))["mean_act_s"]


def test_another_policy_and_setting_decide_otherwise() -> None:
    recording = recording_of(simulated([steps(n, 4, parallel=0.9, high=4) for n in range(4)], "cpu=8"))
    was = setup_of(recording)
    pool = list(recording.machines.values())
    one, four = (
        played(recording, pool, with_settings(was, policy="fixed-units", settings={"fixed_units": units})) for units in (1, 4)
    )
    assert {each.unit_ns // each.run_ns for each in one.ran if each.kind == "run"} == {1}
    assert {each.unit_ns // each.run_ns for each in four.ran if each.kind == "run"} == {4}


def test_a_quota_that_is_raised_lets_more_through() -> None:
    work = Work("call", 0, SECOND, key="api", tokens=(("search", 1),))
    setup = Setup(quotas={"search": m.Quota(concurrency=1)})
    recording = recording_of(simulated([Trajectory(n, "job", 0, [work]) for n in range(4)], "cpu=1", setup))
    was = setup_of(recording)
    pool = list(recording.machines.values())
    assert figures(played(recording, pool, was))["makespan_s"] == pytest.approx(4, abs=0.1)
    wider = with_settings(was, quotas={"search": m.Quota(concurrency=4)})
    assert figures(played(recording, pool, wider))["makespan_s"] == pytest.approx(1, abs=0.1)


def test_from_a_checkpoint_what_was_open_comes_at_the_beginning() -> None:
    log = simulated([steps(n, 6) for n in range(6)], "cpu=2")
    middle = len(log) // 2
    state = State()
    for record in log[:middle]:
        step(state, record)
    found = recording_of(log[middle:], load(dump(state)))
    again = played(found, list(found.machines.values()), setup_of(found))
    was = recorded(found)
    assert {each.id for each in was.ran} == {each.id for each in again.ran}
    assert len(again.ran) > 20
    assert figures(again)["makespan_s"] == pytest.approx(figures(was)["makespan_s"], rel=0.25)


def world_with_open_actions() -> tuple[World, list[ActionId]]:
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(2))
    actions = [world.submit() for _ in range(4)]
    world.decide()
    worker.finish(actions[0], run_ns=SECOND)
    return world, actions


def test_what_was_never_run_is_left_out_and_counted() -> None:
    world, actions = world_with_open_actions()
    world.cancel(actions[3])
    world.decide()
    recording = recording_of(world.log)
    found = played(recording, list(recording.machines.values()), setup_of(recording))
    assert len(found.ran) == 1
    assert sum(found.not_run.values()) == 3
    assert found.not_run == recorded(recording).not_run


def test_an_outcome_that_timed_out_takes_as_long_on_any_number_of_cores() -> None:
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(8))
    action = world.submit(cpu=m.Demand(low=1_000, high=8_000), hint=m.Hint(duration_us=10_000_000, parallel_ppm=990_000))
    world.decide()
    worker.finish(action, Outcome.TIMED_OUT, run_ns=10 * SECOND)
    recording = recording_of(world.log)
    for units in (1, 2, 8):
        assert recording.run_ns(action, units) == 10 * SECOND


def test_an_action_that_fits_nowhere_in_the_pool_is_named() -> None:
    recording = recording_of(simulated([Trajectory(0, "job", 0, [Work("run", 0, SECOND, low=4, high=4)])], "cpu=4"))
    with pytest.raises(ConfigError, match=r"action job/t0/2 would never run in this pool"):
        played(recording, parse("cpu=2"), setup_of(recording))


def test_gpus_restore_what_was_recorded_with_them() -> None:
    services = {"judge": m.Service(weights_mib=1_000, restore_us=2_000_000)}
    work = Work("score", 0, SECOND, key="gpu", service="judge")
    recording = recording_of(simulated([Trajectory(n, "job", 0, [work]) for n in range(3)], "gpu=1x1", Setup(services=services)))
    was, again = recorded(recording), played(recording, [Machine(gpus=1)], setup_of(recording))
    assert figures(again)["makespan_s"] == pytest.approx(figures(was)["makespan_s"], abs=0.1)


def answered(world: World, worker: Worker, action: ActionId, seconds: int, *items: bytes, outcome: Outcome = Outcome.OK) -> None:
    """The action runs for so long and ends, told in a message that has other items for it first."""
    world.decide()
    worker.read()
    world.pass_time(seconds)
    (key,) = [key for key in worker.running if key.action == action]
    start = worker.running.pop(key).start
    result = m.Result(nonce=start.nonce, outcome=outcome, run_ns=seconds * SECOND, units=start.units)
    results = [*items, m.encode(result)]
    told = m.ActionsFinished(
        executor=worker.executor,
        incarnation=worker.incarnation,
        k=worker._k(),
        ids=[action.n] * len(results),
        results=results,
        outputs=[b""] * len(results),
    )
    world.put(subjects.completions(action.task, action.client), told)


def sent(world: World, key: str, cost: dict[str, m.Demand]) -> ActionId:
    spec = m.ActionSpec(nonce=bytes(8), kind="run", cost=cost)
    payload = m.encode(m.Run(argv=("true",)))
    world.put(subjects.actions(key, "t"), m.ActionsSubmitted(client="c", ids=[1], specs=[m.encode(spec)], payloads=[payload]))
    return ActionId("t", "c", 1)


def again_of(world: World) -> Column:
    recording = recording_of(world.log)
    return played(recording, list(recording.machines.values()), setup_of(recording))


def seen_again(world: World) -> tuple[Recording, State]:
    """The recording, and the state at the end of its simulated log."""
    recording, state = recording_of(world.log), State()
    played(recording, list(recording.machines.values()), setup_of(recording), lambda record: step(state, record) and None)
    return recording, state


@pytest.mark.parametrize("other", [b"\xc1", m.encode(m.Result(nonce=b"somebody", outcome=Outcome.OK, run_ns=77 * SECOND))])
def test_what_is_no_outcome_of_an_action_is_passed_over(other: bytes) -> None:
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(2))
    answered(world, worker, world.submit(cpu=1_000), 3, other)
    assert [each.run_ns for each in again_of(world).ran] == [3 * SECOND]


def test_a_recorded_host_has_all_that_it_had() -> None:
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(2), disk=100)
    answered(world, worker, sent(world, "cpu", {"disk": m.Demand(low=60)}), 1)
    assert len(again_of(world).ran) == 1


def test_a_kind_of_executor_that_has_no_units_is_there_again() -> None:
    world = World()
    world.lead()
    worker = world.join("fpga-0", key="fpga", nodes=[])
    answered(world, worker, sent(world, "fpga", {}), 1)
    assert len(again_of(world).ran) == 1


def test_beyond_its_time_out_an_action_ends_on_fewer_cores_too() -> None:
    world = World()
    world.lead("fixed-units", fixed_units=8)
    worker = world.join("cpu-0", nodes=cores(8))
    hint = m.Hint(duration_us=960_000_000, parallel_ppm=1_000_000)
    answered(world, worker, world.submit(cpu=m.Demand(low=1_000, high=8_000), hint=hint, timeout_ms=200_000), 120)
    recording = recording_of(world.log)
    setup = with_settings(setup_of(recording), policy="fcfs-minimum")
    (ran,) = played(recording, parse("cpu=1"), setup).ran
    assert ran.run_ns == 200 * SECOND
    assert recording.outcome(ran.id, 1) is Outcome.TIMED_OUT
    assert recording.outcome(ran.id, 8) is Outcome.OK


def test_outcomes_are_the_recorded_ones() -> None:
    """A time-out teaches nothing, and a sandbox that was not made is not there."""
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(2))
    answered(world, worker, world.submit(cpu=1_000), 2, outcome=Outcome.TIMED_OUT)
    answered(world, worker, world.submit(kind="session.open", memory=100), 1, outcome=Outcome.ERROR)
    recording, state = seen_again(world)
    assert sum(each.ran for each in recording.actions.values()) == state.finished == 2
    assert not state.models
    assert not state.sessions


def test_from_a_checkpoint_what_was_learnt_is_known() -> None:
    log = simulated([steps(n, 6, parallel=0.9, high=4) for n in range(4)], "cpu=8")
    state = State()
    for record in log[: len(log) // 2]:
        step(state, record)
    before = state.models["job", "run"].count
    recording, found = recording_of(log[len(log) // 2 :], load(dump(state))), State()
    counts: list[int] = []

    def observe(record: Record) -> None:
        if isinstance(step(found, record).message, m.ModelsSeeded):
            counts.append(found.models["job", "run"].count)

    played(recording, list(recording.machines.values()), setup_of(recording), observe)
    assert before > 3
    assert counts == [before]


def test_whatever_can_happen_to_a_log_can_be_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that are refused and sent again, executors of GPUs that have cores, losses, leaders, quotas."""
    assert run("--file", max(FOLDER.glob("behaviour-*-chaos.log")), "--policy", "fcfs-minimum", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    ran = found["recorded"]["actions"]
    assert ran > 50
    for course in ("again", "otherwise"):
        more = sum(found[course]["not_run"].values()) - sum(found["recorded"]["not_run"].values())
        assert found[course]["actions"] + more == ran, "nothing is lost on the way"


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    try:
        return main(["replay", *map(str, arguments)])
    except SystemExit as exit_:
        return int(exit_.code or 0)


def test_the_command_shows_three_courses_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    assert run("--file", DEMO, "--pool", "cpu=8", "--timeline", page) == 0
    out = capsys.readouterr().out
    assert "recorded" in out
    assert "again" in out
    assert "otherwise" in out
    assert page.read_text().count("<iframe") == 2


def test_as_json_each_course_has_its_figures_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--file", DEMO, "--policy", "fcfs-minimum", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recorded"]["actions"] == found["again"]["actions"] == found["otherwise"]["actions"] > 20
    assert set(found["recorded"]["tasks"]) == {"coding", "math"}


def test_settings_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[settings]\nfixed_units = 1\n[shares]\ncoding = 3\n[quotas.search]\nconcurrency = 2\n")
    assert run("--file", DEMO, "--policy", "fixed-units", "--settings", file) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[settings]\nnone = 1", "none"),
        ("[settings]\nfixed_units = 0", "fixed_units"),
        ("[quotas.q]\nconcurrency = -1", "quotas"),
        ("[other]\n", "other"),
        ('policy = "none"', "policy"),
        ("x", "settings.toml"),
    ],
)
def test_what_is_wrong_with_a_file_of_settings_is_said(
    content: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    assert run("--file", DEMO, "--settings", file) == 2
    err = capsys.readouterr().err
    assert "settings.toml" in err
    assert words in err


def test_verifying_and_asking_otherwise_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--file", DEMO, "--verify", "--policy", "fair") == 2
    assert "--verify" in capsys.readouterr().err


def test_a_recording_in_which_nothing_ran_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    world = World()
    world.lead()
    path = tmp_path / "empty.log"
    with LogWriter(path, None) as writer:
        for record in world.log:
            writer.message(record)
    assert run("--file", path, "--pool", "cpu=1") == 2
    assert "nothing was run" in capsys.readouterr().err
