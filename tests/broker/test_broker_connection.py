"""Publish, ask, subscribe; what happens to what is on its way when the server goes."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tangram.broker import (
    ApiError,
    Broker,
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
    Delivery,
    EmbeddedServer,
    MessageTooLarge,
    NotLeader,
    stream_state,
)

Connect = Callable[..., AbstractAsyncContextManager[Broker]]
Freeze = Callable[[], None]
MakeStream = Callable[..., Awaitable[None]]
Eventually = Callable[..., Awaitable[None]]


async def test_publishes_are_stored_in_the_order_of_the_calls(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        futures = [broker.publish_soon("s.a", b"%d" % n, headers={"H": "1"} if n % 2 else None) for n in range(2_000)]
        assert [ack.seq for ack in await asyncio.gather(*futures)] == list(range(1, 2_001))


async def test_one_message_id_is_stored_once_also_over_a_kill(
    server: EmbeddedServer, connect: Connect, make_stream: MakeStream, eventually: Eventually
) -> None:
    """The retry of a publish says `duplicate`, with the first one's sequence."""
    async with connect() as broker:
        await make_stream(broker, duplicate_window=60_000_000_000)
        first = await broker.publish("s.a", b"x", headers={"Nats-Msg-Id": "one"})
        again = await broker.publish("s.a", b"x", headers={"Nats-Msg-Id": "one"})
        assert (again.seq, again.duplicate, first.duplicate) == (first.seq, True, False)
        server.kill()
        server.restart()
        await eventually(lambda: broker.reconnects == 1)
        assert (await broker.publish("s.a", b"x", headers={"Nats-Msg-Id": "one"})).duplicate


async def test_too_large_is_found_before_sending_and_the_connection_lives(connect: Connect, make_stream: MakeStream) -> None:
    """1,048,500 bytes fit max_payload, 200 bytes of headers more do not; the server would close the connection."""
    async with connect() as broker:
        await make_stream(broker)
        headers = {"X": "y" * 183}  # 12 + 5 + 183 = 200 bytes
        payload = b"x" * 1_048_500
        with pytest.raises(MessageTooLarge, match="1048700 bytes"):
            await broker.publish("s.a", payload, headers=headers)
        for send in (broker.send("s.a", b"x" * 1_048_577), broker.request("s.a", b"x" * 1_048_577, timeout_s=1.0)):
            with pytest.raises(MessageTooLarge):
                await send
        exact = await broker.publish("s.a", payload[: 1_048_576 - 200], headers=headers)
        assert (exact.seq, broker.reconnects) == (1, 0)


async def test_over_the_streams_own_limit_is_too_large_as_well(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker, max_msg_size=1_000)
        with pytest.raises(MessageTooLarge):
            await broker.publish("s.a", b"x" * 1_001)


