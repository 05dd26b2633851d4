"""`tangram simulate`, `tangram size`: a trace or a workload on the virtual clock."""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import limits
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.simulation.driver import Setup, Simulation
    from tangram.simulation.pool import Machine
    from tangram.simulation.work import Trajectory
    from tangram.simulation.workloads import Workload

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FAILED = 1


def add_to(commands: "Commands") -> None:
    simulate = commands.add_parser("simulate", help="a trace or a workload on a virtual clock, with the real scheduler")
    _add_source(simulate)
    simulate.add_argument(
        "--pool",
        required=True,
        metavar="cpu=N|FILE",
        help="cpu=256 (one host), cpu=15x256,gpu=5x8 (15 and 5 hosts), or a TOML file of hosts",
    )
    simulate.add_argument("--oracle", action="store_true", help="also with hints that tell the truth, beside it")
    simulate.add_argument("--actions-out", type=Path, metavar="FILE", help="each action: JSON lines, or CSV by the name's ending")
    simulate.set_defaults(handler=_simulate)
    size = commands.add_parser("size", help="the smallest pool on which a trace or a workload keeps a mean ACT")
    _add_source(size)
    size.add_argument("--target-act", type=_seconds, required=True, metavar="S", help="mean action completion time, at most")
    size.set_defaults(handler=_size)


def _add_source(command: argparse.ArgumentParser) -> None:
    from tangram.scheduler.policies import POLICIES, SETTINGS
    from tangram.simulation.workloads import WORKLOADS

    command.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="JSON lines, one action a line")
    command.add_argument(
        "--workload",
        choices=list(WORKLOADS),
        help="made from a seed instead",
    )
    command.add_argument("--trajectories", type=common.positive, metavar="N", help="of the workload")
    command.add_argument("--seed", type=int, metavar="S", help="of the workload (default: 0)")
    command.add_argument(
        "--vary", action="append", default=[], metavar="NAME=FACTOR", help="multiply a number of the workload (repeatable)"
    )
    command.add_argument("--policy", default="tangram", choices=list(POLICIES))
    command.add_argument("--units", type=common.positive, metavar="K", help="of a policy with a fixed size")
    command.add_argument("--set", action="append", default=[], metavar="NAME=INTEGER", help=f"one of {', '.join(SETTINGS)}")
    command.add_argument("--assume", type=Path, metavar="FILE", help="TOML or JSON: how each kind of a trace scales")
    command.add_argument("--exclude-kind", action="append", default=[], metavar="K", help="leave out this kind of a trace")
    command.add_argument("--one-shot", action="store_true", help="no sandboxes, so no action is bound to a host")
    command.add_argument(
        "--round-trip-ms", type=float, default=2.0, metavar="MS", help="from a decision's writing to its reading (default: 2)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _source(given: argparse.Namespace) -> "tuple[list[Trajectory], Workload | None]":
    """What is simulated, and the workload that it is from."""
    from tangram.simulation import trace, workloads

    if (given.trace is None) == (given.workload is None):
        raise ConfigError("name a TRACE or a --workload, one of them")
    if given.workload is None:
        for option in ("trajectories", "seed", "vary"):
            if getattr(given, option):
                raise ConfigError(f"--{option}: is for a --workload")
        assumptions = trace.load_assumptions(given.assume) if given.assume else {}
        return trace.load(given.trace, assumptions, given.exclude_kind), None
    if given.assume or given.exclude_kind:
        raise ConfigError(f"{'--assume' if given.assume else '--exclude-kind'}: is for a TRACE")
    if given.trajectories is None:
        raise ConfigError("--trajectories: must be given with --workload")
    workload = workloads.varied(workloads.WORKLOADS[given.workload], dict(map(_factor, given.vary)))
    return workload.trajectories(given.trajectories, given.seed or 0), workload


def _factor(text: str) -> tuple[str, float]:
    name, _, factor = text.partition("=")
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"--vary {text}: must be NAME=FACTOR, with a factor above 0")
    return name, value


