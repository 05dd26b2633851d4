"""Payloads and outputs that are too large for the log: the user sees nothing of it, and nobody else sees them."""

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tangram
from tangram import Outcome, limits, subjects
from tangram import messages as m
from tangram.broker import Blobs, Broker, Delivery, EmbeddedServer, apply, read_log, stream_state
from tangram.local import LocalStack
from tangram.producers.large import Large
from tangram.producers.waiting import Waiting

from .conftest import eventually, fold, whole_log

pytestmark = pytest.mark.asyncio(loop_scope="module")

MB = 1_000_000
TASKS_CONF = Path(__file__).parents[2] / "deploy" / "nats" / "tasks.conf"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(stack: LocalStack) -> AsyncIterator[Broker]:
    connected = await Broker.connect(stack.url, name="test")
    yield connected
    await connected.close()


class RawClient:
    """A producer that writes to the log what no client of ours would."""

    def __init__(self, broker: Broker, task: str) -> None:
        self.broker, self.task, self.name = broker, task, f"raw{secrets.token_hex(4)}"
        self.n = 0
        self._done: dict[int, asyncio.Future[tuple[m.Result, m.Output]]] = {}

    async def open(self) -> "RawClient":
        await self.broker.subscribe(subjects.results(self.task, self.name), self._on_result)
        answer = await self.broker.request(subjects.ask(self.task, self.name), m.encode(m.Ask()), timeout_s=5.0)
        self.born = m.decode_answer(answer).through_seq
        return self

    def _on_result(self, delivery: Delivery) -> None:
        finished = m.decode("tangram.completions.x.x", delivery.data)[1]
        assert isinstance(finished, m.ActionsFinished)
        for n, result, output in zip(finished.ids, finished.results, finished.outputs, strict=True):
            self._done[n].set_result((m.decode_result(result), m.decode_output(output) if output else m.Output()))

    async def submit(self, blob: str, *, kind: str = "run", payload: bytes = b"") -> int:
        self.n += 1
        self._done[self.n] = asyncio.get_running_loop().create_future()
        cost = {"cpu": m.Demand(low=1000)} if kind == "run" else {}
        spec = m.ActionSpec(nonce=bytes(8), kind=kind, cost=cost, payload_blob=blob)
        submitted = m.ActionsSubmitted(client=self.name, born=self.born, ids=[self.n], specs=[m.encode(spec)], payloads=[payload])
        await self.broker.publish(subjects.actions("cpu", self.task), m.encode(submitted))
        return self.n

    async def cancel(self, n: int) -> None:
        cancels = m.CancelsRequested(client=self.name, born=self.born, ids=[n])
        await self.broker.publish(subjects.cancels(self.task), m.encode(cancels))

    async def result(self, n: int) -> tuple[m.Result, m.Output]:
        async with asyncio.timeout(20):
            return await self._done[n]


async def test_a_file_of_20_mb_is_written_and_read(client: tangram.Client) -> None:
    data = os.urandom(20 * MB)
    async with client.session() as box:
        assert (await box.write("large", data)).ok
        seen = await box.run("sha256sum <large")
        assert seen.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
        result = await box.read("large")
        assert (result.outcome, result.data == data) == (Outcome.OK, True)
        refused = await box.read("large", size_max=20 * MB - 1)
        assert (refused.outcome, refused.data) == (Outcome.FAILED, b"")
        assert "too large" in refused.detail
        with pytest.raises(tangram.InvalidRequest, match="size_max"):
            await box.read("large", size_max=limits.FILE_BYTES_MAX + 1)


async def test_the_largest_file_there_may_be(client: tangram.Client) -> None:
    data = os.urandom(limits.FILE_BYTES_MAX)
    async with client.session() as box:
        assert (await box.write("largest", data)).ok
        assert (await box.read("largest")).data == data
        await box.run("echo >>largest")
        assert (await box.read("largest")).outcome is Outcome.FAILED


