"""`tangram bench pipeline|scheduler|gpu|api|evaluation`."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tangram import limits, roles
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("bench", help="figures beside their peers, in one run")
    what = command.add_subparsers(dest="what", required=True, metavar="WHAT")
    pipeline = what.add_parser("pipeline", help="the path of an action, beside a bare chain of three processes")
    pipeline.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    pipeline.add_argument("--seconds", type=common.seconds, default=2.0, metavar="S", help="measured for each row")
    pipeline.add_argument("--sync", nargs="+", default=["always", "default"], choices=["always", "default"])
    pipeline.add_argument("--in-flight", nargs="+", type=common.positive, default=[1, 16, 64, 256, 1024], metavar="N")
    pipeline.add_argument("--executors", nargs="+", type=common.positive, default=[1, 2, 4], metavar="N")
    pipeline.set_defaults(handler=_handle(_pipeline))
    scheduler = what.add_parser("scheduler", help="a pass of the pure core, whatever is queued; and what a backlog takes")
    scheduler.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    scheduler.add_argument(
        "--queued", nargs="+", type=common.not_negative, default=[0, 100_000], metavar="N", help="behind the candidates"
    )
    scheduler.add_argument("--passes", type=common.positive, default=100, metavar="N", help="measured for each row")
    scheduler.add_argument(
        "--backlog", type=common.not_negative, default=100_000, metavar="N", help="actions at a real scheduler; 0: none"
    )
    scheduler.add_argument("--payload", type=common.positive, default=2_000, metavar="BYTES", help="of each of those")
    scheduler.set_defaults(handler=_handle(_scheduler))
    gpu = what.add_parser("gpu", help="weights onto a device, beside a plain copy; and swapping on the whole path")
    gpu.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    gpu.add_argument("--weights", type=common.positive, default=512, metavar="MIB", help="that are moved alone")
    gpu.add_argument("--rounds", type=common.positive, default=9, metavar="N", help="of which the median is taken")
    gpu.add_argument("--seconds", type=common.seconds, default=10.0, metavar="S", help="of each load on the whole path")
    gpu.set_defaults(handler=_handle(_gpu))
    api = what.add_parser("api", help="callers of a provider with a limit, beside a limiter in each worker")
    api.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    api.add_argument("--callers", type=common.positive, default=500, metavar="N")
    api.add_argument("--seconds", type=common.seconds, default=20.0, metavar="S", help="measured for each row")
    api.set_defaults(handler=_handle(_api))
    evaluation = what.add_parser("evaluation", help="the tables of docs/evaluation.md, on the virtual clock; minutes to an hour")
    evaluation.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some of the tables")
    evaluation.add_argument("--quick", action="store_true", help="with far fewer trajectories, to see that all rows run")
    evaluation.add_argument("--trace", metavar="FILE", help="also the tables of a recorded trace")
    evaluation.add_argument(
        "--assume", nargs="+", default=[], metavar="FILE", help="for the trace: also a table with each of these"
    )
    evaluation.set_defaults(handler=_evaluation)


def _handle(run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]]) -> Callable[[argparse.Namespace], int]:
    def handle(given: argparse.Namespace) -> int:
        roles.set_up_logging(False)
        return roles.run_loop(run(given))

    return handle


def _evaluation(given: argparse.Namespace) -> int:
    from tangram.bench import evaluation
    from tangram.cli.simulate import measured

    for name in given.only:
        if name not in evaluation.names():
            raise ConfigError(f"--only {name}: must be one of {', '.join(evaluation.names())}")
    for line in evaluation.tables(
        lambda command: measured(shlex.split(command)), given.only, given.trace, ["", *given.assume], quick=given.quick
    ):
        print(line, flush=True)
    return 0


async def _scheduler(given: argparse.Namespace) -> int:
    from tangram.bench import scheduler

    def say(line: str) -> None:
        print(line, file=sys.stderr if given.json else sys.stdout, flush=True)

    if given.payload > limits.ITEM_BYTES_MAX - 4_096:
        raise ConfigError(f"--payload {given.payload}: must fit a message, at most {limits.ITEM_BYTES_MAX - 4_096}")
    found: dict[str, Any] = {"runs": scheduler.passes(given.queued, given.passes, say)}
    found["fold_per_s"] = round(scheduler.fold_per_s(), 1)
    say(f"pure core: {found['fold_per_s']:.0f} actions/s, each submitted, decided and finished")
    if given.backlog:
        found["backlog"] = await scheduler.backlog(given.backlog, given.payload, say)
    if given.json:
        print(json.dumps(found))
    return 0


async def _api(given: argparse.Namespace) -> int:
    try:
        from tangram.bench import api
    except ImportError as error:
        raise ConfigError(f"bench api: {error.name} is not installed: pip install 'tangram[api]'") from None
    out = sys.stderr if given.json else sys.stdout
    found = await api.run(given.callers, given.seconds, lambda line: print(line, file=out, flush=True))
    if given.json:
        print(json.dumps(found))
    return 0


async def _gpu(given: argparse.Namespace) -> int:
    try:
        from tangram.bench import gpu
    except ImportError as error:
        raise ConfigError(f"bench gpu: {error.name} is not installed: pip install 'tangram[gpu]'") from None
    out = sys.stderr if given.json else sys.stdout
    found = await gpu.run(given.weights, given.rounds, given.seconds, lambda line: print(line, file=out, flush=True))
    if given.json:
        print(json.dumps(found))
    return 0


async def _pipeline(given: argparse.Namespace) -> int:
    from tangram.bench import pipeline

    out = sys.stderr if given.json else sys.stdout
    found = await pipeline.run(
        given.sync, given.in_flight, given.executors, given.seconds, lambda line: print(line, file=out, flush=True)
    )
    if given.json:
        print(json.dumps(found))
        return 0
    bare = {(row["sync"], row["in_flight"]): row for row in found["bare"]}
    for row in found["runs"]:
        beside = bare[(row["sync"], row["in_flight"])]
        ratio = row["actions_per_s"] / beside["actions_per_s"]
        trips = row["p50_ms"] / found["core_request_p50_ms"]
        print(
            f"sync {row['sync']:8} executors {row['executors']}  in flight {row['in_flight']:5}: "
            f"{ratio:.2f} of the bare chain, p50 {trips:.1f} core round trips"
        )
    return 0
