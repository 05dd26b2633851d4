"""What a program writes: read while it runs, its head and tail kept, all of it counted, nothing decoded."""

import array
import asyncio
import fcntl
import os
import termios
from collections import deque
from collections.abc import Callable
from typing import Final

from tangram import limits

CHUNK_BYTES: Final = 65_536
"""A pipe's size on Linux: one read empties it."""
SINK_PAUSE_S: Final = 0.05
"""Output that nobody keeps is read at most once in this time, so that a noisy background process costs little."""


class Held:
    """Bytes of output that a back end holds for all its programs, beyond what each may have anyway."""

    def __init__(self, bytes_max: int = limits.OUTPUT_HELD_BYTES_MAX) -> None:
        self.free = bytes_max


class HeadTail:
    """The first and last bytes of a stream, at most `bytes_max` in all; and not much more memory.

    What is kept beyond OUTPUT_BYTES_MAX is taken from `held`, until `close`. Where that is used up the stream keeps as its head
    what it has, and of the rest its share of OUTPUT_BYTES_MAX.
    """

    def __init__(self, bytes_max: int, held: Held) -> None:
        self._head_max = bytes_max // 2
        self._tail_max = bytes_max - self._head_max
        self._head = bytearray()
        self._tail: deque[bytearray] = deque()
        self._tail_bytes = 0
        self._held, self._taken = held, 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self._take(len(data))
        free = self._head_max - len(self._head)
        if free > 0:
            self._head += data[:free]
            data = data[free:]
        if not data:
            return
        # In blocks, so that neither a byte is moved at every chunk nor many small chunks take more than their bytes.
        if self._tail and len(self._tail[-1]) + len(data) <= CHUNK_BYTES:
            self._tail[-1] += data
        else:
            self._tail.append(bytearray(data))
        self._tail_bytes += len(data)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())

    def _take(self, more: int) -> None:
        """Takes from `held` what the next bytes need, or lowers what is kept."""
        needed = min(len(self._head) + self._tail_bytes + more, self._head_max + self._tail_max) - limits.OUTPUT_BYTES_MAX
        if needed <= self._taken:
            return
        if needed - self._taken <= self._held.free:
            self._held.free -= needed - self._taken
            self._taken = needed
        else:
            self._head_max = min(self._head_max, max(len(self._head), limits.OUTPUT_BYTES_MAX // 2))
            self._tail_max = min(self._tail_max, max(self._tail_bytes, limits.OUTPUT_BYTES_MAX // 2))

    def value(self) -> bytes:
        """What is kept. Where something was left out, the cut splits no UTF-8 character."""
        tail = b"".join(self._tail)[-self._tail_max :] if self._tail_max else b""
        if self.total <= len(self._head) + len(tail):
            return bytes(self._head) + tail
        return whole_end(bytes(self._head)) + whole_start(tail)

    def close(self) -> None:
        """Forgets what is kept and gives back what was taken. Idempotent."""
        self._head, self._tail_bytes = bytearray(), 0
        self._tail.clear()
        self._held.free += self._taken
        self._taken = 0


def whole_end(data: bytes) -> bytes:
    """`data` without the first bytes of a character that its end cuts off."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if 0xF0 <= byte < 0xF8 else 3 if 0xE0 <= byte < 0xF0 else 2 if 0xC2 <= byte < 0xE0 else 1
        return data[:-back] if back < length else data
    return data


def whole_start(data: bytes) -> bytes:
    """`data` without the last bytes of a character that its start cuts off."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def waiting_bytes(fd: int) -> int:
    """How much can be read from a pipe now."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


class Reader:
    """Reads one pipe of a program into a HeadTail, on the event loop's readiness callbacks. Owns the descriptor.

    on_data is called with each chunk after it was kept.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, kept: HeadTail, on_data: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._on_data = on_data
        self._pause: asyncio.TimerHandle | None = None
        self.kept = kept
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._ready)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def _read(self, size: int) -> int:
        """Reads once; -1 when nothing is there now. Closes at the end of the stream."""
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return -1
        if data:
            self.kept.add(data)
            self._on_data(data)
        else:
            self.close()
        return len(data)

    def _ready(self) -> None:
        self._read(CHUNK_BYTES)

    def drain(self) -> None:
        """Reads what is in the pipe at this moment, and not what a background process goes on writing."""
        if self.closed:
            return
        left = waiting_bytes(self._fd)
        while left > 0 and not self.closed:
            size = self._read(min(left, CHUNK_BYTES))
            if size <= 0:
                return
            left -= size

    def sink(self, on_end: Callable[["Reader"], None]) -> None:
        """From now on reads to nowhere, so that whoever still holds the other end neither blocks nor gets SIGPIPE."""
        if self.closed:
            on_end(self)
            return
        self._loop.remove_reader(self._fd)
        self._loop.add_reader(self._fd, self._discard, on_end)

    def _discard(self, on_end: Callable[["Reader"], None]) -> None:
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
            on_end(self)
            return
        self._loop.remove_reader(self._fd)
        self._pause = self._loop.call_later(SINK_PAUSE_S, self._resume, on_end)

    def _resume(self, on_end: Callable[["Reader"], None]) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._discard, on_end)

    def close(self) -> None:
        """Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
