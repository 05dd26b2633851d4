"""What a producer can rely on when it changes its mind, dies, comes back, asks twice, or is not the only one of its name."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

import tangram
from tangram import Outcome, subjects
from tangram import messages as m
from tangram.broker import Broker
from tangram.local import LocalStack
from tangram.scheduler.state import Phase

from .conftest import eventually, fold, processes_with, whole_log

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
SILENCE_S = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    arguments = ["--silence", str(SILENCE_S)]
    async with LocalStack(tmp_path_factory.mktemp("stack"), scheduler_arguments=arguments) as running:
        yield running


@asynccontextmanager
async def producer(stack: LocalStack, name: str, folder: Path, *, flag: bool) -> AsyncIterator["asyncio.subprocess.Process"]:
    """Another process, which has three things open when this is entered. It is killed at the end, if not before."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.e2e.producer", stack.url, name, "1" if flag else "0", str(folder)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        await eventually("it is up", lambda: all((folder / each).exists() for each in ("ids", "inside", "alone")), 20)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def held_mib(stack: LocalStack) -> int:
    """Memory that sandboxes hold, as the log has it."""
    state = fold(await whole_log(stack.url))
    return sum(host.used.get("memory", 0) for host in state.hosts.values())


async def until_held(stack: LocalStack, mib: int) -> None:
    async with asyncio.timeout(15):
        while await held_mib(stack) != mib:
            await asyncio.sleep(0.1)


async def publish(stack: LocalStack, subject: str, message: m.LogMessage) -> None:
    """As somebody who knows the wire."""
    broker = await Broker.connect(stack.url, name="somebody")
    await broker.publish(subject, m.encode(message))
    await broker.close()


async def is_decided(stack: LocalStack, action: str) -> bool:
    state = fold(await whole_log(stack.url))
    return any(str(each.id) == action and each.phase is Phase.DECIDED for each in state.actions.values())


# --- cancels ---------------------------------------------------------------------------------------------------------


STATES = ["before it is submitted", "as it is submitted", "queued", "behind its session", "decided", "running", "finished"]


@pytest.mark.parametrize("state", STATES)
async def test_a_cancel_in_each_state_gives_exactly_one_outcome(
    stack: LocalStack, client: tangram.Client, tmp_path: Path, state: str
) -> None:
    witness = tmp_path / "ran"
    expected = Outcome.OK if state == "finished" else Outcome.CANCELLED
    others: list[tangram.Waiting] = []
    async with client.session() as box:
        if state == "queued":
            others = [await client.start("sleep 60", units=1) for _ in range(2 * (os.cpu_count() or 1))]
            running = await client.start(f"touch {witness}", units=1)
        elif state == "behind its session":
            others = [await box.start("sleep 60", units=0.1)]
            running = await box.start(f"touch {witness}", units=0.1)
        elif state == "before it is submitted":
            before = int((await client.run("true")).id.split("/")[2])
            await publish(stack, subjects.cancels("test"), m.CancelsRequested(client=client.name, ids=[before + 1]))
            running = await client.start(f"touch {witness}", units=0.1)
        elif state == "as it is submitted":
            _, running = await client.submit(*_sleep(client))
        elif state == "decided":
            executor = stack.executors[0].process
            executor.send_signal(signal.SIGSTOP)
            try:
                running = await client.start(f"touch {witness}; sleep 60", units=0.1)
                async with asyncio.timeout(SILENCE_S):
                    while not await is_decided(stack, running.id):
                        await asyncio.sleep(0.01)
                client.cancel(running.id)
                await client.stored()
            finally:
                executor.send_signal(signal.SIGCONT)
        else:
            running = await client.start(f"touch {witness}; {'true' if state == 'finished' else 'sleep 60'}", units=0.1)
            await eventually("it runs", witness.exists)
            if state == "finished":
                assert (await client.result(running.id)).ok
        running.cancel()
        running.cancel()
        client.cancel(running.id)
        result = await asyncio.wait_for(running, 20)
        for other in others:
            other.cancel()
        assert {(await other).outcome for other in others} <= {Outcome.CANCELLED}
    assert result.outcome is expected
    assert (await client.result(running.id)).outcome is expected
    if state != "decided":  # its program may just have begun
        assert witness.exists() == (state in ("running", "finished"))
    assert running.id not in map(str, fold(await whole_log(stack.url)).actions)


def _sleep(client: tangram.Client) -> tuple[m.ActionSpec, m.Payload]:
    from tangram.producers import build

    return build.program("sleep 60", client.trace_id, units=0.1)


