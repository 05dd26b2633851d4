"""The bare chain: the least that three processes can do with the same broker layer. One publishes items, one passes each
on as a decision, one answers it; grouped as ours, one stream, the answers by republish; no validation, no planning, no
accounting, no fencing, and nobody waits for what he wrote to come back.

Run as `python -m tangram.bench.bare decide|complete|echo`.
"""

import asyncio
import itertools
import sys
from typing import Any, Final

import msgspec

from tangram import roles
from tangram.broker import Broker, Delivery, GroupedPublisher, PullLoop, ensure_consumer
from tangram.config import broker_url

STREAM: Final = "BARE"
ACTIONS, DECISIONS, ANSWERS, RESULTS, ECHO = "bare.actions", "bare.decisions", "bare.answers", "bareresults", "bareecho"
ITEM: Final = bytes(200)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, bytes]]).decode


def _publisher(broker: Broker, subject: str) -> "GroupedPublisher[str, tuple[int, bytes]]":
    return GroupedPublisher(
        broker, lambda key, items: (key, _encode(items)), items_max=1_000, size=lambda item: len(item[1]) + 16
    )


async def prepare(broker: Broker) -> None:
    """Makes the stream and the consumers."""
    config: dict[str, Any] = {
        "name": STREAM,
        "subjects": ["bare.*"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_bytes": 1 << 30,
        "allow_direct": True,
        "num_replicas": 1,
        "republish": {"src": ANSWERS, "dest": RESULTS},
    }
    await broker.api(f"STREAM.CREATE.{STREAM}", config)
    for name, subject in (("decide", ACTIONS), ("complete", DECISIONS)):
        await ensure_consumer(broker, STREAM, name, filter_subjects=[subject], start_seq=1, inactive_threshold_s=3_600)


async def pass_on(broker: Broker, consumer: str, subject: str) -> None:
    publisher = _publisher(broker, subject)
    reader = await PullLoop.start(broker, STREAM, consumer)
    while True:
        for delivered in await reader.batch():
            for item in _decode(delivered.data):
                publisher.add(subject, item)
            reader.ack(delivered)


class BareClient:
    """The publishing end: `call()` returns when its item has come back."""

    def __init__(self, broker: Broker) -> None:
        self._publisher = _publisher(broker, ACTIONS)
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[None]] = {}

    def on_answer(self, delivery: Delivery) -> None:
        for number, _ in _decode(delivery.data):
            future = self._open.pop(number, None)
            if future is not None:
                future.set_result(None)

    async def close(self) -> None:
        await self._publisher.close(1.0)

    async def call(self) -> None:
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._publisher.add(ACTIONS, (number, ITEM))
        await future


async def _role(what: str) -> int:
    broker = await Broker.connect(broker_url(), name=f"bare {what}")
    task = asyncio.current_task()
    assert task is not None
    roles.on_signals(task.cancel, task.cancel)
    try:
        if what == "echo":
            await broker.subscribe(ECHO, lambda delivery: broker.send_soon(delivery.reply, delivery.data))
            roles.say_ready()
            await asyncio.Event().wait()
        roles.say_ready()
        await pass_on(broker, what, {"decide": DECISIONS, "complete": ANSWERS}[what])
    except asyncio.CancelledError:
        pass
    finally:
        await broker.close()
    return 0


if __name__ == "__main__":
    roles.end_with_parent()
    sys.exit(roles.run_loop(_role(sys.argv[1])))
