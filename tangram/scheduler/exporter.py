"""Shows what was learnt: models that have changed go into a key-value bucket, now and then. Nothing of Tangram decides by it."""

import asyncio
import logging
from typing import Final

import msgspec

from tangram import limits, subjects
from tangram.broker import Broker, BrokerError
from tangram.scheduler.models import exported
from tangram.scheduler.state import State

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class Exporter:
    """One a scheduler; works while `run` is awaited."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._counts: dict[tuple[str, str], int] = {}
        """Completions of each model when it was last written."""
        self._complaint = ""

    async def run(self, state: State) -> None:
        """Returns never. `state` may change between two awaits, by whole steps."""
        while True:
            pause_s = limits.MODELS_EXPORT_S if await self.write(state) else LOOK_S
            await asyncio.sleep(pause_s)

    async def write(self, state: State) -> bool:
        """Writes what has changed, or the first of it; returns whether anything had. That the broker does not take it is told
        once and costs nobody anything."""
        changed = [key for key, model in state.models.items() if self._counts.get(key) != model.count]
        try:
            for key in changed[: limits.MODELS_EXPORTED_MAX]:
                model = state.models.get(key)
                if model is not None:
                    count = model.count
                    await self._broker.publish(subjects.model(*key), msgspec.json.encode(exported(*key, model)))
                    self._counts[key] = count
        except BrokerError as error:
            if str(error) != self._complaint:
                log.warning("what was learnt is not exported: %s", error)
            self._complaint = str(error)
        if len(self._counts) > 2 * limits.MODELS_MAX:  # most are of kinds that the state has forgotten
            self._counts = {key: count for key, count in self._counts.items() if key in state.models}
        return bool(changed)