async def test_a_cancel_by_the_id_of_its_opening_ends_a_session(client: tangram.Client) -> None:
    box = await client.open_session()
    left = await box.run("nohup sleep 600 >/dev/null 2>&1 & echo started")
    await eventually("it lives on", lambda: processes_with(left.id))
    client.cancel(box.opened.id)
    await eventually("the sandbox is gone", lambda: not processes_with(left.id))
    assert (await box.run("true")).outcome is Outcome.ENVIRONMENT_LOST


async def test_only_what_was_submitted_can_be_cancelled(client: tangram.Client) -> None:
    for wrong in ("other/name/1", f"{client.task}/{client.name}/x", 1 << 40, -1, "", True):
        with pytest.raises(tangram.InvalidRequest) as caught:
            client.cancel(wrong)
        assert caught.value.field == "id"


# --- producers that die ----------------------------------------------------------------------------------------------


async def test_what_a_killed_producer_had_open_ends_if_it_asked_for_that(stack: LocalStack, tmp_path: Path) -> None:
    async with producer(stack, "flagged", tmp_path, flag=True) as process:
        assert await held_mib(stack) == 64
        await asyncio.sleep(0)
        process.send_signal(signal.SIGKILL)
        await eventually("its program ends", lambda: not processes_with("MARKER=flagged"), 20)
        await until_held(stack, 0)
    opened, inside, _ = (tmp_path / "ids").read_text().split()
    async with tangram.Client(stack.url, task="test", name="flagged") as again:
        assert (await again.result(inside)).outcome is Outcome.CANCELLED
        assert (await again.result(opened)).outcome is Outcome.OK


async def test_a_producer_that_dies_while_nobody_leads_is_missed_by_the_next_scheduler(stack: LocalStack, tmp_path: Path) -> None:
    async with producer(stack, "orphan", tmp_path, flag=True) as process:
        assert stack.scheduler is not None
        await stack.scheduler.stop(signal.SIGKILL)
        process.kill()
        await process.wait()
        await stack.start_scheduler()
        await eventually("its program ends", lambda: not processes_with("MARKER=orphan"), 20)
        await until_held(stack, 0)


async def test_a_flagged_producer_that_lives_is_left_alone(stack: LocalStack, tmp_path: Path) -> None:
    async with producer(stack, "alive", tmp_path, flag=True):
        await asyncio.sleep(2 * SILENCE_S)  # nothing announces that nothing happens
        assert processes_with("MARKER=alive")
        assert await held_mib(stack) == 64
    await until_held(stack, 0)


async def test_what_a_killed_producer_had_open_goes_on_and_its_next_process_reads_it(stack: LocalStack, tmp_path: Path) -> None:
    async with producer(stack, "plain", tmp_path, flag=False) as process:
        process.kill()
        await process.wait()
    opened, inside, alone = (tmp_path / "ids").read_text().split()
    async with tangram.Client(stack.url, task="test", name="plain") as client:
        by_id, by_key = await asyncio.gather(client.result(alone), client.result(key="the answer"))
        assert by_id.stdout == by_key.stdout == b"done by plain\n"
        assert (by_id.id, by_id.outcome, by_id.executor) == (alone, Outcome.OK, "cpu-1")
        assert by_id.run_s > 2
        assert by_id.queued_s + by_id.startup_s + by_id.run_s + by_id.overhead_s == pytest.approx(by_id.act_s)
        assert (await client.result(alone)).stdout == b"done by plain\n"  # and once more, when it has ended
        again = await client.run("touch never; sleep 3; echo done by plain", units=0.1, key="the answer")
        assert (again.outcome, again.reason) == (Outcome.REJECTED, "conflict")  # another command
        assert int(again.id.split("/")[2]) > int(alone.split("/")[2])  # it goes on above its predecessor
        with pytest.raises(TimeoutError):
            await client.result(inside, timeout=2 * SILENCE_S)
        assert processes_with("MARKER=plain")  # nobody has asked for its end
        assert await held_mib(stack) == 64
        client.cancel(inside)
        assert (await client.result(inside)).outcome is Outcome.CANCELLED
        client.cancel(opened)
        await until_held(stack, 0)


