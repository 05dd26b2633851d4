"""`tangram simulate`, `tangram size`: a trace or a workload on the virtual clock."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram import limits
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.simulation.driver import Setup, Simulation
    from tangram.simulation.pool import Machine
    from tangram.simulation.report import Figures
    from tangram.simulation.size import Sized
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
    simulate.set_defaults(handler=_simulate, measure=lambda given: _as_json(given, _columns(given)))
    size = commands.add_parser("size", help="the smallest pool on which a trace or a workload keeps a mean ACT")
    _add_source(size)
    size.add_argument("--target-act", type=_seconds, required=True, metavar="S", help="mean action completion time, at most")
    size.set_defaults(handler=_size, measure=lambda given: _size_as_json(given, _sized(given)))


def measured(arguments: Sequence[str]) -> dict[str, Any]:
    """What `tangram simulate ... --json` and `tangram size ... --json` print for these arguments."""
    parser = argparse.ArgumentParser(prog="tangram")
    add_to(parser.add_subparsers(required=True))
    given = parser.parse_args(arguments)
    found: dict[str, Any] = given.measure(given)
    return found


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
    common.add_share(command)
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
    workload = workloads.varied(workloads.WORKLOADS[given.workload], _factors(given.vary))
    return workload.trajectories(given.trajectories, given.seed or 0), workload


def _factors(texts: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, factor in map(_factor, texts):
        if name in found:
            raise ConfigError(f"--vary {name}: is there twice")
        found[name] = factor
    return found


def _factor(text: str) -> tuple[str, float]:
    name, _, factor = text.partition("=")
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0.01 <= value <= 100):
        raise ConfigError(f"--vary {text}: must be NAME=FACTOR, with a factor of 0.01 to 100")
    return name, value


def _setup(given: argparse.Namespace, workload: "Workload | None") -> "Setup":
    from tangram.rules import GPU_CHUNKS
    from tangram.scheduler.policies import SETTINGS
    from tangram.simulation import pool
    from tangram.simulation.driver import UNITS_SETTING, Setup

    offers = workload if workload is not None else pool.offers(getattr(given, "pool", "cpu=1"))
    settings = common.settings(given.set)
    if given.units is not None:
        name = UNITS_SETTING.get(given.policy, "")
        if name not in SETTINGS:
            raise ConfigError(f"--units: policy {given.policy} has no fixed size")
        if given.policy == "static-service" and given.units not in GPU_CHUNKS:
            raise ConfigError(f"--units {given.units}: a service owns chunks of 1, 2, 4 or 8 GPUs")
        settings |= common.settings([f"{name}={given.units}"])
    if not 0 <= given.round_trip_ms <= limits.TICK_NS / 1e6:
        raise ConfigError(f"--round-trip-ms {given.round_trip_ms:g}: must be 0 to {limits.TICK_NS / 1e6:g}")
    return Setup(
        given.policy,
        settings,
        round(given.round_trip_ms * 1e6),
        given.one_shot,
        services=offers.services,
        quotas=offers.quotas,
        shares=common.shares(given.share),
    )


def _run(trajectories: "list[Trajectory]", pool: "list[Machine]", setup: "Setup") -> "Simulation":
    from tangram.simulation.driver import Simulation

    simulation = Simulation(trajectories, pool, setup, time.perf_counter_ns)
    simulation.run()
    return simulation


def _columns(given: argparse.Namespace) -> "dict[str, Figures]":
    """By the policy's name, by each task if there are several, and of the second run with `--oracle`."""
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
    return columns


def _as_json(given: argparse.Namespace, columns: "dict[str, Figures]") -> dict[str, Any]:
    from msgspec import structs

    by_name = {name: structs.asdict(figures) for name, figures in columns.items()}
    found = by_name.pop(given.policy)
    if given.oracle:
        found["oracle"] = by_name.pop("oracle")
    return {**found, "tasks": by_name} if by_name else found


def _simulate(given: argparse.Namespace) -> int:
    from tangram.simulation import pool, report

    columns = _columns(given)
    if given.json:
        print(json.dumps(_as_json(given, columns)))
        return 0
    machines = pool.parse(given.pool)
    trajectories, _ = _source(given)
    cores, gpus, hosts = sum(each.cores for each in machines), sum(each.gpus for each in machines), len(machines)
    units = " and ".join([f"{cores:,} cores"] * (cores > 0) + [f"{gpus:,} GPUs"] * (gpus > 0))
    print(f"{len(trajectories):,} trajectories on {units} of {hosts:,} host{'' if hosts == 1 else 's'}")
    if given.assume is not None:
        print(f"how kinds scale is assumed: {given.assume}")
    for line in report.lines(columns):
        print(line)
    return 0


def _sized(given: argparse.Namespace) -> "tuple[str, Sized]":
    """What was sized, cores or gpus, and how many."""
    from tangram.simulation import report, size

    trajectories, workload = _source(given)
    setup = _setup(given, workload)

    key = size.key_of(trajectories)
    name = "cores" if key == "cpu" else "gpus"

    def mean_act_s(units: int) -> float:
        found = report.figures(_run(trajectories, size.pool(key, units), setup)).mean_act_s
        print(f"{units:,} {name}: mean ACT {found:.3f} s", file=sys.stderr, flush=True)
        return found

    return name, size.smallest(*size.bounds(trajectories, setup), given.target_act, mean_act_s)


def _size_as_json(given: argparse.Namespace, sized: "tuple[str, Sized]") -> dict[str, Any]:
    name, found = sized
    tried = [{name: units, "mean_act_s": act_s} for units, act_s in found.tried]
    return {"target_act_s": given.target_act, name: found.units, "tried": tried}


def _size(given: argparse.Namespace) -> int:
    name, found = sized = _sized(given)
    if given.json:
        print(json.dumps(_size_as_json(given, sized)))
    elif found.units is None:
        (units, act_s), *_ = found.tried
        print(f"no pool keeps {given.target_act:g} s: even on {units:,} {name} the mean ACT is {act_s:.3f} s")
    else:
        print(f"{found.units:,} {name}: mean ACT {dict(found.tried)[found.units]:.3f} s, at most {given.target_act:g} s")
    return 0 if found.units is not None else FAILED
