"""Options that several commands share."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tangram import limits
from tangram.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from tangram import messages as m
    from tangram.replay.sources import Source


def add_nats(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nats", metavar="URL", help="the broker (default: $TANGRAM_NATS, then what `tangram up` has left for this user)"
    )


def add_verbose(command: argparse.ArgumentParser) -> None:
    command.add_argument("--verbose", action="store_true", help="say what is going on")


def add_seed_models(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--seed-models",
        type=Path,
        metavar="FILE",
        help="start from what `tangram models export` has written, for kinds of which the log knows nothing",
    )


def add_sandbox(command: argparse.ArgumentParser) -> None:
    command.add_argument("--sandbox", default="process", choices=["process", "docker"], help="process: no isolation")
    command.add_argument("--image", default="", help="with docker: of sandboxes that name none")


def sandbox_arguments(given: argparse.Namespace) -> list[str]:
    """For the executors of a local stack."""
    return ["--sandbox", given.sandbox, *(["--image", given.image] if given.image else [])]


def add_gpus(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--services", type=Path, metavar="FILE", help="TOML that declares the models (default: those of installed packages)"
    )
    command.add_argument("--gpus", metavar="LIST", help="which GPUs to offer, such as 0-3; default: all")
    command.add_argument("--gpu-memory", metavar="SIZE", help="for weights, of each GPU (default: 90 %% of what it has)")
    command.add_argument(
        "--cpu-sim", type=positive, metavar="N", help="no GPUs: N devices that are played on the CPU, with --gpu-memory"
    )


def add_endpoints(command: argparse.ArgumentParser, *, required: bool = False) -> None:
    command.add_argument("--endpoints", type=Path, metavar="FILE", required=required, help="TOML: what can be called, by name")
    command.add_argument("--calls", type=positive, default=256, metavar="N", help="at the same time (default: 256)")


def endpoint_arguments(given: argparse.Namespace) -> list[str]:
    """Those of `add_endpoints`, again; none if nothing can be called."""
    return ["--endpoints", str(given.endpoints), "--calls", str(given.calls)] if given.endpoints is not None else []


def gpu_arguments(given: argparse.Namespace) -> list[str]:
    """Those of `add_gpus`, again; none if no executor on GPUs is asked for."""
    found: list[str] = []
    for name in ("services", "gpus", "gpu_memory", "cpu_sim"):
        value = getattr(given, name)
        if value is not None:
            found += [f"--{name.replace('_', '-')}", str(value.absolute() if isinstance(value, Path) else value)]
    if found and given.services is None:
        raise ConfigError(f"{found[0]}: needs --services FILE")
    return found


def settings(pairs: list[str]) -> dict[str, int]:
    """NAME=INTEGER pairs; raises ConfigError for an unknown name or a bad value."""
    from tangram.scheduler.policies import SETTINGS

    found: dict[str, int] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in SETTINGS:
            raise ConfigError(f"--set {pair}: must be one of {', '.join(SETTINGS)}")
        try:
            found[name] = int(value)
        except ValueError:
            raise ConfigError(f"--set {pair}: must be NAME=INTEGER") from None
        _, low, high = SETTINGS[name]
        if not low <= found[name] <= high:
            raise ConfigError(f"--set {pair}: must be {low} to {high}")
    return found


def add_share(command: argparse.ArgumentParser) -> None:
    help_ = "the task's weight for the policies fair and split-by-task (1 if it has none); repeatable"
    command.add_argument("--share", action="append", default=[], metavar="TASK=WEIGHT", help=help_)


def shares(pairs: list[str]) -> dict[str, int]:
    """TASK=WEIGHT pairs; raises ConfigError for what is no name, a bad weight, or a task that stands there twice."""
    from tangram.subjects import token

    found: dict[str, int] = {}
    for pair in pairs:
        task, _, value = pair.partition("=")
        try:
            token(task, "task")
        except InvalidRequest as error:
            raise ConfigError(f"--share {pair}: {error}") from None
        if task in found:
            raise ConfigError(f"--share {pair}: {task} has a weight already")
        if not (value.isascii() and value.isdigit() and 1 <= int(value[:20]) <= limits.SHARE_MAX):
            raise ConfigError(f"--share {pair}: the weight must be a whole number, 1 to {limits.SHARE_MAX}")
        found[task] = int(value)
    if len(found) > limits.SHARES_MAX:
        raise ConfigError(f"--share: at most {limits.SHARES_MAX} tasks can have a weight of their own")
    return found


def add_quota(command: argparse.ArgumentParser) -> None:
    help_ = f"a limit of something outside, over all hosts; repeatable. RULES: {QUOTA_RULES}"
    command.add_argument("--quota", action="append", default=[], metavar="NAME=RULES", help=help_)


QUOTA_RULES: Final = "concurrency:N, requests:N/SECONDS, burst:N, tokens:N/SECONDS, any of them with commas between"
_QUOTA_RULE: Final = re.compile(r"(?:(concurrency|burst|requests|tokens):)?([0-9]{1,12})(?:/([0-9]{1,6}(?:\.[0-9]{1,3})?))?")


def quotas(texts: list[str]) -> "dict[str, m.Quota]":
    """Raises ConfigError for what is no quota, or a name that stands there twice or is a resource of hosts."""
    from tangram.rules import HOST_RESOURCES

    found: dict[str, m.Quota] = {}
    for text in texts:
        name, is_there, rules = text.partition("=")
        if not is_there or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) is None:
            raise ConfigError(f"--quota {text}: must be NAME=RULES: {QUOTA_RULES}")
        if name in found:
            raise ConfigError(f"--quota {text}: {name} has a quota already")
        if name in HOST_RESOURCES:
            raise ConfigError(f"--quota {text}: {name} is a resource of hosts")
        found[name] = quota(f"--quota {text}", rules)
    if len(found) > limits.QUOTAS_MAX:
        raise ConfigError(f"--quota: must be at most {limits.QUOTAS_MAX}")
    return found


def quota(where: str, rules: str) -> "m.Quota":
    """A plain number is the concurrency, a plain N/SECONDS are tokens. Raises ConfigError, which begins with `where`."""
    from tangram import messages as m

    found: dict[str, int] = {}
    for rule in rules.split(","):
        match = _QUOTA_RULE.fullmatch(rule.strip())
        if match is None:
            raise ConfigError(f"{where}: {rule!r} is none of {QUOTA_RULES}")
        kind, amount, seconds = match.groups()
        kind = kind or ("tokens" if seconds else "concurrency")
        if (kind in ("tokens", "requests")) != bool(seconds):
            raise ConfigError(f"{where}: {kind} {'take /SECONDS' if not seconds else 'takes no /SECONDS'}")
        if kind in found:
            raise ConfigError(f"{where}: {kind} stands there twice")
        if amount == "0" and kind != "concurrency":
            raise ConfigError(f"{where}: leave the {kind} out if they are not limited")
        found[kind] = int(amount)
        if seconds:
            interval_ms = round(float(seconds) * 1e3)
            if not 1 <= interval_ms <= limits.DEADLINE_MS_MAX:
                raise ConfigError(f"{where}: the interval must be 0.001 to {limits.DEADLINE_MS_MAX // 1000} seconds")
            if found.setdefault("interval_ms", interval_ms) != interval_ms:
                raise ConfigError(f"{where}: requests and tokens must have one interval; two quotas can have two")
    if "burst" in found and "requests" not in found:
        raise ConfigError(f"{where}: burst goes with requests")
    return m.Quota(**found)


def add_range(command: argparse.ArgumentParser) -> None:
    help_ = "a time as 2026-12-31T23:59:59 (UTC unless it has an offset), or how long ago, as 90s, 15m, 2h or 1d"
    command.add_argument("--from", dest="from_", type=moment, metavar="T", help=f"from the last checkpoint before T: {help_}")
    command.add_argument("--until", type=moment, metavar="T", help="up to T")


_AGO: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def moment(text: str) -> int:
    """Nanoseconds since 1970."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return time.time_ns() - round(float(ago[1]) * _UNIT_S[ago[2]] * 1_000) * 1_000_000
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a time as 2026-12-31T23:59:59, or how long ago, as 15m") from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return (found - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1_000


