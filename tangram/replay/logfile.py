"""A log in a file: the state it starts from, the payloads that were open then, and every message since.

    {"tangram_log": 1, ...}\\n          one line of JSON (`Header`), not compressed
    zlib( record record ... end )      a record: its length (4 bytes, big endian), then MessagePack

A record is an array that begins with its kind: ["state", part], ["payloads", CheckpointPayloads], ["message", sequence, stamp in
ns, subject, data] or, last, ["end", messages, sha256 of every record before it]. Both ways only a few mebibytes are in memory.
"""

import contextlib
import hashlib
import os
import platform
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from tangram import limits
from tangram import messages as m
from tangram.errors import ConfigError, UnreadableLog
from tangram.scheduler.checkpoint import UnreadableCheckpoint, dump, load
from tangram.scheduler.fold import Record
from tangram.scheduler.state import State
from tangram.version import __version__

FORMAT: Final = 1
"""Rises when an older version could not read what is written."""
_BEGIN: Final = b'{"tangram_log":'
_HEADER_BYTES_MAX: Final = 64 * 1024
_RECORD_BYTES_MAX: Final = 8 * 1024 * 1024
"""A message of the log has a mebibyte at most; what claims more is damaged."""
_CHUNK_BYTES: Final = 256 * 1024
_UNPACKED_BYTES: Final = 1024 * 1024
_LENGTH: Final = struct.Struct(">I")
_LEVEL: Final = 6


class Header(msgspec.Struct, kw_only=True):
    """checkpoint_seq: of the last message that is in the state; 0 if the file begins with the log. digest: of that state."""

    tangram_log: int = FORMAT
    checkpoint_seq: int = 0
    digest: str = ""
    without_payloads: bool = False
    code_version: str = __version__
    python_version: str = msgspec.field(default_factory=platform.python_version)


class _Head(msgspec.Struct):
    tangram_log: int


class _State(msgspec.Struct, array_like=True, tag="state"):
    part: bytes


class _Payloads(msgspec.Struct, array_like=True, tag="payloads"):
    data: bytes


class _Message(msgspec.Struct, array_like=True, tag="message", gc=False):
    seq: int
    stamp_ns: int
    subject: str
    data: bytes


class _End(msgspec.Struct, array_like=True, tag="end"):
    messages: int
    sha256: bytes


_Entry = _State | _Payloads | _Message | _End
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Entry).decode


class LogWriter:
    """Writes a file, whole or not at all: a context manager. Raises ConfigError, which names the file."""

    def __init__(self, path: Path, state: State | None, *, without_payloads: bool = False) -> None:
        self.messages = 0
        self._path = path
        self._sha256, self._zlib = hashlib.sha256(), zlib.compressobj(_LEVEL)
        self._pending = bytearray()
        try:
            descriptor, self._temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        self._file: IO[bytes] = os.fdopen(descriptor, "wb")
        header = Header(without_payloads=without_payloads)
        if state is not None:
            header.checkpoint_seq, header.digest = state.seq, state.digest.hex()
        try:
            self._file.write(msgspec.json.encode(header) + b"\n")
            data = dump(state) if state is not None else b""
            for at in range(0, len(data), limits.ENVELOPE_BYTES_MAX):
                self._put(_State(data[at : at + limits.ENVELOPE_BYTES_MAX]))
        except BaseException:
            self.__exit__(Exception)
            raise

    def payloads(self, part: m.CheckpointPayloads) -> None:
        """Of actions that are open in the state. Before the first message."""
        self._put(_Payloads(m.encode(part)))

    def message(self, record: Record) -> None:
        self._put(_Message(*record))
        self.messages += 1

    def _put(self, entry: _Entry) -> None:
        raw = _encode(entry)
        self._sha256.update(raw)
        self._write(raw)

    def _write(self, raw: bytes) -> None:
        self._pending += _LENGTH.pack(len(raw)) + raw
        if len(self._pending) >= _CHUNK_BYTES:
            self._file.write(self._zlib.compress(self._pending))
            self._pending.clear()

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._write(_encode(_End(self.messages, self._sha256.digest())))
                self._file.write(self._zlib.compress(self._pending) + self._zlib.flush())
                self._file.close()
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(self._temporary, 0o666 & ~umask)
                os.replace(self._temporary, self._path)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


