"""Content in pieces: whole or an error that says what is wrong, whatever the server, the stream or another task does."""

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tangram import limits, subjects
from tangram.broker import (
    AccessDenied,
    BlobCorrupt,
    BlobMissing,
    Blobs,
    BlobsFull,
    BlobTooLarge,
    Broker,
    EmbeddedServer,
    apply,
    stream_state,
)

Connect = Callable[..., AbstractAsyncContextManager[Broker]]
ROOT = Path(__file__).resolve().parents[2]
PIECE = limits.BLOB_PIECE_BYTES


@pytest.fixture
async def broker(connect: Connect) -> AsyncIterator[Broker]:
    async with connect() as connected:
        await apply(connected)
        yield connected


async def stored(broker: Broker) -> tuple[int, int]:
    """How many pieces are there, and how many were ever stored."""
    state = await stream_state(broker, subjects.BLOBS)
    return state.messages, state.last_seq


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 20_000_000, limits.BLOB_BYTES_MAX])
async def test_what_was_put_can_be_got(connect: Connect, size: int) -> None:
    data = os.urandom(size)
    async with connect() as broker, connect() as other:
        await apply(broker)
        name = await Blobs(broker).put("t", data)
        parsed = subjects.parse_blob(name)
        assert parsed == (hashlib.sha256(data).hexdigest(), size, -(-size // PIECE))
        assert await Blobs(other).get("t", name) == data


@pytest.mark.parametrize("size", [0, limits.BLOB_BYTES_MAX + 1])
async def test_what_has_no_legal_size_is_not_stored(connect: Connect, size: int) -> None:
    async with connect() as broker:
        await apply(broker)
        with pytest.raises(BlobTooLarge, match=str(limits.BLOB_BYTES_MAX)):
            await Blobs(broker).put("t", bytes(size))
        assert await stored(broker) == (0, 0)


async def test_equal_content_is_sent_once_and_young_again_when_it_was_incomplete(connect: Connect) -> None:
    data = os.urandom(3 * PIECE)
    async with connect() as broker:
        await apply(broker)
        blobs = Blobs(broker)
        name = await blobs.put("t", data)
        assert await blobs.put("t", data) == name
        assert await stored(broker) == (3, 3)
        last = subjects.blob("t", name.partition("-")[0], 2)
        await broker.api(f"STREAM.PURGE.{subjects.BLOBS}", {"filter": last})
        assert await blobs.put("t", data) == name  # as one that was given up half-way, or is about to leave by age
        assert await stored(broker) == (3, 6)
        assert await blobs.get("t", name) == data


async def test_content_is_of_its_task_alone(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker)
        blobs = Blobs(broker)
        name = await blobs.put("a", b"secret of a")
        with pytest.raises(BlobMissing, match=r"tangram\.blobs\.b\."):
            await blobs.get("b", name)


async def test_a_missing_piece_and_a_changed_piece_are_told_apart(connect: Connect) -> None:
    data = os.urandom(2 * PIECE + 1)
    async with connect() as broker:
        await apply(broker)
        blobs = Blobs(broker)
        name = await blobs.put("t", data)
        sha256 = name.partition("-")[0]
        await broker.publish(subjects.blob("t", sha256, 1), bytes(PIECE))
        with pytest.raises(BlobCorrupt):
            await blobs.get("t", name)
        await broker.publish(subjects.blob("t", sha256, 1), bytes(PIECE + 2))
        with pytest.raises(BlobCorrupt, match="more of it"):
            await blobs.get("t", name)
        await broker.api(f"STREAM.PURGE.{subjects.BLOBS}", {"filter": subjects.blob("t", sha256, 1)})
        with pytest.raises(BlobMissing):
            await blobs.get("t", name)
        for wrong in ("", "x", f"{sha256}-{len(data) + 1}-3", f"{sha256}-{len(data) - 1}-3", f"{sha256}-{len(data)}-2"):
            with pytest.raises((BlobCorrupt, BlobMissing)):
                await blobs.get("t", wrong)


async def test_a_full_stream_is_said_at_once_and_what_is_there_can_still_be_renewed(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker, max_bytes={subjects.BLOBS: 4 * PIECE + 4_096})
        blobs = Blobs(broker)
        kept = os.urandom(3 * PIECE)
        name = await blobs.put("t", kept)
        with pytest.raises(BlobsFull, match="max_bytes"):
            await blobs.put("t", os.urandom(20 * PIECE))
        subject = subjects.blob("t", name.partition("-")[0], 0)
        await broker.publish(subject, kept[:PIECE])  # age renewed: the old one goes
        assert await blobs.get("t", name) == kept


async def test_it_goes_on_where_it_was_when_the_server_comes_back(server: EmbeddedServer, connect: Connect) -> None:
    data = os.urandom(30_000_000)
    async with connect() as broker:
        await apply(broker)
        blobs = Blobs(broker)
        putting = asyncio.create_task(blobs.put("t", data))
        while (await stored(broker))[0] < 5:
            await asyncio.sleep(0)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
        name = await putting
        getting = asyncio.create_task(blobs.get("t", name))
        await asyncio.to_thread(server.restart)
        assert await getting == data


async def test_many_at_once_do_not_hold_up_what_else_is_said(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker)
        await broker.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.*"]})
        blobs = Blobs(broker)
        putting = [asyncio.create_task(blobs.put("t", os.urandom(400_000))) for _ in range(200)]
        answered = 0
        while not all(task.done() for task in putting):
            assert broker.backlog_bytes <= (limits.BLOB_PIECES_IN_FLIGHT + 1) * PIECE
            await broker.publish("s.x", b"small")
            answered += 1
        assert answered > 5
        names = [task.result() for task in putting]
        found = await asyncio.gather(*(blobs.get("t", name) for name in names))
        assert [len(data) for data in found] == [400_000] * 200


async def test_cancelling_ends_it_and_leaves_the_turns_to_others(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker)
        blobs = Blobs(broker)
        for _ in range(3):
            putting = asyncio.create_task(blobs.put("t", os.urandom(20_000_000)))
            while (await stored(broker))[0] == 0 or broker.backlog_bytes:
                await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
        data = os.urandom(20_000_000)
        assert await blobs.get("t", await blobs.put("t", data)) == data


def two_tasks() -> str:
    """The users of deploy/nats/tasks.conf, whose passwords come from the environment, with passwords."""
    text = (ROOT / "deploy" / "nats" / "tasks.conf").read_text()
    return re.sub(r"\$(\w+)_PASSWORD", lambda match: f'"{match[1].lower()}-password-of-the-test"', text)


@pytest.fixture
async def as_user(tmp_path: Path) -> AsyncIterator[Callable[[str], Awaitable[Broker]]]:
    """`await as_user("a")`: a connection of a user of deploy/nats/tasks.conf, on a server with these users."""
    # The embedded server's own `authorization` comes first in its configuration; the later one is in force.
    server = EmbeddedServer.start(tmp_path / "users")
    server.stop()
    server = EmbeddedServer.start(tmp_path / "users", extra_config=two_tasks())
    opened: list[Broker] = []

    async def connect(user: str) -> Broker:
        url = f"nats://{user}:{user}-password-of-the-test@127.0.0.1:{server.port}"
        broker = await Broker.connect(url, name=f"test {user}", inbox_prefix=f"_INBOX_{user}")
        opened.append(broker)
        return broker

    try:
        yield connect
    finally:
        for broker in opened:
            await broker.close()
        server.stop()


async def test_a_servers_permissions_keep_a_task_from_anothers_blobs(as_user: Callable[[str], Awaitable[Broker]]) -> None:
    roles, a, b = await as_user("roles"), await as_user("a"), await as_user("b")
    await apply(roles)
    data = os.urandom(2 * PIECE)
    name = await Blobs(a).put("a", data)
    assert await Blobs(a).get("a", name) == data
    assert await Blobs(roles).get("a", name) == data
    theirs = Blobs(b)
    with pytest.raises(AccessDenied, match=r"tangram\.blobs\.a\."):
        await theirs.get("a", name)
    with pytest.raises(AccessDenied, match=r"tangram\.blobs\.a\."):
        await theirs.put("a", data)
    with pytest.raises(BlobMissing):
        await theirs.get("b", name)
    # Nor by any other way to read a stream.
    for question, body in (
        (f"$JS.API.DIRECT.GET.{subjects.BLOBS}", b'{"seq":1}'),
        (f"$JS.API.STREAM.MSG.GET.{subjects.BLOBS}", b'{"seq":1}'),
        (f"$JS.API.CONSUMER.CREATE.{subjects.BLOBS}.x", b"{}"),
    ):
        asking = asyncio.create_task(b.ask(question, body, timeout_s=25.0))
        while not b.is_denied(question):
            assert not asking.done()
            await asyncio.sleep(0.01)
        asking.cancel()
    assert await theirs.get("b", await theirs.put("b", data)) == data
