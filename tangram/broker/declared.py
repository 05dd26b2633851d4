"""The streams that this version declares, read from the TOML files in `streams/` and from nowhere else."""

import re
import tomllib
from pathlib import Path
from typing import Final, Literal

import msgspec

from tangram.broker.errors import BrokerError

_SIZES: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SIZE = re.compile(r"(\d+)\s*([A-Za-z]*)")
_DURATION = re.compile(r"(\d+)(s|m|h|d)")


class DeclarationError(BrokerError):
    """A file in `streams/` that cannot be used; the message names it."""


class Republish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stored messages on `src` are sent again on `dest`, after they are stored."""

    src: str
    dest: str


class StreamDeclaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. Sizes are written "64MiB", durations "10m" ("0s": no limit)."""

    name: str
    subjects: list[str]
    description: str = ""
    storage: Literal["file", "memory"] = "file"
    retention: Literal["limits", "interest", "workqueue"] = "limits"
    discard: Literal["new", "old"] = "new"
    max_bytes: str
    max_msg_size: str = "1MiB"
    max_age: str = "0s"
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    duplicate_window: str = "2m"
    allow_direct: bool = True
    deny_delete: bool = True
    deny_purge: bool = False
    republish: Republish | None = None

    def config(self) -> dict[str, object]:
        """As the server's API has it: bytes, nanoseconds. Fields that nobody may switch on behind our back are included."""
        return {
            "name": self.name,
            "description": self.description,
            "subjects": self.subjects,
            "storage": self.storage,
            "retention": self.retention,
            "discard": self.discard,
            "max_bytes": size_bytes(self.max_bytes),
            "max_msg_size": size_bytes(self.max_msg_size),
            "max_age": duration_ns(self.max_age),
            "max_msgs": self.max_msgs,
            "max_msgs_per_subject": self.max_msgs_per_subject,
            "duplicate_window": duration_ns(self.duplicate_window),
            "allow_direct": self.allow_direct,
            "deny_delete": self.deny_delete,
            "deny_purge": self.deny_purge,
            "republish": {"src": self.republish.src, "dest": self.republish.dest} if self.republish is not None else None,
            # Any producer could block a conditional writer with open batches.
            "allow_atomic": False,
            "allow_rollup_hdrs": False,
            "no_ack": False,
        }


def size_bytes(text: str) -> int:
    """ "64MiB" in bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _SIZES:
        raise ValueError(f"{text!r} is not a size such as 64MiB")
    return int(match[1]) * _SIZES[match[2]]


def duration_ns(text: str) -> int:
    """ "10m" in nanoseconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 90s, 10m, 2h, 7d")
    return int(match[1]) * _SECONDS[match[2]] * 1_000_000_000


def declarations_dir() -> Path:
    """Where the files are: in the installed package, else in the checkout. Raises DeclarationError."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_streams", package.parent / "streams"):
        if folder.is_dir():
            return folder
    raise DeclarationError(f"no stream declarations: neither {package / '_streams'} nor {package.parent / 'streams'} is there")


def load_declared(folder: Path | None = None) -> list[StreamDeclaration]:
    """All declarations, by name. Raises DeclarationError, which names the file and the field."""
    folder = folder or declarations_dir()
    declared = [_load(path) for path in sorted(folder.glob("*.toml"))]
    if not declared:
        raise DeclarationError(f"no stream declarations in {folder}")
    return declared


def _load(path: Path) -> StreamDeclaration:
    try:
        declaration = msgspec.convert(tomllib.loads(path.read_text()), StreamDeclaration)
        declaration.config()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise DeclarationError(f"{path}: {error}") from None
    if 0 < duration_ns(declaration.max_age) < duration_ns(declaration.duplicate_window):
        raise DeclarationError(f"{path}: duplicate_window is longer than max_age")
    if declaration.name != path.stem:
        raise DeclarationError(f"{path}: name is {declaration.name!r}, the file says {path.stem!r}")
    for subject in declaration.subjects:
        if not {"*", ">"} & set(subject.split(".")):
            raise DeclarationError(f"{path}: subject {subject!r} is literal: it could be written through a consumer")
    return declaration
