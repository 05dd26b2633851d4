"""Brokers that are killed under load, one node and three: every accepted action has one outcome, none has run twice."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangram
from tangram import messages as m
from tangram import subjects
from tangram.broker import Broker, BrokerError, Busy, LeaderWriter, NotLeader, StoredMessage
from tangram.broker.leader import ATTEMPT_S
from tangram.local import LocalStack
from tests.clusters.conftest import Node
from tests.e2e.conftest import fold, whole_log

pytestmark = [
    pytest.mark.timeout(300),
    # nats-py leaves a connection that an engine's port forwarder took, and then broke off, to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
]


async def apply(url: str, *arguments: str) -> str:
    """`tangram streams apply`, which a cluster that has just started may refuse for some seconds."""
    import sys

    end = time.monotonic() + 60
    while True:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tangram", "streams", "apply", "--nats", url, *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode == 0:
            return output.decode()
        assert time.monotonic() < end, output.decode()
        await asyncio.sleep(0.5)


class Load:
    """Callers that go on for ever, each with its next action when the last one has ended. Each action proves that it ran."""

    def __init__(self, client: tangram.Client, stack: LocalStack, callers: int) -> None:
        self.witness = stack.folder / "witness"
        self.results: list[tangram.Result] = []
        self.pauses_s: list[float] = []
        """Of each action, the time since the last one of all ended."""
        self._client, self._stack = client, stack
        self._stopping = False
        self._last_s = time.monotonic()
        self._progress = asyncio.Event()
        self._tasks = [asyncio.create_task(self._call()) for _ in range(callers)]

    async def _call(self) -> None:
        while not self._stopping:
            result = await self._client.run(f'echo "$TANGRAM_ACTION" >> {self.witness}', units=0.1, timeout=60)
            now_s = time.monotonic()
            self.results.append(result)
            self.pauses_s.append(now_s - self._last_s)
            self._last_s = now_s
            self._progress.set()

    async def further(self, count: int, within_s: float = 60.0) -> None:
        """Fails at once when a role or a caller has ended."""
        goal = len(self.results) + count
        ended = asyncio.create_task(self._stack.wait_for_an_end())
        try:
            async with asyncio.timeout(within_s):
                while len(self.results) < goal:
                    self._progress.clear()
                    progress = asyncio.ensure_future(self._progress.wait())
                    done, _ = await asyncio.wait({progress, ended, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                    assert ended not in done, await ended
                    for task in done - {progress}:
                        await task
        except TimeoutError:
            pytest.fail(f"{len(self.results) + count - goal} of {count} actions ended in {within_s:g} s")
        finally:
            ended.cancel()

    async def goes_on(self) -> bool:
        """Whether anything ended in the last second."""
        before = len(self.results)
        await asyncio.sleep(1)
        return len(self.results) > before

    async def stop(self) -> None:
        self._stopping = True
        async with asyncio.timeout(60):
            await asyncio.gather(*self._tasks)


@contextlib.contextmanager
def told(folder: Path, nodes: list[Node]) -> Iterator[None]:
    """Prints what everybody has said, should the block fail."""
    try:
        yield
    except BaseException:
        for path in sorted(folder.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-20_000:]}")
        for node in nodes:
            print(f"--- {node.name}\n{node.logs()[-20_000:]}")
        raise


def check(load: Load, log: list[StoredMessage]) -> None:
    """Each action that the log accepted has its outcome there, `ok`; each caller was told; none ran twice."""
    state = fold(log)
    assert not state.actions
    accepted = {
        (subject.rpartition(".")[2], message.client, n)
        for subject, message in ((each.subject, m.decode(each.subject, each.data)[1]) for each in log)
        if isinstance(message, m.ActionsSubmitted)
        for n in message.ids
    }
    ran = Counter(load.witness.read_text().split())
    assert Counter(result.outcome for result in load.results) == {tangram.Outcome.OK: len(accepted)}
    assert set(ran.values()) == {1}
    assert len(ran) == len(accepted) == len({result.id for result in load.results})


async def test_one_node_killed_and_restarted_on_its_volume(single: Node, tmp_path: Path) -> None:
    await asyncio.to_thread(single.wait)
    assert "TANGRAM: created" in await apply(single.url)
    stack = LocalStack(tmp_path, nats=single.url, verbose=True)
    with told(tmp_path, [single]):
        async with stack, tangram.Client(single.url, task="test") as client:
            load = Load(client, stack, callers=8)
            for _ in range(2):
                await load.further(50)
                await asyncio.to_thread(single.kill)
                await asyncio.to_thread(single.start)
            await load.further(50)
            await load.stop()
    assert "unchanged" in await apply(single.url)
    check(load, await whole_log(single.url))


async def leader_of(url: str) -> str:
    """Of the log's stream."""
    end = time.monotonic() + 30
    while True:
        broker = await Broker.connect(url, name="test", connect_timeout_s=30)
        try:
            found = (await broker.api(f"STREAM.INFO.{subjects.STREAM}"))["cluster"].get("leader", "")
        except BrokerError:
            found = ""
        finally:
            await broker.close()
        if found:
            return str(found)
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


