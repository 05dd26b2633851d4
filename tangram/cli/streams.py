"""`tangram streams apply|diff|show|export|import`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram import roles
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.replay.logfile import LogFile
    from tangram.replay.sources import Source

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("streams", help="the declared streams against a server")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("apply", "make the server's streams as declared; changes nothing if they are"),
        ("diff", "say what apply would change; exit code 1 if anything"),
        ("show", "say what is stored"),
    ):
        action = actions.add_parser(name, help=text)
        common.add_nats(action)
        if name == "apply":
            action.add_argument("--force", action="store_true", help="also where it destroys something")
            action.add_argument("--replicas", type=common.positive, default=None, metavar="N")
            action.add_argument(
                "--max-bytes",
                type=_max_bytes,
                action="append",
                default=[],
                metavar="STREAM=SIZE",
                help="in place of what is declared, such as TANGRAM_BLOBS=20GiB; may be given for several",
            )
        else:
            action.add_argument("--json", action="store_true")
        action.set_defaults(handler=handle)
    export = actions.add_parser("export", help="the log, with the checkpoint it starts from, into one file")
    export.add_argument("file", type=Path, metavar="FILE")
    common.add_nats(export)
    common.add_range(export)
    export.add_argument(
        "--without-payloads", action="store_true", help="without what programs were given and wrote; still replays"
    )
    export.add_argument("--task", metavar="T", help="only this task's actions, as a report (JSON lines) that cannot be verified")
    import_ = actions.add_parser("import", help="such a file into an empty broker")
    import_.add_argument("file", type=Path, metavar="FILE")
    import_.add_argument("--nats", metavar="URL", required=True, help="the broker: a new one, to be thrown away")
    import_.add_argument("--partial", action="store_true", help="of a damaged file what can be read")
    for action in (export, import_):
        action.add_argument("--json", action="store_true")
        action.set_defaults(handler=handle)


def _max_bytes(text: str) -> tuple[str, int]:
    from tangram.broker.declared import size_bytes

    name, _, size = text.partition("=")
    try:
        return name, size_bytes(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be STREAM=SIZE, such as TANGRAM=8GiB: {error}") from None


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    if given.action == "export":
        common.require_writable(given.file, "export")
    if given.action == "import":
        _log_file(given)  # before anybody is asked
    from tangram.broker import Broker
    from tangram.config import broker_url

    broker = await Broker.connect(broker_url(given.nats), name="tangram streams")
    try:
        return await _ACTIONS[given.action](broker, given)
    finally:
        await broker.close()


async def _apply(broker: Any, given: argparse.Namespace) -> int:
    from tangram.broker import DestructiveChange, apply

    try:
        done = await apply(broker, force=given.force, replicas=given.replicas, max_bytes=dict(given.max_bytes))
    except DestructiveChange as error:
        print(f"tangram: {error}", file=sys.stderr)
        return 1
    for line in done:
        print(line)
    return 0


async def _diff(broker: Any, given: argparse.Namespace) -> int:
    from tangram.broker import diff

    differences = await diff(broker)
    if given.json:
        print(json.dumps([d._asdict() for d in differences], default=str))
    else:
        for d in differences:
            print(f"{d.stream} {d.field}: {d.actual!r} -> {d.declared!r}{'  (destructive)' if d.destructive else ''}")
        if not differences:
            print("no differences")
    return 1 if differences else 0


async def _show(broker: Any, given: argparse.Namespace) -> int:
    from tangram.broker import ApiError, load_declared, stream_state

    found: dict[str, object] = {}
    for declared in load_declared():
        try:
            state = await stream_state(broker, declared.name)
            found[declared.name] = state._asdict()
        except ApiError:
            found[declared.name] = None
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"{'stream':22} {'messages':>10} {'MiB':>8} {'first':>10} {'last':>10}")
    for name, each in found.items():
        if isinstance(each, dict):
            mib = each["bytes"] / 1048576
            print(f"{name:22} {each['messages']:>10} {mib:>8.1f} {each['first_seq']:>10} {each['last_seq']:>10}")
        else:
            print(f"{name:22} {'absent: tangram streams apply':>10}")
    return 0


async def _export(broker: Any, given: argparse.Namespace) -> int:
    from tangram.replay.sources import BrokerSource
    from tangram.replay.transfer import export

    source = await BrokerSource.open(broker, from_ns=given.from_, until_ns=given.until)
    if given.task is not None:
        return await _report(source, given)
    done = await export(source, given.file, without_payloads=given.without_payloads)
    size = given.file.stat().st_size
    if given.json:
        print(json.dumps({"file": str(given.file), "bytes": size, **done._asdict()}))
    else:
        print(f"{given.file}: {_what(done)}, {size / 1048576:.1f} MiB")
    return 0


async def _report(source: "Source", given: argparse.Namespace) -> int:
    from tangram.cli.replay import read_timeline, write_whole
    from tangram.replay.taskreport import lines

    timeline = await read_timeline(source)
    attempts = sum(each.task == given.task for each in timeline.attempts)
    if not attempts:
        raise ConfigError(f"--task {given.task}: has no action in this log")
    write_whole((line + "\n" for line in lines(timeline, given.task)), given.file, "export")
    if given.json:
        print(json.dumps({"file": str(given.file), "task": given.task, "attempts": attempts}))
    else:
        print(f"{given.file}: a report of {attempts} attempts at actions of {given.task}; it cannot be verified")
    return 0


async def _import(broker: Any, given: argparse.Namespace) -> int:
    from tangram.replay.transfer import import_

    file = _log_file(given)
    done = await import_(broker, file)
    if file.problem:
        print(f"tangram: only a part: {file.problem}", file=sys.stderr)
    if given.json:
        print(json.dumps({"file": str(given.file), **done._asdict()}))
    else:
        print(f"{broker.url}: {_what(done)}")
    return 0


def _log_file(given: argparse.Namespace) -> "LogFile":
    from tangram.replay.logfile import LogFile

    return LogFile(given.file, partial=given.partial)


def _what(done: Any) -> str:
    begin = f"from the checkpoint at {done.checkpoint_seq}" if done.checkpoint_seq else "from the log's beginning"
    return f"{done.messages} messages {begin}, up to {done.last_seq}"


_ACTIONS = {"apply": _apply, "diff": _diff, "show": _show, "export": _export, "import": _import}
