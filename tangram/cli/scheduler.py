"""`tangram scheduler`."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common

if TYPE_CHECKING:
    from tangram.scheduler.service import SchedulerConfig

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
    common.add_quota(command)
    command.add_argument(
        "--silence", type=float, default=30.0, metavar="S", help="an executor not heard of for so long is lost (default: 30)"
    )
    common.add_seed_models(command)
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.end_with_parent()
    roles.set_up_logging(given.verbose)
    config = _config(given)
    return roles.run_loop(_run(given, config))


def _config(given: argparse.Namespace) -> "SchedulerConfig":
    from tangram.cli.models import read_file
    from tangram.scheduler.service import SchedulerConfig

    return SchedulerConfig(
        leader=given.name,
        policy=given.policy,
        settings=common.settings(given.set),
        shares=common.shares(given.share),
        quotas=common.quotas(given.quota),
        silence_s=given.silence,
        models=read_file(given.seed_models) if given.seed_models is not None else (),
    )


async def _run(given: argparse.Namespace, config: "SchedulerConfig") -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url
    from tangram.scheduler.service import SchedulerService, Superseded

    closed = asyncio.Event()
    broker = await Broker.connect(broker_url(given.nats), name=f"tangram scheduler {given.name}", on_closed=closed.set)
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
