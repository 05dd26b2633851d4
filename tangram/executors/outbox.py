"""What an executor says: outcomes by client, returns and changes; numbered by k, in the order they reach the wire."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, BrokerError, GroupedPublisher
from tangram.executors.backend import ActionKey
from tangram.outcomes import ErrorReason, Outcome

_RETURNS = "returns"
_OVERHEAD_BYTES = 64


class _Done(NamedTuple):
    n: int
    result: bytes
    output: bytes
    spent: Mapping[str, int] | None = None


class Outbox:
    """Grouped, retried until stored. A message that is sent again carries a new k: the fold skips what comes late under an
    old one, and a repeated outcome changes nothing."""

    def __init__(self, broker: Broker, executor: str, incarnation: str) -> None:
        self._executor, self._incarnation = executor, incarnation
        self._k = 1  # of the join
        self._events = 0
        self._publisher: GroupedPublisher[Hashable, object] = GroupedPublisher(
            broker,
            self._encode,
            items_max=limits.ENVELOPE_ITEMS_MAX,
            size=_size,
            bytes_max=limits.ENVELOPE_BYTES_MAX,
            on_refused=self._on_refused,
        )

    def finish(
        self, action: ActionKey, result: m.Result, output: m.Output | None, spent: Mapping[str, int] | None = None
    ) -> None:
        encoded = b"" if output is None else m.encode(output)
        self._publisher.add((action.task, action.client), _Done(action.n, m.encode(result), encoded, spent))

    def give_back(self, item: m.Returned | m.SessionEnded) -> None:
        self._publisher.add(_RETURNS, item)

    def say(self, event: m.ExecutorChanged | m.ExecutorDraining | m.ExecutorLeft) -> None:
        """`event.k` is replaced when it is sent. Use `flush` before and after where order to other keys matters."""
        self._events += 1
        self._publisher.add(self._events, event)

    async def flush(self) -> None:
        """Returns when all said so far is stored."""
        await self._publisher.flush()

    async def close(self, timeout_s: float) -> None:
        await self._publisher.close(timeout_s)

    def _encode(self, key: Hashable, items: list[object]) -> tuple[str, bytes]:
        self._k += 1
        if isinstance(key, tuple):
            done = [item for item in items if isinstance(item, _Done)]
            finished = m.ActionsFinished(
                executor=self._executor,
                incarnation=self._incarnation,
                k=self._k,
                ids=[item.n for item in done],
                results=[item.result for item in done],
                outputs=[item.output for item in done],
                spent=[(item.n, dict(item.spent)) for item in done if item.spent],
            )
            return subjects.completions(*key), m.encode(finished)
        subject = subjects.executors(self._executor)
        if key == _RETURNS:
            returns = m.ActionsReturned(
                incarnation=self._incarnation,
                k=self._k,
                returned=[item for item in items if isinstance(item, m.Returned)],
                ended=[item for item in items if isinstance(item, m.SessionEnded)],
            )
            return subject, m.encode(returns)
        (event,) = items
        assert isinstance(event, m.ExecutorChanged | m.ExecutorDraining | m.ExecutorLeft)
        return subject, m.encode(replace(event, k=self._k))

    def _on_refused(self, key: Hashable, items: list[object], error: BrokerError) -> None:
        """An outcome must not be lost because its output cannot be stored: it is reported without it."""
        for item in items:
            if isinstance(item, _Done) and item.output:
                result = m.decode_result(item.result)
                bare = m.Result(
                    nonce=result.nonce,
                    attempt=result.attempt,
                    outcome=Outcome.ERROR,
                    reason=ErrorReason.INTERNAL,
                    detail=f"its output could not be stored: {error}"[: limits.DETAIL_LENGTH_MAX],
                    units=result.units,
                    queued_ns=result.queued_ns,
                    startup_ns=result.startup_ns,
                    run_ns=result.run_ns,
                )
                self._publisher.add(key, _Done(item.n, m.encode(bare), b"", item.spent))


def _size(item: object) -> int:
    if isinstance(item, _Done):
        return len(item.result) + len(item.output) + _OVERHEAD_BYTES
    return _OVERHEAD_BYTES