async def test_closing_a_client_that_asked_for_it_ends_what_is_open(stack: LocalStack) -> None:
    async with tangram.Client(stack.url, task="test", name="closing", cancel_on_disconnect=True) as client:
        box = await client.open_session(memory="64MiB")
        running = await box.start("sleep 600.25", units=0.1)
        await eventually("it runs", lambda: processes_with("sleep\x00600.25"))
    try:
        assert (await running).outcome in (Outcome.CANCELLED, Outcome.ENVIRONMENT_LOST)
    except tangram.ClientClosed:
        pass  # the outcome came too late for it
    await eventually("it ends", lambda: not processes_with("sleep\x00600.25"))
    await until_held(stack, 0)
    cancels = [
        m.decode(each.subject, each.data)[1] for each in await whole_log(stack.url) if each.subject == subjects.cancels("test")
    ]
    ours = [each for each in cancels if isinstance(each, m.CancelsRequested) and each.client == "closing"]
    assert all(each.instance for each in ours), "the leader had to do it"


async def test_the_blocking_client_does_the_same(stack: LocalStack) -> None:
    def use() -> tuple[bytes, bytes, Outcome]:
        with tangram.Client.blocking(stack.url, task="test", name="blocking", cancel_on_disconnect=True) as client:
            started = client.start("echo one", key="k")
            first = client.result(started.id, timeout=20)
            client.start("sleep 60").cancel()
            cancelled = client.start("sleep 61")
            cancelled.cancel()
            return first.stdout, client.result(key="k").stdout, cancelled.result().outcome

    assert await asyncio.to_thread(use) == (b"one\n", b"one\n", Outcome.CANCELLED)


async def test_an_id_or_a_key_that_never_was_is_a_clear_error(client: tangram.Client) -> None:
    with pytest.raises(tangram.UnknownAction, match=f"{client.task}/{client.name}/100000"):
        await client.result(100_000)
    with pytest.raises(tangram.UnknownAction, match="no such key"):
        await client.result(key="no such key")
    for wrong in (None, f"{client.task}/another/1", "1/", -1, (1 << 62) + 1, "9" * 5_000, "\u0663"):
        with pytest.raises(tangram.InvalidRequest, match="id"):
            await client.result(wrong)
    for wrong in ("x" * 201, "\ud800", 5):
        with pytest.raises(tangram.InvalidRequest, match="key"):
            await client.result(key=wrong)  # type: ignore[arg-type]
    with pytest.raises(tangram.InvalidRequest, match="id"):
        await client.result(1, key="k")


async def test_a_forged_outcome_does_not_deceive_a_later_process(stack: LocalStack) -> None:
    """It stands before the true one, under a nonce that nobody submitted."""
    async with tangram.Client(stack.url, task="test", name="forged") as client:
        running = await client.start("sleep 1; echo true")
        number = int(running.id.split("/")[2])
        result = m.encode(m.Result(nonce=b"mistaken", outcome=Outcome.FAILED))
        forged = m.ActionsFinished(incarnation="x", k=1, ids=[number], results=[result], outputs=[b""])
        await publish(stack, subjects.completions("test", "forged"), forged)
        async with tangram.Client(stack.url, task="test", name="forged") as later:
            assert (await later.result(running.id)).stdout == b"true\n"  # learnt while it was open
            assert (await later.result(running.id)).stdout == b"true\n"  # and from the log
        assert (await running).stdout == b"true\n"


async def test_a_forged_outcome_does_not_deceive_who_reads_the_log(stack: LocalStack) -> None:
    """When all has been read long ago, nothing but the submission in the log tells what is true."""
    async with tangram.Client(stack.url, task="test", name="reader") as client:
        running = await client.start("sleep 0.5; echo true")
        number = int(running.id.split("/")[2])
        result = m.encode(m.Result(nonce=b"mistaken", outcome=Outcome.FAILED))
        forged = m.ActionsFinished(incarnation="x", k=1, ids=[number], results=[result], outputs=[b""])
        await publish(stack, subjects.completions("test", "reader"), forged)
        assert (await running).stdout == b"true\n"
        for _ in range(2):
            assert (await client.run("true")).ok
        assert fold(await whole_log(stack.url)).clients[("test", "reader")].ended.keys().isdisjoint({number})
        assert (await client.result(number)).stdout == b"true\n"


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_the_same_key_runs_once_whoever_waits(stack: LocalStack, tmp_path: Path) -> None:
    command = f"echo x >> {tmp_path}/ran; sleep 0.3; echo out; echo err >&2; exit 3"
    async with tangram.Client(stack.url, task="test", name="keyed") as client:
        results = await asyncio.gather(*(client.run(command, key="k") for _ in range(3)))
    async with tangram.Client(stack.url, task="test", name="keyed") as client:
        results += [await client.run(command, key="k"), await client.result(key="k"), await client.result(3)]
    assert {(r.outcome, r.exit_code, r.stdout, r.stderr, r.id) for r in results} == {
        (Outcome.FAILED, 3, b"out\n", b"err\n", results[0].id)
    }
    assert (tmp_path / "ran").read_text() == "x\n"


