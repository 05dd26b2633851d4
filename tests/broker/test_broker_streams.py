"""The declared streams, and bringing a server to them."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from tangram.broker import (
    ApiError,
    Broker,
    BrokerError,
    BrokerTimeout,
    DeclarationError,
    Delivery,
    DestructiveChange,
    StreamDeclaration,
    apply,
    bytes_limit,
    diff,
    has_reserve,
    lend_reserve,
    load_declared,
    purge,
)
from tangram.broker.declared import declarations_dir, duration_ns, size_bytes
from tangram.broker.server_binary import find_server

Connect = Callable[..., AbstractAsyncContextManager[Broker]]
ROOT = Path(__file__).resolve().parents[2]
NAMES = ["KV_TANGRAM_MODELS", "TANGRAM", "TANGRAM_BLOBS", "TANGRAM_CHECKPOINTS", "TANGRAM_DEAD"]


def declared(**changes: object) -> list[StreamDeclaration]:
    plain = StreamDeclaration(name="S", subjects=["s.*", "t.*"], max_bytes="1MiB")
    return [msgspec.structs.replace(plain, **changes)]


def test_what_is_declared() -> None:
    streams = {stream.name: stream for stream in load_declared()}
    assert list(streams) == NAMES
    log = streams["TANGRAM"].config()
    assert log["max_bytes"] == 2 << 30
    assert log["duplicate_window"] == 600_000_000_000
    assert (log["discard"], log["retention"], log["storage"], log["max_age"]) == ("new", "limits", "file", 0)
    assert (log["deny_purge"], log["allow_atomic"]) == (False, False)
    for stream in streams.values():
        assert all({"*", ">"} & set(subject.split(".")) for subject in stream.subjects)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("surprise = 1", "surprise"),
        ('max_age = "soon"', "soon"),
        ('max_age = "1m"', "duplicate_window"),
        ('max_bytes = "1MB"', "1MB"),
        ('storage = "tape"', "storage"),
        ('name = "OTHER"', "OTHER"),
        ('subjects = ["tangram.literal"]', "literal"),
        ("subjects = 5", "subjects"),
    ],
)
def test_a_bad_declaration_is_refused_by_file_and_field(tmp_path: Path, line: str, complaint: str) -> None:
    field = line.partition(" ")[0]
    kept = [kept for kept in ('name = "S"', 'subjects = ["s.*"]', 'max_bytes = "1MiB"') if not kept.startswith(field + " ")]
    (tmp_path / "S.toml").write_text("\n".join([*kept, line]))
    with pytest.raises(DeclarationError, match=complaint) as refused:
        load_declared(tmp_path)
    assert "S.toml" in str(refused.value)


def test_sizes_and_durations() -> None:
    assert [size_bytes(text) for text in ("7", "7B", "1KiB", "64MiB", "2 GiB")] == [7, 7, 1 << 10, 64 << 20, 2 << 30]
    assert [duration_ns(text) for text in ("0s", "10m", "2h", "7d")] == [0, 600 * 10**9, 7_200 * 10**9, 604_800 * 10**9]


def test_the_wheels_copy_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tangram.broker.declared as module

    assert declarations_dir() == ROOT / "streams" or declarations_dir() == ROOT / "tangram" / "_streams"
    installed = tmp_path / "tangram" / "broker"
    installed.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(installed / "declared.py"))
    with pytest.raises(DeclarationError, match="no stream declarations"):
        load_declared()
    shutil.copytree(ROOT / "streams", tmp_path / "streams")
    assert declarations_dir() == tmp_path / "streams"
    shutil.copytree(ROOT / "streams", tmp_path / "tangram" / "_streams")
    assert declarations_dir() == tmp_path / "tangram" / "_streams"
    assert [stream.name for stream in load_declared()] == NAMES


async def test_applying_twice_changes_nothing(connect: Connect) -> None:
    async with connect() as broker:
        assert [str(difference) for difference in await diff(broker)] == [f"{name}: missing" for name in NAMES]
        assert await apply(broker) == [f"{name}: created" for name in NAMES]
        assert await diff(broker) == []
        assert await apply(broker) == [f"{name}: unchanged" for name in NAMES]
        assert await apply(broker, max_bytes={"TANGRAM": 3 << 30}) == [
            "TANGRAM: changed max_bytes" if name == "TANGRAM" else f"{name}: unchanged" for name in NAMES
        ]
        assert await apply(broker) == [f"{name}: unchanged" for name in NAMES], "a size that was given by hand stays"
        assert (await broker.api("STREAM.INFO.TANGRAM"))["config"]["max_bytes"] == 3 << 30
        with pytest.raises(BrokerError, match="not declared"):
            await apply(broker, max_bytes={"OTHER": 1})


async def test_what_was_lent_to_a_full_stream_is_no_difference_and_can_be_taken_back(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker, declared=declared(max_bytes="64KiB"))
        info = await broker.api("STREAM.INFO.S")
        await lend_reserve(broker, info, 64 << 10)
        for _ in range(7):
            await broker.publish("s.a", bytes(15_000))
        info = await broker.api("STREAM.INFO.S")
        assert (bytes_limit(info), info["config"]["max_bytes"], has_reserve(info)) == (64 << 10, 128 << 10, True)
        assert await apply(broker, declared=declared(max_bytes="64KiB")) == ["S: unchanged"]
        await apply(broker, declared=declared(max_bytes="96KiB"))  # somebody gives it more meanwhile
        info = await broker.api("STREAM.INFO.S")
        assert (bytes_limit(info), info["config"]["max_bytes"]) == (96 << 10, 128 << 10)
        await apply(broker, declared=declared(max_bytes="64KiB"))
        await apply(broker, declared=declared(max_bytes="64KiB", description="words"))
        assert (await broker.api("STREAM.INFO.S"))["state"]["messages"] == 7
        await purge(broker, "S", before_seq=5)
        await lend_reserve(broker, await broker.api("STREAM.INFO.S"), 0)
        info = await broker.api("STREAM.INFO.S")
        assert (info["config"]["max_bytes"], has_reserve(info), info["state"]["messages"]) == (64 << 10, False, 3)


async def test_harmless_differences_are_applied(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker, declared=declared())
        for n in range(5):
            await broker.publish("s.a", b"%d" % n)
        changed = declared(
            subjects=["s.*", "t.*", "u.*"],
            max_bytes="512KiB",
            duplicate_window="3m",
            description="words",
            max_msgs=5,
            deny_purge=True,
        )
        (line,) = await apply(broker, declared=changed)
        assert line == "S: changed description, subjects, max_bytes, max_msgs, duplicate_window, deny_purge"
        assert await diff(broker, declared=changed) == []
        assert (await broker.api("STREAM.INFO.S"))["state"]["messages"] == 5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"subjects": ["s.*"]}, "subjects"),
        ({"max_bytes": "1KiB"}, "max_bytes"),
        ({"max_msgs": 2}, "max_msgs"),
        ({"max_age": "5m"}, "max_age"),
        ({"max_msgs_per_subject": 1}, "max_msgs_per_subject"),
        ({"max_msg_size": "1KiB"}, "max_msg_size"),
        ({"discard": "old"}, "discard"),
    ],
)
async def test_destructive_differences_need_force(connect: Connect, change: dict[str, object], field: str) -> None:
    async with connect() as broker:
        await apply(broker, declared=declared())
        for _ in range(5):
            await broker.publish("s.a", b"x" * 1_000)
        with pytest.raises(DestructiveChange, match="--force") as refused:
            await apply(broker, declared=declared(**change))
        assert [difference.field for difference in refused.value.differences] == [field]
        assert await diff(broker, declared=declared()) == []
        assert await apply(broker, declared=declared(**change), force=True) == [f"S: changed {field}"]


async def test_what_cannot_change_in_place_is_said_and_nothing_is_deleted(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker, declared=declared())
        await broker.publish("s.a", b"x")
        for change in ({"storage": "memory"}, {"retention": "workqueue"}, {"deny_delete": False}):
            with pytest.raises(DestructiveChange, match=r"cannot be changed in place.*by hand"):
                await apply(broker, declared=declared(**change), force=True)
        assert (await broker.api("STREAM.INFO.S"))["state"]["messages"] == 1


async def test_what_somebody_switched_on_is_a_difference(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker, declared=declared())
        config = (await broker.api("STREAM.INFO.S"))["config"]
        await broker.api(
            "STREAM.UPDATE.S", {**config, "allow_atomic": True, "republish": {"src": "s.*", "dest": "r.{{wildcard(1)}}"}}
        )
        found = await diff(broker, declared=declared())
        assert [(difference.field, difference.destructive) for difference in found] == [
            ("republish", True),
            ("allow_atomic", False),
        ]
        await apply(broker, declared=declared(), force=True)
        assert await diff(broker, declared=declared()) == []


async def test_a_server_without_the_room_is_said_with_the_size(connect: Connect) -> None:
    async with connect() as broker:
        with pytest.raises(ApiError, match=r"no \d+ MiB to give"):
            await apply(broker, max_bytes={"TANGRAM": 1 << 50})


async def test_republished_results_say_where_they_come_from(connect: Connect) -> None:
    async with connect() as broker, connect() as client:
        await apply(broker)
        results: asyncio.Queue[Delivery] = asyncio.Queue()
        await client.subscribe("tangram.results.coding.c1", results.put_nowait)
        await broker.publish("tangram.completions.coding.c2", b"not ours")
        acks = [await broker.publish("tangram.completions.coding.c1", b"%d" % n) for n in range(2)]
        first, second = await results.get(), await results.get()
        assert (first.subject, first.data, first.headers is not None) == ("tangram.results.coding.c1", b"0", True)
        assert first.headers is not None
        assert second.headers is not None
        assert first.headers["Nats-Stream"] == "TANGRAM"
        assert first.headers["Nats-Subject"] == "tangram.completions.coding.c1"
        assert [int(delivery.headers["Nats-Sequence"]) for delivery in (first, second) if delivery.headers] == [
            ack.seq for ack in acks
        ]
        assert int(second.headers["Nats-Last-Sequence"]) == acks[0].seq  # the one before on this subject: gaps show


async def test_the_log_cannot_be_edited_but_can_be_trimmed(connect: Connect) -> None:
    async with connect() as broker:
        await apply(broker)
        for _ in range(3):
            await broker.publish("tangram.cancels.coding", b"x")
        with pytest.raises(ApiError):
            await broker.api("STREAM.MSG.DELETE.TANGRAM", {"seq": 2})
        await broker.api("STREAM.PURGE.TANGRAM", {"seq": 3})
        assert (await broker.api("STREAM.INFO.TANGRAM"))["state"]["first_seq"] == 3
        with pytest.raises((ApiError, BrokerTimeout, BrokerError)):
            await broker.publish("tangram.heartbeats.e1", b"not stored", timeout_s=1.0)


def test_the_production_configuration_is_valid(tmp_path: Path) -> None:
    checked = subprocess.run(
        [str(find_server()), "-t", "-c", str(ROOT / "deploy" / "nats" / "single-node.conf")],
        env={"NATS_DATA": str(tmp_path), "TANGRAM_PASSWORD": "x" * 24},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