class LogFile:
    """An exported log; each of its parts can be read again and again. What is wrong raises UnreadableLog.

    partial: what is wrong behind the state ends the reading instead, and `problem` says so afterwards.
    """

    def __init__(self, path: Path, *, partial: bool = False) -> None:
        self.path, self.partial = path, partial
        self.problem = ""
        self._is_cut = False
        with self._open() as file:
            self.header = self._header(file)

    def state(self) -> State | None:
        """The state it starts from; None if that is the log's beginning."""
        if not self.header.checkpoint_seq:
            return None
        parts: list[bytes] = []
        for entry in self._entries():
            if not isinstance(entry, _State):
                break
            parts.append(entry.part)
        if not parts:
            raise self._wrong("the checkpoint that it starts from is missing")
        try:
            state = load(b"".join(parts))
        except UnreadableCheckpoint as error:
            raise self._wrong(f"the checkpoint that it starts from: {error}") from None
        if (state.seq, state.digest.hex()) != (self.header.checkpoint_seq, self.header.digest):
            raise self._wrong("the checkpoint that it starts from is another one than its first line says")
        return state

    def payloads(self) -> Iterator[m.CheckpointPayloads]:
        """Of actions that are open in the state."""
        for entry in self._readable():
            if isinstance(entry, _Payloads):
                try:
                    yield m.decode_checkpoint_payloads(entry.data)
                except m.MALFORMED as error:
                    raise self._wrong(f"damaged payloads: {error}") from None
            elif isinstance(entry, _Message):
                return

    def records(self) -> Iterator[Record]:
        """Every message, in order, without a gap."""
        for entry in self._readable():
            if isinstance(entry, _Message):
                yield Record(entry.seq, entry.stamp_ns, entry.subject, entry.data)

    # --- what is in there ---

    def _readable(self) -> Iterator[_Entry]:
        try:
            yield from self._in_order()
        except UnreadableLog as error:
            if not self.partial:
                raise
            self.problem = str(error)

    def _in_order(self) -> Iterator[_Entry]:
        """Up to a whole end; each message follows the one before it."""
        last_seq, messages, sha256 = self.header.checkpoint_seq, 0, hashlib.sha256()
        has_state = False
        end: _End | None = None
        for raw, entry in self._raw():
            if end is not None:
                raise self._wrong("something follows its end")
            if isinstance(entry, _End):
                end = entry
                continue
            sha256.update(raw)
            if isinstance(entry, _Message):
                if last_seq and not (messages or has_state):
                    raise self._wrong("the checkpoint that it starts from is missing")
                if entry.seq != last_seq + 1:
                    raise self._wrong(f"message {entry.seq} follows {last_seq}: " + _gap(last_seq, entry.seq))
                last_seq, messages = entry.seq, messages + 1
            else:
                has_state = has_state or isinstance(entry, _State)
            yield entry
        if end is None or self._is_cut:
            raise self._wrong(f"it is cut off behind message {last_seq}")
        if (end.messages, end.sha256) != (messages, sha256.digest()):
            raise self._wrong("its checksum is wrong: it was changed after it had been written")

    def _entries(self) -> Iterator[_Entry]:
        return (entry for _, entry in self._raw())

    def _raw(self) -> Iterator[tuple[bytes, _Entry]]:
        """The records, as they stand there; ends where the file does."""
        left = b""
        for chunk in self._unpacked():
            data, at = left + chunk, 0
            while at + _LENGTH.size <= len(data):
                begin = at + _LENGTH.size
                (size,) = _LENGTH.unpack_from(data, at)
                if size > _RECORD_BYTES_MAX:
                    raise self._wrong(f"it is damaged: a record of {size} bytes")
                if begin + size > len(data):
                    break
                raw = data[begin : begin + size]
                yield raw, self._entry(raw)
                at = begin + size
            left = data[at:]

    def _unpacked(self) -> Iterator[bytes]:
        with self._open() as file:
            self._header(file)
            self._is_cut = False
            unpack = zlib.decompressobj()
            while not unpack.eof:
                packed = unpack.unconsumed_tail or self._read(file)
                try:
                    yield unpack.decompress(packed, _UNPACKED_BYTES) if packed else unpack.flush()
                except zlib.error as error:
                    raise self._wrong(f"it is damaged at byte {file.tell()} or before: {error}") from None
                if not packed:
                    self._is_cut = True
                    return
            if unpack.unused_data or self._read(file):
                raise self._wrong("something follows its end")

    def _entry(self, raw: bytes) -> _Entry:
        try:
            return _decode(raw)
        except m.MALFORMED as error:
            raise self._wrong(f"it is damaged: {error}") from None

    def _header(self, file: IO[bytes]) -> Header:
        line = file.readline(_HEADER_BYTES_MAX)
        if line.startswith(b'{"tangram_task_report"'):
            raise self._wrong("it is a report of one task, without the rest of its log: it cannot be folded or verified")
        if not line.startswith(_BEGIN):
            raise self._wrong("it is no log of `tangram streams export`" if line else "it is empty")
        try:
            written = msgspec.json.decode(line, type=_Head).tangram_log
            if written != FORMAT:
                raise self._wrong(f"it has format {written}, this version reads {FORMAT}")
            return msgspec.json.decode(line, type=Header)
        except m.MALFORMED as error:
            raise self._wrong(f"its first line is damaged: {error}") from None

    def _open(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise self._wrong(error.strerror or str(error)) from None

    def _read(self, file: IO[bytes]) -> bytes:
        try:
            return file.read(_CHUNK_BYTES)
        except OSError as error:
            raise self._wrong(error.strerror or str(error)) from None

    def _wrong(self, what: str) -> UnreadableLog:
        return UnreadableLog(self.path, what)


def _gap(last_seq: int, seq: int) -> str:
    return f"messages {last_seq + 1} to {seq - 1} are missing" if seq > last_seq else "they are in no order"
