"""`tangram replay`: a recorded log, decided anew (--verify), or as a page that shows what ran where and why it waited."""

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common, otherwise, step
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.replay.sources import Source
    from tangram.replay.timeline import Timeline
    from tangram.replay.verify import Report

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("replay", help="a recorded log: verify its decisions, write its timeline as one HTML file")
    common.add_recording(command)
    command.add_argument("--timeline", type=Path, metavar="FILE", help="the HTML file to write")
    command.add_argument("--trace", type=Path, metavar="FILE", help="the same as a Chrome trace (JSON), for Perfetto")
    command.add_argument("--step", action="store_true", help="walk through it event by event, forward and back")
    command.add_argument("--verify", action="store_true", help="decide every window anew, and compare")
    command.add_argument("--json", action="store_true", help="of --verify, and of what would have been otherwise")
    otherwise.add_to(command)
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    is_otherwise = otherwise.is_asked(given)
    if not (given.timeline or given.trace or given.verify or given.step or is_otherwise):
        raise ConfigError(
            "replay: say what to do: --verify, --step, --timeline FILE, --trace FILE; or --policy, --pool, --settings: otherwise"
        )
    if given.step and (given.timeline or given.trace or given.verify or is_otherwise or given.json):
        raise ConfigError("--step: goes alone")
    if given.verify and is_otherwise:
        raise ConfigError("--verify: is about what was decided; what would have been is asked by itself")
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from tangram.replay import verdict
    from tangram.replay.perfetto import pieces

    for path, option in ((given.timeline, "--timeline"), (given.trace, "--trace")):
        if path is not None:
            common.require_writable(path, option)
    code = 0
    async with common.recording(given) as source:
        other = await otherwise.run(given, source) if otherwise.is_asked(given) else None
        if given.step:
            await step.run(source)
        if given.timeline is not None or given.trace is not None:
            timeline = await read_timeline(source)
            if given.trace is not None:
                write_whole(pieces(timeline), given.trace, "--trace")
                print(f"{given.trace}: {len(timeline.attempts)} attempts", file=sys.stderr)
        if given.timeline is not None:
            write_timeline(timeline, given.timeline, other)
            seconds = (timeline.end_ns - timeline.begin_ns) / 1e9
            what = f"{timeline.actions} actions on {len(timeline.hosts)} host(s) in {seconds:.1f} s of log time"
            print(f"{given.timeline}: {what}", file=sys.stderr if given.json else sys.stdout)
        if given.verify:
            began_s = time.monotonic()
            report = await verified(source)
            seconds = time.monotonic() - began_s
            if given.json:
                print(json.dumps({**verdict.summary(report), "problem": source.problem, "seconds": round(seconds, 3)}))
            else:
                print(verdict.text(report))
                print(f"{seconds:.1f} s, {report.actions / max(seconds, 1e-9):,.0f} actions/s", file=sys.stderr)
            code = 0 if report.ok else 1
    return code


async def verified(source: "Source") -> "Report":
    """Every window made anew. Reads the log's decisions first, then all of it. Raises TangramError if it cannot be read."""
    from tangram.replay.planned import Planned
    from tangram.replay.verify import Verifier

    # The fold makes many short-lived objects and few cycles.
    gc.set_threshold(20_000, 20, 100)
    planned = Planned()
    async for batch in source.decisions():
        for record in batch:
            planned.add(record)
    verifier = Verifier(await source.state(), planned, without_payloads=source.without_payloads)
    async for part in source.payloads():
        verifier.payloads(part)
    async for batch in source.batches():
        for record in batch:
            verifier.add(record)
    return verifier.complete()


async def read_timeline(source: "Source") -> "Timeline":
    """Raises TangramError if it cannot be read."""
    from tangram.replay.timeline import Collector

    collector = Collector(await source.state())
    async for batch in source.batches():
        for record in batch:
            collector.add(record)
    return collector.complete()


def write_timeline(timeline: "Timeline", path: Path, other: "Timeline | None" = None) -> None:
    """Writes the page, with another course beside it if there is one. Raises ConfigError."""
    from tangram.replay.timeline import beside, render

    page = render(timeline) if other is None else beside([("recorded", timeline), ("otherwise", other)])
    write_whole([page], path, "--timeline")


def write_whole(pieces: Iterable[str], path: Path, option: str) -> None:
    """Writes a file, whole or not at all. Raises ConfigError."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(pieces)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None
