"""Reading a durable consumer that somebody else makes."""

import asyncio
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tangram.broker import (
    ApiError,
    Broker,
    BrokerUnavailable,
    Delivered,
    EmbeddedServer,
    PullLoop,
    consumer_exists,
    delete_consumer,
    ensure_consumer,
)
from tangram.broker.server_binary import find_server
from tangram.broker.wire import Delivery

Connect = Callable[..., AbstractAsyncContextManager[Broker]]
MakeStream = Callable[..., Awaitable[None]]
Eventually = Callable[..., Awaitable[None]]


async def ensure(
    broker: Broker, name: str = "c", filters: tuple[str, ...] = ("s.>",), start_seq: int = 1, **options: Any
) -> bool:
    return await ensure_consumer(
        broker, "S", name, filter_subjects=list(filters), start_seq=start_seq, **{"inactive_threshold_s": 60.0, **options}
    )


async def read(loop: PullLoop, count: int, seen: dict[int, Delivered] | None = None, timeout_s: float = 10.0) -> list[Delivered]:
    """Takes batches, acknowledging each message, until there are `count` different ones, those in `seen` included."""
    messages = dict(seen or {})
    deadline_s = time.monotonic() + timeout_s
    while len(messages) < count:
        assert time.monotonic() < deadline_s, f"{len(messages)} of {count}"
        for message in await loop.batch(timeout_s=0.5):
            messages.setdefault(message.seq, message)
            loop.ack(message)
    return [messages[seq] for seq in sorted(messages)]


async def test_a_message_after_idling_comes_at_once(connect: Connect, make_stream: MakeStream) -> None:
    """Nats-py's fetch left requests behind and then stalled for its whole time-out with the message in hand."""
    async with connect() as broker:
        await make_stream(broker)
        await ensure(broker)
        loop = await PullLoop.start(broker, "S", "c", batch=8, heartbeat_s=0.1)
        slowest_s = 0.0
        for round_ in range(25):
            assert await loop.batch(timeout_s=0.002 * round_) == []
            begin_s = time.perf_counter()
            await broker.publish("s.a", b"%d" % round_)
            message = (await loop.batch(timeout_s=1.0))[0]
            slowest_s = max(slowest_s, time.perf_counter() - begin_s)
            assert message.data == b"%d" % round_
            loop.ack(message)
        assert slowest_s < 0.5
        await loop.close()


async def test_short_timeouts_lose_nothing(connect: Connect, make_stream: MakeStream) -> None:
    """10,000 messages, read with time-outs of 1 ms and cancelled in between."""
    async with connect() as broker, connect() as writer:
        await make_stream(broker, storage="memory")
        await ensure(broker)
        loop = await PullLoop.start(broker, "S", "c")
        seqs: list[int] = []
        assert await loop.batch(timeout_s=0.001) == []

        async def write() -> None:
            for _ in range(100):
                await asyncio.gather(*(writer.publish_soon("s.a", b"x" * 100) for _ in range(100)))

        writing = asyncio.create_task(write())
        while len(seqs) < 10_000:
            cancelled = asyncio.create_task(loop.batch())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            if not cancelled.cancelled():
                seqs += [message.seq for message in cancelled.result()]
            batch = await loop.batch(timeout_s=0.001)
            seqs += [message.seq for message in batch]
            for message in batch:
                loop.ack(message)
        assert seqs[:10_000] == list(range(1, 10_001))
        await writing
        await loop.close()


async def test_large_messages_and_a_healthy_reader(connect: Connect, make_stream: MakeStream) -> None:
    """120 MB in messages of 1 MB; the server would cut off a reader that it owes more than 64 MiB."""
    async with connect() as broker, connect() as writer:
        await make_stream(broker, storage="memory")
        for _ in range(15):
            await asyncio.gather(*(writer.publish_soon("s.a", b"x" * 1_000_000) for _ in range(8)))
        await ensure(broker)
        loop = await PullLoop.start(broker, "S", "c", batch=256)
        messages = await read(loop, 120)
        assert [message.seq for message in messages] == list(range(1, 121))
        assert {len(message.data) for message in messages} == {1_000_000}
        assert (broker.reconnects, writer.reconnects) == (0, 0)
        await loop.close()


