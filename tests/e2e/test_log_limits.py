"""The log stays within its limit, and what is open stays whole: checkpoints, trims, refusals."""

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest

import tangram
from tangram import subjects
from tangram.broker import Broker, StreamState, apply, purge, read_log, stream_state
from tangram.cli import replay, status
from tangram.local import LocalStack, ProcessFailed
from tangram.outcomes import Outcome
from tangram.replay.sources import BrokerSource
from tangram.scheduler.checkpoints import restore
from tests.e2e.conftest import eventually, fold, whole_log

MIB = 1 << 20


async def state_of(url: str, stream: str = subjects.STREAM) -> StreamState:
    broker = await Broker.connect(url, name="test looks")
    try:
        return await stream_state(broker, stream)
    finally:
        await broker.close()


async def trimmed(url: str, beyond_seq: int = 1) -> None:
    """Waits until the log starts behind a sequence."""
    async with asyncio.timeout(30):
        while (await state_of(url)).first_seq <= beyond_seq:
            await asyncio.sleep(0.05)


async def fill(box: tangram.Session, mib: float) -> None:
    """Actions that end, and that leave so much in the log."""
    for index in range(int(3 * mib)):
        written = await box.write(f"f{index % 5}", b"y" * 333_000)
        assert written.ok, written


async def test_more_passes_through_the_log_than_it_holds_and_what_is_open_lives_on(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, cores=2, max_bytes={subjects.STREAM: 6 * MIB}) as stack:
        async with tangram.Client(stack.url, task="t") as client, client.session() as box:
            await box.write("kept", "of the session")
            # It takes all cores, so the next one waits, with its payload, from before the trims to their end.
            gate = tmp_path / "gate"
            long = asyncio.create_task(client.run(["/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done"], units=1))
            waiting = asyncio.create_task(client.run("cat", stdin=b"of the one that waits", units=2))
            before = (await state_of(stack.url)).last_seq
            other = tangram.Client(stack.url, task="u")
            async with other:
                files = await other.open_session()
                await fill(files, 20)
                await trimmed(stack.url, before)
                assert (await state_of(stack.url)).bytes < 7 * MIB
                assert stack.scheduler is not None
                await stack.scheduler.stop(signal.SIGKILL)
                await stack.start_scheduler()
                await files.close()
            gate.touch()
            assert (await long).ok
            assert (await waiting).stdout == b"of the one that waits"
            assert (await box.read("kept")).data == b"of the session"
        await what_is_left_can_be_folded(stack.url)


async def what_is_left_can_be_folded(url: str) -> None:
    """From its first checkpoint on, to the state that the leader has; and so a timeline and the status can be made of it."""
    broker = await Broker.connect(url, name="test folds")
    try:
        restored = await restore(broker, oldest=True)
        assert restored is not None
        begin_ns, begin_seq = restored.state.now_ns, restored.state.seq
        log = await whole_log(url, begin_seq)
        assert [each.seq for each in log] == list(range(begin_seq + 1, log[-1].seq + 1)), "a hole"
        state = fold(log, restored.state)
        assert (await status.read_state(broker)).digest == state.digest
        timeline = await replay.read_timeline(await BrokerSource.open(broker))
        assert (timeline.begin_ns, timeline.first_seq, timeline.skipped) == (begin_ns, begin_seq + 1, 0)
        shown = {(attempt.kind, str(attempt.outcome)) for attempt in timeline.attempts if attempt.task == "t"}
        assert shown >= {("session.open", "ok"), ("run", "ok"), ("file.read", "ok"), ("session.close", "ok")}
        assert all(attempt.freed_ns is not None for attempt in timeline.attempts if attempt.units)
        report = await replay.verified(await BrokerSource.open(broker))
        assert report.ok, report
        assert report.windows > 3
    finally:
        await broker.close()


async def test_submissions_are_refused_while_the_log_cannot_be_trimmed_and_outcomes_still_flow(tmp_path: Path) -> None:
    async with (
        LocalStack(tmp_path, executors=2, max_bytes={subjects.STREAM: 8 * MIB}) as stack,
        tangram.Client(stack.url, task="t") as client,
        client.session() as box,
        client.session() as other,
    ):
        names = [(await each.run("true")).executor for each in (box, other)]
        assert names[0] != names[1]
        (stopped,) = [role for role in stack.executors if role.name == names[1]]
        # A live executor has still to read what is for it, so nothing may go.
        stopped.process.send_signal(signal.SIGSTOP)
        probes: list[asyncio.Task[tangram.Result]] = []
        try:
            async with asyncio.timeout(25):  # it is lost after 30 s
                while not any(probe.done() and probe.result().outcome is Outcome.REJECTED for probe in probes):
                    await fill(box, 0.5)
                    probes.append(asyncio.create_task(client.run("true", units=0.1)))
            assert (await box.write("more", b"outcomes have room")).ok
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        results = await asyncio.wait_for(asyncio.gather(*probes), 30)
        refused = [result for result in results if result.outcome is Outcome.REJECTED]
        assert {(result.reason, result.retry_after_s) for result in refused} == {("over_limit", 5.0)}
        assert all(result.ok for result in results if result not in refused)
        await trimmed(stack.url)
        async with asyncio.timeout(30):
            while not (await client.run("true")).ok:
                await asyncio.sleep(0.2)


