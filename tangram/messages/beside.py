"""What is said beside the log: questions and their answers, heartbeats, live output, and what an output's data is."""

from typing import Annotated, Literal

from msgspec import Meta

from tangram import limits
from tangram.messages.events import Event, Quota
from tangram.messages.fields import Count, Ids, Name


class Response(Event, frozen=True, kw_only=True):
    """What an endpoint has answered: the `data` of a call's output. A body is as the provider sent it, decompressed."""

    status: Count
    content_type: str = ""
    body: bytes = b""


class Heartbeat(Event, frozen=True, kw_only=True):
    incarnation: Name
    number: Count
    probe: Count = 0
    running: Count = 0


class Ask(Event, frozen=True, kw_only=True):
    """A client asks for ids: from which sequence to read its completions, and its last PubAck's sequence, which whoever
    answers must have folded. recall: the ids, and those that `keys` stand for, are of an earlier process of its name, so it
    does not know their nonces, and wants to know where their outcomes stand instead of the completions. at_seq: it wants
    that one of its completions."""

    ids: Ids = []
    from_seq: Count = 0
    stored_seq: Count = 0
    recall: bool = False
    keys: list[str] = []
    at_seq: Count = 0


class Answer(Event, frozen=True, kw_only=True):
    """open, unseen: those of the asked ids that are. completions: (sequence, stored bytes) that name one of the other asked
    ids, from `from_seq` on, complete up to `through_seq`. next_n: no higher number of this client was seen than the one
    before it. nonces: of the open ones. outcomes: (id, sequence) of the stored message that has the outcome of a recalled id.
    keys: (key, id) of the asked keys that stand for an action."""

    through_seq: Count
    epoch: Count = 0
    open: list[Count] = []
    unseen: list[Count] = []
    next_n: Count = 0
    completions: list[tuple[int, bytes]] = []
    nonces: list[bytes] = []
    outcomes: list[tuple[Count, Count]] = []
    keys: list[tuple[str, Count]] = []


class Control(Event, frozen=True, kw_only=True):
    """Asks the leader to set quotas, and to take those in `without` away, from now on. Answered by Controlled when that is in
    the log."""

    quotas: Annotated[dict[Name, Quota], Meta(max_length=limits.QUOTAS_MAX)] = {}
    without: Annotated[list[Name], Meta(max_length=limits.QUOTAS_MAX)] = []


class Controlled(Event, frozen=True, kw_only=True):
    """error: why nothing was changed, or ""."""

    error: str = ""


class OutputChunk(Event, frozen=True, kw_only=True):
    """Live output, best effort: the outcome carries the output that counts."""

    n: Count
    stream: Literal["stdout", "stderr"]
    offset: Count = 0
    data: bytes
