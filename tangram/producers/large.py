"""What is too large for the log, on its way out and in: payloads that are stored as blobs before their actions are sent, and
outputs that are fetched before their results are told."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.broker import Blobs, Broker
from tangram.errors import ClientClosed
from tangram.outcomes import ErrorReason, Outcome
from tangram.producers import request
from tangram.producers.pending import Pending
from tangram.producers.waiting import Waiting


class Large:
    """Of one client. At most BLOBS_AT_ONCE go out, and come in, at a time; small actions do not wait for them, but for those of
    their own session: they are sent in the order of their calls.

    `send(pending)` is called when it can be sent, `unsent(pending, error)` when it never will be.
    """

    def __init__(
        self, broker: Broker, task: str, send: Callable[[Pending], None], unsent: Callable[[Pending, Exception], None]
    ) -> None:
        self._broker, self._task, self._send, self._unsent = broker, task, send, unsent
        self._blobs = Blobs(broker)
        self._out, self._in = asyncio.Semaphore(limits.BLOBS_AT_ONCE), asyncio.Semaphore(limits.BLOBS_AT_ONCE)
        self._going: dict[int, asyncio.Task[str] | None] = {}
        """Not sent yet, by number: what stores the payload, if it is a large one."""
        self._last: dict[int, asyncio.Task[None]] = {}
        """What the next action of a session is sent after."""
        self._goers: set[asyncio.Task[None]] = set()
        self._comers: set[asyncio.Task[None]] = set()

    # --- out -----------------------------------------------------------------------------------------------------

    def take(self, pending: Pending) -> bool:
        """Whether it takes this action on: it has a large payload, or comes after one in its session."""
        session = pending.wire.spec.session
        before = self._last.get(session) if session else None
        if pending.wire.large is None and before is None:
            return False
        storing: asyncio.Task[str] | None = None
        if pending.wire.large is not None:
            storing = asyncio.get_running_loop().create_task(self._store(pending.wire.large))
            storing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to look at it
        self._going[pending.n] = storing
        task = _keep(self._goers, self._go(pending, storing, before))
        if session:
            self._last[session] = task
            task.add_done_callback(partial(self._gone, session))
        return True

    def _gone(self, session: int, task: "asyncio.Task[None]") -> None:
        if self._last.get(session) is task:
            del self._last[session]

    async def _store(self, payload: m.Payload) -> str:
        async with self._out:
            return await self._blobs.put(self._task, m.encode(payload))

    async def _go(self, pending: Pending, storing: "asyncio.Task[str] | None", before: "asyncio.Task[None] | None") -> None:
        # Dropped too, it keeps its place: what comes after it in its session comes after what was before it.
        for task in (storing, before):
            if task is not None:
                await asyncio.wait([task])
        if pending.n not in self._going:
            return
        del self._going[pending.n]
        try:
            if storing is not None:
                pending.wire = request.with_blob(pending.wire, storing.result())
            self._send(pending)
        except Exception as error:
            self._unsent(pending, error)

    async def sent(self) -> None:
        """Returns when all that was taken on by now has been sent, or never will be."""
        if self._goers:
            await asyncio.wait(set(self._goers))

    def drop(self, n: int) -> bool:
        """Whether it was still here, and so will never be sent."""
        if n not in self._going:
            return False
        storing = self._going.pop(n)
        if storing is not None:
            storing.cancel()
        return True

    # --- in ------------------------------------------------------------------------------------------------------

    def fetch(self, waiting: Waiting, result: m.Result, output: m.Output, executor: str) -> None:
        """Settles `waiting` with the output that `output.blob` names."""
        _keep(self._comers, self._come(waiting, result, output, executor))

    async def _come(self, waiting: Waiting, result: m.Result, output: m.Output, executor: str) -> None:
        try:
            async with self._in:
                whole = m.decode_output(await self._blobs.get(self._task, output.blob))
        except asyncio.CancelledError:
            waiting.fail(ClientClosed("the client was closed while it fetched the output"))
            raise
        except Exception as error:
            if self._broker.is_closed:
                waiting.fail(ClientClosed("the connection was closed while the output was fetched"))
                return
            result, whole = _without_output(result, error), output
        waiting.settle(result, replace(whole, blob=""), executor)

    async def close(self, timeout_s: float) -> None:
        """What is on its way out may go on for so long; what is on its way in then ends."""
        if self._goers:
            await asyncio.wait(self._goers, timeout=timeout_s)
        tasks = [*self._goers, *self._comers, *(task for task in self._going.values() if task is not None)]
        self._going.clear()
        await asyncio.sleep(0)  # one that has not taken its first step would not tell its caller
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _keep(kept: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    task = asyncio.get_running_loop().create_task(work)
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task


def _without_output(result: m.Result, error: Exception) -> m.Result:
    """As the executor says it of an output that it cannot store: without its output an outcome is no verdict."""
    ended = result.outcome.value if result.exit_code is None else f"{result.outcome.value}, exit code {result.exit_code}"
    detail = f"its output could not be fetched: {error} (it ended {ended})"
    return replace(result, outcome=Outcome.ERROR, reason=ErrorReason.INTERNAL, detail=detail[: limits.DETAIL_LENGTH_MAX])