async def test_an_input_of_20_mb(client: tangram.Client) -> None:
    data = os.urandom(20 * MB)
    result = await client.run("sha256sum", stdin=data)
    assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_output_is_kept_whole_when_asked_for(client: tangram.Client) -> None:
    data = os.urandom(20 * MB)
    result = await client.run("tee /dev/stderr | head -c 300000", stdin=data, output_max=limits.OUTPUT_KEPT_BYTES_MAX)
    assert (len(result.stdout), result.stdout_bytes, result.stdout == data[:300_000]) == (300_000, 300_000, True)
    whole = await client.run("cat; echo oops >&2; exit 3", stdin=data, output_max=20 * MB)
    assert (whole.outcome, whole.exit_code, whole.stderr) == (Outcome.FAILED, 3, b"oops\n")
    assert whole.stdout == data
    assert whole.is_verdict
    usual = await client.run("cat", stdin=data)
    assert usual.stdout_bytes == 20 * MB
    assert limits.OUTPUT_BYTES_MAX - 8 < len(usual.stdout) <= limits.OUTPUT_BYTES_MAX  # a cut splits no character
    with pytest.raises(tangram.InvalidRequest, match="output_max"):
        await client.run("true", output_max=limits.OUTPUT_KEPT_BYTES_MAX + 1)


async def test_both_streams_at_their_most_and_several_at_once(client: tangram.Client) -> None:
    size = limits.OUTPUT_KEPT_BYTES_MAX
    script = f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2"
    results = await asyncio.gather(*(client.run(script, output_max=size, units=0.1) for _ in range(4)))
    for result in results:
        assert result.ok
        assert (result.stdout, result.stderr) == (bytes(size), bytes(size))


async def test_actions_of_a_session_keep_their_order_around_a_large_one(client: tangram.Client) -> None:
    async with client.session() as box:
        first, second = os.urandom(10 * MB), os.urandom(500_000)
        results = await asyncio.gather(
            box.write("f", first),
            box.run("wc -c <f"),
            box.write("f", second),
            box.write("f", b"three"),
            box.run("wc -c <f"),
        )
    assert [result.stdout.strip() for result in results] == [b"", b"10000000", b"", b"", b"5"]


async def test_fifty_that_fail_at_once_with_a_large_input_tell_the_real_reason(client: tangram.Client) -> None:
    async def one(number: int) -> None:
        result = await client.run(f"echo real {number} >&2; exit 3", stdin=bytes(MB), units=0.1)
        assert (result.outcome, result.exit_code, result.stderr) == (Outcome.FAILED, 3, b"real %d\n" % number)

    await asyncio.gather(*(one(number) for number in range(50)))


async def test_many_medium_ones_hold_nobody_up(client: tangram.Client) -> None:
    medium = [asyncio.ensure_future(client.run("wc -c", stdin=os.urandom(400 * 1024), units=0.1)) for _ in range(100)]
    small = 0
    while not all(task.done() for task in medium):
        assert (await asyncio.wait_for(client.noop(units=0), 30)).ok
        small += 1
    assert small > 5
    assert {task.result().stdout.strip() for task in medium} == {b"409600"}


async def test_one_that_is_cancelled_while_it_is_stored_is_never_sent(stack: LocalStack, broker: Broker) -> None:
    async with tangram.Client(stack.url, task="cancelled", name="c") as client, client.session() as box:
        before = (await stream_state(broker, subjects.BLOBS)).last_seq
        writing = asyncio.ensure_future(box.write("f", os.urandom(60 * MB)))
        behind = asyncio.ensure_future(box.run("ls"))
        held = asyncio.ensure_future(box.run("touch ran"))
        while (await stream_state(broker, subjects.BLOBS)).last_seq == before:
            await asyncio.sleep(0)
        writing.cancel()
        held.cancel()
        for task in (writing, held):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await behind).stdout == b""
        assert (await box.run("ls")).stdout == b""
        assert client.open_actions == 0
    sent = [
        n
        for message in await whole_log(stack.url)
        if message.subject == subjects.actions("cpu", "cancelled")
        for n in m.decode(message.subject, message.data)[1].ids  # type: ignore[union-attr]
    ]
    assert sent == [1, 3, 5, 6]  # open, behind, ls, close


async def test_one_that_is_cancelled_at_once_keeps_its_place_in_its_session(client: tangram.Client) -> None:
    data = os.urandom(20 * MB)
    async with client.session() as box:
        writing = asyncio.ensure_future(box.write("f", data))
        dropped = [asyncio.ensure_future(box.write("f", bytes(MB))), asyncio.ensure_future(box.run("rm f"))]
        reading = asyncio.ensure_future(box.run("wc -c <f"))
        await asyncio.sleep(0)  # they are submitted, and nothing more
        for n in (box.n + 2, box.n + 3):
            client.cancel(n)
        assert [result.outcome for result in await asyncio.gather(*dropped)] == [Outcome.CANCELLED] * 2
        assert (await writing).ok
        assert (await reading).stdout.strip() == b"20000000"


