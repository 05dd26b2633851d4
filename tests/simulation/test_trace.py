"""What a trace, a table of assumptions and a pool say, and what is said about bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tangram import messages as m
from tangram.errors import ConfigError
from tangram.simulation import pool, trace
from tangram.simulation.pool import Machine
from tangram.simulation.work import Work

ROW = {"trajectory": 0, "step": 0, "kind": "test", "think_s": 1.5, "duration_s": 4.0}


def write(folder: Path, *rows: dict[str, Any] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def only(path: Path, assumptions: trace.Assumptions | None = None) -> Work:
    ((work,),) = [trajectory.work for trajectory in trace.load(path, assumptions or {})]
    return work


def test_a_row_is_rigid_and_takes_one_core_unless_it_says_otherwise(tmp_path: Path) -> None:
    work = only(write(tmp_path, {**ROW, "cpu_cores": 3.1, "mem_mb": 900, "start_s": None}))
    assert work == Work("test", 1_500_000_000, 4_000_000_000)
    assert work.run_ns(8) == 4_000_000_000
    assert work.cost() == {"cpu": m.Demand(low=1_000, high=1_000)}
    assert work.hint is None
    wide = only(write(tmp_path, {**ROW, "min_units": 3, "max_units": 9}))
    assert (wide.low, wide.high) == (3, 3), "what does not say how it scales does not scale"


def test_a_row_says_how_it_scales(tmp_path: Path) -> None:
    work = only(write(tmp_path, {**ROW, "min_units": 2, "max_units": 8, "parallel": 0.75, "memory_mib": 512}))
    assert work.cost() == {"cpu": m.Demand(low=2_000, high=8_000), "memory": m.Demand(low=512)}
    assert [work.run_ns(units) for units in (1, 2, 8, 99)] == [4_000_000_000, 2_500_000_000, 1_375_000_000, 1_375_000_000]
    legal = only(write(tmp_path, {**ROW, "units": [1, 2, 4], "parallel": 1.0}))
    assert legal.cost() == {"cpu": m.Demand(low=1_000, high=4_000, legal=(1_000, 2_000, 4_000))}


def test_a_declared_hint_and_the_truth(tmp_path: Path) -> None:
    row = {**ROW, "parallel": 0.5, "max_units": 4, "hint": {"duration_s": 9, "parallel": 0.1}}
    work = only(write(tmp_path, row))
    assert work.hint == m.Hint(duration_us=9_000_000, parallel_ppm=100_000)
    assert work.truth() == m.Hint(duration_us=4_000_000, parallel_ppm=500_000)


def test_lines_may_be_interleaved_and_a_trajectory_may_start_later(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {**ROW, "start_s": 2.5, "task": "a"},
        "",
        {**ROW, "trajectory": 7},
        {**ROW, "step": 4, "task": "a", "kind": "edit"},
    )
    first, second = trace.load(path, {})
    assert (first.number, first.task, first.start_ns) == (0, "a", 2_500_000_000)
    assert [work.kind for work in first.work] == ["test", "edit"]
    assert (second.number, second.task, second.start_ns, len(second.work)) == (7, "trace", 0, 1)


def test_assumptions_fill_in_for_rows_that_say_nothing(tmp_path: Path) -> None:
    table = tmp_path / "assume.toml"
    table.write_text(
        'test = { parallel = 0.5, max_units = 8, rigid_from_s = 100 }\n"shell.git" = { parallel = 1, max_units = 2 }\n'
    )
    assumptions = trace.load_assumptions(table)
    path = write(
        tmp_path,
        ROW,
        {**ROW, "step": 1, "duration_s": 120.0},
        {**ROW, "step": 2, "parallel": 0.1, "max_units": 3},
        {**ROW, "step": 3, "max_units": 4},
        {**ROW, "step": 4, "kind": "shell.git"},
        {**ROW, "step": 5, "kind": "edit"},
    )
    ((assumed, timed_out, own, capped, git, edit),) = [each.work for each in trace.load(path, assumptions)]
    assert (assumed.high, assumed.run_ns(8)) == (8, 2_250_000_000)
    assert (timed_out.high, timed_out.run_ns(8)) == (8, 120_000_000_000)
    assert (own.high, own.scalable_ns) == (3, 400_000_000)
    assert (capped.high, capped.scalable_ns) == (4, 2_000_000_000)
    assert (git.high, git.run_ns(2)) == (2, 2_000_000_000)
    assert (edit.high, edit.scalable_ns) == (1, 0)
    as_json = tmp_path / "assume.json"
    as_json.write_text(json.dumps({"test": {"parallel": 0.5, "max_units": 8, "rigid_from_s": 100}}))
    assert trace.load_assumptions(as_json) == {"test": assumptions["test"]}


def test_a_kind_is_left_out_on_request_only(tmp_path: Path) -> None:
    path = write(tmp_path, {**ROW, "start_s": 3}, {**ROW, "step": 1, "kind": "edit"}, {**ROW, "trajectory": 1})
    (left,) = trace.load(path, {}, ["test"])
    assert ([work.kind for work in left.work], left.start_ns) == (["edit"], 3_000_000_000)
    with pytest.raises(ConfigError, match=r"--exclude-kind: .* has no kind 'tset'; it has edit, test"):
        trace.load(path, {}, ["tset"])
    with pytest.raises(ConfigError, match=r"--assume: .* has no kind 'tset'"):
        trace.load(path, {"tset": trace.Assumption(parallel=1, max_units=2)})
    with pytest.raises(ConfigError, match="no action"):
        trace.load(path, {}, ["test", "edit"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", ":2: Input data was truncated"),
        ("[]", ":2: expected `object`, got `array`"),
        ('{"trajectory": 0}', ":2: object missing required field `step`"),
        ({**ROW, "think_s": "1"}, ":2: think_s: expected `float`, got `str`"),
        ({**ROW, "think_s": -1}, ":2: think_s: expected `float` >= 0"),
        ({**ROW, "duration_s": 90_000}, ":2: duration_s: expected `float` <= 86400"),
        ({**ROW, "kind": "Bash"}, ":2: kind: expected `str` matching regex"),
        ({**ROW, "kind": "session.open"}, ":2: kind: sandboxes are opened and closed by the simulation"),
        ({**ROW, "max_unit": 4}, ":2: object contains unknown field `max_unit`"),
        ({**ROW, "key": "disk"}, ":2: key: invalid enum value 'disk'"),
        ({**ROW, "key": "gpu", "min_units": 3}, ":2: units: of GPUs must be among 1, 2, 4, 8"),
        ({**ROW, "key": "api", "min_units": 2}, ":2: units: a call that needs neither cores nor GPUs has none"),
        ({**ROW, "service": "judge"}, ":2: service: is for a row with key gpu"),
        ({**ROW, "tokens": {"search": -1}}, ":2: tokens[...]: expected `int` >= 0"),
        ({**ROW, "parallel": 1.5}, ":2: parallel: expected `float` <= 1"),
        ({**ROW, "min_units": 4, "max_units": 2}, ":2: max_units: must not be below min_units, 4"),
        ({**ROW, "min_units": 0}, ":2: min_units: expected `int` >= 1"),
        ({**ROW, "units": [2, 1]}, ":2: units: must rise"),
        ({**ROW, "units": []}, ":2: units: expected `array` of length >= 1"),
        ({**ROW, "units": [1], "max_units": 2}, ":2: units: stands for min_units and max_units"),
        ({**ROW, "units": [1, "2"]}, ":2: units[1]: expected `int`"),
        ({**ROW, "step": 5, "trajectory": 1}, ":2: step: must be above the one before it in its trajectory, 9"),
        ({**ROW, "step": 10, "trajectory": 1, "start_s": 1}, ":2: start_s: belongs on the first line"),
        ({**ROW, "step": 10, "trajectory": 1, "task": "b"}, ":2: task: must be that of its trajectory, trace"),
        ({**ROW, "task": "a b"}, ":2: task: expected `str` matching regex"),
        ({**ROW, "hint": {"parallel": 2}}, ":2: hint.parallel: expected `float` <= 1"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_field(tmp_path: Path, row: dict[str, Any] | str, said: str) -> None:
    path = write(tmp_path, {**ROW, "trajectory": 1, "step": 9}, row)
    with pytest.raises(ConfigError) as caught:
        trace.load(path, {})
    assert str(caught.value).startswith(str(path) + said)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        trace.load(tmp_path / "nowhere.jsonl", {})
    with pytest.raises(ConfigError, match="no action in it"):
        trace.load(write(tmp_path, ""), {})
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"kind": "\xff"}')
    with pytest.raises(ConfigError, match=r"bytes\.jsonl:1: "):
        trace.load(path, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("test = 1", "test: expected `object`, got `int`"),
        ("[test]\nparallel = 2\nmax_units = 2", "test: parallel: expected `float` <= 1"),
        ("[test]\nparallel = 1", "test: object missing required field `max_units`"),
        ("[test", "Expected ']'"),
    ],
)
def test_a_bad_table_of_assumptions_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "assume.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        trace.load_assumptions(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_pools(tmp_path: Path) -> None:
    assert pool.parse("cpu=3840") == [Machine((3_840,))]
    assert pool.parse("cpu=15x256") == [Machine((256,))] * 15
    path = tmp_path / "pool.toml"
    path.write_text("[[hosts]]\ncount = 2\ncores = [64, 64]\nmemory_mib = 4096\n[[hosts]]\ncores = [8]\n")
    two, three, one = pool.parse(str(path))
    assert two == three == Machine((64, 64), 4_096)
    assert (one.nodes, one.cores) == ((8,), 8)


@pytest.mark.parametrize(
    "text", ["cpu=", "cpu=0", "cpu=0x4", "cpu=4x", "cpu=-1", "cpu=1.5", "cpu=99999", "cpu=9999x1", "none.toml"]
)
def test_a_bad_pool_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        pool.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts = []", "hosts: expected `array` of length >= 1"),
        ("[[hosts]]\ncores = 4", "hosts[0].cores: expected `array`, got `int`"),
        ("[[hosts]]\ncores = [0]", "hosts[0].cores[0]: expected `int` >= 1"),
        ("[[hosts]]\ncores = [9000, 9000]", "a host must have at most 16384 cores"),
        ("cores = 4", "object contains unknown field `cores`"),
        (
            "[[hosts]]\ngpus = 8\n[services.judge]\nrestore_gb_per_s = 20",
            "services[...]: object missing required field `weights_gib`",
        ),
        ("[[hosts]]\ngpus = 8\n[quotas.web]\ninterval_s = 0", "quotas[...].interval_s: expected `float` >= 0.001"),
    ],
)
def test_a_bad_pool_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        pool.parse(str(path))
    assert said in str(caught.value)
