"""`tangram run -- CMD`: one action from the shell, its output streamed.

Exits as `timeout` and `docker run` do: the program's own code; 124 timed_out; 137 out_of_memory; 125 any other outcome.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tangram import roles
from tangram.cli import common
from tangram.errors import ConfigError, SessionError
from tangram.outcomes import Outcome

if TYPE_CHECKING:
    from tangram.producers.options import SessionRunOptions
    from tangram.producers.result import Result

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EXIT_OF = {Outcome.TIMED_OUT: 124, Outcome.OUT_OF_MEMORY: 137}


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("run", help="run one action")
    common.add_nats(command)
    command.add_argument("--task", default="shell")
    command.add_argument("--units", default="1", metavar="N|A-B", help="cores: a number, a fraction, a range or a list 1,2,4")
    command.add_argument("--memory", metavar="SIZE", help='such as "2GiB" (default: no limit)')
    command.add_argument(
        "--take", action="append", default=[], metavar="QUOTA[=TOKENS]", help="name a quota of the scheduler's; repeatable"
    )
    command.add_argument("--image", default="", help="of its sandbox, where executors run containers")
    command.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of its run time")
    command.add_argument("--deadline", type=float, default=3600.0, metavar="S", help="to wait for its start")
    command.add_argument("-i", "--stdin", action="store_true", help="pass on standard input, read to its end first")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of its output")
    command.add_argument("argv", nargs="+", metavar="CMD", help="the program and its arguments, after --")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


def parse_units(text: str) -> "int | float | tuple[int, int] | set[int]":
    """Raises ConfigError."""
    try:
        if "," in text:
            return {int(part) for part in text.split(",")}
        if "-" in text:
            low, _, high = text.partition("-")
            return int(low), int(high)
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"--units {text}: must be a number, a fraction, a range such as 1-8, or a list such as 1,2,4") from None


def _quotas(texts: list[str]) -> dict[str, int]:
    """Raises ConfigError."""
    found = {}
    for text in texts:
        name, _, tokens = text.partition("=")
        if not (tokens or "0").isdecimal() or not (tokens or "0").isascii():
            raise ConfigError(f"--take {text}: must be QUOTA or QUOTA=TOKENS")
        found[name] = int(tokens or "0")
    return found


async def _run(given: argparse.Namespace) -> int:
    from tangram.producers.client import Client

    printed = {"stdout": 0, "stderr": 0}
    gone: set[str] = set()

    def show(stream: str, data: bytes) -> None:
        printed[stream] += len(data)
        if stream not in gone:
            out = sys.stdout if stream == "stdout" else sys.stderr
            try:
                out.buffer.write(data)
                out.flush()
            except BrokenPipeError:  # whoever read it has gone, as `| head` does; the action goes on
                gone.add(stream)
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())

    units = parse_units(given.units)
    if not given.argv[0]:
        raise ConfigError("CMD: must name a program")
    async with Client(given.nats, task=given.task) as client:
        running = asyncio.current_task()
        assert running is not None
        roles.on_signals(running.cancel, running.cancel)
        try:
            options: SessionRunOptions = {
                "units": units,
                "timeout": given.timeout,
                "deadline": given.deadline,
                "on_output": None if given.json else show,
                "quotas": _quotas(given.take),
                "stdin": await _standard_input() if given.stdin else b"",
            }
            if given.image:
                async with client.session(image=given.image, memory=given.memory, deadline=given.deadline) as box:
                    result = await box.run(given.argv, **options)
            else:
                result = await client.run(given.argv, memory=given.memory, **options)
        except SessionError as error:
            result = error.result
        except asyncio.CancelledError:
            return 130  # leaving the block sends the action's cancel
    if given.json:
        print(json.dumps(as_json(result)))
    else:
        _show_rest(result, printed, show)
        if result.outcome not in (Outcome.OK, Outcome.FAILED):
            print(f"tangram: {result}", file=sys.stderr)
    return exit_code(result)


async def _standard_input() -> bytes:
    """Read in a thread that nobody has to wait for, so that the wait for its end can be interrupted."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes] = loop.create_future()

    def tell(data: bytes) -> None:
        if not done.done():
            done.set_result(data)

    def read() -> None:
        data = sys.stdin.buffer.read()
        with contextlib.suppress(RuntimeError):  # the loop is closed: interrupted
            loop.call_soon_threadsafe(tell, data)

    threading.Thread(target=read, daemon=True).start()
    return await done


def _show_rest(result: "Result", printed: dict[str, int], show: Callable[[str, bytes], None]) -> None:
    """Live output is best effort; the result has what counts."""
    for stream, kept, total in (
        ("stdout", result.stdout, result.stdout_bytes),
        ("stderr", result.stderr, result.stderr_bytes),
    ):
        if printed[stream] < total and printed[stream] <= len(kept):
            show(stream, kept[printed[stream] :])


def exit_code(result: "Result") -> int:
    if result.outcome in (Outcome.OK, Outcome.FAILED) and result.exit_code is not None:
        return result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
    return _EXIT_OF.get(result.outcome, 125)


def as_json(result: "Result") -> dict[str, object]:
    return {
        "id": result.id,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "detail": result.detail,
        "exit_code": result.exit_code,
        "stdout": result.stdout.decode("utf-8", "backslashreplace"),
        "stderr": result.stderr.decode("utf-8", "backslashreplace"),
        "units": result.units,
        "executor": result.executor,
        "attempt": result.attempt,
        "act_s": result.act_s,
        "queued_s": result.queued_s,
        "startup_s": result.startup_s,
        "run_s": result.run_s,
        "overhead_s": result.overhead_s,
        "cpu_s": result.cpu_s,
        "memory_peak_bytes": result.memory_peak_bytes,
    }
