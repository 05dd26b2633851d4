"""`tangram replay --timeline FILE`: a recorded log, as a page that shows what ran where, when, and why it waited."""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.replay.sources import Source
    from tangram.replay.timeline import Timeline

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("replay", help="a recorded log: write its timeline as one HTML file")
    common.add_recording(command)
    command.add_argument("--timeline", type=Path, required=True, metavar="FILE", help="the HTML file to write")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    common.require_writable(given.timeline, "--timeline")
    async with common.recording(given) as source:
        timeline = await read_timeline(source)
    write_timeline(timeline, given.timeline)
    seconds = (timeline.end_ns - timeline.begin_ns) / 1e9
    print(f"{given.timeline}: {timeline.actions} actions on {len(timeline.hosts)} host(s) in {seconds:.1f} s of log time")
    return 0


async def read_timeline(source: "Source") -> "Timeline":
    """Raises TangramError if it cannot be read."""
    from tangram.replay.timeline import Collector

    collector = Collector(await source.state())
    async for batch in source.batches():
        for record in batch:
            collector.add(record)
    return collector.complete()


def write_timeline(timeline: "Timeline", path: Path) -> None:
    """Writes the page, whole or not at all. Raises ConfigError."""
    from tangram.replay.timeline import render

    page = render(timeline)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(page)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"--timeline {path}: {error.strerror}") from None