def add_recording(command: argparse.ArgumentParser) -> None:
    """Where a recorded log comes from."""
    add_nats(command)
    command.add_argument("--file", type=Path, metavar="F", help="what `tangram streams export` has written, in place of a broker")
    command.add_argument("--partial", action="store_true", help="with --file: of a damaged one what can be read")
    add_range(command)


@contextlib.asynccontextmanager
async def recording(given: argparse.Namespace) -> "AsyncIterator[Source]":
    """The log that `add_recording` names. Says at the end, if it was damaged, how far it goes. Raises TangramError."""
    from tangram.broker import Broker
    from tangram.config import broker_url
    from tangram.replay.sources import BrokerSource, FileSource

    if given.file is not None:
        if given.from_ is not None or given.until is not None or given.nats is not None:
            raise ConfigError("--file: is read whole; --nats, --from and --until are for a broker")
        file = FileSource(given.file, partial=given.partial)
        yield file
        if file.problem:
            print(f"tangram: only a part: {file.problem}", file=sys.stderr)
        return
    if given.partial:
        raise ConfigError("--partial: is for a --file")
    broker = await Broker.connect(broker_url(given.nats), name=f"tangram {given.command}")
    try:
        yield await BrokerSource.open(broker, from_ns=given.from_, until_ns=given.until)
    finally:
        await broker.close()


def require_writable(path: Path, option: str) -> None:
    """Raises ConfigError before a long log is read for nothing."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:  # refuses nan as well
        raise argparse.ArgumentTypeError("must be more than 0, and at most a day")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError("must be 0 to 65535")
    return value
