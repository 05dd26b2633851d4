"""Starts a program inside its limits.

A gate (/bin/sh, builtins only) first enters the control groups and the folder, then becomes the program. So no user
code runs outside its groups, a program that cannot be started fails as in a shell (126, 127, text on stderr), and the
end of the status pipe tells when the program proper began.
"""

import contextlib
import errno
import fcntl
import os
import resource
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from tangram import limits

STATUS_FD: Final = 9
"""A single digit, because that is all a POSIX shell's redirection takes."""
_SIGNALS: Final = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}


class Child(Struct, frozen=True, kw_only=True):
    """A started program and the descriptors that its supervisor owns. `status` gives the gate's error, or nothing, and
    ends when the program starts. pid is also the id of its process group and session."""

    pid: int
    pidfd: int
    stdout: int
    stderr: int
    status: int

    def discard(self) -> None:
        """Ends it with nobody to supervise it."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self.pidfd, self.stdout, self.stderr, self.status):
            os.close(fd)


def gate(entries: Sequence[Path]) -> str:
    """The gate's script; its arguments are the folder and then the program's."""
    enter = "".join(f"echo 0 >{shlex.quote(str(entry))} && " for entry in entries)
    place = f"{{ {enter}:; }} 2>&{STATUS_FD} || exit 125; " if entries else ""
    return f'{place}cd -- "$1" || exit 126; shift; exec "$@" {STATUS_FD}>&-'


def check_descriptors() -> None:
    """Raises OSError while there are too few to start a program, and to end those that run: what cannot be read for want of a
    descriptor looks as if it were not there."""
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # the lowest that is free
    os.close(fd)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fd >= most - limits.DESCRIPTORS_RESERVED:
        raise OSError(errno.EMFILE, f"{fd} of the {most} descriptors that this executor may have are in use")


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    stdin: bytes,
    entries: Sequence[Path],
    affinity: Sequence[int],
) -> Child:
    """Starts `argv` in `folder` with exactly `env`, in a new process session, inside the groups of `entries`
    (cgroup.procs files) and on the cores of `affinity`, if any. Blocks for about a millisecond.

    Raises OSError when the system has no resources for it.
    """
    with contextlib.ExitStack() as parents, contextlib.ExitStack() as children:
        stdout = _pipe(parents, children)
        stderr = _pipe(parents, children)
        status = _pipe(parents, children)
        source = _input(stdin, children)
        # The status pipe comes last: its number may be that of one of the others' sources only above STATUS_FD.
        actions = [
            (os.POSIX_SPAWN_DUP2, source, 0),
            (os.POSIX_SPAWN_DUP2, stdout[1], 1),
            (os.POSIX_SPAWN_DUP2, stderr[1], 2),
            (os.POSIX_SPAWN_DUP2, status[1], STATUS_FD),
        ]
        words = [b"sh", b"-c", gate(entries).encode(), b"sh", os.fsencode(folder), *_words(argv, env)]
        names = {name.encode(): value.encode() for name, value in env.items()}
        with _on_cores(affinity):
            pid = os.posix_spawn("/bin/sh", words, names, file_actions=actions, setsid=True, setsigdef=_SIGNALS, setsigmask=[])
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            # Not the error itself: that one would say that nothing was started.
            raise OSError(errno.ECHILD, f"started, and ended because it could not be watched: {error}") from None
        parents.pop_all()
        return Child(pid=pid, pidfd=pidfd, stdout=stdout[0], stderr=stderr[0], status=status[0])


def seal_descriptors() -> None:
    """Keeps what this process itself inherited (sockets, a parent's pipes) from the programs it starts. Descriptors
    that Python opens are never inherited."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)


def _words(argv: Sequence[str], env: Mapping[str, str]) -> list[bytes]:
    """The arguments, with a name that shells would take for an option of `exec` made a path."""
    name = argv[0]
    if name.startswith("-"):
        name = f"./{name}" if "/" in name else shutil.which(name, path=env.get("PATH", "")) or f"./{name}"
    return [name.encode(), *(word.encode() for word in argv[1:])]


def _high(fd: int) -> int:
    """The same file at a number above all those the gate uses."""
    if fd > STATUS_FD:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STATUS_FD + 1)
    finally:
        os.close(fd)


def _pipe(parents: contextlib.ExitStack, children: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    parents.callback(os.close, reading)
    try:
        writing = _high(writing)
    finally:
        children.callback(os.close, writing)
    return reading, writing


def _input(data: bytes, children: contextlib.ExitStack) -> int:
    """Standard input as a file in memory: nothing has to be fed while the program runs, so one that does not read its
    input is no special case."""
    fd = _high(os.memfd_create("stdin") if data else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    children.callback(os.close, fd)
    if data:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """The calling thread, and what it starts, only on these cores."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
