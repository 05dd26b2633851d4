"""`tangram bench evaluation`: each row of its tables can be repeated by the command that it names."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tangram.bench.evaluation import names
from tangram.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", "evaluation", "--quick", *arguments]) == 0
    return capsys.readouterr().out


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", ["coding-scarce", "mopd-2048", "pooled-2048"])
def test_a_row_says_what_its_command_says_and_how_that_lies_beside_the_baseline(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "--only", name).splitlines()
    found = re.match(r"### (\S+): `tangram (.*) \.\.\.`", lines[0])
    assert found is not None
    assert found[1] == name
    rows = [cells(line) for line in lines[4:] if line]
    assert rows[0][-4 if name == "pooled-2048" else -2] == "1.00x"
    assert sum("--policy tangram" in row[0] for row in rows) >= 3
    for row in (rows[0], next(row for row in rows if row[0] == "`--policy tangram`")):
        assert main([*shlex.split(f"{found[2]} {row[0].strip('`')}"), "--json"]) == 0
        assert f"{json.loads(capsys.readouterr().out)['mean_act_s']:.3f}" == row[1]


def test_the_smallest_pool_is_beside_what_the_baseline_holds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [cells(line) for line in printed(capsys, "--only", "size").splitlines()[4:] if line]
    assert {row[2] for row in rows} == {"3,840 cores", "36 gpus"}
    for command, _, holds, smallest, saved in rows:
        assert main([*shlex.split(command.strip("`"))[1:], "--json"]) == 0
        unit = holds.split()[1]
        assert json.loads(capsys.readouterr().out)[unit] == int(smallest)
        assert saved == f"{1 - int(smallest) / int(holds.split()[0].replace(',', '')):.0%}"


def test_each_number_is_varied_both_ways_and_the_best_fixed_size_stands_beside(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--only", "vary-coding").splitlines()
    rows = [cells(line) for line in lines[4:] if line.startswith("|")]
    assert rows[0][0] == "as it is"
    assert [row[0] for row in rows[1:3]] == ["`actions=0.5`", "`actions=2`"]
    for _, static, fixed, tangram, beside_static, beside_fixed in rows:
        assert float(beside_static[:-1]) == pytest.approx(float(static) / float(tangram), abs=0.02)
        assert float(beside_fixed[:-1]) == pytest.approx(float(fixed.split()[0]) / float(tangram), abs=0.02)
    assert lines[-2].startswith("Beside the best fixed size of each row: ")


def test_a_trace_has_a_table_without_assumptions_and_one_with_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, assume = tmp_path / "a trace.jsonl", tmp_path / "assume.toml"
    row = {"trajectory": 1, "think_s": 1, "duration_s": 4}
    trace.write_text("\n".join(json.dumps({**row, "step": step, "kind": kind}) for step, kind in enumerate(["make", "agent"])))
    assume.write_text("make = { parallel = 1.0, max_units = 4 }\n")
    found = printed(capsys, "--only", "trace", "--trace", str(trace), "--assume", str(assume))
    rigid, elastic = ([cells(line) for line in table.splitlines()[4:] if line] for table in found.split("\n### "))
    assert {row[1] for row in rigid} == {"4.002"}
    assert next(row for row in elastic if row[0] == "`fixed-units --units 4`")[1] == "1.002"


def test_a_table_that_is_not_there_is_an_error_that_names_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "evaluation", "--only", "coding"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("--only coding", *names()))
