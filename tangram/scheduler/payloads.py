"""The shell's cache of the payloads of pending actions. The log has them all; this saves reading them back."""

from tangram import limits
from tangram.scheduler.state import ActionId


class PayloadCache:
    """Payloads of open actions, bounded in bytes. What does not fit is not kept: the newest wait longest anyway."""

    def __init__(self, bytes_max: int = limits.PAYLOAD_CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._payloads: dict[ActionId, bytes] = {}

    def keep(self, action: ActionId, payload: bytes) -> None:
        if action not in self._payloads and self._bytes + len(payload) <= self._bytes_max:
            self._bytes += len(payload)
            self._payloads[action] = payload

    def get(self, action: ActionId) -> bytes | None:
        return self._payloads.get(action)

    def drop(self, action: ActionId) -> None:
        payload = self._payloads.pop(action, None)
        if payload is not None:
            self._bytes -= len(payload)

    def __len__(self) -> int:
        return len(self._payloads)