async def test_payloads_that_wait_are_bounded(tmp_path: Path) -> None:
    async with (
        LocalStack(tmp_path, executors=0, settings={"pending_mib_max": 1}) as stack,
        tangram.Client(stack.url, task="t") as client,
    ):
        waiting = [asyncio.create_task(client.run("wc -c", stdin=b"z" * 300_000, units=0.1)) for _ in range(8)]
        async with asyncio.timeout(10):
            while sum(each.done() for each in waiting) < 5:
                await asyncio.sleep(0.01)
        refused = [each.result() for each in waiting if each.done()]
        assert {(result.outcome, result.reason) for result in refused} == {(Outcome.REJECTED, "over_limit")}
        await stack.start_executor()
        results = await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert Counter(result.stdout for result in results) == {b"300000\n": 3, b"": 5}


async def test_open_actions_are_bounded_and_sessions_that_are_open_can_go_on(tmp_path: Path) -> None:
    async with (
        LocalStack(tmp_path, cores=1, settings={"pending_max": 5}) as stack,
        tangram.Client(stack.url, task="t") as client,
        client.session() as box,
    ):
        gate = tmp_path / "gate"
        program = f"while [ ! -e {gate} ]; do sleep 0.05; done"
        running = [asyncio.create_task(client.run(program)) for _ in range(5)]
        await eventually("all are submitted", lambda: client.open_actions == 5)
        result = await client.run("true")
        assert result.outcome is Outcome.REJECTED
        assert (result.reason, result.retry_after_s) == ("over_limit", 5.0)
        assert "5 actions are open" in result.detail
        assert (await box.write("f", "still")).ok
        gate.touch()
        assert all(result.ok for result in await asyncio.gather(*running))
        assert (await client.run("true")).ok


async def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_is_used(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, cores=2, max_bytes={subjects.STREAM: 4 * MIB}) as stack:  # noqa: SIM117
        async with tangram.Client(stack.url, task="t") as client, client.session() as box:
            await box.write("kept", "of the session")
            await fill(box, 6)
            await trimmed(stack.url)
            assert stack.scheduler is not None
            await stack.scheduler.stop(signal.SIGKILL)
            broker = await Broker.connect(stack.url, name="test damages")
            try:
                ends = await read_log(broker, subjects.CHECKPOINTS, 1, subject=subjects.CHECKPOINT_ENDS)
                assert len(ends) >= 2
                newest = subjects.checkpoint_name(ends[-1].subject)
                assert await purge(broker, subjects.CHECKPOINTS, subject=subjects.checkpoint(newest, "state")) >= 1
            finally:
                await broker.close()
            await stack.start_scheduler()
            assert (await box.read("kept")).data == b"of the session"


async def test_what_a_scheduler_left_of_a_checkpoint_when_it_died_takes_no_room(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack:
        broker = await Broker.connect(stack.url, name="test leaves parts")
        try:
            assert stack.scheduler is not None
            await stack.scheduler.stop(signal.SIGKILL)
            for name in ("7-aaaa", "9-bbbb"):
                for part in ("state", "payloads"):
                    await broker.publish(subjects.checkpoint(name, part), b"x" * 1_000)
            await stack.start_scheduler()
            async with asyncio.timeout(10):
                while (await stream_state(broker, subjects.CHECKPOINTS)).messages:
                    await asyncio.sleep(0.05)
        finally:
            await broker.close()


async def test_a_log_that_was_made_anew_does_not_go_on_from_the_old_ones_checkpoint(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path, cores=2, max_bytes={subjects.STREAM: 4 * MIB})
    try:
        await stack.start()
        async with tangram.Client(stack.url, task="t") as client, client.session() as box:
            await fill(box, 6)
            await trimmed(stack.url)
        assert stack.scheduler is not None
        await stack.scheduler.stop(signal.SIGKILL)
        broker = await Broker.connect(stack.url, name="test deletes")
        try:
            await broker.api(f"STREAM.DELETE.{subjects.STREAM}")
            await apply(broker, max_bytes={subjects.STREAM: 4 * MIB})
        finally:
            await broker.close()
        with pytest.raises(ProcessFailed, match="is of a log made at"):
            await stack.start_scheduler()
    finally:
        await stack.stop()
