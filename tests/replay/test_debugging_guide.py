"""What docs/debugging.md says of its recorded case is what the commands say."""

import json
from pathlib import Path

import pytest

from tangram.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
CASE = str(DOCS / "cases" / "starving.log")
GUIDE = (DOCS / "debugging.md").read_text()


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--file", CASE]) == 0
    return capsys.readouterr().out


def test_the_recording_verifies_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for line in out(capsys, "replay", "--verify").splitlines():
        assert line in GUIDE


def test_the_worst_waits_are_those_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "why", "--task", "eval", "--worst", "3").splitlines()
    assert "189 taken" in shown[0]
    assert shown[0] in GUIDE
    assert shown[1] in GUIDE


def test_a_fair_share_mends_it_and_twice_the_cores_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    fair = json.loads(out(capsys, "replay", "--settings", str(DOCS / "cases" / "fair.toml"), "--json"))
    eval_was, eval_fair = (fair[name]["tasks"]["eval"] for name in ("recorded", "otherwise"))
    flood_was, flood_fair = (fair[name]["tasks"]["backfill"] for name in ("recorded", "otherwise"))
    assert fair["again"]["mean_act_s"] == pytest.approx(fair["recorded"]["mean_act_s"], rel=0.02)
    assert f"{eval_fair['mean_act_s']:.3f}" in GUIDE
    assert eval_fair["worst_queue_s"] < eval_was["worst_queue_s"] / 100
    assert flood_fair["mean_act_s"] < flood_was["mean_act_s"] * 1.02
    wide = json.loads(out(capsys, "replay", "--pool", "cpu=4", "--json"))
    assert wide["otherwise"]["tasks"]["eval"]["worst_queue_s"] > eval_was["worst_queue_s"] / 3
