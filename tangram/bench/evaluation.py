"""The tables of docs/evaluation.md: workloads and a trace on the virtual clock, each row by the command that it names.

Whoever repeats a command by hand gets the same figures: simulations are deterministic.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

Measure = Callable[[str], dict[str, Any]]
"""The JSON of a command, `simulate ...` or `size ...`."""

QUICK: Final = 32
"""So many times fewer trajectories when it is only to be seen that all rows run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One workload at one batch. baseline: the static policy that ratios are against; statics: others of its kind."""

    name: str
    head: str
    baseline: str
    statics: tuple[str, ...] = ()
    fixed: tuple[int, ...] = (1, 2, 4, 8)
    restores: bool = False

    def rows(self) -> Iterator[str]:
        yield from (self.baseline, *self.statics)
        yield "--policy fcfs-minimum"
        yield from (f"--policy fixed-units --units {units}" for units in self.fixed)
        yield from ("--policy marginal-gain", "--policy paper", "--policy tangram")
        if self.restores:
            yield "--policy tangram --set count_restore=0"
        yield from ("--policy tangram --set learn=0", "--policy tangram --set learn=0 --oracle")


def _pods(*units: int) -> tuple[str, ...]:
    return tuple(f"--policy static-trajectory --units {each}" for each in units)


def _served(units: int, replicas: int = 1) -> str:
    return f"--policy static-service --units {units}" + (f" --set static_replicas={replicas}" if replicas > 1 else "")


_PODS: Final = _pods(3)[0]
_CODING: Final = "--workload coding --trajectories"
BATCHES: Final = (
    Batch("coding-1280", f"{_CODING} 1280 --pool cpu=15x256", _PODS, _pods(1, 2, 4, 8), (2, 4, 8, 16)),
    Batch("coding-1536", f"{_CODING} 1536 --pool cpu=15x256", _PODS, _pods(1, 2, 4, 8), (2, 4, 8, 16)),
    Batch("coding-scarce", f"{_CODING} 1280 --pool cpu=4x256", _pods(1)[0], _pods(2, 4)),
    Batch("mopd-2048", "--workload mopd --trajectories 2048 --pool gpu=5x8", _served(4), (_served(2, 2),), restores=True),
    Batch("mopd-3072", "--workload mopd --trajectories 3072 --pool gpu=5x8", _served(4), (_served(2, 2),), restores=True),
    Batch(
        "deepsearch-2048",
        "--workload deepsearch --trajectories 2048 --pool gpu=5x8",
        _served(4, 10),
        (_served(4), _served(1, 40)),
        restores=True,
    ),
    Batch(
        "pooled-2048",
        "--workload mopd+deepsearch --trajectories 2048 --pool gpu=5x8",
        _served(4),
        (_served(2, 2), "--policy split-by-task", "--policy fair"),
        restores=True,
    ),
)

SIZED: Final = (
    ("coding", f"{_CODING} 1280", f"--pool cpu=15x256 {_PODS}", "cores", 3_840),
    ("mopd", "--workload mopd --trajectories 2048", f"--pool gpu=5x8 {_served(4)}", "gpus", 36),
    ("mopd", "--workload mopd --trajectories 3072", f"--pool gpu=5x8 {_served(4)}", "gpus", 36),
)
"""Workload, what is simulated, its static baseline, and what that holds."""
SLACK: Final = 1.05

VARIED: Final = (
    (
        "coding",
        f"{_CODING} 256 --pool cpu=3x256",
        _PODS,
        ("actions", "mean_run_s", "active_share", "think_cv", "cv_factor", "serial", "max_units"),
    ),
    (
        "coding-scarce",
        f"{_CODING} 256 --pool cpu=1x205",
        _pods(1)[0],
        ("actions", "mean_run_s", "active_share", "think_cv", "cv_factor", "serial", "max_units"),
    ),
    (
        "mopd",
        "--workload mopd --trajectories 2048 --pool gpu=5x8",
        _served(4),
        ("teachers", "mean_run_s", "reference_gpus", "run_cv", "serial", "mean_think_s", "think_cv", "weights_gib"),
    ),
    (
        "deepsearch",
        "--workload deepsearch --trajectories 512 --pool gpu=1x8",
        _served(4, 2),
        ("searches", "mean_search_s", "mean_think_s", "think_cv", "search_concurrency", "mean_judge_s", "judge_cv", "serial"),
    ),
)
"""Workload, what is simulated, its static baseline, and its numbers."""
FIXED: Final = (1, 2, 4, 8)

TRACE_POOLS: Final = (9, 14, 18, 23, 32)
TRACE_POLICIES: Final = (
    "static-trajectory --units 1",
    *(f"fixed-units --units {units}" for units in FIXED),
    "marginal-gain",
    "paper",
    "tangram",
)


def names() -> list[str]:
    return [each.name for each in BATCHES] + ["size"] + [f"vary-{each[0]}" for each in VARIED] + ["trace"]


def tables(
    measure: Measure, only: Sequence[str], trace: str | None, assumptions: Sequence[str], *, quick: bool = False
) -> Iterator[str]:
    """Markdown, a line at a time. only: names of tables, all if empty. trace: the file of a trace; assumptions: for each table of
    it an --assume file, "" for none."""
    known: dict[str, dict[str, Any]] = {}

    def of(command: str) -> dict[str, Any]:
        if command not in known:
            known[command] = measure(_quick(command) if quick else command)
        return known[command]

    def lines() -> Iterator[str]:
        for batch in BATCHES:
            if not only or batch.name in only:
                yield from _batch(batch, of)
        if not only or "size" in only:
            yield from _sized(of)
        for name, head, baseline, numbers in VARIED:
            if not only or f"vary-{name}" in only:
                yield from _varied(f"vary-{name}", head, baseline, numbers, of)
        if trace is not None and (not only or "trace" in only):
            for assume in assumptions:
                yield from _traced(trace, assume, of)

    yield from map(_quick, lines()) if quick else lines()


def _quick(text: str) -> str:
    return re.sub(r"(?<=--trajectories )[0-9]+", lambda count: str(max(2, int(count[0]) // QUICK)), text)


def _batch(batch: Batch, of: Measure) -> Iterator[str]:
    yield f"### {batch.name}: `tangram simulate {batch.head} ...`"
    yield ""
    found = [(row, of(f"simulate {batch.head} {row}")) for row in batch.rows()]
    tasks = sorted(found[0][1].get("tasks", {}))
    yield from _head(
        ["", "mean ACT, s", "queue", "run", *(["of it restore"] if batch.restores else []), "step, s", "ACT", "step"]
        + [f"{task}: ACT, step" for task in tasks]
    )
    base = found[0][1]
    for row, measured in found:
        figures = measured["oracle"] if "--oracle" in row else measured
        cells = [f"{figures[name]:.3f}" for name in ("mean_act_s", "mean_queue_s", "mean_run_s")]
        cells += [f"{figures['mean_startup_s']:.3f}"] if batch.restores else []
        cells.append(f"{figures['mean_step_s']:.1f}")
        cells += [f"{base[name] / figures[name]:.2f}x" for name in ("mean_act_s", "mean_step_s")]
        each = figures.get("tasks", {})
        cells += [f"{each[task]['mean_act_s']:.3f}, {each[task]['mean_step_s']:.1f}" if task in each else "" for task in tasks]
        yield _row([f"`{row}`", *cells])
    yield ""


def _sized(of: Measure) -> Iterator[str]:
    yield f"### size: the smallest pool on which the mean ACT is at most {SLACK:g} times that of the static baseline"
    yield ""
    yield from _head(["command", "static", "it holds", "smallest", "saved"])
    for _, head, baseline, unit, holds in SIZED:
        target = math.floor(of(f"simulate {head} {baseline}")["mean_act_s"] * SLACK * 1_000) / 1_000
        found = of(f"size {head} --target-act {target:g}")[unit]
        saved = f"{1 - found / holds:.0%}" if found is not None else "none is"
        yield _row([f"`tangram size {head} --target-act {target:g}`", f"`{baseline}`", f"{holds:,} {unit}", f"{found}", saved])
    yield ""


def _varied(name: str, head: str, baseline: str, numbers: Sequence[str], of: Measure) -> Iterator[str]:
    yield f"### {name}: `tangram simulate {head} --vary ...`, static: `{baseline}`"
    yield ""
    yield from _head(["`--vary`", "static, s", "best of `fixed-units`, s", "`tangram`, s", "static by it", "best fixed by it"])
    gains: list[float] = []
    for vary in ["", *(f"{number}={factor}" for number in numbers for factor in ("0.5", "2"))]:
        start = f"simulate {head}" + (f" --vary {vary}" if vary else "")
        static, tangram = (of(f"{start} {policy}")["mean_act_s"] for policy in (baseline, "--policy tangram"))
        fixed = {units: of(f"{start} --policy fixed-units --units {units}")["mean_act_s"] for units in FIXED}
        best = min(fixed, key=lambda units: (fixed[units], units))
        gains.append(fixed[best] / tangram)
        yield _row(
            [
                f"`{vary}`" if vary else "as it is",
                f"{static:.3f}",
                f"{fixed[best]:.3f} ({best})",
                f"{tangram:.3f}",
                f"{static / tangram:.2f}x",
                f"{gains[-1]:.2f}x",
            ]
        )
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    yield ""
    yield f"Beside the best fixed size of each row: {mean:.3f}x in the geometric mean, {min(gains):.3f}x at worst."
    yield ""


def _traced(trace: str, assume: str, of: Measure) -> Iterator[str]:
    head = f"simulate {shlex.quote(trace)} --exclude-kind agent" + (f" --assume {shlex.quote(assume)}" if assume else "")
    yield f"### trace: `tangram {head} --pool cpu=N --policy ...`"
    yield ""
    yield from _head(["mean ACT, s", *(f"{cores} cores" for cores in TRACE_POOLS)])
    for policy in TRACE_POLICIES:
        cells = [f"{of(f'{head} --pool cpu={cores} --policy {policy}')['mean_act_s']:.3f}" for cores in TRACE_POOLS]
        yield _row([f"`{policy}`", *cells])
    yield ""


def _head(cells: Sequence[str]) -> Iterator[str]:
    yield _row(cells)
    yield _row(["---"] * len(cells))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
