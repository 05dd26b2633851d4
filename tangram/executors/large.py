"""What is too large for the log, at an executor: payloads that are read before their actions begin, and outputs that are
stored before their outcomes are told."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.broker import Blobs, Broker, BrokerError, BrokerTimeout
from tangram.executors.backend import Ended
from tangram.outcomes import ErrorReason, Outcome

T = TypeVar("T")

FILES_AT_ONCE: Final = 16
"""File actions that may hold FILE_BYTES_MAX each, before and after the BLOBS_AT_ONCE that travel."""
STEP_S: Final = 1.0


class Large:
    """Of one incarnation. Only BLOBS_AT_ONCE go in, and out, at a time; nothing else waits for them."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._blobs = broker, Blobs(broker)
        self._in, self._out = asyncio.Semaphore(limits.BLOBS_AT_ONCE), asyncio.Semaphore(limits.BLOBS_AT_ONCE)
        self._files = asyncio.Semaphore(FILES_AT_ONCE)

    def room(self, start: m.Start) -> contextlib.AbstractAsyncContextManager[None]:
        """To be held from before its payload is read until its output is stored."""
        return self._files if start.kind in ("file.write", "file.read") else contextlib.nullcontext()

    async def payload(self, start: m.Start) -> bytes:
        """Whatever the payload says, it is read as its own task's. Raises BrokerError."""

        async def get() -> bytes:
            async with self._in:
                return await self._blobs.get(start.task, start.payload_blob)

        return await self._within(get())

    async def stored(self, start: m.Start, ended: Ended) -> Ended:
        """`ended`, with an output that fits: as a blob if need be. An outcome is not lost because its output cannot be stored,
        but without it is no verdict."""
        output = ended.output
        if len(output.stdout) + len(output.stderr) + len(output.data) <= limits.ITEM_BYTES_MAX - limits.SPEC_BYTES_MAX:
            return ended

        async def put() -> str:
            async with self._out:
                return await self._blobs.put(start.task, m.encode(output))

        rest = m.Output(stdout_bytes=output.stdout_bytes, stderr_bytes=output.stderr_bytes)
        try:
            return replace(ended, output=replace(rest, blob=await self._within(put())))
        except BrokerError as error:
            outcome, reason = ended.outcome, ended.reason
            detail = f"its output could not be stored: {error} (it ended {outcome}, exit code {ended.exit_code})"
            if outcome.is_verdict:
                outcome, reason = Outcome.ERROR, ErrorReason.INTERNAL
            return replace(ended, outcome=outcome, reason=reason, detail=detail[: limits.DETAIL_LENGTH_MAX], output=rest)

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        """`work` within BLOB_MS_MAX, in which time without a connection does not count: log time stands still then too."""
        task = asyncio.create_task(work)
        left_s = limits.BLOB_MS_MAX / 1e3
        try:
            while left_s > 0:
                await asyncio.wait([task], timeout=STEP_S)
                if task.done():
                    return task.result()
                left_s -= STEP_S if self._broker.is_connected else 0.0
            raise BrokerTimeout(f"not done within {limits.BLOB_MS_MAX // 1000} s")
        finally:
            task.cancel()
