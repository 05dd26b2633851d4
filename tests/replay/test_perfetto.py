"""A timeline as a Chrome trace, checked against the rules of its format; and one task's report."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tangram.cli.main import main
from tangram.cli.replay import read_timeline
from tangram.replay import perfetto, taskreport
from tangram.replay.sources import FileSource
from tangram.replay.timeline import Timeline, collect
from tangram.simulation.driver import Setup, Simulation
from tangram.simulation.pool import parse
from tangram.simulation.work import Model, Trajectory, Work
from tests.replay.record import FOLDER

FILES = sorted(FOLDER.glob("*.log"))
DEMO = max(FOLDER.glob("behaviour-*-demo.log"))


def on_gpus() -> Timeline:
    log: list[Any] = []
    work = Work("score", 0, 1_000_000_000, key="gpu", service="judge", low=1, high=2, legal=(1, 2))
    setup = Setup(services={"judge": Model(1.0).service})
    trajectories = [Trajectory(n, "job", 0, [work, work]) for n in range(4)]
    Simulation(trajectories, parse("gpu=1x2"), setup, observe=log.append).run()
    return collect(log)


TIMELINES = {path.stem: asyncio.run(read_timeline(FileSource(path))) for path in FILES} | {"gpus": on_gpus()}


@pytest.fixture(params=TIMELINES)
def events(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads("".join(perfetto.pieces(TIMELINES[request.param])))
    return found


def test_every_event_is_of_a_known_kind_and_has_its_fields(events: list[dict[str, Any]]) -> None:
    fields = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "b": {"name", "cat", "id", "pid", "tid", "ts", "args"},
        "e": {"name", "cat", "id", "pid", "tid", "ts"},
        "C": {"name", "pid", "tid", "ts", "args"},
    }
    for event in events:
        assert set(event) == fields[event["ph"]] | {"ph"}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert {event["ph"] for event in events} == set(fields)


def test_every_process_and_thread_has_a_name(events: list[dict[str, Any]]) -> None:
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["pid"] in processes
        if event["ph"] in "Xbe":
            assert (event["pid"], event["tid"]) in threads


def test_on_one_thread_nothing_overlaps(events: list[dict[str, Any]]) -> None:
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            where = (event["pid"], event["tid"])
            assert event["ts"] >= ends[where] - 0.001
            ends[where] = event["ts"] + event["dur"]


def test_each_waiting_begins_and_ends_once(events: list[dict[str, Any]]) -> None:
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(ended[each] >= begun[each] for each in begun)


def test_units_in_use_end_at_none_when_all_is_done() -> None:
    found = list(perfetto.events(TIMELINES["gpus"]))
    counters = [event["args"]["GPUs"] for event in found if event["name"] == "GPUs in use"]
    assert max(counters) == 2
    assert min(counters) == counters[-1] == 0
    ran = [event for event in found if event["ph"] == "X" and event["args"]["service"] == "judge"]
    assert {event["args"]["units"] for event in ran} <= {1, 2}
    assert len({event["tid"] for event in ran}) == 2


def test_the_command_writes_it_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main(["replay", "--file", str(DEMO), "--trace", str(path)]) == 0
    assert len(json.loads(path.read_text())) > 100


def test_a_folder_is_no_place_for_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--file", str(DEMO), "--trace", str(tmp_path)]) == 2
    assert "--trace" in capsys.readouterr().err


def test_a_tasks_report_has_its_attempts_alone_and_says_what_it_is() -> None:
    timeline = TIMELINES[DEMO.stem]
    header, *rows = [json.loads(line) for line in taskreport.lines(timeline, "math")]
    assert header["tangram_task_report"] == taskreport.FORMAT
    assert "cannot be" in header["note"]
    assert len(rows) == header["attempts"] == sum(each.task == "math" for each in timeline.attempts)
    assert "coding" not in json.dumps(rows)
    for row in rows:
        assert row["submitted_s"] <= (row["decided_s"] or row["finished_s"])


def test_a_report_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text("\n".join(taskreport.lines(TIMELINES[DEMO.stem], "math")))
    assert main(["replay", "--file", str(path), "--verify"]) == 2
    assert "report of one task" in capsys.readouterr().err
