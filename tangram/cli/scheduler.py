"""`tangram scheduler`."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    from tangram.scheduler.policies import POLICIES, SETTINGS

    command = commands.add_parser("scheduler", help="run a scheduler")
    common.add_nats(command)
    common.add_verbose(command)
    command.add_argument("--name", default="scheduler", help="its name in the log")
    command.add_argument("--policy", default="tangram", choices=list(POLICIES))
    command.add_argument("--set", action="append", default=[], metavar="NAME=INTEGER", help=f"one of {', '.join(SETTINGS)}")
    common.add_share(command)
    command.add_argument(
        "--silence", type=float, default=30.0, metavar="S", help="an executor not heard of for so long is lost (default: 30)"
    )
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.end_with_parent()
    roles.set_up_logging(given.verbose)
    return roles.run_loop(_run(given, common.settings(given.set), common.shares(given.share)))


async def _run(given: argparse.Namespace, settings: dict[str, int], shares: dict[str, int]) -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url
    from tangram.scheduler.service import SchedulerConfig, SchedulerService, Superseded

    closed = asyncio.Event()
    broker = await Broker.connect(broker_url(given.nats), name=f"tangram scheduler {given.name}", on_closed=closed.set)
    config = SchedulerConfig(leader=given.name, policy=given.policy, settings=settings, shares=shares, silence_s=given.silence)
    service = SchedulerService(broker, config)
    roles.on_signals(service.stop, service.stop)
    running = asyncio.create_task(service.run())
    ready = asyncio.create_task(service.leading.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        roles.say_ready()
    ready.cancel()
    try:
        await running
    except Superseded as error:
        print(f"tangram: {error}", file=sys.stderr)
        return 1
    finally:
        await broker.close()
    return 0
