"""A log without what users' programs were given and have written, on which the core decides as before. Pure.

The core reads payloads: it counts their bytes, checks their types and rules, and compares those under one key. So a payload keeps
its structure and the length of every part, its numbers, and the names of its fields and environment variables; every text
and every byte string becomes filling that depends on the whole payload and on a secret that is thrown away: equal payloads stay
equal, and different ones different (unless they have only a few letters).
"""

import hashlib
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from tangram import messages as m
from tangram.scheduler.fold import Record

_LETTERS: Final = bytes(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"[i & 63] for i in range(256))
_VARIED: Final = 16
"""Bytes of each text that differ; the rest is one letter over and over, as it has to be compressed."""
_BROKEN: Final = b"\xc1"
"""Never valid: for what could not be read and would be skipped, or refused, anyway."""
_WIDE: Final = {2: "\u00e9", 3: "\u20ac", 4: "\U0001f642"}
"""In place of characters by their bytes: limits count characters as well."""


class Redaction:
    """secret: of one export; who has it can find out which of two payloads it was."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def record(self, record: Record) -> Record:
        try:
            message = m.decode(record.subject, record.data)[1]
        except m.Malformed as error:
            return record if error.unknown_type else record._replace(data=_BROKEN)
        match message:
            case m.ActionsSubmitted():
                message = replace(message, payloads=[self.payload(each) for each in message.payloads])
            case m.DecisionsMade():
                items = [
                    replace(each, payload=self.payload(each.payload)) if isinstance(each, m.Start) else each
                    for each in message.items
                ]
                message = replace(message, items=items)
            case m.ActionsFinished():
                results = [_result(raw) for raw in message.results] if message.incarnation else message.results
                message = replace(message, results=results, outputs=[b""] * len(message.outputs))
            case _:
                return record
        return record._replace(data=m.encode(message))

    def payloads(self, part: m.CheckpointPayloads) -> m.CheckpointPayloads:
        return replace(part, payloads=[self.payload(each) for each in part.payloads])

    def payload(self, payload: bytes) -> bytes:
        if not payload:
            return payload
        seed = hashlib.blake2b(payload, key=self._secret, digest_size=32).digest()
        found = bytearray(payload)
        try:
            for number, (start, end, is_text) in enumerate(_values(payload)):
                varied = hashlib.blake2b(seed, salt=number.to_bytes(8, "big"), digest_size=_VARIED).digest().translate(_LETTERS)
                found[start:end] = _filling(payload[start:end], varied, is_text=is_text)
        except (IndexError, KeyError):
            return _BROKEN * len(payload)
        return bytes(found)


def _filling(value: bytes, varied: bytes, *, is_text: bool) -> bytes:
    filling = varied[: len(value)].ljust(len(value), b"x")
    if not is_text or (value.isascii() and b"\0" not in value):
        return filling
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return b"\xff" * len(value)
    letters = filling.decode()
    found = []
    at = 0
    for character in text:
        size = len(character.encode())
        # A NUL has to stay what it is: it makes a request invalid.
        found.append(_WIDE[size] if size > 1 else "\0" if character == "\0" else letters[at])
        at += size
    return "".join(found).encode()


def _result(raw: bytes) -> bytes:
    """Without its words, which may be those of a program."""
    try:
        return m.encode(replace(m.decode_result(raw), detail=""))
    except m.MALFORMED:
        return raw if m.is_newer_result(raw) else _BROKEN


def _values(data: bytes) -> Iterator[tuple[int, int, bool]]:
    """Where texts and byte strings stand in MessagePack that are no keys of maps, nor what the top map's "type" is, and whether
    each is a text. Raises IndexError or KeyError for what is no MessagePack."""
    open_: list[list[int]] = [[1, 0]]
    """Of each array and map around: values that are still to come, and 1 if it is a map; its keys count too."""
    at = 0
    is_tag = False
    while open_:
        around = open_[-1]
        if not around[0]:
            open_.pop()
            continue
        around[0] -= 1
        is_key = bool(around[1]) and around[0] % 2 == 1
        kind = data[at]
        begin, size, count, is_map, is_text = _head(data, at, kind)
        at = begin + size
        if at > len(data):
            raise IndexError
        if is_text is not None and not is_key and not is_tag:
            yield begin, at, is_text
        is_tag = is_key and len(open_) == 2 and data[begin:at] == b"type"
        if count is not None:
            open_.append([count * 2 if is_map else count, int(is_map)])
    if at != len(data):
        raise IndexError


def _head(data: bytes, at: int, kind: int) -> tuple[int, int, int | None, bool, bool | None]:
    """Of one value: where its body begins, the body's bytes, how many values it holds (None: it is no array or map), whether it
    is a map, and whether it is a text (None: neither a text nor bytes)."""
    if kind < 0x80 or kind >= 0xE0 or kind in (0xC0, 0xC2, 0xC3):
        return at + 1, 0, None, False, None
    if kind < 0x90:
        return at + 1, 0, kind & 15, True, None
    if kind < 0xA0:
        return at + 1, 0, kind & 15, False, None
    if kind < 0xC0:
        return at + 1, kind & 31, None, False, True
    if kind in _FIXED:
        return at + 1, _FIXED[kind], None, False, None
    width = _WIDTHS[kind]
    if at + width >= len(data):
        raise IndexError
    number = int.from_bytes(data[at + 1 : at + 1 + width], "big")
    begin = at + 1 + width
    if kind >= 0xDC:
        return begin, 0, number, kind >= 0xDE, None
    if 0xC7 <= kind <= 0xC9:  # an extension has a type besides
        return begin, number + 1, None, False, None
    return begin, number, None, False, kind >= 0xD9


_FIXED: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""Bytes behind the first one, by it: numbers, and extensions of a fixed size."""


_WIDTHS: Final = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""Bytes of a length, by the first one: byte strings, extensions, texts, arrays, maps."""
