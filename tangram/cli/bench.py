"""`tangram bench pipeline`."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("bench", help="figures beside their peers, in one run")
    what = command.add_subparsers(dest="what", required=True, metavar="WHAT")
    pipeline = what.add_parser("pipeline", help="the path of an action, beside a bare chain of three processes")
    pipeline.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    pipeline.add_argument("--seconds", type=float, default=2.0, metavar="S", help="measured for each row")
    pipeline.add_argument("--sync", nargs="+", default=["always", "default"], choices=["always", "default"])
    pipeline.add_argument("--in-flight", nargs="+", type=common.positive, default=[1, 16, 64, 256, 1024], metavar="N")
    pipeline.add_argument("--executors", nargs="+", type=common.positive, default=[1, 2, 4], metavar="N")
    pipeline.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.set_up_logging(False)
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
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