async def test_the_consumer_may_come_later_and_go_and_come_again(
    connect: Connect, make_stream: MakeStream, eventually: Eventually
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        loop = await PullLoop.start(broker, "S", "c", heartbeat_s=0.1)
        await eventually(lambda: loop.state == "missing")
        await broker.publish("s.a", b"1")
        await ensure(broker)
        assert [message.data for message in await read(loop, 1)] == [b"1"]
        await eventually(lambda: loop.state == "reading")
        assert await delete_consumer(broker, "S", "c")
        await eventually(lambda: loop.state == "missing")
        await ensure(broker, start_seq=2)
        await broker.publish("s.a", b"2")
        assert [message.data for message in await read(loop, 1)] == [b"2"]
        await loop.close()


async def test_unacknowledged_comes_again_acknowledged_does_not(
    connect: Connect, make_stream: MakeStream, eventually: Eventually
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        await ensure(broker, ack_wait_s=0.1)
        await broker.publish("s.a", b"x", headers={"H": "v"})
        loop = await PullLoop.start(broker, "S", "c")
        first = (await loop.batch(timeout_s=2.0))[0]
        again = (await loop.batch(timeout_s=2.0))[0]
        assert (first.seq, first.deliveries, again.seq, again.deliveries) == (1, 1, 1, 2)
        assert (again.subject, again.data, again.headers) == ("s.a", b"x", {"H": "v"})
        assert abs(again.stamp_ns - time.time_ns()) < 60_000_000_000
        loop.ack(again)

        async def settled() -> bool:
            return bool((await broker.api("CONSUMER.INFO.S.c"))["num_ack_pending"] == 0)

        await eventually(settled)
        assert await loop.batch(timeout_s=0.3) == []
        await loop.close()


async def test_reading_goes_on_over_kills(
    server: EmbeddedServer, connect: Connect, make_stream: MakeStream, eventually: Eventually
) -> None:
    async with connect() as broker, connect() as writer:
        await make_stream(broker)
        await ensure(broker, ack_wait_s=0.5)
        loop = await PullLoop.start(broker, "S", "c")
        seen: dict[int, Delivered] = {}
        stored: list[int] = []
        for kill in range(3):
            stored += [ack.seq for ack in await asyncio.gather(*(writer.publish_soon("s.a", b"x") for _ in range(200)))]
            if kill < 2:
                seen |= {message.seq: message for message in await loop.batch(timeout_s=1.0)}
                server.kill()
                await asyncio.to_thread(server.restart)
                await eventually(lambda kill=kill: broker.reconnects == writer.reconnects == kill + 1)
        assert set(stored) == set(range(1, 601))
        assert [message.seq for message in await read(loop, 600, seen)] == list(range(1, 601))
        await loop.close()


async def test_ensuring_a_consumer_twice_changes_nothing(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        await broker.publish("s.a", b"x")
        assert await ensure(broker, start_seq=1)
        assert not await ensure(broker, start_seq=1)
        assert not await ensure(broker, start_seq=2)  # it keeps its place
        assert (await broker.api("CONSUMER.INFO.S.c"))["config"]["opt_start_seq"] == 1
        assert not await ensure(broker, filters=("s.a", "s.b"), ack_wait_s=7.0)
        config = (await broker.api("CONSUMER.INFO.S.c"))["config"]
        assert (config["filter_subjects"], config["ack_wait"], config["max_ack_pending"]) == (
            ["s.a", "s.b"],
            7_000_000_000,
            100_000,
        )
        assert await delete_consumer(broker, "S", "c")
        assert not await delete_consumer(broker, "S", "c")
        assert await ensure(broker, start_seq=5)
        assert await ensure(broker, start_seq=1)  # the one that started later would miss messages


async def ack_subject(broker: Broker) -> str:
    """The reply subject of a message that a consumer delivers, as it is on the wire."""
    replies: asyncio.Queue[str] = asyncio.Queue()

    def take(delivery: Delivery) -> None:
        replies.put_nowait(delivery.reply)

    await broker.subscribe("raw", take)
    broker.send_soon("$JS.API.CONSUMER.MSG.NEXT.S.c", b'{"batch":1,"expires":1000000000}', reply="raw")
    return await replies.get()


@pytest.fixture
def bare_server_url(tmp_path: Path) -> Iterator[str]:
    """A server with nothing configured but its port and store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(find_server()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(tmp_path), "-l", str(tmp_path / "log")]
    with subprocess.Popen(command) as process:
        yield f"nats://127.0.0.1:{port}"
        process.kill()


async def test_servers_still_send_acks_of_the_first_form_by_default(bare_server_url: str, make_stream: MakeStream) -> None:
    """The canary: when a server's default flips, this says so. (We read both; nats-py's ordered consumers do not.)"""
    broker = await Broker.connect(bare_server_url, name="canary")
    await make_stream(broker)
    await ensure(broker)
    await broker.publish("s.a", b"x")
    assert len((await ack_subject(broker)).split(".")) == 9
    await broker.close()


async def test_acks_of_the_second_form_are_read_as_well(tmp_path: Path, make_stream: MakeStream) -> None:
    with EmbeddedServer.start(tmp_path / "v2", extra_config="feature_flags { js_ack_fc_v2: true }") as server:
        broker = await Broker.connect(server.url, name="v2")
        await make_stream(broker)
        await ensure(broker, ack_wait_s=60.0)
        await broker.publish("s.a", b"first")
        assert len((await ack_subject(broker)).split(".")) >= 11
        await broker.publish("s.a", b"second")
        loop = await PullLoop.start(broker, "S", "c")
        (message,) = await read(loop, 1)
        assert (message.seq, message.data) == (2, b"second")
        assert abs(message.stamp_ns - time.time_ns()) < 60_000_000_000
        await loop.close()
        await broker.close()


async def test_closed_for_good_ends_the_wait(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        await ensure(broker)
        loop = await PullLoop.start(broker, "S", "c", heartbeat_s=0.1)
        waiting = asyncio.create_task(loop.batch())
        await asyncio.sleep(0)
        await broker.close()
        with pytest.raises(BrokerUnavailable):
            await waiting
        await loop.close()


async def test_whether_a_consumer_exists(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        with pytest.raises(ApiError):
            await consumer_exists(broker, "S", "c")
        await make_stream(broker)
        assert not await consumer_exists(broker, "S", "c")
        await ensure(broker)
        assert await consumer_exists(broker, "S", "c")
        await delete_consumer(broker, "S", "c")
        assert not await consumer_exists(broker, "S", "c")