async def test_closing_the_client_meanwhile_is_told(stack: LocalStack) -> None:
    async with tangram.Client(stack.url, task="closed") as client:
        writing = [asyncio.ensure_future(client.run("true", stdin=os.urandom(40 * MB))) for _ in range(8)]
        await asyncio.sleep(0)
    results = await asyncio.gather(*writing, return_exceptions=True)
    assert all(isinstance(result, tangram.ClientClosed | tangram.Result) for result in results)


async def test_a_payload_that_is_gone_or_changed_runs_nothing(broker: Broker, stack: LocalStack) -> None:
    raw = await RawClient(broker, "gone").open()
    blobs = Blobs(broker)
    payload = m.encode(m.Run(argv=("echo", "ran")))
    name = await blobs.put("gone", payload)
    assert (await raw.result(await raw.submit(name)))[1].stdout == b"ran\n"  # a small one may be a blob too
    sha256 = name.partition("-")[0]
    await broker.publish(subjects.blob("gone", sha256, 0), payload.replace(b"ran", b"bad"))
    missing = f"{hashlib.sha256(b'nothing').hexdigest()}-7-1"
    for blob, why in ((name, "not what its name says"), (missing, "is not stored")):
        result, output = await raw.result(await raw.submit(blob))
        assert (result.outcome, result.reason, output) == (Outcome.ERROR, "internal", m.Output())
        assert "payload" in result.detail
        assert why in result.detail


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("run", m.encode(m.SessionOpen())),
        ("session.open", m.encode(m.Run(argv=("true",)))),
        ("run", m.encode(m.Run(argv=("a" * limits.ARGUMENT_BYTES_MAX,) * 17))),
        ("run", b"\xc1"),
        ("run", b"\x81" * 100_000),
    ],
    ids=["other type", "no session", "argv", "garbage", "depth"],
)
async def test_a_blob_that_holds_no_such_request_is_rejected(broker: Broker, kind: str, payload: bytes) -> None:
    raw = await RawClient(broker, "wrong").open()
    result, _ = await raw.result(await raw.submit(await Blobs(broker).put("wrong", payload), kind=kind))
    assert (result.outcome, result.reason) == (Outcome.REJECTED, "invalid")


async def test_names_that_are_none_are_rejected_and_their_neighbours_live(broker: Broker) -> None:
    raw = await RawClient(broker, "names").open()
    good = m.encode(m.Run(argv=("true",)))
    for blob, payload in (("../x", b""), ("0a" * 32 + "-1-2", b""), (await Blobs(broker).put("names", good), good)):
        result, _ = await raw.result(await raw.submit(blob, payload=payload))
        assert (result.outcome, result.reason) == (Outcome.REJECTED, "invalid")
        assert "payload_blob" in result.detail
    assert (await raw.result(await raw.submit("", payload=good)))[0].outcome is Outcome.OK


async def test_a_cancel_ends_one_whose_payload_is_on_its_way(broker: Broker) -> None:
    raw = await RawClient(broker, "early").open()
    # Of the many pieces that this name promises none is there, and that is not said at once.
    n = await raw.submit(f"{hashlib.sha256(b'x').hexdigest()}-{limits.BLOB_BYTES_MAX}-160")
    await raw.cancel(n)
    result, _ = await raw.result(n)
    assert result.outcome is Outcome.CANCELLED


async def test_another_task_that_names_a_blob_gets_nothing_of_it(client: tangram.Client, broker: Broker) -> None:
    secret = b"secret of a" * 100_000
    name = await Blobs(broker).put("a", m.encode(m.Run(argv=("cat",), stdin=secret)))
    raw = await RawClient(broker, "b").open()
    result, output = await raw.result(await raw.submit(name))
    assert (result.outcome, result.exit_code, output) == (Outcome.ERROR, None, m.Output())
    assert "secret" not in result.detail


