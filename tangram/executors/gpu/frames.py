"""How an executor and its workers talk: 4 bytes of length (big endian) and MessagePack. A request is [verb, argument]; an answer
[true, value], or [false, kind of failure (`places.Failed`), words]."""

import socket
import struct
from typing import Any, Final

import msgspec

LENGTH: Final = struct.Struct(">I")
FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
"""More than a payload that travels as a blob has."""


def read(own: socket.socket) -> Any:
    """None at the end."""
    head = _exactly(own, LENGTH.size)
    return None if head is None else msgspec.msgpack.decode(_exactly(own, LENGTH.unpack(head)[0]) or b"")


def write(own: socket.socket, value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    own.sendall(LENGTH.pack(len(data)) + data)


def _exactly(own: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = own.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
