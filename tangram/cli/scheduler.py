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
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.end_with_parent()
    roles.set_up_logging(given.verbose)
    settings = common.settings(given.set)
    return roles.run_loop(_run(given.nats, given.name, given.policy, settings))


async def _run(nats: str | None, name: str, policy: str, settings: dict[str, int]) -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url
    from tangram.scheduler.service import SchedulerConfig, SchedulerService, Superseded

    closed = asyncio.Event()
    broker = await Broker.connect(broker_url(nats), name=f"tangram scheduler {name}", on_closed=closed.set)
    service = SchedulerService(broker, SchedulerConfig(leader=name, policy=policy, settings=settings))
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
