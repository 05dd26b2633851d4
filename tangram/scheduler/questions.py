"""What clients ask, answered as soon as the state has got so far."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.broker import Broker, BrokerError, Delivery
from tangram.scheduler.answers import answer
from tangram.scheduler.state import State

log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""A question about something that this scheduler has not read yet waits this long, then it is dropped: it comes again."""


class Questions:
    """state: as it is now."""

    def __init__(self, broker: Broker, state: Callable[[], State]) -> None:
        self._broker, self._state = broker, state
        self._waiting: dict[str, tuple[float, Delivery, m.Ask]] = {}
        """The oldest first: by subject, because a client asks one at a time."""
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, delivery: Delivery, *, is_ready: bool) -> None:
        """is_ready: it may be answered at once, if the state has got so far; else `answer_waiting` does it."""
        try:
            ask = m.decode_ask(delivery.data)
        except m.MALFORMED as error:
            log.warning("question on %s dropped: %s", delivery.subject, error)
            return
        task = delivery.subject.split(".")[2]
        # The asker has chosen it, and we may write where it may not: to the log, to the broker's own subjects.
        if not delivery.reply.startswith(("_INBOX.", f"_INBOX_{task}.")):
            log.warning("question on %s dropped: its answer would go to %.100r", delivery.subject, delivery.reply)
            return
        self._waiting.pop(delivery.subject, None)  # nobody waits for that answer any more
        if is_ready and ask.stored_seq <= self._state().seq:
            self._answer_soon(delivery, ask)
            return
        self._waiting[delivery.subject] = (time.monotonic() + PATIENCE_S, delivery, ask)
        if len(self._waiting) > limits.ASKS_WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]

    def answer_waiting(self) -> None:
        now_s = time.monotonic()
        for subject, (until_s, delivery, ask) in list(self._waiting.items()):
            if ask.stored_seq <= self._state().seq:
                self._answer_soon(delivery, ask)
            elif until_s > now_s:
                continue
            del self._waiting[subject]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _answer_soon(self, delivery: Delivery, ask: m.Ask) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(delivery, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, delivery: Delivery, ask: m.Ask) -> None:
        _, _, task, client = delivery.subject.split(".")
        try:
            reply = await answer(self._broker, self._state(), task, client, ask)
            await self._broker.send(delivery.reply, m.encode(reply))
        except BrokerError as error:
            log.warning("question on %s not answered: %s", delivery.subject, error)