async def test_what_is_too_large_for_the_log_is_shared_and_read_back_too(stack: LocalStack) -> None:
    """Its payload and its output are blobs."""
    data = os.urandom(600_000)
    async with tangram.Client(stack.url, task="test", name="large") as client:
        started = await client.start("cat", stdin=data, output_max=1_000_000, key="k")
        assert (await started).stdout == data
    async with tangram.Client(stack.url, task="test", name="large") as client:
        again = await client.run("cat", stdin=data, output_max=1_000_000, key="k")
        assert (again.id, again.stdout) == (started.id, data)
        assert (await client.result(started.id)).stdout == data
        other = await client.run("cat", stdin=data[1:], output_max=1_000_000, key="k")
        assert (other.outcome, other.reason) == (Outcome.REJECTED, "conflict")


async def test_another_request_under_a_key_is_refused(client: tangram.Client) -> None:
    assert (await client.run("echo 1", key="taken")).ok
    refused = await client.run("echo 2", key="taken")
    assert (refused.outcome, refused.reason) == (Outcome.REJECTED, "conflict")
    assert "key" in refused.detail


async def test_a_session_comes_back_under_its_key(stack: LocalStack) -> None:
    async with tangram.Client(stack.url, task="test", name="boxes") as client:
        box = await client.open_session(key="box")
        await box.write("f", "kept")
    async with tangram.Client(stack.url, task="test", name="boxes") as client, client.session(key="box") as same:
        assert same.n == box.n
        assert (await same.read("f")).data == b"kept"
    async with tangram.Client(stack.url, task="test", name="boxes") as client, client.session(key="box") as other:
        assert other.n != box.n
        assert (await other.read("f")).outcome is Outcome.FAILED


async def test_a_key_that_is_no_text_is_named(client: tangram.Client) -> None:
    for wrong in ("x" * 201, 5):
        with pytest.raises(tangram.InvalidRequest) as caught:
            await client.run("true", key=wrong)  # type: ignore[arg-type]
        assert caught.value.field == "key"


# --- names -----------------------------------------------------------------------------------------------------------


async def test_a_client_whose_name_another_has_taken_is_told_and_what_it_had_open_ends_well(stack: LocalStack) -> None:
    async with tangram.Client(stack.url, task="test", name="twin") as first:
        running = await first.start("sleep 1; echo first")
        async with tangram.Client(stack.url, task="test", name="twin") as second:
            before = await second.run("echo before")
            for _ in range(2):
                refused = await asyncio.wait_for(first.run("echo never"), 10)
                assert (refused.outcome, refused.reason) == (Outcome.REJECTED, "conflict")
                assert "twin" in refused.detail
            after = await second.run("echo after")
            assert after.id == refused.id  # the number was free for the one that has the name
            assert (await running).stdout == b"first\n"
            for _ in range(2):
                assert (await second.run("true")).ok  # from here on the log alone knows what became of those before
            for known in (before, after):
                assert (await second.result(known.id)).stdout == known.stdout
    async with tangram.Client(stack.url, task="test", name="twin") as third:
        for known in (before, after):  # each number has two outcomes in the log, and one of them is not about it
            assert (await third.result(known.id)).stdout == known.stdout


async def test_two_clients_that_connected_before_either_had_sent_anything(stack: LocalStack) -> None:
    """Both think that the same number is free: one of them gets it, the other a clear answer, and nothing is lost."""
    async with (
        tangram.Client(stack.url, task="test", name="both") as one,
        tangram.Client(stack.url, task="test", name="both") as other,
    ):
        results = await asyncio.wait_for(asyncio.gather(*(c.run(f"echo {i}") for i in range(4) for c in (one, other))), 30)
    for index, result in enumerate(results):
        assert result.ok or (result.outcome, result.reason) == (Outcome.REJECTED, "conflict")
        assert not result.ok or result.stdout == f"{index // 2}\n".encode()
    assert any(result.ok for result in results)
    async with tangram.Client(stack.url, task="test", name="both") as later:
        for result in results:
            if result.ok:
                assert (await later.result(result.id)).stdout == result.stdout
