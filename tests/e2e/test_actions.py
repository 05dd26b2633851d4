"""Actions through the whole chain: what a user calls and what comes back."""

import asyncio
import time

import pytest

import tangram
from tangram import Outcome
from tangram.local import LocalStack

from .conftest import eventually, processes_with

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_program_that_succeeds(client: tangram.Client) -> None:
    result = await client.run("echo out; echo err >&2")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == (Outcome.OK, 0, b"out\n", b"err\n")
    assert result.is_verdict
    assert result.units == 1
    assert result.executor == "cpu-1"


async def test_a_program_that_fails_is_an_outcome_and_no_exception(client: tangram.Client) -> None:
    result = await client.run(["sh", "-c", "exit 7"])
    assert (result.outcome, result.exit_code, result.is_verdict) == (Outcome.FAILED, 7, True)


async def test_times_add_up_to_the_action_completion_time(client: tangram.Client) -> None:
    started_s = time.monotonic()
    result = await client.run("sleep 0.2")
    assert result.run_s > 0.1  # its start is known when the executor reads of it
    assert result.queued_s + result.startup_s + result.run_s + result.overhead_s == pytest.approx(result.act_s, abs=0.05)
    assert result.act_s <= time.monotonic() - started_s


async def test_a_time_out_keeps_what_was_written_and_leaves_no_process(client: tangram.Client) -> None:
    result = await client.run("echo before; sleep 300 & setsid sleep 301 & wait", timeout=0.3)
    assert (result.outcome, result.stdout) == (Outcome.TIMED_OUT, b"before\n")
    assert not processes_with(result.id)
    assert (await client.run("true")).ok  # the next action is not held up


async def test_a_background_child_does_not_hold_the_result(client: tangram.Client) -> None:
    started_s = time.monotonic()
    result = await client.run("sleep 60 & echo done")
    assert (result.outcome, result.stdout) == (Outcome.OK, b"done\n")
    assert time.monotonic() - started_s < 10
    await eventually("one-shot leaves nothing", lambda: not processes_with(result.id))


async def test_bytes_of_any_kind_come_back_as_they_were(client: tangram.Client) -> None:
    result = await client.run(["printf", r"\376\000x"])
    assert result.stdout == b"\xfe\x00x"


@pytest.mark.parametrize("size", [65_537, 1_048_576, 1_048_577, 20_000_000])
async def test_output_of_any_size_is_counted_and_kept_at_both_ends(client: tangram.Client, size: int) -> None:
    result = await client.run(f"printf head; head -c {size - 8} /dev/zero; printf tail")
    assert result.ok
    assert result.stdout_bytes == size
    assert result.stdout.startswith(b"head")
    assert result.stdout.endswith(b"tail")
    if size < 100_000:
        assert len(result.stdout) == size


async def test_input_reaches_the_program(client: tangram.Client) -> None:
    data = bytes(range(256)) * 400
    assert (await client.run("cat", stdin=data)).stdout == data


async def test_a_session_keeps_its_files_and_its_state(client: tangram.Client) -> None:
    async with client.session() as box:
        assert (await box.write("lib/a.txt", "one")).ok
        assert (await box.run("cat lib/a.txt; echo two > b.txt")).stdout == b"one"
        assert (await box.read("b.txt")).data == b"two\n"
        missing = await box.read("absent")
        assert missing.outcome is Outcome.FAILED
        assert missing.detail
    gone = await box.run("true")
    assert gone.outcome is Outcome.ENVIRONMENT_LOST
    assert not gone.is_verdict


async def test_actions_of_one_session_run_in_order_and_one_at_a_time(client: tangram.Client) -> None:
    async with client.session() as box:
        runs = [asyncio.ensure_future(box.run(f"echo {i} >> log; sleep 0.02; echo {i} >> log")) for i in range(8)]
        await asyncio.gather(*runs)
        log = (await box.read("log")).data.split()
    assert log == [str(i).encode() for i in range(8) for _ in range(2)]


async def test_what_a_session_leaves_running_ends_with_it(client: tangram.Client) -> None:
    async with client.session() as box:
        result = await box.run("nohup sleep 600 >/dev/null 2>&1 & echo started")
        assert result.stdout == b"started\n"
        # Its exec may be under way, with an idle session's sliver of cpu time.
        await eventually("it lives on", lambda: processes_with(result.id))
    await eventually("session's children end", lambda: not processes_with(result.id))


