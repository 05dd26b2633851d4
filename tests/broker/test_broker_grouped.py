"""What queued up while the last publish was on its way is one message."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tangram.broker import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    EmbeddedServer,
    GroupedPublisher,
    MessageTooLarge,
    PubAck,
    PublishRefused,
    StoredMessage,
    read_log,
)

Connect = Callable[..., AbstractAsyncContextManager[Broker]]
Freeze = Callable[[], None]
MakeStream = Callable[..., Awaitable[None]]
Eventually = Callable[..., Awaitable[None]]


def encode(key: str, items: list[bytes]) -> tuple[str, bytes]:
    return f"s.{key}", b",".join(items)


def grouped(broker: Broker, *, items_max: int = 1_000, **options: object) -> "GroupedPublisher[str, bytes]":
    return GroupedPublisher(broker, encode, items_max=items_max, size=len, **options)  # type: ignore[arg-type]


async def stored(broker: Broker) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    while batch := await read_log(broker, "S", messages[-1].seq + 1 if messages else 1):
        messages += batch
    return messages


def first_occurrences(messages: list[StoredMessage], subject: str) -> list[bytes]:
    items = [item for message in messages if message.subject == subject for item in message.data.split(b",")]
    return list(dict.fromkeys(items))


async def test_alone_at_once_and_together_what_queues_up(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        acks: list[tuple[str, list[bytes], PubAck]] = []
        publisher = grouped(broker, on_stored=lambda key, items, ack: acks.append((key, items, ack)))
        publisher.add("a", b"1")
        await publisher.flush()
        assert acks == [("a", [b"1"], PubAck(1, False))]
        for n in range(2, 10):
            publisher.add("a", b"%d" % n)
            publisher.add("b", b"%d" % n)
        assert publisher.queued == 16
        await publisher.wait_stored()
        assert publisher.queued == 0
        messages = await stored(broker)
        assert [(message.subject, message.data) for message in messages[1:]] == [
            ("s.a", b"2,3,4,5,6,7,8,9"),
            ("s.b", b"2,3,4,5,6,7,8,9"),
        ]
        assert await publisher.close() == []
        with pytest.raises(BrokerUnavailable):
            publisher.add("a", b"late")


async def test_messages_stay_within_their_bounds(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        publisher = grouped(broker, items_max=3, bytes_max=10)
        items = [b"1", b"2", b"3", b"4", b"5" * 8, b"6" * 3, b"7" * 50, b"8"]
        for item in items:
            publisher.add("a", item)
        await publisher.flush()
        assert [message.data.split(b",") for message in await stored(broker)] == [
            items[:3],
            [items[3], items[4]],
            [items[5]],
            [items[6]],
            [items[7]],
        ]
        await publisher.close()


async def test_what_never_fits_is_refused_and_its_neighbours_live(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        refused: list[tuple[list[bytes], BrokerError]] = []
        publisher = grouped(broker, bytes_max=100_000_000, on_refused=lambda key, items, error: refused.append((items, error)))
        big = b"x" * 1_100_000
        items = [b"1", b"2", big, b"3", b"y" * 600_000, b"z" * 600_000]
        for item in items:
            publisher.add("a", item)
        await publisher.flush()
        assert first_occurrences(await stored(broker), "s.a") == [item for item in items if item != big]
        assert [entry[0] for entry in refused] == [[big]]
        assert isinstance(refused[0][1], MessageTooLarge)
        await broker.api("STREAM.UPDATE.S", {"name": "S", "subjects": ["s.>"], "allow_direct": True, "sealed": True})
        publisher.add("a", b"4")
        await publisher.flush()
        assert refused[1][0] == [b"4"]
        assert isinstance(refused[1][1], PublishRefused)
        await publisher.close()


async def test_everything_is_stored_in_order_over_kills(
    server: EmbeddedServer, connect: Connect, make_stream: MakeStream, eventually: Eventually
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        told: dict[str, list[bytes]] = {"a": [], "b": []}
        numbers: list[int] = []

        def numbered(key: str, items: list[bytes]) -> tuple[str, bytes]:
            numbers.append(len(numbers))
            return encode(key, items)

        publisher: GroupedPublisher[str, bytes] = GroupedPublisher(
            broker, numbered, lambda key, items, ack: told[key].extend(items), items_max=50, size=len
        )
        added: dict[str, list[bytes]] = {"a": [], "b": []}
        done = asyncio.Event()

        async def produce() -> None:
            n = 0
            while not done.is_set() or n < 2_000:
                for key, items in added.items():
                    items.append(b"%d" % n)
                    publisher.add(key, items[-1])
                n += 1
                if n % 20 == 0:
                    await asyncio.sleep(0.001)

        producing = asyncio.create_task(produce())
        for kill in range(3):
            before = len(told["a"])
            await eventually(lambda before=before: len(told["a"]) > before + 100)
            server.kill()
            await asyncio.to_thread(server.restart)
            await eventually(lambda kill=kill: broker.reconnects == kill + 1)
        done.set()
        await producing
        await publisher.wait_stored()
        messages = await stored(broker)
        for key, items in added.items():
            assert first_occurrences(messages, f"s.{key}") == items
            assert told[key] == items  # each is told once, in order
        assert await publisher.close() == []


async def test_a_full_stream_is_tried_again(connect: Connect, make_stream: MakeStream, eventually: Eventually) -> None:
    async with connect() as broker:
        await make_stream(broker, max_msgs=2, discard="new")
        tries: list[int] = []

        def counted(key: str, items: list[bytes]) -> tuple[str, bytes]:
            tries.append(len(items))
            return encode(key, items)

        publisher: GroupedPublisher[str, bytes] = GroupedPublisher(broker, counted, items_max=2, size=len, retry_s=0.001)
        for n in range(6):
            publisher.add("a", b"%d" % n)
        await eventually(lambda: len(tries) > 6)
        assert publisher.queued == 2
        await broker.api("STREAM.PURGE.S")
        await publisher.flush()
        assert [message.data for message in await stored(broker)] == [b"4,5"]
        await publisher.close()


async def test_closing_returns_what_is_not_known_to_be_stored(
    server: EmbeddedServer, freeze: Freeze, connect: Connect, make_stream: MakeStream
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        publisher = grouped(broker, items_max=2)
        publisher.add("a", b"0")
        await publisher.flush()
        freeze()
        for n in range(1, 6):
            publisher.add("a" if n % 2 else "b", b"%d" % n)
        waiting = asyncio.create_task(publisher.flush())
        left = await publisher.close(timeout_s=0.05)
        server.kill()
        assert left == [("a", b"1"), ("b", b"2"), ("a", b"3"), ("b", b"4"), ("a", b"5")]
        with pytest.raises(BrokerUnavailable):
            await waiting


async def test_an_answer_that_stays_away_is_a_retry(connect: Connect, make_stream: MakeStream, eventually: Eventually) -> None:
    async with connect() as broker:
        await make_stream(broker, no_ack=True)
        publisher = grouped(broker, timeout_s=0.02)
        publisher.add("a", b"1")
        await asyncio.sleep(0)
        publisher.add("a", b"2")

        async def seen() -> bool:
            return len(await stored(broker)) >= 3

        await eventually(seen)
        assert first_occurrences(await stored(broker), "s.a") == [b"1", b"2"]
        assert await publisher.close(timeout_s=0.01) == [("a", b"1"), ("a", b"2")]


async def test_an_encoder_that_raises_stops_the_publisher_and_loses_nothing(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)

        def broken(key: str, items: list[bytes]) -> tuple[str, bytes]:
            if b"bad" in items:
                raise RuntimeError("cannot encode")
            return encode(key, items)

        publisher: GroupedPublisher[str, bytes] = GroupedPublisher(broker, broken, items_max=10, size=len)
        publisher.add("a", b"bad")
        with pytest.raises(RuntimeError):
            await publisher.flush()
        with pytest.raises(BrokerUnavailable, match="cannot encode"):
            publisher.add("a", b"1")
        assert await publisher.close() == [("a", b"bad")]


async def test_a_connection_closed_for_good_stops_the_publisher(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        publisher = grouped(broker)
        await broker.close()
        publisher.add("a", b"1")
        with pytest.raises(BrokerUnavailable):
            await publisher.flush()
        assert isinstance(publisher.failed, BrokerUnavailable)
        assert await publisher.close() == [("a", b"1")]


async def test_nothing_counts_as_stored_while_it_waits_beside_what_was(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker, max_bytes=100_000, discard="new")
        publisher = grouped(broker, retry_s=0.01)
        publisher.add("big", b"x" * 200_000)  # there will never be room for it
        publisher.add("small", b"y")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await publisher.flush()
        assert [message.data for message in await stored(broker)] == [b"y"]
        async with asyncio.timeout(10):  # it gives up after a moment, and gives the loop to others meanwhile
            assert await publisher.close(0.2) == [("big", b"x" * 200_000)]