def _setup(given: argparse.Namespace, workload: "Workload | None") -> "Setup":
    from tangram.scheduler.policies import SETTINGS
    from tangram.simulation.driver import UNITS_SETTING, Setup

    settings = common.settings(given.set)
    if given.units is not None:
        name = UNITS_SETTING.get(given.policy, "")
        if name not in SETTINGS:
            raise ConfigError(f"--units: policy {given.policy} has no fixed size")
        settings |= common.settings([f"{name}={given.units}"])
    if not 0 <= given.round_trip_ms <= limits.TICK_NS / 1e6:
        raise ConfigError(f"--round-trip-ms {given.round_trip_ms:g}: must be 0 to {limits.TICK_NS / 1e6:g}")
    return Setup(
        given.policy,
        settings,
        round(given.round_trip_ms * 1e6),
        given.one_shot,
        services=workload.services if workload is not None else {},
        quotas=workload.quotas if workload is not None else {},
    )


def _run(trajectories: "list[Trajectory]", pool: "list[Machine]", setup: "Setup") -> "Simulation":
    from tangram.simulation.driver import Simulation

    simulation = Simulation(trajectories, pool, setup, time.perf_counter_ns)
    simulation.run()
    return simulation


def _simulate(given: argparse.Namespace) -> int:
    from msgspec import structs

    from tangram.simulation import pool, report

    out: Path | None = given.actions_out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--actions-out {out}: must be a file in a folder that exists")
    machines = pool.parse(given.pool)
    trajectories, workload = _source(given)
    setup = _setup(given, workload)
    simulation = _run(trajectories, machines, setup)
    columns = {given.policy: report.figures(simulation)}
    tasks = sorted({trajectory.task for trajectory in trajectories})
    if len(tasks) > 1:
        columns |= {task: report.figures(simulation, task) for task in tasks}
    if out is not None:
        report.write_actions(simulation.done, out)
    if given.oracle:
        columns["oracle"] = report.figures(_run(trajectories, machines, replace(setup, oracle=True)))
    if given.json:
        found = structs.asdict(columns[given.policy])
        if given.oracle:
            found["oracle"] = structs.asdict(columns["oracle"])
        if len(tasks) > 1:
            found["tasks"] = {task: structs.asdict(columns[task]) for task in tasks}
        print(json.dumps(found))
        return 0
    cores, gpus, hosts = sum(each.cores for each in machines), sum(each.gpus for each in machines), len(machines)
    units = " and ".join([f"{cores:,} cores"] * (cores > 0) + [f"{gpus:,} GPUs"] * (gpus > 0))
    print(f"{len(trajectories):,} trajectories on {units} of {hosts:,} host{'' if hosts == 1 else 's'}")
    if given.assume is not None:
        print(f"how kinds scale is assumed: {given.assume}")
    for line in report.lines(columns):
        print(line)
    return 0


def _size(given: argparse.Namespace) -> int:
    from tangram.simulation import report, size
    from tangram.simulation.pool import Machine

    trajectories, workload = _source(given)
    setup = _setup(given, workload)

    def mean_act_s(cores: int) -> float:
        found = report.figures(_run(trajectories, [Machine((cores,))], setup)).mean_act_s
        print(f"{cores:,} cores: mean ACT {found:.3f} s", file=sys.stderr, flush=True)
        return found

    found = size.smallest(*size.bounds(trajectories, setup), given.target_act, mean_act_s)
    if given.json:
        tried = [{"cores": cores, "mean_act_s": act_s} for cores, act_s in found.tried]
        print(json.dumps({"target_act_s": given.target_act, "cores": found.cores, "tried": tried}))
    elif found.cores is None:
        (cores, act_s), *_ = found.tried
        print(f"no pool keeps {given.target_act:g} s: even on {cores:,} cores the mean ACT is {act_s:.3f} s")
    else:
        print(f"{found.cores:,} cores: mean ACT {dict(found.tried)[found.cores]:.3f} s, at most {given.target_act:g} s")
    return 0 if found.cores is not None else FAILED
