"""A log taken from a broker into a file and put into another one."""

import asyncio
import json
from pathlib import Path

import pytest

import tangram
from tangram import subjects
from tangram.broker import Broker, EmbeddedServer, apply, read_log, stream_state
from tangram.local import LocalStack
from tangram.replay.logfile import LogFile
from tangram.replay.sources import BrokerSource, stored_records
from tangram.replay.transfer import export, import_
from tangram.scheduler.checkpoints import restore
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State
from tests.e2e.test_cli import tangram as command
from tests.e2e.test_log_limits import MIB, fill, trimmed

SECRET = "hunter2-hunter2"


async def connected(url: str) -> Broker:
    return await Broker.connect(url, name="test copies")


async def folded(broker: Broker) -> State:
    """As a scheduler would, from the oldest checkpoint on."""
    source = await BrokerSource.open(broker)
    state = await source.state() or State()
    async for batch in source.batches():
        for record in batch:
            assert not step(state, record).skipped
    return state


async def verifies(*arguments: str, url: str = "", windows: int = 3) -> None:
    done = await command("replay", "--verify", "--json", *arguments, url=url)
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout)
    assert (said["differ"], said["windows"] >= windows, said["unmade"]) == (0, True, 0)


async def test_a_log_is_the_same_in_another_broker_and_work_goes_on_there(tmp_path: Path) -> None:
    file, again, masked = tmp_path / "run.log", tmp_path / "again.log", tmp_path / "masked.log"
    async with LocalStack(tmp_path / "stack", cores=2) as stack:
        async with tangram.Client(stack.url, task="t") as client, client.session() as box:
            assert (await box.write("f", SECRET.encode())).ok
            assert (await box.read("f")).data == SECRET.encode()
            assert (await client.run(f"echo {SECRET}; exit 3", units=1)).exit_code == 3
        assert stack.scheduler is not None
        await stack.scheduler.stop()
        done = await command("streams", "export", str(file), "--json", url=stack.url)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["bytes"] == file.stat().st_size
        assert (said["checkpoint_seq"], said["first_seq"], said["messages"]) == (0, 1, said["last_seq"])
        broker = await connected(stack.url)
        original = await folded(broker)
        await broker.close()
        assert (await command("streams", "export", str(masked), "--without-payloads", url=stack.url)).returncode == 0
        await verifies(url=stack.url)
        done = await command("streams", "export", str(again), "--until", "2001-02-03", url=stack.url)
        assert (done.returncode, b"--until" in done.stderr, again.exists()) == (2, True, False)
        told = await command("why", "--task", "t", "--worst", "1", "--json", url=stack.url)
        (story,) = json.loads(told.stdout)
        told = await command("why", story["action"], url=stack.url)
        assert (told.returncode, b"got " in told.stdout, b"ended: " in told.stdout) == (0, True, True), told.stderr
    whole, hidden = (b"".join(record.data for record in LogFile(path).records()) for path in (file, masked))
    assert SECRET.encode() in whole
    assert SECRET.encode() not in hidden
    state = State()
    for record in LogFile(masked).records():
        step(state, record)
    assert state.digest == original.digest
    for path in (file, masked):
        await verifies("--file", str(path))
    with EmbeddedServer.start(tmp_path / "other") as server:
        done = await command("streams", "import", str(file), "--nats", server.url)
        assert done.returncode == 0, done.stderr
        assert f"{said['messages']} messages".encode() in done.stdout
        broker = await connected(server.url)
        assert (await folded(broker)).digest == original.digest
        await export(await BrokerSource.open(broker), again)
        await broker.close()
        assert list(LogFile(again).records()) == list(LogFile(file).records())
        await verifies(url=server.url)
        done = await command("streams", "import", str(file), "--nats", server.url)
        assert (done.returncode, b"is not empty" in done.stderr) == (2, True)
        assert (await command("status", "--json", url=server.url)).stdout.startswith(b'{"scheduler_answers": false')
        # Somebody may lead on from there.
        async with LocalStack(tmp_path / "on", nats=server.url, cores=2) as on:  # noqa: SIM117
            async with tangram.Client(on.url, task="t") as client:
                assert (await client.run("true", units=1)).ok
        broker = await connected(server.url)
        state = await folded(broker)
        await broker.close()
        await verifies(url=server.url)
        assert (state.window > original.window, state.finished > original.finished) == (True, True)


