"""What a program writes: read while it runs, its head and tail kept, all of it counted, nothing decoded."""

import array
import asyncio
import fcntl
import os
import termios
from collections.abc import Callable
from typing import Final

CHUNK_BYTES: Final = 65_536
"""A pipe's size on Linux: one read empties it."""
SINK_PAUSE_S: Final = 0.05
"""Output that nobody keeps is read at most once in this time, so that a noisy background process costs little."""


class HeadTail:
    """The first and last bytes of a stream, at most `bytes_max` in all; memory stays below twice that."""

    def __init__(self, bytes_max: int) -> None:
        self._head_max = bytes_max // 2
        self._tail_max = bytes_max - self._head_max
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        free = self._head_max - len(self._head)
        if free > 0:
            self._head += data[:free]
            data = data[free:]
        if data:
            self._tail += data[-self._tail_max :]
            # Trimmed only at twice its size, so that each byte is moved once and not at every chunk.
            if len(self._tail) > 2 * self._tail_max:
                del self._tail[: -self._tail_max]

    def value(self) -> bytes:
        """What is kept. Where something was left out, the cut splits no UTF-8 character."""
        if self.total <= self._head_max + self._tail_max:
            return bytes(self._head + self._tail)
        return whole_end(bytes(self._head)) + whole_start(bytes(self._tail[-self._tail_max :]))


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

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, bytes_max: int, on_data: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._on_data = on_data
        self._pause: asyncio.TimerHandle | None = None
        self.kept = HeadTail(bytes_max)
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
