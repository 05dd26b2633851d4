"""A newer record fences every write of an older leader, its own older self included."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tangram.broker import (
    Broker,
    BrokerTimeout,
    EmbeddedServer,
    LeaderWriter,
    MessageTooLarge,
    NotLeader,
    PubAck,
    last_for,
    read_log,
)

Connect = Callable[..., AbstractAsyncContextManager[Broker]]
Freeze = Callable[[], None]
MakeStream = Callable[..., Awaitable[None]]
Eventually = Callable[..., Awaitable[None]]
LEADER = "s.leader"


async def acquire(broker: Broker, data: bytes = b"", **options: float) -> LeaderWriter:
    return await LeaderWriter.acquire(broker, "S", LEADER, data, **options)  # type: ignore[arg-type]


def writes(prefix: str, count: int) -> list[tuple[str, bytes, str]]:
    return [("s.w", f"{prefix}-{n}".encode(), f"{prefix}-{n}") for n in range(count)]


async def stored(broker: Broker) -> list[bytes]:
    return [message.data for message in await read_log(broker, "S", 1, subject="s.w", batch=5_000)]


async def test_a_window_is_stored_in_order(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        leader = await acquire(broker, b"first")
        assert leader.epoch == 1
        assert [ack.seq for ack in await leader.write_all(writes("a", 100))] == list(range(2, 102))
        assert await stored(broker) == [b"a-%d" % n for n in range(100)]
        assert (await leader.write_soon("s.w", b"one", "one")).seq == 102
        assert await leader.write_all([]) == []
        one_by_one = await acquire(broker, pipelined=False)
        assert [ack.seq for ack in await one_by_one.write_all(writes("b", 3))] == [104, 105, 106]


async def test_the_same_window_again_is_a_duplicate(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        leader = await acquire(broker)
        first = await leader.write_all(writes("a", 5))
        assert await leader.write_all(writes("a", 5)) == [PubAck(ack.seq, True) for ack in first]


async def test_a_stale_leader_stores_nothing_more(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as first, connect() as second:
        await make_stream(first)
        stale = await acquire(first, b"1")
        await stale.write_all(writes("before", 3))
        fresh = await acquire(second, b"2")
        assert fresh.epoch > stale.epoch
        await fresh.write_all(writes("fresh", 3))
        with pytest.raises(NotLeader):
            await stale.write_all(writes("stale", 50))
        with pytest.raises(NotLeader):  # it knows by now
            await stale.write_soon("s.w", b"stale", "x")
        assert await stored(first) == [b"before-%d" % n for n in range(3)] + [b"fresh-%d" % n for n in range(3)]
        last = await last_for(first, "S", LEADER)
        assert last is not None
        assert (last.seq, last.data) == (fresh.epoch, b"2")


async def test_its_own_late_writes_are_fenced_once_it_acquired_anew(
    freeze: Freeze, thaw: Freeze, connect: Connect, make_stream: MakeStream
) -> None:
    """Writes that it gave up on still lie in the socket of the old connection when it acquires on a new one."""
    async with connect() as old, connect() as new:
        await make_stream(old)
        before = await acquire(old, b"1", give_up_s=0.05)
        freeze()
        try:
            late = asyncio.create_task(before.write_all(writes("late", 3_000)))
            await asyncio.wait({late})
            assert isinstance(late.exception(), BrokerTimeout)
        finally:
            thaw()
        again = await acquire(new, b"2", timeout_s=20.0)  # behind 3,000 messages that are synced one by one
        await again.write_all(writes("again", 2))
        await old.flush()  # the server has taken all that the old connection had sent
        messages = await read_log(new, "S", 1, batch=5_000)
        last_late = max((message.seq for message in messages if message.data.startswith(b"late")), default=0)
        assert last_late < again.epoch
        assert [message.data for message in messages if message.seq > again.epoch] == [b"again-0", b"again-1"]
        with pytest.raises(BrokerTimeout):
            await before.write_all(writes("more", 1))


class LosesOneAck(Broker):
    """The real thing, but the first acknowledgement does not arrive."""

    lost = False

    async def publish(self, subject: str, data: bytes, **options: Any) -> PubAck:
        ack = await super().publish(subject, data, **options)
        if not self.lost:
            self.lost = True
            raise BrokerTimeout("lost")
        return ack


async def test_a_record_whose_acknowledgement_was_lost_is_recognised(
    server: EmbeddedServer, connect: Connect, make_stream: MakeStream
) -> None:
    """The server looks at the condition before the message id, so the retry reads as if another had been faster."""
    async with connect() as other:
        await make_stream(other)
        await acquire(other, b"other")
        broker = await LosesOneAck.connect(server.url, name="t")
        leader = await acquire(broker, b"mine")
        assert broker.lost
        assert leader.epoch == 2
        assert len(await leader.write_all(writes("a", 3))) == 3
        await broker.close()


async def test_raced_takeovers_leave_one_leader(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as one, connect() as two:
        await make_stream(one)
        for round_ in range(20):
            results = await asyncio.gather(acquire(one), acquire(two), return_exceptions=True)
            leaders = [result for result in results if isinstance(result, LeaderWriter)]
            assert leaders
            assert all(isinstance(result, (LeaderWriter, NotLeader)) for result in results)
            # Both may have acquired, one after the other: only the later one may write.
            leaders.sort(key=lambda leader: leader.epoch)
            outcomes = await asyncio.gather(
                *(leader.write_all(writes(f"{round_}-{n}", 10)) for n, leader in enumerate(leaders)), return_exceptions=True
            )
            assert isinstance(outcomes[-1], list)
            assert all(isinstance(outcome, NotLeader) for outcome in outcomes[:-1])


async def test_writes_survive_a_kill_and_are_stored_once(
    server: EmbeddedServer, connect: Connect, make_stream: MakeStream
) -> None:
    async with connect() as broker:
        await make_stream(broker)
        leader = await acquire(broker, give_up_s=20.0)
        await leader.write_all(writes("a", 10))
        writing = asyncio.create_task(leader.write_all(writes("b", 500)))
        await asyncio.sleep(0)
        await broker.flush()
        server.kill()
        await asyncio.to_thread(server.restart)
        acks = await writing
        assert len({ack.seq for ack in acks}) == 500
        assert sorted(await stored(broker)) == sorted([b"a-%d" % n for n in range(10)] + [b"b-%d" % n for n in range(500)])


async def test_giving_up_ends_the_writer(freeze: Freeze, thaw: Freeze, connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        leader = await acquire(broker, give_up_s=0.1)
        freeze()
        try:
            with pytest.raises(BrokerTimeout, match="gave up"):
                await leader.write_all(writes("a", 5))
            with pytest.raises(BrokerTimeout):
                await acquire(broker, timeout_s=0.1)
        finally:
            thaw()
        with pytest.raises(BrokerTimeout):
            await leader.write_all(writes("b", 1))
        again = await acquire(broker)
        await again.write_all(writes("c", 1))
        data = await stored(broker)
        assert data[-1] == b"c-0"  # what of "a" was stored stands before the new record
        assert b"b-0" not in data


async def test_a_full_stream_is_waited_for(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker, max_msgs=3, discard="new")
        leader = await acquire(broker)
        writing = asyncio.create_task(leader.write_all(writes("a", 4)))
        await asyncio.sleep(0.05)
        assert not writing.done()
        await broker.api("STREAM.PURGE.S", {"filter": "s.w"})
        assert len(await writing) == 4


async def test_what_cannot_fit_is_said(connect: Connect, make_stream: MakeStream) -> None:
    async with connect() as broker:
        await make_stream(broker)
        leader = await acquire(broker)
        with pytest.raises(MessageTooLarge):
            await leader.write_all([("s.w", b"x" * 1_048_576, "big")])
        assert len(await leader.write_all(writes("a", 1))) == 1
