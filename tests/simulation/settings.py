"""The settings in which policies are compared: workloads, how many trajectories, how many cores for each, one host or four.

`python -m tests.simulation.settings [--quick | --full] [--seed S] [--trace FILE] [--json FILE]` prints, by workload and for all,
mean ACT under each policy beside the best of the fixed numbers of units in hindsight: geometric mean and worst. Without the
trace its two workloads are left out. Constants of the rule `priced` were chosen on seeds 1 and 2.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean
from typing import Any, Final, NamedTuple

from tangram.simulation import trace
from tangram.simulation.driver import Setup, Simulation
from tangram.simulation.pool import Machine
from tangram.simulation.work import Trajectory, Work

SECOND: Final = 1_000_000_000
FIXED: Final = (1, 2, 4, 8)
POLICIES: Final = ("marginal-gain", "paper", "tangram")
SCALES: Final = {"shell.test": (0.8, 8), "shell.build": (0.9, 16), "shell.python": (0.5, 4)}
"""Assumed: the parallel part of a kind, and the units it can use."""
TIMEOUT_S: Final = 114.0
"""A call of the trace that took so long ran into its time-out."""
ACTIONS: Final = 20
MEAN_RUN_S: Final = 1.5
MEAN_THINK_S: Final = 2.0
"""Of a made action, on one unit, and of the thinking before it: with C/N = 0.43 all cores are busy on one unit each."""
START_S: Final = 20.0
"""Trajectories start at random within it."""
RATIOS: Final = (0.2, 0.35, 0.5, 0.7, 1.0)


class Made(NamedTuple):
    """Lognormal durations of this variation; the part of all actions that scales, and the kinds that those are."""

    cv: float
    part: float
    kinds: dict[str, tuple[float, int]] = SCALES


MADE: Final = {
    "cv 1, half": Made(1, 0.5),
    "cv 1, all": Made(1, 1),
    "cv 2, half": Made(2, 0.5),
    "cv 2, all": Made(2, 1),
    "cv 4, half": Made(4, 0.5),
    "cv 4, all": Made(4, 1),
    "p16": Made(2, 0.5, {"wide": (0.95, 16)}),
}
TRACES: Final = {"trace": None, "trace, rigid time-outs": TIMEOUT_S}


class Setting(NamedTuple):
    workload: str
    trajectories: int
    cores: int
    hosts: int

    @property
    def machines(self) -> list[Machine]:
        return [Machine((self.cores // self.hosts,))] * self.hosts


def made(workload: Made, count: int, seed: int) -> list[Trajectory]:
    """Each trajectory's draws depend on the seed and its number alone."""
    found = []
    for number in range(count):
        random = Random(f"{seed}/{number}")
        found.append(Trajectory(number, "t", _within(random), [_work(random, workload) for _ in range(ACTIONS)]))
    return found


def _work(random: Random, workload: Made) -> Work:
    scales = random.random() < workload.part
    kind = random.choice(list(workload.kinds)) if scales else random.choice(("search", "file"))
    parallel, units = workload.kinds[kind] if scales else (0.0, 1)
    duration_ns = round(_lognormal(random, MEAN_RUN_S, workload.cv) * SECOND)
    think_ns = round(_lognormal(random, MEAN_THINK_S, 0.8) * SECOND)
    return Work(kind, think_ns, duration_ns, round(duration_ns * parallel), 1, units)


def _lognormal(random: Random, mean: float, cv: float) -> float:
    variance = math.log(1 + cv * cv)
    return random.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def _within(random: Random) -> int:
    return round(random.uniform(0, START_S) * SECOND)


