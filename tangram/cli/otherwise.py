"""`tangram replay --policy P --pool POOL --settings FILE`: what a recording's actions would have come to otherwise."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from tangram.cli import common
from tangram.errors import ConfigError
from tangram.messages.fields import Name, Setting, Shares

if TYPE_CHECKING:
    from tangram.replay.otherwise import Column
    from tangram.replay.recording import Recording
    from tangram.replay.sources import Source
    from tangram.replay.timeline import Timeline
    from tangram.simulation.driver import Setup
    from tangram.simulation.pool import Machine

OPTIONS = ("policy", "pool", "settings", "set", "share", "quota")


def add_to(command: argparse.ArgumentParser) -> None:
    from tangram.scheduler.policies import POLICIES, SETTINGS

    group = command.add_argument_group("otherwise", "what is not given is as it was when the recording ended")
    group.add_argument("--policy", choices=list(POLICIES))
    group.add_argument("--pool", metavar="cpu=N|FILE", help="as for tangram simulate")
    group.add_argument("--settings", type=Path, metavar="FILE", help="TOML: policy, [settings], [shares], [quotas.NAME]")
    group.add_argument("--set", action="append", default=[], metavar="NAME=INTEGER", help=f"one of {', '.join(SETTINGS)}")
    common.add_share(command)
    common.add_quota(command)


def is_asked(given: argparse.Namespace) -> bool:
    return any(getattr(given, name) for name in OPTIONS)


async def run(given: argparse.Namespace, source: "Source") -> "Timeline | None":
    """Prints the table. Returns the timeline of the other course, if one is to be written. Raises TangramError."""
    from tangram.replay import otherwise as o
    from tangram.replay.recording import Recording
    from tangram.replay.timeline import Collector

    state = await source.state()
    recording = Recording() if state is None else Recording(state)
    async for batch in source.batches():
        for record in batch:
            recording.add(record)
    was = o.setup_of(recording)
    other, pool = _otherwise(given, was, recording)
    if not any(each.ran for each in recording.actions.values()):
        raise ConfigError("nothing was run in this recording")
    collector = Collector() if given.timeline is not None else None
    again = o.played(recording, list(recording.machines.values()), was, unfit=None)
    observe = None if collector is None else collector.add
    columns = {
        "recorded": o.recorded(recording),
        "again": again,
        "otherwise": o.played(recording, pool, other, observe, unfit=again.unfit),
    }
    if given.json:
        print(json.dumps({name: _as_json(column) for name, column in columns.items()} | {"problem": source.problem}))
    else:
        print(o.text(columns))
        print(_NOTE, file=sys.stderr)
    return None if collector is None else collector.complete()


_NOTE = "again: on the virtual clock, as it was scheduled. How far that is from `recorded` is how far to trust `otherwise`."


def _as_json(column: "Column") -> dict[str, object]:
    from tangram.replay.otherwise import figures, tasks

    by_task = {task: figures(column, task) for task in tasks([column])}
    return {**figures(column), "tasks": by_task, "not_run": dict(column.not_run)}


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = ""
    settings: dict[str, Setting] = {}
    shares: Shares = {}


def _otherwise(given: argparse.Namespace, was: "Setup", recording: "Recording") -> "tuple[Setup, list[Machine]]":
    """Raises ConfigError."""
    from tangram.replay.otherwise import with_settings
    from tangram.simulation import pool

    machines, offers = list(recording.machines.values()), pool.Offers({}, {})
    if given.pool is not None:
        machines, offers = pool.parse(given.pool), pool.offers(given.pool)
    elif not machines:
        raise ConfigError("--pool: must be given, as no executor has joined in this recording")
    other = with_settings(was, services=offers.services, quotas=offers.quotas)
    if given.settings is not None:
        other = _from_file(given.settings, other)
    return with_settings(
        other,
        policy=given.policy or "",
        settings=common.settings(given.set),
        shares=common.shares(given.share),
        quotas=common.quotas(given.quota),
    ), machines


def _from_file(path: Path, setup: "Setup") -> "Setup":
    import msgspec

    from tangram.replay.otherwise import with_settings
    from tangram.scheduler.policies import POLICIES
    from tangram.simulation.pool import DeclaredQuota
    from tangram.simulation.trace import decode_file

    class File(_File, frozen=True, kw_only=True, forbid_unknown_fields=True):
        quotas: dict[Name, DeclaredQuota] = {}

    found = decode_file(path, lambda data: msgspec.toml.decode(data, type=File))
    pairs = [f"{name}={value}" for name, value in found.settings.items()]
    try:
        settings = common.settings(pairs)
    except ConfigError as error:
        raise ConfigError(f"{path}: settings: {error}") from None
    if found.policy not in ("", *POLICIES):
        raise ConfigError(f"{path}: policy: must be one of {', '.join(POLICIES)}")
    return with_settings(
        setup,
        policy=found.policy,
        settings=settings,
        shares=found.shares,
        quotas={name: each.quota for name, each in found.quotas.items()},
    )
