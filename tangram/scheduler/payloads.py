"""The payloads of open actions, which neither the fold nor a pass looks at: a bounded cache, and where the rest stands."""

from collections.abc import Iterable, Mapping
from typing import Final

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, StoredMessage, next_stored, read_log
from tangram.scheduler.state import Action, ActionId

_TRIES: Final = 3
"""A checkpoint may be replaced by the next while it is read from."""


class Payloads:
    """Each payload is in the log at its action's place, or, if that has been trimmed, in the last checkpoint.

    What does not fit the cache is read back when it is needed: the newest wait longest anyway.
    """

    def __init__(self, broker: Broker, bytes_max: int = limits.PAYLOAD_CACHE_BYTES) -> None:
        self._broker, self._bytes_max = broker, bytes_max
        self._bytes = 0
        self._cached: dict[ActionId, bytes] = {}
        self._checkpointed: dict[ActionId, int] = {}
        """Where in the checkpoints' stream."""

    def keep(self, action: ActionId, payload: bytes) -> None:
        if action not in self._cached and self._bytes + len(payload) <= self._bytes_max:
            self._bytes += len(payload)
            self._cached[action] = payload

    def drop(self, action: ActionId) -> None:
        self._checkpointed.pop(action, None)
        payload = self._cached.pop(action, None)
        if payload is not None:
            self._bytes -= len(payload)

    def stored(self, stored: StoredMessage, message: m.ActionsSubmitted, open_: Mapping[ActionId, Action]) -> None:
        """Keeps those of a submission whose actions are open, as far as there is room."""
        for action_id, payload in _of_submission(stored, message, open_):
            self.keep(action_id, payload)

    def checkpointed(self, places: dict[ActionId, int]) -> None:
        """A new checkpoint holds these; the one before it may go."""
        self._checkpointed = places

    async def fetch(self, wanted: Iterable[Action], open_: Mapping[ActionId, Action], *, ahead: bool) -> dict[ActionId, bytes]:
        """The payloads of `wanted`; one that is nowhere is absent. ahead: keep what stands beside them, if there is room.

        Raises BrokerUnavailable, BrokerTimeout.
        """
        found: dict[ActionId, bytes] = {}
        for action in wanted:
            if action.id in found:
                continue
            cached = self._cached.get(action.id)
            if cached is not None:
                found[action.id] = cached
                continue
            for action_id, payload in await self._beside(action, open_):
                found[action_id] = payload
                if ahead:
                    self.keep(action_id, payload)
        return found

    async def _beside(self, action: Action, open_: Mapping[ActionId, Action]) -> list[tuple[ActionId, bytes]]:
        """What the message holds that has this action's payload, of those that are open."""
        for _ in range(_TRIES):
            place = self._checkpointed.get(action.id)
            if place is None:
                stored = await self._stored(subjects.STREAM, action.order[0])
                if stored is not None:
                    message = m.decode(stored.subject, stored.data)[1]
                    assert isinstance(message, m.ActionsSubmitted)
                    return _of_submission(stored, message, open_)
            else:
                stored = await self._stored(subjects.CHECKPOINTS, place)
                if stored is not None:
                    part = m.decode_checkpoint_payloads(stored.data)
                    named = zip((ActionId(*each) for each in part.ids), part.payloads, strict=True)
                    return [(action_id, payload) for action_id, payload in named if action_id in open_]
            if self._checkpointed.get(action.id) == place:
                break
        return []

    async def _stored(self, stream: str, seq: int) -> StoredMessage | None:
        for stored in await read_log(self._broker, stream, seq, batch=1):
            if stored.seq == seq:
                return stored
        # A replica that lags may not have it yet: its stream's leader has the word.
        found = await next_stored(self._broker, stream, seq)
        return found if found is not None and found.seq == seq else None


def _of_submission(
    stored: StoredMessage, message: m.ActionsSubmitted, open_: Mapping[ActionId, Action]
) -> list[tuple[ActionId, bytes]]:
    task = stored.subject.rsplit(".", 1)[1]
    found = []
    for index, n in enumerate(message.ids):
        action = open_.get(ActionId(task, message.client, n))
        if action is not None and action.order == (stored.seq, index):  # else it is a duplicate
            found.append((action.id, message.payloads[index]))
    return found
