"""Writing as the leader: a record on one subject, and every later write conditional on that record being the last.

The server checks `Nats-Expected-Last-Subject-Sequence` against the leader subject for each message, so a newer record
fences all that an older leader still has on its way. A chain of expected stream sequences would not.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final

from tangram.broker.connection import Broker
from tangram.broker.errors import IN_PROCESS, BrokerError, BrokerTimeout, BrokerUnavailable, Busy, NotLeader
from tangram.broker.log import last_for
from tangram.broker.wire import PubAck

ATTEMPT_S: Final = 1.0
"""A write without an answer is sent again after this, the same bytes under the same id."""
GIVE_UP_S: Final = 5.0
BACKOFF_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.25

Write = tuple[str, bytes, str]
"""Subject, payload, message id."""


class LeaderWriter:
    """May write until somebody acquires after it, or until it has given up on a write: then `over` says why, and every
    further write fails with it. `epoch` is the sequence of its record.
    """

    def __init__(self, broker: Broker, subject_leader: str, epoch: int, *, pipelined: bool, give_up_s: float) -> None:
        self._broker, self._pipelined, self._give_up_s = broker, pipelined, give_up_s
        self._condition = {
            "Nats-Expected-Last-Subject-Sequence": str(epoch),
            "Nats-Expected-Last-Subject-Sequence-Subject": subject_leader,
        }
        self.epoch: Final = epoch
        self.over: BrokerError | None = None

    @classmethod
    async def acquire(
        cls,
        broker: Broker,
        stream: str,
        subject_leader: str,
        data: bytes,
        *,
        timeout_s: float = 5.0,
        pipelined: bool | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> "LeaderWriter":
        """Stores the record `data` as the successor of what is last on `subject_leader`.

        `pipelined` False awaits each write before the next, which a replicated stream needs: it answers 10164 to a
        second conditional message while one is in process, and 50 of them then take seconds. None asks the stream.
        Raises NotLeader if another was faster, BrokerTimeout when it is not known to be stored after `timeout_s` (acquire
        again: the next record supersedes it), BrokerUnavailable, ApiError (no such stream).
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        if pipelined is None:
            info = await broker.api(f"STREAM.INFO.{stream}", timeout_s=timeout_s)
            pipelined = info["config"]["num_replicas"] == 1
        last = await last_for(broker, stream, subject_leader, timeout_s=max(0.001, deadline_s - loop.time()))
        msg_id = f"leader-{secrets.token_hex(16)}"
        headers = {"Nats-Msg-Id": msg_id, "Nats-Expected-Last-Subject-Sequence": str(last.seq if last is not None else 0)}
        try:
            epoch = (await _insist(broker, subject_leader, data, headers, deadline_s)).seq
        except NotLeader:
            # The server looks at the condition before the id: a retry after a lost acknowledgement reads as if
            # another had been faster, though the record that is last is ours.
            last = await last_for(broker, stream, subject_leader, timeout_s=max(0.1, deadline_s - loop.time()))
            if last is None or last.headers is None or last.headers.get("Nats-Msg-Id") != msg_id:
                raise
            epoch = last.seq
        return cls(broker, subject_leader, epoch, pipelined=pipelined, give_up_s=give_up_s)

    def write_soon(self, subject: str, data: bytes, msg_id: str) -> asyncio.Future[PubAck]:
        """Sends one write without waiting and without a retry. The future fails as that of `Broker.publish_soon` does."""
        if self.over is not None:
            failed: asyncio.Future[PubAck] = asyncio.get_running_loop().create_future()
            failed.set_exception(self.over)
            failed.exception()
            return failed
        return self._broker.publish_soon(subject, data, headers=self._headers(msg_id))

    async def write_all(self, writes: Sequence[Write]) -> list[PubAck]:
        """Stores `writes`, returns their acknowledgements in order; `duplicate` means that a retry found it stored.

        Pipelined, so the first round reaches the log in order; what was refused as Busy or got no answer is sent again
        under its id, and may then stand behind its successors. Raises NotLeader (there is a newer record: nothing of this
        is stored behind it, what got no answer before may be stored in front of it), BrokerTimeout after `give_up_s`
        (some may still be stored: acquire anew and read up to the new record), MessageTooLarge or PublishRefused (the
        rest may be stored).
        """
        if not self._pipelined:
            return [(await self._store([write]))[0] for write in writes]
        return await self._store(writes)

    async def _store(self, writes: Sequence[Write]) -> list[PubAck]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._give_up_s
        acks: dict[int, PubAck] = {}
        pause_s = BACKOFF_S
        while True:
            left_s = deadline_s - loop.time()
            open_ = {index: self.write_soon(*write) for index, write in enumerate(writes) if index not in acks}
            if open_:
                await asyncio.wait(open_.values(), timeout=max(0.0, min(ATTEMPT_S, left_s)))
            unknown = self._collect(open_, acks)
            if len(acks) == len(writes):
                return [acks[index] for index in range(len(writes))]
            if loop.time() + pause_s > deadline_s:
                self.over = BrokerTimeout(f"gave up after {self._give_up_s:g} s: {unknown}")
                raise self.over
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    def _collect(self, open_: dict[int, asyncio.Future[PubAck]], acks: dict[int, PubAck]) -> BrokerError | None:
        """Sorts out the answers; returns the last error that is worth another try, raises one that is not."""
        final: BrokerError | None = None
        unknown: BrokerError | None = None
        for index, future in open_.items():
            if not future.done():
                future.cancel()
                unknown = BrokerTimeout("no acknowledgement")
                continue
            error = future.exception()
            if error is None:
                acks[index] = future.result()
            elif not isinstance(error, BrokerError):
                raise error
            elif self._is_passing(error):
                unknown = error
                if isinstance(error, Busy) and error.code == IN_PROCESS:
                    self._pipelined = False  # the stream has been given replicas since
            elif isinstance(error, NotLeader) or final is None:
                final = error
        if final is not None:
            if isinstance(final, NotLeader):
                self.over = final
            raise final
        return unknown

    def _is_passing(self, error: BrokerError) -> bool:
        if isinstance(error, BrokerUnavailable):
            return not self._broker.is_closed
        return isinstance(error, (Busy, BrokerTimeout))

    def _headers(self, msg_id: str) -> dict[str, str]:
        return {"Nats-Msg-Id": msg_id, **self._condition}


async def _insist(broker: Broker, subject: str, data: bytes, headers: dict[str, str], deadline_s: float) -> PubAck:
    """Publishes until there is an answer that is not Busy."""
    loop = asyncio.get_running_loop()
    pause_s = BACKOFF_S
    while True:
        left_s = deadline_s - loop.time()
        try:
            return await broker.publish(subject, data, headers=headers, timeout_s=max(0.001, min(ATTEMPT_S, left_s)))
        except (Busy, BrokerTimeout, BrokerUnavailable) as error:
            if broker.is_closed:
                raise
            if loop.time() + pause_s > deadline_s:
                raise BrokerTimeout(f"{subject}: not known to be stored: {error}") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, BACKOFF_MAX_S)