async def settled(url: str) -> None:
    """Waits until all replicas have all of the log."""
    broker = await Broker.connect(url, name="test")
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    cluster = (await broker.api(f"STREAM.INFO.{subjects.STREAM}"))["cluster"]
                    replicas = cluster.get("replicas", [])
                    if cluster.get("leader") and len(replicas) == 2 and all(each["current"] for each in replicas):
                        return
                except BrokerError:
                    pass
                await asyncio.sleep(0.1)
    finally:
        await broker.close()


async def test_three_nodes_lose_one_after_the_other(cluster: list[Node], tmp_path: Path) -> None:
    url = ",".join(node.url for node in cluster)
    await apply(url, "--replicas", "1")
    stack = LocalStack(tmp_path, nats=url, verbose=True)
    with told(tmp_path, cluster):
        async with stack, tangram.Client(url, task="test") as client:
            load = Load(client, stack, callers=8)
            await load.further(50)
            assert "TANGRAM: changed num_replicas" in await apply(url, "--replicas", "3")
            for victim in ("leader", "follower", "leader"):
                await load.further(100)
                await settled(url)
                leader = await leader_of(url)
                node = next(each for each in cluster if (each.name == leader) == (victim == "leader"))
                before = len(load.pauses_s)
                await asyncio.to_thread(node.kill)
                await load.further(100)
                print(f"{victim} killed: the longest pause was {max(load.pauses_s[before:]):.1f} s")
                await asyncio.to_thread(node.start)
            for node in cluster[1:]:
                await asyncio.to_thread(node.kill)
            # One of three takes nothing: what is on its way comes to rest.
            while await load.goes_on():
                pass
            for node in cluster[1:]:
                await asyncio.to_thread(node.start)
            await load.further(100)
            await settled(url)
            await asyncio.to_thread(cluster[0].kill)
            await asyncio.to_thread(cluster[0].lose_disk)
            await asyncio.to_thread(cluster[0].start)
            await load.further(100)
            await settled(url)
            await load.stop()
    print(f"{len(load.results)} actions")
    check(load, await whole_log(url))


async def test_a_leader_on_three_nodes_writes_in_order_and_is_fenced(cluster: list[Node]) -> None:
    url = ",".join(node.url for node in cluster)
    await apply(url, "--replicas", "3")
    await leader_of(url)
    broker = await Broker.connect(url, name="test")
    try:
        first = await LeaderWriter.acquire(broker, subjects.STREAM, subjects.LEADER, b"first")
        writes = [("tangram.decisions.cpu.here", b"%d" % n, f"first-{n}") for n in range(50)]
        began = time.monotonic()
        acks = await first.write_all(writes)
        assert time.monotonic() - began < 5
        assert [ack.seq for ack in acks] == list(range(first.epoch + 1, first.epoch + 51))
        second = await LeaderWriter.acquire(broker, subjects.STREAM, subjects.LEADER, b"second")
        with pytest.raises(NotLeader):
            await first.write_all([("tangram.decisions.cpu.here", b"late", "first-late")])
        assert (await second.write_all([("tangram.decisions.cpu.here", b"next", "second-1")]))[0].seq == second.epoch + 1
    finally:
        await broker.close()


async def test_a_write_that_waits_for_a_majority_is_stored_once(cluster: list[Node]) -> None:
    url = ",".join(node.url for node in cluster)
    await apply(url, "--replicas", "3")
    await settled(url)
    leader = await leader_of(url)
    others = [node for node in cluster if node.name != leader]
    broker = await Broker.connect(next(node.url for node in cluster if node.name == leader), name="test")
    try:
        writer = await LeaderWriter.acquire(broker, subjects.STREAM, subjects.LEADER, b"record", give_up_s=60)
        write = ("tangram.decisions.cpu.here", b"one", "one")
        for node in others:
            await asyncio.to_thread(node.pause)
        first, copy = writer.write_soon(*write), writer.write_soon(*write)
        async with asyncio.timeout(30):
            with pytest.raises(Busy, match="10158"):
                await copy
            assert not first.done()
            writing = asyncio.create_task(writer.write_all([write]))
            await asyncio.wait({writing}, timeout=2 * ATTEMPT_S)  # it has tried more than once
            assert not writing.done()
            for node in others:
                await asyncio.to_thread(node.go_on)
            assert [ack.seq for ack in await writing] == [writer.epoch + 1]
        assert (await writer.write_all([("tangram.decisions.cpu.here", b"two", "two")]))[0].seq == writer.epoch + 2
    finally:
        await broker.close()