async def test_an_elastic_action_gets_free_cores_and_is_told(client: tangram.Client, stack: LocalStack) -> None:
    result = await client.run("echo $TANGRAM_UNITS; nproc", units=(1, 8), parallel=0.95)
    told, seen = result.stdout.split()
    assert int(told) == int(seen) == result.units >= 1


async def test_more_than_any_host_has_is_refused_at_once(client: tangram.Client) -> None:
    result = await client.run("true", units=1_000)
    assert (result.outcome, result.reason) == (Outcome.REJECTED, "never_fits")
    assert "cpu" in result.detail


async def test_what_waits_beyond_its_deadline_expires(client: tangram.Client) -> None:
    blockers = [asyncio.ensure_future(client.run("sleep 60", units=1)) for _ in range(64)]
    await asyncio.sleep(0)  # they are submitted first
    try:
        late = await client.run("true", deadline=0.2)
    finally:
        for blocker in blockers:
            blocker.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)
    assert (late.outcome, late.is_verdict) == (Outcome.EXPIRED, False)


async def test_cancelling_the_caller_ends_the_program(client: tangram.Client) -> None:
    marker = "sleep 654.321"
    running = asyncio.ensure_future(client.run(marker))
    await eventually("it runs", lambda: processes_with(marker.replace(" ", "\0")))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually("it has ended", lambda: not processes_with(marker.replace(" ", "\0")))


async def test_a_cancelled_action_never_starts_if_it_was_queued(client: tangram.Client, tmp_path: "object") -> None:
    witness = f"{tmp_path}/ran"
    blockers = [asyncio.ensure_future(client.run("sleep 0.5")) for _ in range(32)]
    await asyncio.sleep(0)
    queued = asyncio.ensure_future(client.run(f"touch {witness}"))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.gather(queued, *blockers, return_exceptions=True)
    result = await client.run(f"test ! -e {witness}")
    assert result.ok


async def test_many_at_once_are_all_answered_and_waiting_is_not_run_time(client: tangram.Client) -> None:
    results = await asyncio.gather(*(client.run("sleep 0.02") for _ in range(128)))
    assert {result.outcome for result in results} == {Outcome.OK}
    assert max(result.queued_s for result in results) > max(result.run_s for result in results)


async def test_live_output_arrives_before_the_end(client: tangram.Client) -> None:
    chunks: list[bytes] = []
    first = asyncio.Event()

    def on_output(stream: str, data: bytes) -> None:
        chunks.append(data)
        first.set()

    running = asyncio.ensure_future(client.run("echo early; sleep 1; echo late", on_output=on_output))
    await asyncio.wait_for(first.wait(), 10)
    assert not running.done()
    assert (await running).stdout == b"early\nlate\n"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"units": 0.001}, "units"),
        ({"units": (2, 1)}, "units"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"memory": "lots"}, "memory"),
        ({"retry": "always"}, "retry"),
        ({"env": {"A B": "x"}}, "env"),
        ({"parallel": 2.0}, "parallel"),
    ],
)
async def test_a_bad_request_names_its_field(client: tangram.Client, arguments: dict[str, object], field: str) -> None:
    with pytest.raises(tangram.InvalidRequest) as caught:
        await client.run("true", **arguments)  # type: ignore[arg-type]
    assert field in caught.value.field


async def test_a_nul_in_an_argument_is_refused_before_it_is_sent(client: tangram.Client) -> None:
    with pytest.raises(tangram.InvalidRequest, match="argv"):
        await client.run(["echo", "a\0b"])


async def test_the_blocking_client_does_the_same(stack: LocalStack) -> None:
    def use() -> tuple[bytes, bytes]:
        with tangram.Client.blocking(stack.url, task="test") as client:
            once = client.run("echo once").stdout
            with client.session() as box:
                box.write("f", b"kept")
                return once, box.read("f").data

    assert await asyncio.to_thread(use) == (b"once\n", b"kept")


async def test_no_scheduler_is_one_clear_line() -> None:
    with pytest.raises(tangram.BrokerUnavailable, match="cannot connect"):
        async with tangram.Client("nats://127.0.0.1:1", task="test", connect_timeout=0.5):
            pass


async def test_a_lost_session_is_empty_before_its_memory_is_given_back(client: tangram.Client) -> None:
    box = await client.open_session(memory="64MiB")
    left = await box.run("nohup sleep 600 >/dev/null 2>&1 & echo started")
    await eventually("it lives on", lambda: processes_with(left.id))
    lost = await box.run('rm -rf "$HOME"')
    assert lost.outcome is Outcome.ENVIRONMENT_LOST
    assert not processes_with(left.id)  # when the answer is here, not some time later
