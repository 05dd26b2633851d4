"""`tangram COMMAND`: the parser, and the one place where exceptions become exit codes.

Exit codes: 0 done, 1 the job failed, 2 usage or configuration, 3 the broker or a back end cannot be reached.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from tangram.errors import BrokerError, ConfigError, InvalidRequest, TangramError
from tangram.version import __version__

FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="tangram", description="External resources for agentic RL, allocated per action.")
    top.add_argument("--version", action="version", version=f"tangram {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Imported here, so that `tangram --version` and the roles do not load what they do not use.
    from tangram.cli import (
        bench,
        demo,
        doctor,
        executor,
        models,
        quota,
        replay,
        run,
        scheduler,
        simulate,
        status,
        streams,
        up,
        why,
    )

    for module in (demo, up, run, status, quota, models, replay, why, doctor, simulate, streams, scheduler, executor, bench):
        module.add_to(commands)
    return top


def _open_standard_descriptors() -> None:
    """A caller may have closed some of them; the next file that is opened would then stand for standard input or output."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode))


def main(arguments: Sequence[str] | None = None) -> int:
    _open_standard_descriptors()
    given = parser().parse_args(arguments)
    try:
        code: int = given.handler(given)
        return code
    except (ConfigError, InvalidRequest) as error:
        print(f"tangram: {error}", file=sys.stderr)
        return USAGE
    except BrokerError as error:
        print(f"tangram: {error}", file=sys.stderr)
        return UNREACHABLE
    except TangramError as error:
        print(f"tangram: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # Whoever read our output has gone, as `| head` does. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(f"tangram: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
