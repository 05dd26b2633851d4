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
from typing import TYPE_CHECKING, Final

from tangram import roles
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tangram.demo.report import Report

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


DOCKER_IMAGE = "python:3.12-slim"
TIMELINE = Path("tangram-demo.html")


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("demo", help="the main job on an embedded broker, against a static baseline")
    common.add_verbose(command)
    command.add_argument("--workload", default="coding", choices=["coding", "mopd", "deepsearch", "mopd+deepsearch"])
    common.add_sandbox(command)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument(
        "--trajectories", type=common.positive, metavar="N", help="default: 16 (coding), 24 (the others), of each job"
    )
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
    if given.timeline is not None:
        common.require_writable(given.timeline, "--timeline")
    elif os.access(".", os.W_OK):
        given.timeline = TIMELINE
    running = asyncio.current_task()
    assert running is not None
    roles.on_signals(running.cancel, running.cancel)
    try:
        return await (_coding if given.workload == "coding" else _services)(given)
    except asyncio.CancelledError:
        print("tangram: interrupted", file=sys.stderr)
        return 130


async def _services(given: argparse.Namespace) -> int:
    """The workloads whose actions need GPUs and calls, and no sandbox."""
    from rich.console import Console

    try:
        from tangram.demo import deepsearch, mopd, teachers
        from tangram.executors.api import backend  # noqa: F401  # its extra has to be there
    except ImportError as error:
        raise ConfigError(f"--workload {given.workload}: {error.name} is not installed: pip install 'tangram[gpu,api]'") from None
    from tangram.demo.jobs import Job, compare
    from tangram.demo.progress import Progress
    from tangram.demo.report import show
    from tangram.local import LocalStack

    if given.sandbox != "process" or given.without_learning:
        raise ConfigError(f"--workload {given.workload}: has no sandboxes, and no run without learning")
    trajectories = given.trajectories or 24
    command = f"tangram demo --workload {given.workload} --seed {given.seed} --trajectories {trajectories}"
    console = Console(stderr=given.json)
    names = given.workload.split("+")
    searches, distils = deepsearch.TASK in names, mopd.TASK in names
    jobs: list[Job] = [mopd.Distilled(trajectories, given.seed)] if distils else []
    jobs += [deepsearch.Searched(trajectories, given.seed)] if searches else []
    policies, title, note = _SERVICES[given.workload]
    devices = mopd.DEVICES if distils else 1
    with tempfile.TemporaryDirectory(prefix="tangram-demo-") as name:
        folder = Path(name)
        teachers.declare(folder / "services.toml", teachers=distils, judge=searches)
        gpus = ["--services", str(folder / "services.toml"), "--cpu-sim", str(devices), "--gpu-memory", f"{mopd.DEVICE_MIB}MiB"]

        @contextlib.asynccontextmanager
        async def stack(policy: str) -> AsyncIterator[str]:
            progress.note(f"{policy}: starting {len(jobs)} job(s) on {devices} device(s) (cpu-sim: played on the CPU)")
            async with contextlib.AsyncExitStack() as opened:
                endpoints = folder / f"{policy}.toml"
                if searches:
                    (folder / f"search-{policy}").mkdir()
                    url = await opened.enter_async_context(deepsearch.provider(folder / f"search-{policy}"))
                    deepsearch.declare(endpoints, url, policy)
                local = await opened.enter_async_context(
                    LocalStack(
                        folder / policy,
                        policy="tangram" if policy == deepsearch.PER_WORKER else policy,
                        settings={"static_units": 1, "static_shared": 1},
                        quotas=deepsearch.quotas(policy) if searches else [],
                        executors=0,
                        gpu_arguments=gpus,
                        api_arguments=["--endpoints", str(endpoints)] if searches else [],
                        verbose=given.verbose,
                    )
                )
                progress.note("")
                yield local.url
                if policy == "tangram":
                    await _timeline(local.url, given)

        async with Progress(console) as progress:
            reserved = devices if policies[0] == mopd.STATIC else 0
            found = await compare(jobs, policies, stack, progress, seed=given.seed, command=command, reserved=reserved)
    show(found, console, title, " ".join(note.split()), unit="GPU")
    return _end(given, found, console, command)


_SERVICES: Final = {
    "mopd": (
        ("static-service", "tangram"),
        "One step of students of nine teachers; two devices hold three each (cpu-sim)",
        """ACT: from submitting a batch to having its scores. Overhead: the share of all ACT that is neither queue nor run:
restoring weights is most of it. static-service: each teacher keeps to one device, which it shares with others.""",
    ),
    "deepsearch": (
        ("per-worker", "tangram"),
        "One step of agents that search (16 requests a second, 8 at once) and are judged (cpu-sim)",
        """ACT: from asking to having the page, or the judge's scores. per-worker: a limiter in each of four workers, of a
quarter of what the provider takes.""",
    ),
    "mopd+deepsearch": (
        ("split-by-task", "tangram"),
        "Two jobs at once: students of nine teachers, and agents that search; two devices (cpu-sim)",
        """ACT: from submitting to having the scores, or the page. split-by-task: each job has one of the two devices;
under tangram they are one pool.""",
    ),
}
"""By workload: the policies, the baseline first; the table's title and its note."""


async def _timeline(url: str, given: argparse.Namespace) -> None:
    from tangram.broker import Broker
    from tangram.cli.replay import read_timeline, write_timeline
    from tangram.replay.sources import BrokerSource

    if given.timeline is None:
        return
    broker = await Broker.connect(url, name="tangram demo timeline")
    try:
        write_timeline(await read_timeline(await BrokerSource.open(broker)), given.timeline)
    finally:
        await broker.close()


def _end(given: argparse.Namespace, found: "Report", console: "Console", command: str) -> int:
    console.print(f"seed {given.seed}; again with: {command}")
    if given.timeline is not None:
        console.print(f"timeline: {given.timeline}", markup=False)
    if given.json:
        print(json.dumps(found))
    return 1 if any(figures["wrong"] for figures in found["policies"].values()) else 0


async def _coding(given: argparse.Namespace) -> int:
    from rich.console import Console

    from tangram.demo.config import TANGRAM, UNLEARNT, DemoConfig
    from tangram.demo.progress import Progress
    from tangram.demo.report import show
    from tangram.demo.runner import compare
    from tangram.executors.cpu.machine import host_cores
    from tangram.local import LocalStack

    given.trajectories = given.trajectories or 16
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
            if policy == TANGRAM:
                await _timeline(local.url, given)

    try:
        async with Progress(console) as progress:
            found = await compare(config, stack, progress, command=command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(found, console)
    return _end(given, found, console, command)
