"""What a simulation says: figures, and the actions one by one."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from tangram.simulation.client import Done
from tangram.simulation.driver import Simulation

SECOND_NS: Final = 1_000_000_000


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Times are virtual, but for those of the passes, which are real.

    mean_run_s: from the start to the end; mean_startup_s, the restoring of weights, is part of it. mean_step_s: a step is the
    trajectories of one task that start together; it ends with the last of their actions. unit_seconds_held: cores and GPUs,
    by actions, by sandboxes that reserve cores, and by services that own GPUs; gpu_seconds_held: of it the GPUs.
    unit_seconds_at_one_unit: what the same actions take on one unit each. restores: times that weights were brought onto GPUs.
    """

    actions: int
    mean_act_s: float
    p50_act_s: float
    p95_act_s: float
    mean_queue_s: float
    mean_run_s: float
    mean_startup_s: float
    mean_step_s: float
    makespan_s: float
    unit_seconds_held: float
    gpu_seconds_held: float
    unit_seconds_at_one_unit: float
    restores: int
    passes: int
    pass_p50_ms: float
    pass_p99_ms: float


def figures(simulation: Simulation, task: str | None = None) -> Figures:
    """Of a simulation that has run, or of the actions of one task of it; what is held, restored and planned is always that of
    all."""
    done = [each for each in simulation.done if task is None or each.trajectory.task == task]
    acts_ns = sorted(each.finished_ns - each.arrived_ns for each in done)
    passes_ns = sorted(simulation.pass_ns)
    steps: dict[tuple[str, int], int] = {}
    for each in done:
        batch = (each.trajectory.task, each.trajectory.start_ns)
        steps[batch] = max(steps.get(batch, 0), each.finished_ns)
    makespan_ns = max(steps.values()) - min(start_ns for _, start_ns in steps)
    gpu_ns = simulation.held_unit_ns("gpu")
    if simulation.setup.policy == "static-service":
        gpu_ns = simulation.owned_gpus * makespan_ns
    return Figures(
        actions=len(done),
        mean_act_s=_mean_s(acts_ns),
        p50_act_s=_seconds(_percentile(acts_ns, 50)),
        p95_act_s=_seconds(_percentile(acts_ns, 95)),
        mean_queue_s=_mean_s([each.started_ns - each.arrived_ns for each in done]),
        mean_run_s=_mean_s([each.finished_ns - each.started_ns for each in done]),
        mean_startup_s=_mean_s([each.startup_ns for each in done]),
        mean_step_s=_mean_s([end_ns - start_ns for (_, start_ns), end_ns in steps.items()]),
        makespan_s=_seconds(makespan_ns),
        unit_seconds_held=_seconds(simulation.held_unit_ns("cpu") + gpu_ns),
        gpu_seconds_held=_seconds(gpu_ns),
        unit_seconds_at_one_unit=_seconds(sum(each.work.duration_ns for each in done if each.work.key != "api")),
        restores=simulation.restores,
        passes=len(passes_ns),
        pass_p50_ms=round(_percentile(passes_ns, 50) / 1e6, 4),
        pass_p99_ms=round(_percentile(passes_ns, 99) / 1e6, 4),
    )


def _percentile(rising: Sequence[int], percent: int) -> int:
    """Nearest rank."""
    return rising[max(0, math.ceil(len(rising) * percent / 100) - 1)]


def _seconds(nanoseconds: float) -> float:
    return round(nanoseconds / SECOND_NS, 6)


def _mean_s(values_ns: Sequence[int]) -> float:
    return _seconds(sum(values_ns) / len(values_ns))


def lines(columns: dict[str, Figures]) -> Iterator[str]:
    """A table, one column a run."""
    rows = {
        "mean ACT, s": "mean_act_s",
        "  of it queued": "mean_queue_s",
        "  of it running": "mean_run_s",
        "p50 ACT, s": "p50_act_s",
        "p95 ACT, s": "p95_act_s",
        "    restoring weights": "mean_startup_s",
        "step, s": "mean_step_s",
        "makespan, s": "makespan_s",
        "unit-seconds held": "unit_seconds_held",
        "  of it GPUs": "gpu_seconds_held",
        "  on one unit each": "unit_seconds_at_one_unit",
        "actions": "actions",
        "restores": "restores",
        "passes": "passes",
        "pass p50, ms": "pass_p50_ms",
        "pass p99, ms": "pass_p99_ms",
    }
    yield f"{'':20}" + "".join(f"{name:>20}" for name in columns)
    for label, name in rows.items():
        values = [getattr(each, name) for each in columns.values()]
        yield f"{label:20}" + "".join(f"{value:>20,.3f}" if isinstance(value, float) else f"{value:>20,}" for value in values)


FIELDS: Final = ("id", "trajectory", "kind", "arrived", "started", "finished", "units", "host")


def write_actions(done: Sequence[Done], path: Path) -> None:
    """One line an action, in order of trajectory and step; CSV if the name ends so, else JSON lines. Times in seconds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        _write(done, file, as_csv=path.suffix == ".csv")


def _write(done: Sequence[Done], file: TextIO, *, as_csv: bool) -> None:
    table = csv.writer(file, lineterminator="\n")
    if as_csv:
        table.writerow(FIELDS)
    for each in sorted(done, key=lambda each: (each.trajectory.number, each.step)):
        row: tuple[Any, ...] = (
            f"{each.trajectory.task}/{each.trajectory.number}/{each.step}",
            each.trajectory.number,
            each.work.kind,
            each.arrived_ns / SECOND_NS,
            each.started_ns / SECOND_NS,
            each.finished_ns / SECOND_NS,
            each.units,
            each.host,
        )
        if as_csv:
            table.writerow(row)
        else:
            file.write(json.dumps(dict(zip(FIELDS, row, strict=True))) + "\n")
