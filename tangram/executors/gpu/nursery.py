"""Where workers are born: a process that imports torch once and forks one worker for each socket that it is sent.

It never touches a device itself, so every fork begins with a clean one. It ends when the executor does, and its workers end
with it: the kernel kills them.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any, Final

MESSAGE_BYTES_MAX: Final = 64 * 1024
_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """This process is killed when the thread that has forked it is gone."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """argv: the number of an inherited socket. Each message on it is a worker's plan, as JSON, with the socket it serves."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor says when
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; whoever holds the other end of its socket sees its end
    sys.path.insert(0, os.getcwd())
    import torch  # noqa: F401, PLC0415  # once, for all

    with socket.socket(fileno=int(sys.argv[1])) as orders:
        while True:
            data, fds, _, _ = socket.recv_fds(orders, MESSAGE_BYTES_MAX, 1)
            if not data:
                return
            if os.fork() == 0:
                orders.close()
                _work(json.loads(data), fds[0])
            for fd in fds:
                os.close(fd)


def _work(plan: dict[str, Any], fd: int) -> None:
    from tangram.executors.gpu.worker import serve  # noqa: PLC0415  # behind torch

    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with socket.socket(fileno=fd) as own:
            serve(plan, own)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