async def test_an_output_that_cannot_be_fetched_is_no_verdict(broker: Broker) -> None:
    large = Large(broker, "test", lambda pending: None, lambda pending, error: None)
    told = m.Result(nonce=bytes(8), outcome=Outcome.FAILED, exit_code=3, units=2)
    for blob in (f"{hashlib.sha256(b'gone').hexdigest()}-4-1", "no name", await Blobs(broker).put("test", b"no output")):
        waiting = Waiting("test/c/1", 0.0, lambda: None)
        waiting.fetch = large.fetch
        waiting.settle(told, m.Output(blob=blob, stdout_bytes=4), "e")
        result = await asyncio.wait_for(waiting, 20)
        assert (result.outcome, result.exit_code, result.units, result.stdout_bytes) == (Outcome.ERROR, 3, 2, 4)
        assert not result.is_verdict
        assert "could not be fetched" in result.detail
        assert "failed, exit code 3" in result.detail
    await large.close(1.0)


async def test_a_full_stream_is_an_error_that_says_so_on_either_side(tmp_path: Path) -> None:
    async with LocalStack(tmp_path) as stack:
        broker = await Broker.connect(stack.url, name="test")
        await apply(broker, max_bytes={subjects.BLOBS: 4 * MB}, force=True)
        async with tangram.Client(stack.url, task="full") as client, client.session() as box:
            with pytest.raises(tangram.BlobsFull, match="max_bytes"):
                await box.write("f", bytes(20 * MB))
            await box.run("head -c 20000000 /dev/zero >f")
            read = await box.read("f")
            assert (read.outcome, read.reason, read.data) == (Outcome.ERROR, "internal", b"")
            assert "max_bytes" in read.detail
            printed = await box.run("cat f", output_max=30 * MB)
            assert (printed.outcome, printed.exit_code, printed.stdout_bytes) == (Outcome.ERROR, 0, 20 * MB)
            assert (await box.write("small", bytes(100_000))).ok
            await apply(broker, max_bytes={subjects.BLOBS: 100 * MB})
            assert len((await box.read("f")).data) == 20 * MB
            assert client.open_actions == 0
        await broker.close()
        fold(await whole_log(stack.url))


async def test_a_scheduler_that_starts_anew_decides_what_has_its_payload_in_a_blob(tmp_path: Path) -> None:
    data = os.urandom(MB)
    async with LocalStack(tmp_path, executors=0) as stack, tangram.Client(stack.url, task="anew") as client:
        waiting = asyncio.ensure_future(client.run("sha256sum", stdin=data))
        broker = await Broker.connect(stack.url, name="test")
        while not await read_log(broker, subjects.STREAM, 1, subject=subjects.actions("cpu", "anew")):
            await asyncio.sleep(0.01)
        await broker.close()
        assert stack.scheduler is not None
        await stack.scheduler.stop()
        await stack.start_scheduler()
        await stack.start_executor()
        assert (await waiting).stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_tasks_that_a_server_keeps_apart_work_as_others_do(tmp_path: Path) -> None:
    """With the users of deploy/nats/tasks.conf."""
    conf = re.sub(r"\$(\w+)_PASSWORD", lambda match: f'"{match[1].lower()}-password-of-the-test"', TASKS_CONF.read_text())
    EmbeddedServer.start(tmp_path / "users").stop()
    server = EmbeddedServer.start(tmp_path / "users", extra_config=conf)

    def url(user: str) -> str:
        return f"nats://{user}:{user}-password-of-the-test@127.0.0.1:{server.port}"

    try:
        async with LocalStack(tmp_path / "stack", nats=url("roles")) as stack:
            assert stack.url == url("roles")
            for task in ("a", "b"):
                async with tangram.Client(url(task), task=task) as client, client.session() as box:
                    chunks: list[bytes] = []
                    assert (await box.write("f", bytes(2 * MB))).ok
                    assert (await box.read("f")).data == bytes(2 * MB)
                    live = await box.run("echo live", on_output=lambda _, data, to=chunks: to.append(data))  # type: ignore[misc]
                    assert live.stdout == b"live\n"
                    await eventually("live output", lambda to=chunks: to == [b"live\n"])  # type: ignore[misc]
    finally:
        server.stop()


async def test_the_log_of_all_this_folds(stack: LocalStack, client: tangram.Client) -> None:
    state = fold(await whole_log(stack.url))
    assert not state.actions
