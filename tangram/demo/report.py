"""From records to figures: pure functions, and the table that shows them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NotRequired, TypedDict

from rich.console import Console
from rich.table import Table

from tangram.demo.config import STATIC, TANGRAM
from tangram.demo.records import PolicyRun, Record


class PolicyFigures(TypedDict):
    """mean_act_s, p95_act_s, mean_queue_s, mean_run_s: over all actions, session.open among them.
    overhead_share: see `overhead_share`. wrong: actions whose outcome was not the planned one."""

    mean_act_s: float
    p95_act_s: float
    makespan_s: float
    core_seconds_held: float
    overhead_share: float
    mean_queue_s: float
    mean_run_s: float
    actions: int
    wrong: int


class Report(TypedDict):
    """act_ratio, step_ratio: the baseline's mean ACT and makespan by Tangram's; above 1 Tangram is better. jobs: of several at
    once, by task and policy, each one's own mean_act_s and makespan_s."""

    act_ratio: float
    step_ratio: float
    policies: dict[str, PolicyFigures]
    seed: int
    command: str
    jobs: NotRequired[dict[str, dict[str, dict[str, float]]]]


def overhead_share(records: Sequence[Record]) -> float:
    """1 - (sum of queue and run times) / (sum of ACTs): the part of all waiting in which the action was neither waiting
    for its turn nor running. It holds the log, the decision, the start of the program and the way back.

    Queue times are in the log's time, which may run a little ahead of the client's: the share is never below 0.
    """
    acts = math.fsum(record.act_s for record in records)
    useful = math.fsum(record.queued_s + record.run_s for record in records)
    return max(0.0, 1.0 - useful / acts) if acts else 0.0


def core_seconds_held(run: PolicyRun) -> float:
    """Core-seconds that nobody else could use: of a reservation, its cores for the session's life; otherwise each
    action's cores from its grant to its end."""
    if run.reserved_units:
        return run.reserved_units * math.fsum(life.open_s for life in run.lives)
    return math.fsum(record.core_seconds for record in run.records)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank); 0 if there are none."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else 0.0


def figures(run: PolicyRun) -> PolicyFigures:
    records = run.records
    return {
        "mean_act_s": _mean(record.act_s for record in records),
        "p95_act_s": percentile((record.act_s for record in records), 0.95),
        "makespan_s": run.makespan_s,
        "core_seconds_held": core_seconds_held(run),
        "overhead_share": overhead_share(records),
        "mean_queue_s": _mean(record.queued_s for record in records),
        "mean_run_s": _mean(record.run_s for record in records),
        "actions": len(records),
        "wrong": sum(record.wrong for record in records),
    }


def report(runs: Iterable[PolicyRun], *, seed: int, command: str, baseline: str = STATIC) -> Report:
    """The figures of all that ran. Raises KeyError if one of the two that are compared has not."""
    policies = {run.policy: figures(run) for run in runs}
    static, tangram = policies[baseline], policies[TANGRAM]
    return {
        "act_ratio": _ratio(static["mean_act_s"], tangram["mean_act_s"]),
        "step_ratio": _ratio(static["makespan_s"], tangram["makespan_s"]),
        "policies": policies,
        "seed": seed,
        "command": command,
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else 0.0


def _ratio(baseline: float, ours: float) -> float:
    return baseline / ours if ours else 0.0


_NOTE: Final = (
    "ACT: from submitting an action to having its result. Opening a session is an action: under a reservation it waits "
    "there for its cores, and that wait is part of the mean. Overhead: the share of all ACT that is neither queue nor "
    "run."
)
_ROWS: Final[tuple[tuple[str, Callable[[PolicyFigures], str]], ...]] = (
    ("mean ACT", lambda row: f"{row['mean_act_s']:.3f} s"),
    ("p95 ACT", lambda row: f"{row['p95_act_s']:.3f} s"),
    ("mean queue", lambda row: f"{row['mean_queue_s']:.3f} s"),
    ("mean run", lambda row: f"{row['mean_run_s']:.3f} s"),
    ("overhead", lambda row: f"{row['overhead_share']:.1%}"),
    ("step", lambda row: f"{row['makespan_s']:.1f} s"),
    ("core-seconds held", lambda row: f"{row['core_seconds_held']:.1f}"),
    ("actions", lambda row: str(row["actions"])),
    ("wrong outcomes", lambda row: str(row["wrong"])),
)


def show(
    result: Report, console: Console, title: str = "One step of a coding agent on HumanEval", note: str = "", unit: str = "core"
) -> None:
    """Prints the table. Give a console on stderr where stdout belongs to the JSON object. note: in place of that on coding."""
    policies = result["policies"]
    table = Table(title=title, caption=note or _NOTE, caption_justify="left", min_width=72)
    table.add_column("")
    for name in policies:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ratio", justify="right")
    ratios = {"mean ACT": result["act_ratio"], "step": result["step_ratio"]}
    for name, text in _ROWS:
        ratio = f"{ratios[name]:.2f}x" if name in ratios else ""
        table.add_row(name.replace("core", unit), *(text(row) for row in policies.values()), ratio, style="bold" if ratio else "")
    console.print(table)
    for task, rows in result.get("jobs", {}).items():
        baseline, ours = rows.values()
        ratios_of = ", ".join(
            f"{words} {baseline[key]:.3f} -> {ours[key]:.3f} s ({_ratio(baseline[key], ours[key]):.2f}x)"
            for key, words in (("mean_act_s", "mean ACT"), ("makespan_s", "step"))
        )
        console.print(f"{task}: {ratios_of}", highlight=False)
