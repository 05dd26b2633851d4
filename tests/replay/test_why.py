"""`tangram why`: each pass that left an action behind says what it found, and the story goes from its submission to its end."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tangram import messages as m
from tangram import subjects
from tangram.cli.why import lines
from tangram.outcomes import Outcome
from tangram.replay.logfile import LogWriter
from tangram.replay.planned import Planned
from tangram.replay.why import Event, Story, Waits, Why
from tangram.scheduler.fold import Record
from tangram.scheduler.state import ActionId
from tests.core.world import World, cores
from tests.replay.record import chaos
from tests.replay.synthetic import busy_log

ROOT = Path(__file__).parents[2]
SECOND = 1_000_000_000


def submit(world: World, n: int, low: int = 1, high: int = 0, key: str = "cpu", **more: object) -> ActionId:
    cost = {"cpu": m.Demand(low=low * 1_000, high=high * 1_000)} if low else {}
    cost |= more.pop("cost", {})  # type: ignore[arg-type]
    spec = m.ActionSpec(nonce=n.to_bytes(8, "big"), kind="run", cost=cost, **more)  # type: ignore[arg-type]
    payload = m.encode(m.Run(argv=("true",)))
    world.put(subjects.actions(key, "t"), m.ActionsSubmitted(client="c", ids=[n], specs=[m.encode(spec)], payloads=[payload]))
    return ActionId("t", "c", n)


def planned_of(log: Sequence[Record]) -> Planned:
    planned = Planned()
    for record in log:
        if record.subject.startswith("tangram.decisions."):
            planned.add(record)
    return planned


def story_of(world: World, action: ActionId) -> Story:
    return stories(world.log, [action])[action]


def stories(log: Sequence[Record], wanted: Sequence[ActionId]) -> dict[ActionId, Story]:
    why = Why(None, planned_of(log), wanted)
    for record in log:
        why.add(record)
    return why.stories


def left(story: Story) -> list[Event]:
    return [each for each in story.events if each.what == "left"]


def started(world: World) -> None:
    """A window is in the log only if it has a decision, so a small action goes with each."""
    world.decide()
    for worker in world.workers.values():
        worker.read()


def ends(world: World, action: ActionId) -> None:
    for worker in world.workers.values():
        for key in [key for key in worker.running if key.action == action]:
            worker.end(key, Outcome.OK)
            worker.send()


def test_a_story_from_submission_to_its_end() -> None:
    world = World()
    world.lead()
    world.join("cpu-0", host="node", nodes=cores(4))
    first = submit(world, 1, low=3)
    second = submit(world, 2, low=2, high=4)
    started(world)
    world.after(1_500)
    small = submit(world, 3, low=1)
    ends(world, first)
    started(world)
    ends(world, second)
    story = story_of(world, second)
    assert [each.what for each in story.events] == ["submitted", "ready", "left", "decided", "ended"]
    submitted, _, passed, decided, ended = story.events
    assert "asks for 2 to 4 cores" in submitted.text
    assert (passed.reason, passed.window) == ("taken", 1)
    assert "it needs 2 cores" in passed.text
    assert "1 started (t/c/1: 3 cores 0-2)" in passed.text
    assert "nobody waits before it" in passed.text
    assert decided.text.startswith("got ")
    assert "on node (cpu-0)" in decided.text
    assert "1.5" in decided.text
    assert ended.text.startswith("ended: ok")
    assert small in stories(world.log, [small])


def test_what_is_free_is_named_and_who_was_before_it() -> None:
    world = World()
    world.lead("fcfs-minimum")
    for host in ("a", "b"):
        world.join(host, host=host, nodes=cores(2))
    busy = [submit(world, 1, low=2), submit(world, 2, low=1)]
    started(world)
    wide, narrow = submit(world, 3, low=2), submit(world, 4, low=2)
    tiny = submit(world, 5, low=0)  # needs nothing, so the next window has something to say
    started(world)
    assert busy
    (passed,) = left(story_of(world, narrow))
    assert passed.reason == "short"
    assert "cores: needs 2, 1 of 2 free on b, and no more on 1 other host" in passed.text
    assert f"1 started ({tiny})" in passed.text
    assert f"1 before it wait ({wide})" in passed.text


def test_what_is_kept_for_a_wide_action_says_for_which() -> None:
    world = World()
    world.lead("fcfs-minimum")
    world.join("cpu-0", nodes=cores(4))
    submit(world, 1, low=2)
    started(world)
    wide, narrow = submit(world, 2, low=4), submit(world, 3, low=1, cost={"memory": m.Demand(low=1)})
    submit(world, 4, low=0)
    started(world)
    (passed,) = left(story_of(world, narrow))
    assert passed.reason == "kept"
    assert f"what is free is kept for {wide}, which waits for 4 cores" in passed.text


def test_a_quota_and_a_lack_of_executors_are_said() -> None:
    world = World()
    world.lead(quotas={"q": m.Quota(concurrency=1)})
    alone = submit(world, 1, low=1)
    world.join("api-0", key="api", host="x", nodes=[])
    submit(world, 2, low=0, key="api", cost={"q": m.Demand(low=0)})
    started(world)
    second = submit(world, 3, low=0, key="api", cost={"q": m.Demand(low=0)})
    submit(world, 4, low=0, key="api")
    started(world)
    (passed,) = left(story_of(world, second))
    assert (passed.reason, "quota q: 1 of 1 places taken" in passed.text) == ("quota", True)
    assert {each.reason for each in left(story_of(world, alone))} == {"executor"}


def test_who_waits_for_a_gpu_is_told_how_many_are_free() -> None:
    world = World()
    world.lead("fcfs-minimum")
    world.join("gpu-0", key="gpu", host="g", nodes=[], gpus=range(2))
    submit(world, 1, low=0, key="gpu", cost={"gpu": m.Demand(low=2)})
    started(world)
    waits = submit(world, 2, low=0, key="gpu", cost={"gpu": m.Demand(low=1)})
    submit(world, 3, low=0, key="gpu")
    started(world)
    (passed,) = left(story_of(world, waits))
    assert passed.reason == "short"
    assert "GPUs: needs 1, 0 of 2 free on g" in passed.text


def test_a_story_from_a_lost_executor_and_a_cancel() -> None:
    world = World()
    world.lead()
    worker = world.join("cpu-0", nodes=cores(2))
    action = submit(world, 1, retry="safe")
    started(world)
    world.lose(worker)
    world.put(subjects.cancels("t"), m.CancelsRequested(client="c", ids=[1]))
    world.rule()
    texts = [(each.what, each.text) for each in story_of(world, action).events]
    assert [what for what, _ in texts] == ["submitted", "ready", "decided", "again", "owed", "ended"]
    assert "its executor was lost" in dict(texts)["again"]
    assert "cancelled" in dict(texts)["owed"]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_pass_has_a_sentence(seed: int) -> None:
    log = chaos(seed, 800).world.log
    everybody = [ActionId(task, client, n) for task in "tu" for client in "ab" for n in range(1, 80)]
    found = stories(log, everybody)
    assert len(found) > 40
    reasons = {"executor", "quota", "evicted", "choice", "short", "taken", "kept", "queue"}
    for story in found.values():
        assert story.events[0].what == "submitted"
        assert [each.at_ns for each in story.events] == sorted(each.at_ns for each in story.events)
        for each in left(story):
            assert each.reason in reasons
            assert each.window > 0
            assert len(each.text) > 10
        assert lines(story)


def test_every_window_that_could_have_started_it_is_there() -> None:
    """Between becoming ready and its decision."""
    log = busy_log(300)
    waits = Waits(None, "coding", 5)
    for record in log:
        waits.add(record)
    worst = waits.worst()
    assert [each for each, _ in worst] == sorted((each for each, _ in worst), reverse=True)
    for waited_ns, action in worst:
        story = stories(log, [action])[action]
        (ready,) = [each.at_ns for each in story.events if each.what == "ready"]
        (decided,) = [each for each in story.events if each.what == "decided"]
        assert decided.at_ns - ready == waited_ns
        windows = [each.window for each in left(story)]
        assert windows == list(range(windows[0], decided.window)), "one sentence for each"


def test_passes_that_follow_each_other_are_one_line() -> None:
    story = Story(ActionId("t", "c", 1), "run", SECOND)
    story.events = [
        Event("left", (1 + index) * SECOND, index, f"text {index}", index, "short" if index < 4 else "kept")
        for index in range(1, 6)
    ]
    _, summary, first, last = lines(story)
    assert "windows 1 to 5, until 5.000, left it (5 passes: 3 short, 2 kept)" in summary
    assert (first.strip(), last.strip()) == ("first: text 1", "last:  text 5")
    assert len(lines(story, passes=True)) == 1 + 5


# --- the command ---------------------------------------------------------------------------------------------------


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tangram", "why", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("why") / "log"
    with LogWriter(path, None) as writer:
        for record in busy_log(300):
            writer.message(record)
    return str(path)


def test_the_command_tells_of_one_action(file: str) -> None:
    done = asked("coding/c3/3", "--file", file)
    assert done.returncode == 0, done.stderr
    assert "asks for" in done.stdout
    assert "got " in done.stdout
    said = json.loads(asked("coding/c3/3", "--file", file, "--json").stdout)
    assert (said["action"], said["events"][0]["what"]) == ("coding/c3/3", "submitted")


def test_the_command_tells_of_the_worst(file: str) -> None:
    done = asked("--task", "coding", "--worst", "3", "--file", file)
    assert done.returncode == 0, done.stderr
    assert sum("left by" in line for line in done.stdout.splitlines()) == 3
    said = json.loads(asked("--task", "coding", "--worst", "3", "--file", file, "--json").stdout)
    assert len(said) == 3
    assert json.loads(asked("--task", "nobody", "--file", file, "--json").stdout) == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("", 2, "name either"),
        ("coding/c0/3 --task coding", 2, "name either"),
        ("coding/c0", 2, "must be TASK/CLIENT/N"),
        ("co.ding/c0/1", 2, "must be TASK/CLIENT/N"),
        ("coding/c0/x", 2, "N is a number"),
        ("--task coding --worst 9999", 2, "at most"),
        ("coding/nobody/3", 1, "is not in this log"),
    ],
)
def test_what_it_cannot_tell_it_says(file: str, arguments: str, code: int, says: str) -> None:
    done = asked(*arguments.split(), "--file", file)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert says in done.stderr


def test_what_a_quota_of_requests_lacks_is_said() -> None:
    for quota, words in (
        (m.Quota(requests=1, interval_ms=9_000), "quota q: 1 requests in 9 s, 1 made"),
        (m.Quota(requests=1, interval_ms=9_000, burst=1), "quota q: 1 requests in 9 s, 1 at once"),
    ):
        world = World()
        world.lead(quotas={"q": quota})
        world.join("api-0", key="api", nodes=[])
        for number in (1, 2):
            waits = submit(world, number, low=0, key="api", cost={"q": m.Demand(low=0)})
            started(world)
        submit(world, 3, low=0, key="api")  # so that the next window has something to say
        started(world)
        (passed,) = left(story_of(world, waits))
        assert (passed.reason, words in passed.text) == ("quota", True)