async def test_refusals_have_their_kind(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        with pytest.raises(Busy, match="no stream"):
            await broker.publish("s.a", b"x")
        await make_stream(broker, max_msgs=1, discard="new")
        await broker.publish("s.a", b"x")
        with pytest.raises(Busy) as full:
            await broker.publish("s.a", b"x")
        assert full.value.code == 10077
        with pytest.raises(NotLeader):
            await broker.publish("s.a", b"x", headers={"Nats-Expected-Last-Subject-Sequence": "5"})
        with pytest.raises(ApiError) as missing:
            await broker.api("STREAM.INFO.NONE")
        assert missing.value.code == 10059


async def test_no_acknowledgement_is_a_timeout(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker, no_ack=True)
        with pytest.raises(BrokerTimeout, match="may or may not"):
            await broker.publish("s.a", b"x", timeout_s=0.05)


async def test_ask_and_answer(connect: Connect) -> None:
    async with connect() as asking, connect() as answering:
        subscription = await answering.subscribe(
            "echo", lambda question: answering.send_soon(question.reply, question.data[::-1])
        )
        assert await asking.request("echo", b"abc", timeout_s=1.0) == b"cba"
        await subscription.unsubscribe()
        await answering.flush()
        with pytest.raises(BrokerUnavailable, match="nobody answers echo"):
            await asking.request("echo", b"abc", timeout_s=1.0)
        await answering.subscribe("mute", lambda question: None)
        with pytest.raises(BrokerTimeout):
            await asking.request("mute", b"", timeout_s=0.02)
        assert 0 < await asking.rtt() < 1


async def test_a_bad_subject_is_an_error_not_a_protocol_injection(connect: Connect) -> None:
    async with connect() as broker:
        for subject in ("", "a b", "a\r\nPUB b 0\r\n\r\n"):
            with pytest.raises(BrokerError):
                broker.send_soon(subject, b"")
            with pytest.raises(BrokerError):
                await broker.publish(subject, b"")
        with pytest.raises(BrokerError):
            await broker.subscribe("a..b", lambda _: None)


async def test_a_slow_callback_loses_nothing(connect: Connect) -> None:
    """Large messages, a callback that holds the loop up, more than nats-py's limits in all."""
    async with connect() as reading, connect() as sending:
        received: list[int] = []

        def take(delivery: Delivery) -> None:
            if len(received) % 50 == 0:
                time.sleep(0.05)
            received.append(len(delivery.data))

        await reading.subscribe("big.*", take)
        data = b"x" * 1_000_000
        for _ in range(8):
            for _ in range(25):
                sending.send_soon("big.a", data)
            await sending.flush()
            await reading.flush()  # core messages have no flow control: the server cuts off who it owes 64 MiB
        assert received == [1_000_000] * 200
        assert reading.reconnects == 0


async def test_what_is_on_its_way_fails_when_the_server_dies_and_what_comes_later_fails_at_once(
    server: EmbeddedServer, freeze: Freeze, connect: Connect, make_stream: MakeStream, eventually: Eventually
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        freeze()
        on_their_way = [broker.publish_soon("s.a", b"x") for _ in range(100)]
        asked = asyncio.create_task(broker.api("STREAM.INFO.S"))
        await asyncio.sleep(0)
        server.kill()
        results = await asyncio.gather(*on_their_way, return_exceptions=True)
        assert {type(result) for result in results} == {BrokerTimeout}
        with pytest.raises(BrokerUnavailable):
            await asked
        assert not broker.is_connected
        for _ in range(10):
            with pytest.raises(BrokerUnavailable):
                await broker.publish("s.a", b"late")
        broker.send_soon("s.a", b"late")
        with pytest.raises(BrokerUnavailable):
            await broker.rtt()
        came_back: list[int] = []
        broker.on_reconnect(lambda: came_back.append(1))
        server.restart()
        await eventually(lambda: came_back)
        ack = await broker.publish("s.a", b"y")
        state = await stream_state(broker, "S")
        assert ack.seq == state.last_seq == state.messages == 1  # nothing of the above was stored late


async def test_a_late_pong_does_not_kill_the_reader(
    freeze: Freeze, thaw: Freeze, connect: Connect, make_stream: MakeStream
) -> None:
    """nats-py sets the pong on the future that the time-out has cancelled, and its read loop ends."""
    async with connect() as broker:
        await make_stream(broker)
        freeze()
        try:
            with pytest.raises(BrokerTimeout):
                await broker.rtt(0.05)
            cancelled = asyncio.create_task(broker.rtt())
            await asyncio.sleep(0)
            cancelled.cancel()
        finally:
            thaw()
        assert (await broker.publish("s.a", b"x")).seq == 1
        assert broker.reconnects == 0


async def test_cancelling_a_publisher_cancels_it(freeze: Freeze, thaw: Freeze, connect: Connect, make_stream: MakeStream) -> None:
    """nats-py's publish swallows CancelledError when its buffer is full: here none of 20 is."""
    async with connect() as broker:
        await make_stream(broker)
        started = asyncio.Event()

        async def pour() -> None:
            while True:
                started.set()
                futures = [broker.publish_soon("s.a", b"x" * 100_000) for _ in range(50)]
                await asyncio.wait(futures, timeout=0.001)

        freeze()  # so that every buffer is full
        try:
            for _ in range(20):
                task = asyncio.create_task(pour())
                await started.wait()
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
                assert task.cancelled()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await pour()
        finally:
            thaw()


async def test_too_much_on_its_way_is_busy(freeze: Freeze, thaw: Freeze, connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        freeze()
        try:
            futures = [broker.publish_soon("s.a", b"") for _ in range(65_537)]
            assert isinstance(futures[-1].exception(), Busy)
            assert not futures[-2].done()
        finally:
            thaw()


async def test_closing_never_hangs_and_fails_what_waits(
    server: EmbeddedServer, freeze: Freeze, connect: Connect, make_stream: MakeStream
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        freeze()
        waiting = broker.publish_soon("s.a", b"x" * 1_000_000)
        begin_s = time.monotonic()
        await broker.close()
        server.kill()
        assert time.monotonic() - begin_s < 3.0
        assert isinstance(waiting.exception(), BrokerTimeout)
        with pytest.raises(BrokerUnavailable):
            await broker.publish("s.a", b"x")
        broker.send_soon("s.a", b"x")
        await broker.close()


async def test_closed_for_good_is_told_once(connect: Connect, eventually: Eventually) -> None:
    told: list[int] = []
    async with connect(on_closed=lambda: told.append(1)) as broker:
        await broker.subscribe("mute", lambda _: None)
        asked = asyncio.create_task(broker.request("mute", b"", timeout_s=5.0))
        await asyncio.sleep(0)
        await broker._link.nc._send_command(b"NONSENSE\r\n")  # the server answers -ERR and closes
        await broker._link.nc._flush_pending()
        with pytest.raises(BrokerUnavailable):
            await asked
        await eventually(lambda: told)
        assert broker.is_closed
    assert told == [1]


async def test_closing_ourselves_is_not_told(connect: Connect) -> None:
    told: list[int] = []
    async with connect(on_closed=lambda: told.append(1)):
        pass
    assert told == []


async def test_nobody_there_is_one_clear_line_without_the_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(BrokerUnavailable) as refused:
            await Broker.connect(f"nats://tangram:hunter2@127.0.0.1:{port}", name="t", connect_timeout_s=0.3)
    message = str(refused.value)
    assert f"nats://127.0.0.1:{port}" in message
    assert "hunter2" not in message
    assert "\n" not in message


async def test_a_wrong_password_fails_at_once(server: EmbeddedServer) -> None:
    begin_s = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"(?i)authorization"):
        await Broker.connect(f"nats://tangram:wrong@127.0.0.1:{server.port}", name="t", connect_timeout_s=10.0)
    assert time.monotonic() - begin_s < 3.0


async def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "late") as server:
        server.stop()
        connecting = asyncio.create_task(Broker.connect(server.url, name="t"))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.restart)
        broker = await connecting
        assert await broker.rtt() > 0
        await broker.close()
