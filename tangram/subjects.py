"""Names and subjects: the only module that puts a subject together or takes one apart."""

import re
from functools import lru_cache
from typing import Final, NamedTuple

from tangram.errors import InvalidRequest
from tangram.limits import BLOB_BYTES_MAX, BLOB_PIECES_MAX, NAME_LENGTH_MAX

STREAM: Final = "TANGRAM"
BLOBS: Final = "TANGRAM_BLOBS"
LEADER: Final = "tangram.decisions.leader"
CLOCK: Final = "tangram.decisions.clock"
CONTROL: Final = "tangram.control"
"""Not stored: asks the leader to change what it is configured by."""
CLIENT_HEARTBEATS: Final = "tangram.heartbeats.*.*"
"""Filter for those of all clients; an executor's have a token less."""
ALL_BUT_LEADER: Final = (
    "tangram.actions.>", "tangram.cancels.>", "tangram.executors.>", "tangram.completions.>", "tangram.decisions.*.*", CLOCK,
)  # fmt: skip
MODELS: Final = "KV_TANGRAM_MODELS"
"""The stream of a key-value bucket, for whoever wants to see what was learnt: the scheduler writes it and does not read it."""
CHECKPOINTS: Final = "TANGRAM_CHECKPOINTS"
CHECKPOINT_ENDS: Final = "tangram.checkpoints.*.end"

_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{NAME_LENGTH_MAX}}}")
_BLOB = re.compile(r"([0-9a-f]{64})-([1-9][0-9]{0,15})-([1-9][0-9]{0,7})")


def token(name: object, field: str = "name") -> str:
    """Returns `name` if it may be part of a subject, else raises InvalidRequest.

    Everything that reaches a subject, a path, a cgroup or a container name passes here, so no dot, wildcard, space or
    slash can change what is addressed.
    """
    if not isinstance(name, str) or _TOKEN.fullmatch(name) is None:
        raise InvalidRequest(field, f"must match [A-Za-z0-9_-]{{1,{NAME_LENGTH_MAX}}}", name)
    return name


@lru_cache(maxsize=65_536)
def actions(key: str, task: str) -> str:
    return f"tangram.actions.{token(key, 'key')}.{token(task, 'task')}"


def actions_of(task: str) -> str:
    """Filter for all submissions of one task, whatever their key resource."""
    return f"tangram.actions.*.{token(task, 'task')}"


def cancels(task: str) -> str:
    return f"tangram.cancels.{token(task, 'task')}"


@lru_cache(maxsize=65_536)
def executors(executor: str) -> str:
    return f"tangram.executors.{token(executor, 'executor')}"


@lru_cache(maxsize=65_536)
def completions(task: str, client: str) -> str:
    return f"tangram.completions.{token(task, 'task')}.{token(client, 'client')}"


@lru_cache(maxsize=65_536)
def decisions(key: str, executor: str) -> str:
    return f"tangram.decisions.{token(key, 'key')}.{token(executor, 'executor')}"


def decisions_of(executor: str) -> str:
    """Filter for all decisions for one executor, whatever their key resource."""
    return f"tangram.decisions.*.{token(executor, 'executor')}"


def consumer(incarnation: str) -> str:
    """The durable consumer through which one incarnation reads its decisions."""
    return f"executor-{token(incarnation, 'incarnation')}"


def results(task: str, client: str) -> str:
    """Where the stream republishes the completions of one client; not stored under this name."""
    return f"tangram.results.{token(task, 'task')}.{token(client, 'client')}"


def ask(task: str, client: str) -> str:
    return f"tangram.ask.{token(task, 'task')}.{token(client, 'client')}"


def heartbeats(executor: str) -> str:
    return f"tangram.heartbeats.{token(executor, 'executor')}"


def client_heartbeats(task: str, client: str) -> str:
    """Of a client whose actions are to end with it; not stored."""
    return f"tangram.heartbeats.{token(task, 'task')}.{token(client, 'client')}"


def output(task: str, client: str) -> str:
    """Live output of one client's actions; not stored."""
    return f"tangram.output.{token(task, 'task')}.{token(client, 'client')}"


def model(task: str, kind: str) -> str:
    """Of the bucket's entry. A kind may have dots in a row, which a subject may not; it has no slash."""
    return f"$KV.TANGRAM_MODELS.{token(task, 'task')}.{kind.replace('.', '/')}"


def dead(reason: str) -> str:
    return f"tangram.dead.{token(reason, 'reason')}"


def checkpoint(name: str, part: str) -> str:
    """part: "state", "payloads", "end", or ">" for all of them."""
    return f"tangram.checkpoints.{token(name, 'checkpoint')}.{part if part == '>' else token(part, 'part')}"


def checkpoint_name(subject: str) -> str:
    return subject.split(".")[2]


class BlobName(NamedTuple):
    """A payload or an output in pieces: the hexadecimal sha256 of the whole, its bytes, how many pieces. As text it is
    "<sha256>-<bytes>-<pieces>"; whose it is does not stand in it."""

    sha256: str
    size: int
    pieces: int

    def __str__(self) -> str:
        return f"{self.sha256}-{self.size}-{self.pieces}"


def parse_blob(text: str) -> BlobName | None:
    """Returns the parts of a blob's name, or None for what `str(BlobName)` would not have written, or beyond the limits."""
    match = _BLOB.fullmatch(text)
    if match is None:
        return None
    name = BlobName(match[1], int(match[2]), int(match[3]))
    return name if name.size <= BLOB_BYTES_MAX and name.pieces <= min(name.size, BLOB_PIECES_MAX) else None


def blob(task: str, sha256: str, index: int) -> str:
    """Where a piece is stored: the second token is all that a server needs to keep tasks from one another."""
    return f"tangram.blobs.{token(task, 'task')}.{token(sha256, 'sha256')}.{index}"


class Address(NamedTuple):
    """A stored subject taken apart. `role` is its second token; `first` and `second` are what follows, '' if absent."""

    role: str
    first: str
    second: str


@lru_cache(maxsize=65_536)
def parse(subject: str) -> Address | None:
    """Returns the parts of a subject of the log, or None if it is not one."""
    parts = subject.split(".")
    if parts[0] != "tangram" or not all(_TOKEN.fullmatch(part) for part in parts[1:]):
        return None
    match parts[1:]:
        case ["actions" | "completions" | "decisions" as role, first, second]:
            return Address(role, first, second)
        case ["cancels" | "executors" | "decisions" as role, first]:
            return Address(role, first, "")
        case _:
            return None