async def test_a_trimmed_log_goes_with_its_checkpoint_and_what_was_open(tmp_path: Path) -> None:
    file, late = tmp_path / "run.log", tmp_path / "late.log"
    gate = tmp_path / "gate"
    async with LocalStack(tmp_path / "stack", cores=2, max_bytes={subjects.STREAM: 4 * MIB}) as stack:  # noqa: SIM117
        async with tangram.Client(stack.url, task="t") as client, client.session() as box:
            long = asyncio.create_task(client.run(["/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done"], units=1))
            waiting = asyncio.create_task(client.run("cat", stdin=b"of the one that waits", units=2))
            await fill(box, 6)
            await trimmed(stack.url, 20)
            broker = await connected(stack.url)
            assert stack.scheduler is not None
            await stack.scheduler.stop()  # nothing is trimmed from here on
            exported = await export(await BrokerSource.open(broker), file)
            assert exported.checkpoint_seq > 0
            newest = await restore(broker)
            assert newest is not None
            middle = exported.last_seq - 1
            (record, *_) = [each async for batch in stored_records(broker, middle - 1, middle) for each in batch]
            part = await export(await BrokerSource.open(broker, from_ns=record.stamp_ns), late)
            assert part.checkpoint_seq == max(end.seq for end in newest.ends if end.seq < middle)
            assert part.messages == exported.messages - (part.checkpoint_seq - exported.checkpoint_seq)
            until = await BrokerSource.open(broker, until_ns=record.stamp_ns)
            assert until.last_seq == middle
            await broker.close()
            await stack.start_scheduler()
            gate.touch()
            assert (await long).ok
            assert (await waiting).ok
    for path in (file, late):
        await verifies("--file", str(path), windows=0)
    kept = [payload for each in LogFile(file).payloads() for payload in each.payloads]
    assert any(b"of the one that waits" in payload for payload in kept)
    with EmbeddedServer.start(tmp_path / "other") as server:
        broker = await connected(server.url)
        try:
            done = await import_(broker, LogFile(file))
            assert done == exported
            stored = await stream_state(broker, subjects.STREAM)
            assert (stored.first_seq, stored.last_seq) == (exported.first_seq, exported.last_seq)
            restored = await restore(broker)
            assert restored is not None
            assert restored.state.seq == exported.checkpoint_seq
            records = [
                record async for batch in stored_records(broker, exported.checkpoint_seq, done.last_seq) for record in batch
            ]
            assert records == list(LogFile(file).records())
        finally:
            await broker.close()


async def test_a_damaged_file_leaves_the_broker_empty_unless_a_part_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    async with LocalStack(tmp_path / "stack") as stack:
        async with tangram.Client(stack.url, task="t") as client:
            for _ in range(5):
                assert (await client.run("true", units=1)).ok
        assert (await command("streams", "export", str(file), url=stack.url)).returncode == 0
    file.write_bytes(file.read_bytes()[:-40])
    with EmbeddedServer.start(tmp_path / "other") as server:
        done = await command("streams", "import", str(file), "--nats", server.url)
        assert (done.returncode, str(file).encode() in done.stderr, b"cut off" in done.stderr) == (2, True, True)
        broker = await connected(server.url)
        await apply(broker)
        assert (await stream_state(broker, subjects.STREAM)).messages == 0
        done = await command("streams", "import", str(file), "--nats", server.url, "--partial")
        assert (done.returncode, b"only a part" in done.stderr) == (0, True)
        stored = await read_log(broker, subjects.STREAM, 1)
        await broker.close()
        assert len(stored) > 5
        assert isinstance(stored[0].recorded_ns(len(stored)), int)


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "{folder}"),
        ("export", "{folder}/no/file"),
        ("export", "{folder}/file", "--from", "yesterday"),
        ("import", "{folder}/none", "--nats", "nats://127.0.0.1:1"),
        ("import", "{folder}/none"),
    ],
    ids=" ".join,
)
async def test_what_cannot_be_meant_is_exit_code_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    done = await command("streams", *given, url="nats://127.0.0.1:1")
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False), done.stderr


async def test_a_header_moves_no_clock_but_that_of_a_recording(tmp_path: Path) -> None:
    """Whoever may send an action could else send a time."""
    with EmbeddedServer.start(tmp_path) as server:
        broker = await connected(server.url)
        await apply(broker)
        for _ in range(2):
            await broker.publish(subjects.cancels("t"), b"\x80", headers={"Tangram-Recorded-Stamp": "7"})
        found: list[Record] = [record async for batch in stored_records(broker, 0, 2) for record in batch]
        await broker.close()
        assert all(record.stamp_ns > 10**18 for record in found)


async def test_one_task_is_exported_as_a_report_from_a_live_broker(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    async with LocalStack(tmp_path / "stack", cores=2) as stack:
        async with tangram.Client(stack.url, task="mine") as mine, tangram.Client(stack.url, task="theirs") as theirs:
            assert (await mine.run(f"echo {SECRET}; exit 3", units=1)).exit_code == 3
            assert (await theirs.run("true", units=1)).ok
        done = await command("streams", "export", str(file), "--task", "mine", "--json", url=stack.url)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["attempts"] == 1
        done = await command("streams", "export", str(file), "--task", "nobody", url=stack.url)
        assert done.returncode == 2
        assert b"nobody" in done.stderr
        done = await command("streams", "import", str(file), "--nats", stack.url, url=stack.url)
        assert done.returncode == 2
        assert b"report of one task" in done.stderr
    header, row = [json.loads(line) for line in file.read_text().splitlines()]
    assert header["task"] == "mine"
    assert (row["outcome"], row["exit_code"]) == ("failed", 3)
    assert SECRET not in file.read_text()
    assert "theirs" not in file.read_text()
