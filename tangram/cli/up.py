"""`tangram up`: broker, scheduler and this machine's executors, in the foreground."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    from tangram.scheduler.policies import POLICIES

    command = commands.add_parser("up", help="broker, scheduler and executors on this machine, in the foreground")
    common.add_nats(command)
    common.add_verbose(command)
    command.add_argument("--data", type=Path, help="folder for all state (default: $TANGRAM_HOME or ~/.tangram)")
    command.add_argument("--port", type=common.port, default=0, help="of the embedded broker (default: as last time, or any)")
    command.add_argument("--policy", default="tangram", choices=list(POLICIES))
    command.add_argument("--set", action="append", default=[], metavar="NAME=INTEGER")
    common.add_share(command)
    common.add_quota(command)
    common.add_seed_models(command)
    common.add_sandbox(command)
    common.add_gpus(command)
    common.add_endpoints(command)
    command.add_argument("--executors", type=common.positive, default=1, metavar="N")
    command.add_argument("--cores", type=common.positive, default=None, metavar="N", help="cores to offer (default: all)")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.set_up_logging(given.verbose)
    return roles.run_loop(_run(given))


def _check_files(given: argparse.Namespace) -> None:
    """What is wrong with them is said here, not in an executor's log. Raises ConfigError."""
    if given.endpoints is not None:
        from tangram.executors.api import declared as endpoints

        declared = {text.partition("=")[0] for text in given.quota}
        for name, endpoint in endpoints.load(given.endpoints).items():
            missing = [each for each in endpoint.takes if declared and each not in declared]
            if missing:
                print(
                    f"tangram: endpoint {name} takes {', '.join(missing)}: without a --quota its calls are rejected",
                    file=sys.stderr,
                )
    if given.services is not None:
        from tangram.executors.gpu import declared as services

        services.load(given.services)


async def _run(given: argparse.Namespace) -> int:
    from tangram.cli.models import read_file
    from tangram.config import home
    from tangram.local import LocalStack

    folder = given.data or home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--data {folder}: {error.strerror}") from None
    common.quotas(given.quota)
    _check_files(given)
    if given.seed_models is not None:
        read_file(given.seed_models)  # what is wrong with it is said here, not in a log
    stack = LocalStack(
        folder,
        policy=given.policy,
        settings=common.settings(given.set),
        shares=common.shares(given.share),
        quotas=given.quota,
        executors=given.executors,
        port=given.port,
        nats=given.nats,
        cores=given.cores or 0,
        scheduler_arguments=["--seed-models", str(given.seed_models)] if given.seed_models is not None else [],
        executor_arguments=common.sandbox_arguments(given),
        gpu_arguments=common.gpu_arguments(given),
        api_arguments=common.endpoint_arguments(given),
        verbose=given.verbose,
    )
    stop = asyncio.Event()
    roles.on_signals(stop.set, stop.set)
    starting = asyncio.create_task(stack.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 130
        await starting
        where = f"nats://127.0.0.1:{stack.server.port}" if stack.server is not None else stack.url.rpartition("@")[2]
        print(f"tangram is up: {len(stack.executors)} executor(s), policy {stack.policy}, broker {where}", file=sys.stderr)
        prefix = f"TANGRAM_HOME={given.data} " if given.data else ""
        print(f"try: {prefix}tangram run -- echo hello", file=sys.stderr)
        ended = asyncio.create_task(stack.wait_for_an_end())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            print(f"tangram: {ended.result()}", file=sys.stderr)
            return 1
        ended.cancel()
        return 0
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.wait({starting})
        await stack.stop()
