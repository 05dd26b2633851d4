"""Adding and removing executors while work goes on."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

import tangram
from tangram import messages as m
from tangram.executors.cpu.machine import host_cores
from tangram.local import LocalStack

from .conftest import eventually, fold, whole_log

CORES = sum(len(node) for node in host_cores())


async def test_a_second_host_started_in_mid_run_gets_work_within_a_second(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="scale") as client:
        await stack.start_executor("--name", "first", "--host", "one", "--cores", "1")
        runs = [asyncio.ensure_future(client.run("sleep 0.2")) for _ in range(40)]
        await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        await stack.start_executor("--name", "second", "--host", "two", "--cores", "1")
        results = await asyncio.gather(*runs)
        assert {result.executor for result in results} == {"first", "second"}
        joined_ns = first_ns = 0
        for message in await whole_log(stack.url):
            if message.subject == "tangram.executors.second" and not joined_ns:
                joined_ns = message.stamp_ns
            if message.subject == "tangram.decisions.cpu.second" and not first_ns:
                first_ns = message.stamp_ns
        assert 0 < first_ns - joined_ns < 1_000_000_000


async def test_two_executors_of_one_host_share_its_cores_without_overlap(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=2) as stack, tangram.Client(stack.url, task="scale") as client:
        results = await asyncio.gather(*(client.run("sleep 0.1") for _ in range(24)))
        assert {result.executor for result in results} == {"cpu-1", "cpu-2"}
        log = await whole_log(stack.url)
        state = fold(log)  # checks after each message that no core has two holders
        (host,) = state.hosts.values()
        assert host.pool.all.bit_count() == CORES
        assert host.pool.used == 0


async def test_draining_lets_what_runs_end_and_takes_nothing_new(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=2) as stack, tangram.Client(stack.url, task="scale") as client:
        running = [asyncio.ensure_future(client.run("echo started; sleep 1")) for _ in range(CORES)]
        log_has_starts = asyncio.Event()

        async def watch() -> None:
            while sum(b"Start" in message.data for message in await whole_log(stack.url)) < 1:
                await asyncio.sleep(0.02)
            log_has_starts.set()

        await asyncio.wait_for(watch(), 10)
        first = stack.executors[0]
        first.process.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*running)
        assert all(result.ok for result in results)
        assert await asyncio.wait_for(first.process.wait(), 10) == 0
        after = await asyncio.gather(*(client.run("true") for _ in range(6)))
        assert {result.executor for result in after} == {"cpu-2"}
        assert any(isinstance(_decoded(message), m.ExecutorLeft) for message in await whole_log(stack.url))


async def test_a_drain_ends_at_its_limit_and_says_what_it_ended(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="scale") as client:
        executor = await stack.start_executor("--drain", "0.2")
        chunks = asyncio.Event()
        one_shot = asyncio.ensure_future(client.run("echo up; sleep 600", on_output=lambda *_: chunks.set(), units=0.1))
        box = await client.open_session()
        in_session = asyncio.ensure_future(box.run("sleep 600", units=0.1))
        await asyncio.wait_for(chunks.wait(), 10)
        executor.process.send_signal(signal.SIGTERM)
        ended = await asyncio.gather(one_shot, in_session)
        assert [result.outcome for result in ended] == [tangram.Outcome.LOST, tangram.Outcome.ENVIRONMENT_LOST]
        assert await asyncio.wait_for(executor.process.wait(), 10) == 0


async def test_work_without_an_executor_waits_for_one(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="scale") as client:
        running = asyncio.ensure_future(client.run("echo finally"))
        await eventually("it is queued", lambda: client.open_actions == 1)
        await stack.start_executor()
        assert (await running).stdout == b"finally\n"


async def test_a_neighbour_testifies_for_a_dead_executor_that_does_not_come_back(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="scale") as client:
        await stack.start_executor("--name", "doomed", "--cores", "1")
        up = asyncio.Event()
        running = asyncio.ensure_future(client.run("echo up; sleep 600", on_output=lambda *_: up.set()))
        await asyncio.wait_for(up.wait(), 10)
        await stack.start_executor("--name", "neighbour", "--cores", "1")
        killed_s = time.monotonic()
        stack.executors[0].process.kill()
        result = await asyncio.wait_for(running, 20)
        assert result.outcome is tangram.Outcome.LOST
        assert not result.is_verdict
        assert time.monotonic() - killed_s < 15
        assert (await client.run("true")).executor == "neighbour"


async def test_a_retry_safe_action_runs_again_elsewhere(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="scale") as client:
        await stack.start_executor("--name", "doomed", "--cores", "1")
        witness = tmp_path / "attempts"
        command = f"echo $TANGRAM_ATTEMPT >> {witness}; test $TANGRAM_ATTEMPT != 1 || sleep 600"
        running = asyncio.ensure_future(client.run(command, retry="safe"))
        await eventually("the first attempt runs", witness.exists)
        await stack.start_executor("--name", "neighbour", "--cores", "1")
        stack.executors[0].process.kill()
        result = await asyncio.wait_for(running, 20)
        assert (result.ok, result.attempt, result.executor) == (True, 2, "neighbour")
        assert witness.read_text().split() == ["1", "2"]


async def test_the_same_name_twice_on_one_host_is_refused(tmp_path: Path) -> None:
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="scale") as client:
        await stack.start_executor("--name", "twin")
        with pytest.raises(tangram.TangramError, match="already running"):
            await stack.start_executor("--name", "twin")
        assert (await client.run("true")).ok


def _decoded(message: object) -> object:
    return m.decode(message.subject, message.data)[1]  # type: ignore[attr-defined]


async def test_a_host_that_vanishes_whole_is_lost_by_its_silence(tmp_path: Path) -> None:
    """Nobody on it can testify: what it ran ends all the same, and new work goes elsewhere."""
    arguments = ["--silence", "2"]
    async with (
        LocalStack(tmp_path, executors=0, scheduler_arguments=arguments) as stack,
        tangram.Client(stack.url, task="scale") as client,
    ):
        await stack.start_executor("--name", "gone", "--host", "gone")
        box = await client.open_session()
        up = asyncio.Event()
        running = [
            asyncio.ensure_future(box.run("echo up; sleep 600", on_output=lambda *_: up.set(), units=0.1)),
            asyncio.ensure_future(client.run("sleep 600", units=0.1)),
        ]
        await asyncio.wait_for(up.wait(), 10)
        await stack.start_executor("--name", "here", "--host", "here")
        stack.executors[0].process.kill()
        ended = await asyncio.wait_for(asyncio.gather(*running), 30)
        assert [result.outcome for result in ended] == [tangram.Outcome.ENVIRONMENT_LOST, tangram.Outcome.LOST]
        assert (await asyncio.wait_for(box.close(), 10)).outcome is tangram.Outcome.ENVIRONMENT_LOST
        async with client.session() as other:
            assert (await other.run("true")).executor == "here"


async def test_a_silent_executor_that_lives_joins_anew(tmp_path: Path) -> None:
    arguments = ["--silence", "2"]
    async with (
        LocalStack(tmp_path, scheduler_arguments=arguments) as stack,
        tangram.Client(stack.url, task="scale") as client,
    ):
        witness = tmp_path / "ran"
        running = asyncio.ensure_future(client.run(f"echo x >> {witness}; sleep 600"))
        await eventually("it runs", witness.exists)
        stack.executors[0].process.send_signal(signal.SIGSTOP)
        assert (await asyncio.wait_for(running, 30)).outcome is tangram.Outcome.LOST
        stack.executors[0].process.send_signal(signal.SIGCONT)
        assert (await asyncio.wait_for(client.run("true"), 30)).ok
        assert witness.read_text() == "x\n"
        fold(await whole_log(stack.url))
