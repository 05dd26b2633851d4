"""The end of a process that is not our child, from the kernel."""

import array
import asyncio
import fcntl
import os
import time
from typing import Final

_GET_INFO: Final = 0xC000FF0B | (64 << 16)
"""PIDFD_GET_INFO for the first version of struct pidfd_info, which has 64 bytes."""
_INFO_EXIT: Final = 1 << 3
_EXIT_CODE: Final = 60
_WAIT_S: Final = 0.25


async def wait_exit_code(pidfd: int) -> int | None:
    """The exit code of a process that has ended, -N if signal N ended it; None if the kernel (before 6.15) does not
    tell, or its parent does not reap it soon."""
    pause = 0.0005
    end = time.monotonic() + _WAIT_S
    info = array.array("Q", bytes(64))
    while time.monotonic() < end:
        info[0] = _INFO_EXIT
        try:
            fcntl.ioctl(pidfd, _GET_INFO, info)
            if info[0] & _INFO_EXIT:
                status = int.from_bytes(info.tobytes()[_EXIT_CODE : _EXIT_CODE + 4], "little", signed=True)
                return os.waitstatus_to_exitcode(status)
        except ProcessLookupError:
            # The call is known; the process is not reaped yet.
            pass
        except OSError:
            return None
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.01)
    return None
