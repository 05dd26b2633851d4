"""`tangram executor cpu`."""

import argparse
import asyncio
import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import roles, subjects
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("executor", help="run an executor")
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    cpu = kinds.add_parser("cpu", help="programs on this machine's cores")
    common.add_nats(cpu)
    common.add_verbose(cpu)
    cpu.add_argument("--name", help="unique among executors (default: HOST-PID)")
    cpu.add_argument("--host", help="name of this machine (default: its host name)")
    cpu.add_argument("--cores", metavar="N|LIST", help="how many cores to offer, or which (0-3,8); default: all")
    cpu.add_argument("--memory", metavar="SIZE", help='memory to offer, such as "16GiB" (default: what this machine has)')
    cpu.add_argument(
        "--sandbox",
        default="process",
        choices=["process", "docker", "none"],
        help="process: no isolation; docker: containers; none: runs nothing, may offer cores that do not exist (to measure)",
    )
    cpu.add_argument("--image", default="", help="image of programs without a session, and of sessions that name none")
    cpu.add_argument("--state", type=Path, help="folder for locks and sandboxes (default: $TANGRAM_HOME/executors)")
    cpu.add_argument("--drain", type=float, default=30.0, metavar="S", help="seconds that SIGTERM leaves what runs")
    cpu.add_argument("--no-cgroups", action="store_true", help="do not use control groups even where they can be written")
    cpu.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    roles.end_with_parent()
    roles.set_up_logging(given.verbose)
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url, home
    from tangram.executors.backend import Backend
    from tangram.executors.cpu.process import ProcessBackend
    from tangram.executors.docker import DockerBackend, DockerConfig, DockerUnavailable, Engine
    from tangram.executors.none import NoBackend
    from tangram.executors.presence import Claim, ExecutorAlreadyRunning
    from tangram.executors.service import ExecutorConfig, ExecutorReplaced, ExecutorService

    host = subjects.token(given.host or _as_name(socket.gethostname()), "host")
    config = ExecutorConfig(
        name=subjects.token(given.name or f"{host[:50]}-{os.getpid()}", "name"),
        host=host,
        state=given.state or home() / "executors",
        cores=(tuple(range(int(given.cores or 1))),) if given.sandbox == "none" else offered_cores(given.cores),
        capacity={"memory": _memory(given.memory)},
        drain_s=given.drain,
    )

    engine: Engine | None = None
    if given.sandbox == "docker":
        try:
            engine = Engine()
            await engine.check(given.image)
        except DockerUnavailable as error:
            print(f"tangram: {error}", file=sys.stderr)
            return 3

    def make_backend(claim: Claim) -> Backend:
        if given.sandbox == "none":
            return NoBackend()
        if engine is not None:
            claim.record("docker", engine=engine.url)
            docker = DockerConfig(image=given.image, cgroups=False if given.no_cgroups else None)
            return DockerBackend(engine, claim.incarnation, docker)
        backend = ProcessBackend(
            config.state / host / "sandboxes", claim.incarnation, cgroups=False if given.no_cgroups else None
        )
        claim.record("process", backend.paths, [backend.folder], [backend.ledger])
        return backend

    broker = await Broker.connect(broker_url(given.nats), name=f"tangram executor {config.name}")
    service = ExecutorService(broker, config, make_backend)
    roles.on_signals(service.stop, lambda: service.stop(now=True))
    running = asyncio.create_task(service.run())
    ready = asyncio.create_task(service.joined.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        roles.say_ready()
    ready.cancel()
    try:
        await running
    except ExecutorAlreadyRunning as error:
        print(f"tangram: {error}", file=sys.stderr)
        return 2
    except ExecutorReplaced as error:
        print(f"tangram: {error}", file=sys.stderr)
        return 1
    finally:
        await broker.close()
    return 0


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:64] or "host"


def _memory(text: str | None) -> int:
    from tangram.executors.cpu.machine import host_memory_mib
    from tangram.producers.request import memory_mib

    return memory_mib(text) if text else host_memory_mib()


def offered_cores(text: str | None) -> tuple[tuple[int, ...], ...]:
    """Core ids by NUMA node. Raises ConfigError for cores that this process may not use."""
    from tangram.executors.cpu.kernel import parse_cores
    from tangram.executors.cpu.machine import host_cores

    nodes = host_cores()
    usable = [core for node in nodes for core in node]
    if text is None:
        wanted = set(usable)
    elif text.isdigit():
        wanted = set(usable[: int(text)])
        if not 1 <= int(text) <= len(usable):
            raise ConfigError(f"--cores {text}: this process may use {len(usable)} cores")
    else:
        try:
            wanted = set(parse_cores(text))
        except ValueError:
            raise ConfigError(f"--cores {text}: must be a number, or a list such as 0-3,8") from None
        if not wanted or not wanted <= set(usable):
            raise ConfigError(f"--cores {text}: this process may use {usable}")
    return tuple(tuple(core for core in node if core in wanted) for node in nodes if wanted & set(node))
