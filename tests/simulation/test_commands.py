"""`tangram simulate` and `tangram size` as a user types them."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tangram.cli.main import main
from tangram.scheduler.policies import POLICIES
from tangram.simulation.size import smallest

ROOT = Path(__file__).parents[2]
FIELDS = [
    "actions", "mean_act_s", "p50_act_s", "p95_act_s", "mean_queue_s", "mean_run_s", "mean_startup_s", "mean_step_s",
    "makespan_s", "unit_seconds_held", "gpu_seconds_held", "unit_seconds_at_one_unit", "restores", "passes", "pass_p50_ms",
    "pass_p99_ms",
]  # fmt: skip
CODING = ("--workload", "coding", "--trajectories", "6")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_its_fields_and_the_oracle_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "simulate", *CODING, "--pool", "cpu=8", "--oracle")
    assert list(found) == [*FIELDS, "oracle"]
    assert list(found["oracle"]) == FIELDS
    assert found["actions"] == found["oracle"]["actions"] == 180
    assert found["mean_act_s"] == pytest.approx(found["mean_queue_s"] + found["mean_run_s"], abs=2e-6)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_runs(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    assert printed(capsys, "simulate", *CODING, "--pool", "cpu=2x4", "--policy", policy)["actions"] == 180


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_serves_models_and_quotas(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    arguments = ("--workload", "mopd+deepsearch", "--trajectories", "30", "--pool", "gpu=5x8", "--policy", policy)
    settings = ("--set", "static_units=4") if policy == "static-service" else ()
    found = printed(capsys, "simulate", *arguments, *settings)
    assert found["actions"] == 30 + 30 * 11
    assert {task: each["actions"] for task, each in found["tasks"].items()} == {"mopd": 30, "deepsearch": 330}
    assert found["restores"] >= 10, "weights are on no GPU at the beginning"
    assert found["mean_run_s"] >= found["mean_startup_s"] > 0
    if policy == "static-service":
        assert found["gpu_seconds_held"] == pytest.approx(40 * found["makespan_s"])


def test_a_pool_of_gpus_is_sized(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "size", "--workload", "mopd", "--trajectories", "64", "--target-act", "1.5")
    tried = {each["gpus"]: each["mean_act_s"] for each in found["tried"]}
    assert tried[found["gpus"]] <= 1.5 < tried[found["gpus"] - 1]


def test_numbers_of_a_workload_are_varied(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("simulate", *CODING, "--pool", "cpu=200", "--policy", "fcfs-minimum")
    one, two = printed(capsys, *arguments), printed(capsys, *arguments, "--vary", "mean_run_s=2")
    assert two["mean_run_s"] == pytest.approx(2 * one["mean_run_s"], rel=0.01)
    assert main([*arguments, "--vary", "mean_run=2"]) == 2
    assert "--vary mean_run: the workload has" in capsys.readouterr().err
    for wrong in ("mean_run_s=fast", "mean_run_s=1e300", "actions=1e9", "active_share=3", "think_cv=0"):
        assert main([*arguments, "--vary", wrong]) == 2, wrong
    assert main([*arguments, "--vary", "actions=2", "--vary", "actions=3"]) == 2


def test_what_a_pool_lacks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", "mopd", "--trajectories", "4", "--pool", "cpu=16"]) == 1
    assert "wants gpu 1 for teacher-" in capsys.readouterr().err
    assert (
        main(
            [
                "simulate",
                "--workload",
                "mopd",
                "--trajectories",
                "4",
                "--pool",
                "gpu=8",
                "--policy",
                "static-service",
                "--units",
                "3",
            ]
        )
        == 2
    )


def test_units_are_the_fixed_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "actions.jsonl"
    arguments = ("simulate", *CODING, "--pool", "cpu=24", "--policy", "static-trajectory", "--actions-out", str(out))
    one, four = printed(capsys, *arguments), printed(capsys, *arguments, "--units", "4")
    assert {json.loads(line)["units"] for line in out.read_text().splitlines()} == {4}
    assert four["unit_seconds_held"] > 2 * one["unit_seconds_held"]
    assert four["mean_run_s"] < one["mean_run_s"]


@pytest.mark.parametrize("name", ["actions.csv", "actions.jsonl"])
def test_the_actions_add_up_to_the_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    found = printed(capsys, "simulate", *CODING, "--pool", "cpu=2x4", "--actions-out", str(out))
    text = out.read_text()
    rows = list(csv.DictReader(text.splitlines())) if name.endswith("csv") else [json.loads(line) for line in text.splitlines()]
    assert list(rows[0]) == ["id", "trajectory", "kind", "arrived", "started", "finished", "units", "host"]
    assert len({row["id"] for row in rows}) == len(rows) == found["actions"]
    assert {row["host"] for row in rows} == {"h0", "h1"}
    times = [(float(row["arrived"]), float(row["started"]), float(row["finished"]), int(row["units"])) for row in rows]
    count = len(rows)
    assert sum(end - arrived for arrived, _, end, _ in times) / count == pytest.approx(found["mean_act_s"], abs=2e-6)
    assert sum(start - arrived for arrived, start, _, _ in times) / count == pytest.approx(found["mean_queue_s"], abs=2e-6)
    assert sum((end - start) * units for _, start, end, units in times) == pytest.approx(found["unit_seconds_held"], abs=1e-5)
    acts = sorted(end - arrived for arrived, _, end, _ in times)
    assert acts[count // 2 - 1] == pytest.approx(found["p50_act_s"], abs=2e-6)
    assert acts[count * 95 // 100 - 1] == pytest.approx(found["p95_act_s"], abs=2e-6)
    assert max(end for _, _, end, _ in times) == pytest.approx(found["makespan_s"], abs=2e-6)


def test_the_same_arguments_give_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    """But for what passes took by the real clock."""
    outs, runs = [], []
    for seed in ("1", "4000"):
        out = tmp_path / f"{seed}.csv"
        arguments = ("simulate", *CODING, "--seed", "5", "--pool", "cpu=3x4", "--oracle", "--json", "--actions-out", str(out))
        outs.append(out)
        runs.append(
            subprocess.Popen(
                [sys.executable, "-m", "tangram", *arguments],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    printed = [json.loads(run.communicate(timeout=100)[0]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    for found in printed:
        for figures in (found, found["oracle"]):
            del figures["pass_p50_ms"], figures["pass_p99_ms"]
    assert json.dumps(printed[0]) == json.dumps(printed[1])
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *CODING, "--pool", "cpu=2x4", "--oracle"]) == 0
    text = capsys.readouterr().out
    assert "6 trajectories on 8 cores of 2 hosts" in text
    assert [line.split() for line in text.splitlines() if "tangram" in line] == [["tangram", "oracle"]]
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("actions")] == ["180"]


def test_a_trace_with_assumptions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, assume = tmp_path / "t.jsonl", tmp_path / "a.json"
    row = {"trajectory": 0, "step": 0, "kind": "build", "think_s": 0, "duration_s": 8}
    trace.write_text(json.dumps(row))
    assume.write_text(json.dumps({"build": {"parallel": 1.0, "max_units": 4}}))
    arguments = ("simulate", str(trace), "--pool", "cpu=4", "--round-trip-ms", "0")
    assert printed(capsys, *arguments)["mean_act_s"] == 8
    assert printed(capsys, *arguments, "--assume", str(assume))["mean_act_s"] == 2
    assert main([*arguments, "--assume", str(assume)]) == 0
    assert "assumed: " + str(assume) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "--pool", "cpu=4"], "name a TRACE or a --workload"),
        (["simulate", "t.jsonl", *CODING, "--pool", "cpu=4"], "name a TRACE or a --workload"),
        (["simulate", "t.jsonl", "--trajectories", "4", "--pool", "cpu=4"], "--trajectories: is for a --workload"),
        (["simulate", "t.jsonl", "--seed", "4", "--pool", "cpu=4"], "--seed: is for a --workload"),
        (["simulate", "--workload", "coding", "--pool", "cpu=4"], "--trajectories: must be given"),
        (["simulate", *CODING, "--pool", "cpu=4", "--assume", "a.toml"], "--assume: is for a TRACE"),
        (["simulate", *CODING, "--pool", "cpu=4", "--exclude-kind", "edit"], "--exclude-kind: is for a TRACE"),
        (["simulate", *CODING, "--pool", "four"], "four: No such file"),
        (["simulate", *CODING, "--pool", "cpu=4", "--units", "4"], "--units: policy tangram has no fixed size"),
        (["simulate", *CODING, "--pool", "cpu=4", "--round-trip-ms", "nan"], "--round-trip-ms nan: must be 0 to 1000"),
        (["simulate", *CODING, "--pool", "cpu=4", "--actions-out", "no/where.csv"], "--actions-out no/where.csv: must be a file"),
        (["simulate", "nowhere.jsonl", "--pool", "cpu=4"], "nowhere.jsonl: No such file"),
        (["size", "nowhere.jsonl", "--target-act", "1"], "nowhere.jsonl: No such file"),
        (["simulate", *CODING, "--pool", "cpu=4", "--share", "coding"], "--share coding: the weight must be a whole number"),
        (["simulate", *CODING, "--pool", "cpu=4", "--share", "coding=0"], "--share coding=0: the weight must be"),
        (["simulate", *CODING, "--pool", "cpu=4", "--share", "coding=-1"], "--share coding=-1: the weight must be"),
        (["simulate", *CODING, "--pool", "cpu=4", "--share", "coding=1.5"], "--share coding=1.5: the weight must be"),
        (["simulate", *CODING, "--pool", "cpu=4", "--share", "a*=1"], "--share a*=1: task: must match"),
        (["simulate", *CODING, "--pool", "cpu=4", "--share", "a=1", "--share", "a=2"], "--share a=2: a has a weight already"),
    ],
)
def test_what_cannot_be_used_is_said_so(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_task_without_a_part_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", *CODING, "--pool", "cpu=4", "--policy", "split-by-task"]
    assert main([*arguments, "--share", "other=1"]) == 1
    assert "never_fits at most cpu 0 of one host are the part of task coding" in capsys.readouterr().err
    assert main([*arguments, "--share", "coding=1"]) == 0


def test_size_finds_the_fewest_cores_that_keep_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "size", *CODING, "--target-act", "1.6")
    cores = found["cores"]
    at = [printed(capsys, "simulate", *CODING, "--pool", f"cpu={n}")["mean_act_s"] for n in (cores - 1, cores)]
    assert at[1] <= 1.6 < at[0]
    assert {each["cores"]: each["mean_act_s"] for each in found["tried"]}[cores] == at[1]


def test_size_says_when_no_pool_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *CODING, "--target-act", "0.1"]) == 1
    assert "no pool keeps 0.1 s: even on " in capsys.readouterr().out
    assert main(["size", *CODING, "--target-act", "0.1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cores"] is None


@pytest.mark.parametrize(("target", "cores"), [(0.5, None), (1.0, 10), (1.01, 10), (2.0, 5), (2.4, 5), (9.0, 3)])
def test_the_bisection(target: float, cores: int | None) -> None:
    asked = []

    def mean_act_s(cores: int) -> float:
        asked.append(cores)
        return 10 / cores

    found = smallest(3, 10, target, mean_act_s)
    assert found.units == cores
    assert found.tried == sorted((each, 10 / each) for each in asked)


def test_a_trace_of_calls_and_scores_on_gpus_with_what_its_pool_says_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two searches at a time, of one second each; then both are scored on the one GPU, onto which the judge comes once."""
    rows = [
        {"trajectory": number, "step": step, "think_s": 0, "kind": kind, "duration_s": seconds, **more}
        for number in range(4)
        for step, (kind, seconds, more) in enumerate(
            [("search", 1, {"key": "api", "tokens": {"web": 1}}), ("score", 0.5, {"key": "gpu", "service": "judge"})]
        )
    ]
    trace, machines = tmp_path / "trace.jsonl", tmp_path / "pool.toml"
    trace.write_text("\n".join(map(json.dumps, rows)))
    machines.write_text(
        "[[hosts]]\ngpus = 1\n[services.judge]\nweights_gib = 40\nrestore_gb_per_s = 42.94967296\nrestore_fixed_s = 0\n"
        "[quotas.web]\nconcurrency = 2\n"
    )
    found = printed(capsys, "simulate", str(trace), "--pool", str(machines), "--round-trip-ms", "0")
    assert (found["actions"], found["restores"]) == (8, 1)
    assert found["gpu_seconds_held"] == pytest.approx(1 + 4 * 0.5)
    assert found["makespan_s"] == pytest.approx(1 + 1 + 4 * 0.5)
    machines.write_text("[[hosts]]\ngpus = 1\n[quotas.web]\nconcurrency = 2\n")
    assert main(["simulate", str(trace), "--pool", str(machines)]) == 1
    assert "no executor serves judge" in capsys.readouterr().err
