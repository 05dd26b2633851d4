"""Figures from records made by hand, and what is shown of them."""

import io
import json

import pytest
from rich.console import Console

from tangram.demo.config import STATIC, TANGRAM, UNLEARNT
from tangram.demo.plan import Kind
from tangram.demo.records import Life, PolicyRun, Record
from tangram.demo.report import core_seconds_held, figures, overhead_share, percentile, report, show
from tangram.outcomes import Outcome


def record(
    act_s: float,
    *,
    kind: Kind = Kind.TEST,
    queued_s: float = 0.0,
    startup_s: float = 0.0,
    run_s: float = 0.0,
    units: int = 0,
    outcome: Outcome = Outcome.OK,
    expected: Outcome = Outcome.OK,
) -> Record:
    return Record(
        trajectory=0,
        kind=kind,
        outcome=outcome,
        expected=expected,
        act_s=act_s,
        queued_s=queued_s,
        startup_s=startup_s,
        run_s=run_s,
        units=units,
    )


RECORDS = (
    record(4.0, kind=Kind.OPEN, queued_s=3.9),
    record(1.0, queued_s=0.25, startup_s=0.125, run_s=0.5, units=1),
    record(1.0, kind=Kind.SUITE, startup_s=0.25, run_s=0.75, units=4, expected=Outcome.FAILED),
    record(2.0, run_s=2.0, units=1, outcome=Outcome.FAILED, expected=Outcome.FAILED),
)
LIVES = (Life(trajectory=0, open_s=10.0), Life(trajectory=1, open_s=2.5))
STATIC_RUN = PolicyRun(policy=STATIC, makespan_s=12.0, records=RECORDS, lives=LIVES, reserved_units=2)
TANGRAM_RUN = PolicyRun(policy=TANGRAM, makespan_s=8.0, records=RECORDS[1:3], lives=LIVES)


def test_figures_of_a_policy() -> None:
    assert figures(STATIC_RUN) == pytest.approx(
        {
            "mean_act_s": 2.0,
            "p95_act_s": 4.0,
            "makespan_s": 12.0,
            "core_seconds_held": 25.0,
            "overhead_share": 1 - (3.9 + 0.75 + 0.75 + 2.0) / 8.0,
            "mean_queue_s": 4.15 / 4,
            "mean_run_s": 3.25 / 4,
            "actions": 4,
            "wrong": 1,
        }
    )


def test_cores_are_held_by_sessions_or_by_actions() -> None:
    assert core_seconds_held(STATIC_RUN) == 2 * 12.5
    assert core_seconds_held(TANGRAM_RUN) == 1 * 0.625 + 4 * 1.0


def test_overhead_is_neither_queue_nor_run() -> None:
    assert overhead_share([record(2.0, queued_s=0.5, startup_s=0.3, run_s=1.0)]) == pytest.approx(0.25)
    assert overhead_share([]) == 0.0
    assert overhead_share([record(1.0, queued_s=1.001)]) == 0.0


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([2.0, 1.0], 0.5) == 1.0
    assert percentile([], 0.95) == 0.0


def test_a_policy_without_records_has_figures() -> None:
    empty = figures(PolicyRun(policy=TANGRAM, makespan_s=0.0, records=(), lives=()))
    assert set(empty.values()) == {0}


def test_ratios_are_baseline_by_tangram() -> None:
    result = report([STATIC_RUN, TANGRAM_RUN], seed=3, command="tangram demo --seed 3")
    assert result["act_ratio"] == 2.0
    assert result["step_ratio"] == 1.5
    assert list(result["policies"]) == [STATIC, TANGRAM]
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"act_ratio", "step_ratio", "policies", "seed", "command"}
    assert (result["seed"], result["command"]) == (3, "tangram demo --seed 3")


def test_tangram_without_learning_stands_beside_it() -> None:
    unlearnt = PolicyRun(policy=UNLEARNT, makespan_s=9.0, records=RECORDS[:3], lives=LIVES)
    result = report([STATIC_RUN, TANGRAM_RUN, unlearnt], seed=3, command="")
    assert (result["act_ratio"], result["step_ratio"]) == (2.0, 1.5), "of tangram as it is"
    assert result["policies"][UNLEARNT]["makespan_s"] == 9.0
    out = io.StringIO()
    show(result, Console(file=out, width=80))
    assert UNLEARNT in out.getvalue()
    assert "…" not in out.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_is_whole_and_says_where_a_reservation_waits(width: int) -> None:
    out = io.StringIO()
    show(report([STATIC_RUN, TANGRAM_RUN], seed=1, command=""), Console(file=out, width=width))
    text = out.getvalue()
    for cell in (STATIC, TANGRAM, "2.00x", "1.50x", "core-seconds held", "25.0", "2.000 s"):
        assert cell in text
    assert "Opening a session is an action" in " ".join(text.split())
    assert "…" not in text
