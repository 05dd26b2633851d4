"""`tangram demo`: real coding actions from concurrent trajectories, under a static reservation and under Tangram."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


DOCKER_IMAGE = "python:3.12-slim"
TIMELINE = Path("tangram-demo.html")


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("demo", help="the main job on an embedded broker, against a static baseline")
    common.add_verbose(command)
    command.add_argument("--workload", default="coding", choices=["coding"])
    common.add_sandbox(command)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--trajectories", type=common.positive, default=16, metavar="N")
    command.add_argument(
        "--timeline", type=Path, metavar="FILE", help=f"what ran where under tangram, as one HTML file (default: {TIMELINE})"
    )
    command.add_argument("--without-learning", action="store_true", help="a third time, under tangram with learn=0")
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.set_up_logging(given.verbose)
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from rich.console import Console

    from tangram.broker import Broker
    from tangram.cli.common import require_writable
    from tangram.cli.replay import read_timeline, write_timeline
    from tangram.demo.config import TANGRAM, UNLEARNT, DemoConfig
    from tangram.demo.progress import Progress
    from tangram.demo.report import show
    from tangram.demo.runner import compare
    from tangram.executors.cpu.machine import host_cores
    from tangram.local import LocalStack
    from tangram.replay.sources import BrokerSource

    if given.timeline is not None:
        require_writable(given.timeline, "--timeline")
    elif os.access(".", os.W_OK):
        given.timeline = TIMELINE
    docker = given.sandbox == "docker"
    if docker and not given.image:
        given.image = DOCKER_IMAGE
    config = DemoConfig(seed=given.seed, trajectories=given.trajectories, unlearnt=given.without_learning)
    if docker:  # in an image the interpreter has its usual name
        config = replace(config, python="python3")
    console = Console(stderr=given.json)
    command = f"tangram demo --seed {given.seed} --trajectories {given.trajectories}"
    if docker:
        command += f" --sandbox docker --image {given.image}"
    if given.without_learning:
        command += " --without-learning"
    running = asyncio.current_task()
    assert running is not None
    roles.on_signals(running.cancel, running.cancel)
    # With a core for each trajectory a reservation never waits, and there is nothing to show.
    usable = sum(len(node) for node in host_cores())
    cores = min(usable, max(1, given.trajectories // 4))
    folder = Path(tempfile.mkdtemp(prefix="tangram-demo-"))

    @contextlib.asynccontextmanager
    async def stack(policy: str) -> AsyncIterator[str]:
        settings = {"static_units": config.static_units, "learn": int(policy != UNLEARNT)}
        async with LocalStack(
            folder / policy,
            policy=TANGRAM if policy == UNLEARNT else policy,
            settings=settings,
            cores=cores,
            verbose=given.verbose,
            executor_arguments=common.sandbox_arguments(given),
        ) as local:
            yield local.url
            if given.timeline is not None and policy == TANGRAM:
                broker = await Broker.connect(local.url, name="tangram demo timeline")
                try:
                    write_timeline(await read_timeline(await BrokerSource.open(broker)), given.timeline)
                finally:
                    await broker.close()

    try:
        async with Progress(console) as progress:
            found = await compare(config, stack, progress, command=command)
    except asyncio.CancelledError:
        print("tangram: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(found, console)
    console.print(f"seed {given.seed}; again with: {command}")
    if given.timeline is not None:
        console.print(f"timeline: {given.timeline}", markup=False)
    if given.json:
        print(json.dumps(found))
    return 1 if any(figures["wrong"] for figures in found["policies"].values()) else 0
