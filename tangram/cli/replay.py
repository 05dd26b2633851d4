"""`tangram replay --timeline FILE`: a recorded log, as a page that shows what ran where, when, and why it waited."""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tangram import roles, subjects
from tangram.cli import common
from tangram.errors import ApiError, ConfigError, TangramError

if TYPE_CHECKING:
    from tangram.broker import Broker
    from tangram.replay.timeline import Timeline

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("replay", help="a recorded log: write its timeline as one HTML file")
    common.add_nats(command)
    command.add_argument("--timeline", type=Path, required=True, metavar="FILE", help="the HTML file to write")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url

    require_writable(given.timeline)
    broker = await Broker.connect(broker_url(given.nats), name="tangram replay")
    try:
        timeline = await read_timeline(broker)
    finally:
        await broker.close()
    write_timeline(timeline, given.timeline)
    seconds = timeline.end_ns / 1e9
    print(f"{given.timeline}: {timeline.actions} actions on {len(timeline.hosts)} host(s) in {seconds:.1f} s of log time")
    return 0


async def read_timeline(broker: "Broker") -> "Timeline":
    """The timeline of what is stored now. Raises TangramError if there is no log, or none that can be folded."""
    from tangram.broker import read_log, stream_state
    from tangram.replay.timeline import Collector
    from tangram.scheduler.checkpoints import restore
    from tangram.scheduler.fold import Record

    try:
        stored = await stream_state(broker, subjects.STREAM)
    except ApiError as error:
        raise TangramError(f"the broker has no log ({error.description}); tangram streams apply makes one") from None
    if not stored.messages:
        raise TangramError("the log is empty: nothing has run on this broker yet")
    is_whole = stored.messages == stored.last_seq
    restored = None if is_whole else await restore(broker, oldest=True)
    if restored is None and not is_whole:
        raise TangramError(f"the log begins at {stored.first_seq}, and no checkpoint leads up to it: it cannot be folded")
    collector = Collector(None if restored is None else restored.state)
    while collector.seq < stored.last_seq:
        messages = await read_log(broker, subjects.STREAM, collector.seq + 1)
        if not messages:
            break
        for message in messages:
            collector.add(Record(message.seq, message.stamp_ns, message.subject, message.data))
    return collector.complete()


def require_writable(path: Path) -> None:
    """Raises ConfigError before a long log is read for nothing."""
    if path.is_dir():
        raise ConfigError(f"--timeline {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--timeline {path}: there is no folder {path.parent}")


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
