"""What can be wrong with weights."""

from tangram.errors import TangramError


class WeightsError(TangramError):
    """Base. Attribute: service."""

    def __init__(self, service: str, what: str) -> None:
        self.service = service
        super().__init__(f"{service}: {what}")


class Evicted(WeightsError):
    """Weights were used that are not on the device."""


class Busy(WeightsError):
    """Somebody uses the weights: they cannot go now."""


class Broken(WeightsError):
    """The weights are not what was registered: something was rebound, added, or written past the store."""


class Refused(WeightsError):
    """A module that the store cannot take."""
