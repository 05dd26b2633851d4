"""Batches scored by a real executor: broker, scheduler, workers, weights on devices that are played on the CPU."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="the gpu extra is not installed")

import tangram
from tangram import messages as m
from tangram.executors.gpu.places import Failed
from tangram.executors.gpu.workers import Nursery, Worker
from tangram.local import LocalStack, ProcessFailed
from tangram.outcomes import Outcome
from tests.e2e.conftest import whole_log
from tests.e2e.test_cli import tangram as command
from tests.gpu import models

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICES = {
    "one": ("one", "[1, 2]"),
    "two": ("two", "[1]"),
    "large": ("large", "[1]"),
    "larger": ("larger", "[1]"),
    "wayward": ("wayward", "[1]"),
}


def declared(folder: Path, names: Sequence[str] = tuple(SERVICES)) -> Path:
    path = folder / "services.toml"
    lines = [
        f'[services.{name}]\nfactory = "tests.gpu.models:{SERVICES[name][0]}"\nunits = {SERVICES[name][1]}' for name in names
    ]
    path.write_text("\n".join(lines))
    return path


def started(folder: Path, quotas: Sequence[str] = ()) -> LocalStack:
    """Two devices, each with room for one large model."""
    gpus = ["--services", str(declared(folder)), "--cpu-sim", "2", "--gpu-memory", "6MiB"]
    return LocalStack(folder / "stack", executors=0, quotas=quotas, gpu_arguments=gpus)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    async with started(tmp_path_factory.mktemp("gpu")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: LocalStack) -> AsyncIterator[tangram.Client]:
    async with tangram.Client(stack.url, task="t") as found:
        yield found


def alone(batch: list[Any], factory: Any = models.one) -> list[float]:
    """What the model says without any executor."""
    import torch

    with torch.inference_mode():
        return [float(each) for each in factory().score(batch)]


async def test_scores_come_in_order_whatever_the_size_of_the_batch(client: tangram.Client) -> None:
    for size in (0, 1, 2, 3, 1_000):
        batch = [[number % 7, number / 1_000] for number in range(size)]
        expected = alone(batch) if size else []
        for units in (1, 2, {1, 2}):
            assert await client.score("one", batch, units=units) == pytest.approx(expected, rel=1e-4, abs=1e-5)


async def test_a_batch_too_large_for_the_log_is_scored(client: tangram.Client) -> None:
    batch = [[float(number)] * 64 for number in range(1_000)]  # 576 KB
    assert len(await client.score("one", batch)) == 1_000


async def test_services_that_do_not_fit_together_take_turns_and_keep_their_weights(client: tangram.Client) -> None:
    names = {"large": models.large, "larger": models.larger, "one": models.one, "two": models.two}
    expected = {name: alone([[1, 2]], factory) for name, factory in names.items()}
    for _ in range(5):
        for name, want in expected.items():
            assert await client.score(name, [[1, 2]]) == pytest.approx(want, rel=1e-4)


async def test_many_batches_of_more_services_than_there_is_room_for_all_come_back(client: tangram.Client) -> None:
    names = ["large", "larger", "one", "two"] * 20
    found = await asyncio.gather(*(client.score(name, [[1]]) for name in names))
    assert len(found) == 80
    assert all(math.isfinite(score) for (score,) in found)


async def test_a_blocking_client_scores_as_well(stack: LocalStack) -> None:
    def blocking() -> list[float]:
        with tangram.Client.blocking(stack.url, task="t") as client:
            return client.score("one", [[1]])

    assert await asyncio.to_thread(blocking) == pytest.approx(alone([[1]]), rel=1e-4)


async def refused(client: tangram.Client, service: str, batch: list[Any], **options: Any) -> tangram.Result:
    with pytest.raises(tangram.ScoreError) as caught:
        await client.score(service, batch, **options)
    return caught.value.result


@pytest.mark.parametrize(
    ("item", "words"),
    [("raise", "ValueError: as told"), ("nan", "score of item 0 is nan"), ("short", "0 scores for 1 items"), ("die", "died")],
)
async def test_what_goes_wrong_in_a_worker_ends_its_batch_alone(item: str, words: str, client: tangram.Client) -> None:
    result = await refused(client, "wayward", [[item]], retry="never")
    assert result.outcome is Outcome.ERROR
    assert not result.is_verdict
    assert words in result.detail
    assert await client.score("wayward", [["fine"]]) == [0.0]


async def test_a_workers_death_costs_no_other_service_anything(client: tangram.Client) -> None:
    expected = alone([[5]])
    others = [asyncio.create_task(client.score("one", [[5]])) for _ in range(40)]
    await refused(client, "wayward", [["die"]], retry="never")
    for other in others:
        assert await other == pytest.approx(expected, rel=1e-4)


async def test_weights_that_were_rebound_are_made_anew(client: tangram.Client) -> None:
    await client.score("wayward", [["rebind"]])
    for name in ("large", "larger", "large", "larger"):
        await client.score(name, [[1]])
    assert await client.score("wayward", [["fine"]]) == [0.0]


async def test_a_worker_that_breaks_while_evicted_is_made_anew(tmp_path: Path) -> None:
    nursery = Nursery("test")
    plan = {"service": "frail", "factory": "tests.gpu.models:frail", "ledger": str(tmp_path), "capacity_bytes": 1 << 20}
    worker = Worker(nursery, plan)
    await worker.restore()
    (pid,) = await worker.score([["pid"]])
    await worker.evict()
    os.kill(int(pid), signal.SIGUSR1)
    with pytest.raises(Failed, match="put in the place") as caught:
        await worker.restore()
    assert caught.value.kind == "broken"
    await worker.restore()
    assert await worker.score([["pid"]]) != [pid]
    assert has_ended(int(pid))
    await worker.close()
    await nursery.close()


async def test_a_factory_sees_the_gpu_of_its_worker_alone() -> None:
    nursery = Nursery("test")
    with pytest.raises(Failed, match="it sees GPU-5"):
        await Worker(nursery, {"service": "s", "factory": "tests.gpu.models:visible", "uuid": "GPU-5"}).load()
    await nursery.close()


async def test_a_batch_that_takes_too_long_is_ended_and_the_gpu_is_free_again(client: tangram.Client) -> None:
    result = await refused(client, "wayward", [["sleep", 60]], timeout=0.3)
    assert result.outcome is Outcome.TIMED_OUT
    assert await client.score("wayward", [["fine"]]) == [0.0]


async def test_a_cancelled_batch_gives_its_gpu_back(client: tangram.Client) -> None:
    running = asyncio.create_task(client.score("wayward", [["sleep", 60]], units=1))
    (pid,) = await client.score("wayward", [["pid"]])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert pid > 0
    found = await asyncio.wait_for(asyncio.gather(*(client.score("wayward", [["fine"]]) for _ in range(4))), 30)
    assert found == [[0.0]] * 4


async def test_what_nobody_serves_is_said(client: tangram.Client) -> None:
    assert (await refused(client, "nobody", [[1]])).outcome is Outcome.REJECTED
    assert (await refused(client, "two", [[1]], units=2)).outcome is Outcome.REJECTED


@pytest.mark.parametrize(
    ("batch", "options", "field"),
    [
        ("text", {}, "batch"),
        (None, {}, "batch"),
        ([object()], {}, "batch"),
        ([1], {"units": 3}, "cost.gpu"),
        ([1], {"units": 0}, "units"),
        ([1], {"units": 0.5}, "units"),
    ],
)
async def test_a_bad_request_names_its_field(batch: Any, options: dict[str, Any], field: str, client: tangram.Client) -> None:
    with pytest.raises(tangram.InvalidRequest) as caught:
        await client.score("one", batch, **options)
    assert caught.value.field == field


async def test_an_executor_that_is_killed_leaves_no_worker_and_safe_batches_go_on(tmp_path: Path) -> None:
    async with started(tmp_path) as stack, tangram.Client(stack.url, task="t") as client:
        (pid,) = await client.score("wayward", [["pid"]])
        waiting = asyncio.create_task(client.score("wayward", [["sleep", 1]]))
        await client.score("one", [[1]])
        await stack.executors[0].stop(signal.SIGKILL)
        await stack.start_gpu_executor("--services", str(declared(tmp_path)), "--cpu-sim", "2", "--gpu-memory", "6MiB")
        assert await asyncio.wait_for(waiting, 60) == [0.0]
    assert has_ended(int(pid))


def has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


async def test_the_restore_times_that_were_seen_are_announced(stack: LocalStack, client: tangram.Client) -> None:
    from tangram import messages as m
    from tangram.broker import Broker
    from tangram.replay.sources import BrokerSource

    async def announced() -> dict[str, m.Service]:
        broker = await Broker.connect(stack.url, name="test")
        try:
            source = await BrokerSource.open(broker)
            found: dict[str, m.Service] = {}
            async for batch in source.batches():
                for record in batch:
                    message = m.decode(record.subject, record.data)[1]
                    if isinstance(message, m.ExecutorJoined | m.ExecutorChanged) and message.services:
                        found = message.services
            return found
        finally:
            await broker.close()

    assert (await announced())["large"].weights_mib == 5  # 4 MiB and a bias
    for _ in range(2):
        for name in ("large", "larger"):
            await client.score(name, [[1]])
    async with asyncio.timeout(20):
        while not (await announced())["large"].restored_us:
            await asyncio.sleep(0.2)


# --- starting it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[services.x]\nfactory = "tests.gpu.models:broken"', "no such checkpoint"),
        ('[services.x]\nfactory = "tests.gpu.models:nobody"', "nobody"),
        ('[services.x]\nfactory = "no.such.module:f"', "no.such.module"),
        ('[services.x]\nfactory = "builtins:object"', "score"),
        ('[services.x]\nfactory = "f"', "services.x.factory"),
        ("[services.x]\nunits = [3]", "services.x.units"),
        ('[services.x]\nengine = "vllm"', "services.x.urls"),
        ("[services.x]\nspeed = 1", "speed"),
        ("services = 1", "services"),
    ],
)
async def test_what_is_wrong_with_a_service_is_said_at_the_start(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "services.toml"
    path.write_text(content)
    gpus = ["--services", str(path), "--cpu-sim", "1", "--gpu-memory", "6MiB"]
    with pytest.raises(ProcessFailed, match=words.replace(".", r"\.")):
        async with LocalStack(tmp_path / "stack", executors=0, gpu_arguments=gpus):
            pass


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a driver")
async def test_without_gpus_the_command_says_why_and_plays_none_by_itself(tmp_path: Path) -> None:
    done = await command("executor", "gpu", "--services", str(declared(tmp_path)), "--nats", "nats://127.0.0.1:1")
    assert done.returncode == 3
    assert b"no GPUs, because" in done.stderr
    assert b"--cpu-sim" in done.stderr


async def test_weights_come_ahead_of_an_action_that_waits_for_a_quota(tmp_path: Path) -> None:
    async with started(tmp_path, ["one=concurrency:1"]) as stack, tangram.Client(stack.url, task="t") as client:
        first = asyncio.create_task(client.scored("wayward", ["sleep", 1.0], quotas={"one": 0}))
        second = asyncio.create_task(client.score("large", [[1, 2]], quotas={"one": 0}))
        assert (await first).ok
        assert await second == pytest.approx(alone([[1, 2]], models.large), rel=1e-4)
        sent = [
            item
            for record in await whole_log(stack.url)
            if ".decisions.gpu." in record.subject
            for item in m.decode(record.subject, record.data)[1].items  # type: ignore[union-attr]
        ]
        kinds = [(type(item).__name__, item.service) for item in sent]
        assert kinds.index(("Prefetch", "large")) < kinds.index(("Start", "large"))
