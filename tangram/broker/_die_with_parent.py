"""Run as a script: PARENT_PID COMMAND...: becomes COMMAND, which the kernel kills when the parent ends (Linux)."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above: no signal will come
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
