"""A host without descriptors: nothing is begun, and that is said; what runs ends as ever."""

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator

import pytest

from tangram import limits
from tangram.executors.backend import Grant, SessionKey
from tangram.executors.cpu.action import failed
from tangram.messages import SessionOpen
from tangram.outcomes import Outcome

from .conftest import Lab, eventually


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Only so many more may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken = [os.dup(2) for _ in range(highest)]  # so that the lowest free one is above all that are open
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("left", [2, limits.DESCRIPTORS_RESERVED - 2])
async def test_without_descriptors_nothing_is_begun(lab: Lab, left: int) -> None:
    with descriptors_left(left):
        ended = await lab.sh(f"touch {lab.folder}/witness")
        opened = await lab.backend.open(SessionKey("task", "client", 99), SessionOpen(), Grant())
    for refused in (ended, opened):
        assert (refused.outcome, refused.not_begun) == (Outcome.ERROR, True)
        assert "descriptors" in refused.detail
    assert not (lab.folder / "witness").exists()
    again = await lab.sh("echo begun")
    assert (again.outcome, again.output.stdout, again.not_begun) == (Outcome.OK, b"begun\n", False)
    assert (await lab.backend.open(SessionKey("task", "client", 99), SessionOpen(), Grant())).outcome is Outcome.OK


async def test_what_runs_already_ends_as_ever(lab: Lab) -> None:
    running = lab.sh("sleep 0.5; echo done; exit 3")
    killed = lab.sh("sleep 60 & sleep 60", timeout_ms=700)
    await eventually(lambda: len(lab.survivors()) >= 2)
    with descriptors_left(limits.DESCRIPTORS_RESERVED - 2):
        ended, timed_out = await asyncio.gather(running, killed)
    assert (ended.outcome, ended.exit_code, ended.output.stdout) == (Outcome.FAILED, 3, b"done\n")
    assert timed_out.outcome is Outcome.TIMED_OUT


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN])
def test_what_may_have_begun_is_never_given_back(number: int) -> None:
    error = OSError(number, "none left")
    assert failed(error, begun=False).not_begun
    assert not failed(error).not_begun


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.E2BIG, errno.ENOENT, errno.ECHILD])
def test_other_errors_are_answers(number: int) -> None:
    assert not failed(OSError(number, "x"), begun=False).not_begun
