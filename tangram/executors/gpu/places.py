"""A service on one device, as the executor sees it: something that can be restored there, evicted, and asked for scores."""

from typing import Any, Protocol


class Failed(Exception):
    """What was asked for did not happen. kind: "memory" (the device has no room), "died" (its process is gone; it comes back),
    "load" (the service cannot be made), "score" (its code raised), "answer" (not as many finite numbers as items), or "broken"
    (its weights are not what they were; it is made anew)."""

    def __init__(self, kind: str, words: str) -> None:
        self.kind = kind
        super().__init__(words)


class Place(Protocol):
    """One call at a time; each raises Failed."""

    @property
    def is_resident(self) -> bool:
        """False too while it is not known."""

    async def load(self) -> int:
        """Makes the service ready to be restored, if it is not; the bytes that it then takes on the device."""

    async def restore(self) -> None: ...

    async def evict(self) -> None: ...

    async def score(self, batch: list[Any]) -> list[float]: ...

    def kill(self) -> None:
        """Ends what it does at once, whatever that costs; the pending call raises Failed."""

    async def close(self) -> bool:
        """In bounded time: whether nothing of it is left on the device."""
