"""`tangram executor cpu`, `tangram executor gpu`, `tangram executor api`."""

import argparse
import asyncio
import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram import roles, subjects
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.executors.service import ExecutorConfig, MakeBackend

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("executor", help="run an executor")
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    cpu = kinds.add_parser("cpu", help="programs on this machine's cores")
    _add_common(cpu)
    cpu.add_argument("--cores", metavar="N|LIST", help="how many cores to offer, or which (0-3,8); default: all")
    cpu.add_argument("--memory", metavar="SIZE", help='memory to offer, such as "16GiB" (default: what this machine has)')
    cpu.add_argument(
        "--sandbox",
        default="process",
        choices=["process", "docker", "none"],
        help="process: no isolation; docker: containers; none: runs nothing, may offer cores that do not exist (to measure)",
    )
    cpu.add_argument("--image", default="", help="image of programs without a session, and of sessions that name none")
    cpu.add_argument("--no-cgroups", action="store_true", help="do not use control groups even where they can be written")
    cpu.set_defaults(handler=handle, run=_run_cpu)
    gpu = kinds.add_parser("gpu", help="batches on models, on this machine's GPUs")
    _add_common(gpu)
    common.add_gpus(gpu)
    gpu.set_defaults(handler=handle, run=_run_gpu)
    api = kinds.add_parser("api", help="requests to declared endpoints")
    _add_common(api)
    common.add_endpoints(api, required=True)
    api.set_defaults(handler=handle, run=_run_api)


def _add_common(command: argparse.ArgumentParser) -> None:
    common.add_nats(command)
    common.add_verbose(command)
    command.add_argument("--name", help="unique among executors (default: HOST-PID)")
    command.add_argument("--host", help="name of this machine (default: its host name)")
    command.add_argument("--state", type=Path, help="folder for locks and sandboxes (default: $TANGRAM_HOME/executors)")
    command.add_argument("--drain", type=float, default=30.0, metavar="S", help="seconds that SIGTERM leaves what runs")


def handle(given: argparse.Namespace) -> int:
    roles.end_with_parent()
    roles.set_up_logging(given.verbose)
    return roles.run_loop(given.run(given))


async def _run_cpu(given: argparse.Namespace) -> int:
    from tangram.executors.backend import Backend
    from tangram.executors.cpu.process import ProcessBackend
    from tangram.executors.docker import DockerBackend, DockerConfig, DockerUnavailable, Engine
    from tangram.executors.none import NoBackend
    from tangram.executors.presence import Claim

    cores = (tuple(range(int(given.cores or 1))),) if given.sandbox == "none" else offered_cores(given.cores)
    config = _config(given, cores=cores, capacity={"memory": _memory(given.memory)})

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
            config.state / config.host / "sandboxes", claim.incarnation, cgroups=False if given.no_cgroups else None
        )
        claim.record("process", backend.paths, [backend.folder], [backend.ledger])
        return backend

    return await _serve(given, config, make_backend)


async def _run_gpu(given: argparse.Namespace) -> int:
    from tangram.executors.gpu import declared
    from tangram.executors.gpu.inventory import BrokenGpus, NoGpus
    from tangram.executors.gpu.make import make_backend, played, real
    from tangram.executors.gpu.places import Failed

    services = declared.load(given.services) if given.services is not None else declared.installed()
    if not services:
        raise ConfigError(f"--services FILE: must be given: no installed package has an entry point of {declared.ENTRY_POINTS}")
    if given.cpu_sim is not None and given.gpu_memory is None:
        raise ConfigError("--gpu-memory SIZE: must be given with --cpu-sim")
    memory_mib = _memory(given.gpu_memory) if given.gpu_memory is not None else 0
    try:
        found = played(given.cpu_sim, memory_mib) if given.cpu_sim else real(_gpu_ids(given.gpus), memory_mib)
    except (NoGpus, BrokenGpus) as error:
        print(f"tangram: {error}; --cpu-sim N plays some on the CPU", file=sys.stderr)
        return 3
    config = _config(
        given,
        key="gpu",
        gpus=tuple(each.id for each in found),
        capacity={"gpu_memory": min(each.memory_mib for each in found)},
    )
    try:
        return await _serve(given, config, lambda claim: make_backend(claim, services, found))
    except Failed as failed:
        print(f"tangram: {failed}", file=sys.stderr)
        return 2


async def _run_api(given: argparse.Namespace) -> int:
    from tangram.executors.api import declared
    from tangram.rules import CALLS

    endpoints = declared.load(given.endpoints)
    try:
        from tangram.executors.api.backend import ApiBackend
    except ImportError as error:
        raise ConfigError(f"an executor of kind api needs the extra tangram[api]: {error}") from None
    config = _config(given, key="api", capacity={CALLS: given.calls})
    return await _serve(given, config, lambda _: ApiBackend(endpoints))


def _gpu_ids(text: str | None) -> set[int] | None:
    from tangram.executors.cpu.kernel import parse_cores

    if text is None:
        return None
    try:
        return set(parse_cores(text))
    except ValueError:
        raise ConfigError(f"--gpus {text}: must be a list such as 0-3,6") from None


def _config(given: argparse.Namespace, **offers: Any) -> "ExecutorConfig":
    from tangram.config import home
    from tangram.executors.service import ExecutorConfig

    host = subjects.token(given.host or _as_name(socket.gethostname()), "host")
    return ExecutorConfig(
        name=subjects.token(given.name or f"{host[:50]}-{os.getpid()}", "name"),
        host=host,
        state=given.state or home() / "executors",
        drain_s=given.drain,
        **offers,
    )


async def _serve(given: argparse.Namespace, config: "ExecutorConfig", make_backend: "MakeBackend") -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url
    from tangram.executors.presence import ExecutorAlreadyRunning
    from tangram.executors.service import ExecutorReplaced, ExecutorService

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
