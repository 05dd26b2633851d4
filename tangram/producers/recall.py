"""Outcomes of actions that this process did not submit, or that share the outcome of another: looked up in the log."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.broker import BrokerError
from tangram.errors import InvalidRequest, ResultGone, UnknownAction
from tangram.producers.pending import Ledger, Waiter
from tangram.producers.result import Result
from tangram.producers.waiting import Fetch, Waiting

PATIENCE_S: Final = 1.0
PATIENCE_MAX_S: Final = 60.0
"""An open action is asked for again after the first, then ever more rarely, down to the second."""
RETRY_S: Final = 0.25


def number_of(id: int | str, task: str, name: str) -> int:  # noqa: A002
    """The number in an id of a client. Raises InvalidRequest."""
    owner, slash, number = str(id).rpartition("/")
    ours = not slash or owner == f"{task}/{name}"
    if isinstance(id, bool) or not ours or not (number.isascii() and number.isdigit()):
        raise InvalidRequest("id", f"must be {task}/{name}/NUMBER, or the number", id)
    n = int(number) if len(number) <= 19 else limits.NUMBER_MAX + 1
    if n > limits.NUMBER_MAX:
        raise InvalidRequest("id", f"must end in a number of at most {limits.NUMBER_MAX}", id)
    return n


def checked_key(key: str) -> str:
    """Raises InvalidRequest."""
    if not isinstance(key, str) or len(key) > limits.KEY_LENGTH_MAX:
        raise InvalidRequest("key", f"must be a text of at most {limits.KEY_LENGTH_MAX} characters", key)
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("key", f"must be text that UTF-8 can hold: {error.reason}", key) from None
    return key


class Recall:
    """owner: "task/client". ask: puts a question to a scheduler; it raises ClientClosed, or BrokerError to be tried again.
    barrier: stores something in the log, and returns its sequence."""

    def __init__(
        self, owner: str, ledger: Ledger, ask: Callable[[m.Ask], Awaitable[m.Answer]], barrier: Callable[[], Awaitable[int]]
    ) -> None:
        self._owner, self._ledger, self._ask, self._barrier = owner, ledger, ask, barrier
        self._sharing: dict[asyncio.Task[None], Waiter] = {}
        self.fetch: Fetch | None = None
        """See `Waiting.fetch`."""
        ledger.on_shared = self._share_soon

    async def result(self, n: int, key: str) -> Result:
        """The outcome of action `n`, or of what `key` stands for if there is one. Waits while it is open. Raises UnknownAction,
        ResultGone, ClientClosed."""
        question = m.Ask(ids=[] if key else [n], keys=[key] if key else [], recall=True)
        patience_s = PATIENCE_S
        while True:
            answer = await self._answer(question)
            named = dict(answer.keys).get(key) if key else n
            if named is None or named in answer.unseen:
                if not question.stored_seq:  # the scheduler may not have read yet what was submitted just now
                    question = replace(question, stored_seq=await self._stored())
                    continue
                raise UnknownAction(f"{self._owner}/{n}" if not key else f"{self._owner}: key {key!r}")
            nonce = dict(zip(answer.open, answer.nonces, strict=True)).get(named)
            waiting = Waiting(f"{self._owner}/{named}", time.monotonic(), lambda: None)
            waiting.fetch = self.fetch
            if nonce is not None:
                self._ledger.recalled.setdefault(named, []).append((nonce, waiting))
            else:
                await self._read(waiting, named, dict(answer.outcomes).get(named, 0))
            try:
                async with asyncio.timeout(patience_s if nonce is not None else None):
                    return await waiting
            except TimeoutError:
                patience_s = min(2 * patience_s, PATIENCE_MAX_S)
            finally:
                self._forget(named, waiting)

    def _forget(self, n: int, waiting: Waiting) -> None:
        left = [each for each in self._ledger.recalled.pop(n, []) if each[1] is not waiting]
        if left:
            self._ledger.recalled[n] = left

    async def _read(self, waiting: Waiting, n: int, seq: int) -> None:
        """Settles it with what stands at `seq`. Raises ResultGone."""
        found = await self._found(n, seq) if seq else None
        if found is None:
            raise ResultGone(f"{self._owner}/{n}: its outcome is no longer in the log")
        result, output, executor = found
        if result.same_as:
            await self._share(waiting, result)
        else:
            waiting.settle(result, output, executor)

    # --- outcomes that are shared --------------------------------------------------------------------------------

    def _share_soon(self, waiter: Waiter, result: m.Result) -> None:
        task = asyncio.get_running_loop().create_task(self._share(waiter, result))
        self._sharing[task] = waiter
        task.add_done_callback(lambda done: self._sharing.pop(done, None))

    async def _share(self, waiter: Waiter, ruling: m.Result) -> None:
        """The action was not run: what came of the first one of its key is its outcome."""
        try:
            found = await self._found(ruling.same_as, ruling.at_seq)
        except Exception as error:
            waiter.fail(error)
            return
        if found is None:
            waiter.settle(replace(ruling, detail="what it wrote is no longer in the log"), m.Output(), "")
        else:
            result, output, executor = found
            waiter.settle(replace(result, same_as=ruling.same_as), output, executor)

    def close(self, error: Exception) -> None:
        """Whoever still waits gets `error`."""
        for task, waiter in list(self._sharing.items()):
            task.cancel()
            waiter.fail(error)
        for recalled in self._ledger.recalled.values():
            for _, waiter in recalled:
                waiter.fail(error)
        self._ledger.recalled.clear()

    # --- the log -------------------------------------------------------------------------------------------------

    async def _found(self, n: int, seq: int) -> tuple[m.Result, m.Output, str] | None:
        """What the completion at `seq` says of `n`: (result, output, executor); None if it is not there any more."""
        answer = await self._answer(m.Ask(at_seq=seq))
        for at, data in answer.completions:
            finished = m.decode("tangram.completions.any.any", data)[1]
            if at == seq and isinstance(finished, m.ActionsFinished) and n in finished.ids:
                index = finished.ids.index(n)
                output = finished.outputs[index]
                return (
                    m.decode_result(finished.results[index]),
                    m.decode_output(output) if output else m.Output(),
                    finished.executor,
                )
        return None

    async def _stored(self) -> int:
        while True:
            try:
                return await self._barrier()
            except BrokerError:
                await asyncio.sleep(RETRY_S)

    async def _answer(self, question: m.Ask) -> m.Answer:
        while True:
            try:
                return await self._ask(question)
            except BrokerError:
                await asyncio.sleep(RETRY_S)
