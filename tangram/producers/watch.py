"""What a client asks a scheduler for by itself: what it has missed of its results, and what is overdue."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.broker import BrokerError
from tangram.outcomes import Outcome
from tangram.producers.pending import Ledger, Pending

log = logging.getLogger(__name__)

PATIENCE_MAX_S: Final = 60.0
"""The most between two questions for one action."""
WATCH_S: Final = 0.5
BORN_REFRESH_S: Final = 3_600.0
"""Well below the time after which a client without actions is forgotten: who was born before that would be refused."""


class Watcher:
    """Looks twice a second, and at once when `look` is set. born: a sequence of the log that a scheduler has told. stored_seq:
    the last that the broker has told for what was sent."""

    def __init__(
        self,
        ledger: Ledger,
        question: Callable[[m.Ask], Awaitable[m.Answer]],
        resend: Callable[[Pending], None],
        room: asyncio.Event,
    ) -> None:
        """resend: for an action that nobody knows. room is set when actions were settled."""
        self._ledger, self._question, self._resend, self._room = ledger, question, resend, room
        self.look = asyncio.Event()
        self.born = 0
        self.stored_seq = 0
        self._born_s = 0.0

    def begin(self, through_seq: int) -> None:
        self.born = self._ledger.read_seq = through_seq
        self._born_s = time.monotonic()

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(WATCH_S):
                    await self.look.wait()
            except TimeoutError:
                pass
            self.look.clear()
            ledger = self._ledger
            doubtful = ledger.doubtful(time.monotonic())
            was_behind, ledger.behind = ledger.behind, False
            old = time.monotonic() - self._born_s > BORN_REFRESH_S
            if not doubtful and not was_behind and not old:
                continue
            try:
                through_seq = await self._ask(doubtful)
                self.born, self._born_s = max(self.born, through_seq), time.monotonic()
                if was_behind:
                    ledger.read_seq = max(ledger.read_seq, through_seq)
            except (BrokerError, *m.MALFORMED) as error:
                log.debug("nobody answers: %s", error)
                ledger.behind = ledger.behind or was_behind
                await asyncio.sleep(WATCH_S)

    async def _ask(self, ids: list[int]) -> int:
        """Asks for `ids`, until each is settled, or known to be open, or on its way again. Returns the sequence up to which
        all is known."""
        through_seq = 0
        for at in range(0, max(len(ids), 1), limits.ENVELOPE_ITEMS_MAX):
            through_seq = await self._ask_some(ids[at : at + limits.ENVELOPE_ITEMS_MAX])
        return through_seq

    async def _ask_some(self, asked: list[int]) -> int:
        ledger = self._ledger
        after = [pending.after_seq for n in asked if (pending := ledger.open.get(n)) is not None]
        from_seq = 1 + min(after, default=-1)
        while True:
            answer = await self._question(m.Ask(ids=asked, from_seq=from_seq, stored_seq=self.stored_seq))
            for n in ledger.answered(asked, answer, time.monotonic(), PATIENCE_MAX_S):
                self._resend(ledger.open[n])
            self._room.set()
            known = set(answer.open) | set(answer.unseen)
            asked = [n for n in asked if n in ledger.open and n not in known]
            if not asked:
                return answer.through_seq
            if not answer.completions:
                for n in asked:  # it has ended, and what it ended with is no longer in the log
                    pending = ledger.open.pop(n)
                    pending.settle(Outcome.LOST, detail="its outcome is no longer in the log")
                return answer.through_seq
            from_seq = answer.through_seq + 1
