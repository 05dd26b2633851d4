"""Running one role as a process: its loop, its signals, its readiness, its end with its parent."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

READY_FD: Final = "TANGRAM_READY_FD"
"""Environment: a descriptor to which the process writes one line when it is ready."""
PARENT: Final = "TANGRAM_PARENT"
"""Environment: the process that started this one, and with which it has to end."""
_PR_SET_PDEATHSIG: Final = 1


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` on uvloop where it is installed, else on asyncio's loop; returns its exit code."""
    try:
        import uvloop  # noqa: PLC0415  # optional

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
    )


def end_with_parent() -> None:
    """Asks the kernel for SIGINT when the parent that is named in the environment ends (Linux; elsewhere it is up to it)."""
    parent = os.environ.pop(PARENT, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the call above
        sys.exit(1)


def say_ready() -> None:
    number = os.environ.pop(READY_FD, "")
    if number:
        os.write(int(number), b"ready\n")
        os.close(int(number))


def on_signals(soft: Callable[[], object], hard: Callable[[], object]) -> None:
    """SIGTERM: end in order. SIGINT, or a second SIGTERM: end now."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def terminate() -> None:
        seen.append(1)
        (soft if len(seen) == 1 else hard)()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, hard)
