"""Options that several commands share."""

import argparse
from pathlib import Path

from tangram.errors import ConfigError


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