def replicated(recorded: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """So many of a recorded trace, each as often as any other, nearly."""
    random = Random(seed)
    order: list[Trajectory] = []
    while len(order) < count:
        order += random.sample(list(recorded), len(recorded))
    return [Trajectory(number, "t", _within(random), each.work) for number, each in enumerate(order[:count])]


def recorded(path: Path, rigid_from_s: float | None) -> list[Trajectory]:
    says = {
        kind: trace.Assumption(parallel=part, max_units=units, rigid_from_s=rigid_from_s)
        for kind, (part, units) in SCALES.items()
    }
    return trace.load(path, says, ["agent"])


def settings(extent: str, workloads: Sequence[str]) -> Iterator[Setting]:
    for workload in workloads:
        if extent == "quick" and workload not in ("trace", "cv 2, half", "cv 2, all", "cv 4, half", "p16"):
            continue
        for hosts in (1, 4):
            for count in {"quick": (128,), "usual": (32, 128), "full": (32, 128, 512)}[extent]:
                if count < 32 * hosts:
                    continue
                for ratio in (0.3, 0.5, 0.8) if extent == "quick" else RATIOS:
                    yield Setting(workload, count, max(1, round(ratio * count / hosts)) * hosts, hosts)


def act_s(
    trajectories: list[Trajectory], setting: Setting, policy: str, units: int | None = None, *, oracle: bool = False
) -> float:
    chosen = {} if units is None else {"fixed_units": units}
    simulation = Simulation(trajectories, setting.machines, Setup(policy, chosen, oracle=oracle))
    simulation.run()
    return fmean([(each.finished_ns - each.arrived_ns) / SECOND for each in simulation.done])


def compared(trajectories: list[Trajectory], setting: Setting) -> dict[str, float]:
    """Mean ACT in seconds: by policy, and " known" where it is told how long each action takes on each size."""
    found = {f"fixed {units}": act_s(trajectories, setting, "fixed-units", units) for units in FIXED}
    for policy in POLICIES:
        found[policy] = act_s(trajectories, setting, policy)
        found[f"{policy} known"] = act_s(trajectories, setting, policy, oracle=True)
    return found


def best_fixed(found: dict[str, float]) -> float:
    return min(found[f"fixed {units}"] for units in FIXED)


def report(rows: list[tuple[Setting, dict[str, float]]]) -> Iterator[str]:
    names = [f"{policy}{known}" for known in ("", " known") for policy in POLICIES]
    yield f"{'beside the best fixed: geometric mean, worst':44}" + "".join(f"{name:>20}" for name in names)
    for hosts in (1, 4):
        here = [row for row in rows if row[0].hosts == hosts]
        for workload in [*dict.fromkeys(setting.workload for setting, _ in here), ""]:
            those = [found for setting, found in here if workload in ("", setting.workload)]
            if those:
                parts = [[found[name] / best_fixed(found) for found in those] for name in names]
                label = f"{hosts} host{'s' * (hosts > 1)}, {workload or 'all'} ({len(those)})"
                yield f"{label:44}" + "".join(f"{geometric_mean(each):>13.3f} {max(each):>6.3f}" for each in parts)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.settings")
    parser.add_argument("--quick", action="store_const", const="quick", default="usual", dest="extent")
    parser.add_argument("--full", action="store_const", const="full", dest="extent")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--trace", type=Path, help="JSON lines; a kind `agent` in it is left out")
    parser.add_argument("--json", type=Path, help="write each setting's figures there")
    given = parser.parse_args(arguments)
    workloads = [*(TRACES if given.trace else ()), *MADE]
    rows: list[tuple[Setting, dict[str, float]]] = []
    lines: list[dict[str, Any]] = []
    for setting in settings(given.extent, workloads):
        if setting.workload in MADE:
            trajectories = made(MADE[setting.workload], setting.trajectories, given.seed)
        else:
            trajectories = replicated(recorded(given.trace, TRACES[setting.workload]), setting.trajectories, given.seed)
        found = compared(trajectories, setting)
        rows.append((setting, found))
        lines.append({**setting._asdict(), **found})
        print(setting, {name: round(value, 3) for name, value in found.items()}, file=sys.stderr, flush=True)
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in report(rows):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
