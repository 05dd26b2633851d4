"""vLLM and SGLang servers that sleep and wake: what they answer is not believed, what can be observed is."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the gpu extra is not installed")

from tangram.executors.gpu.engines import Engine, Phase, Sglang, Vllm
from tangram.executors.gpu.places import Failed
from tests.gpu.doubles.__main__ import WEIGHTS

Start = Callable[..., str]
KINDS = {"vllm": Vllm, "sglang": Sglang}


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(kind: str, *flags: str) -> str:
        process = subprocess.Popen([sys.executable, "-m", "tests.gpu.doubles", kind, *flags], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield begin
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def engine_at(url: str, kind: str, **options: Any) -> Engine:
    seen = [0]

    def free() -> int:
        """As a driver, it answers also for a process that is gone."""
        with contextlib.suppress(httpx.HTTPError):
            seen[0] = int(httpx.get(f"{url}/_free").json())
        return seen[0]

    options = {"patience_s": 3.0, "observe_s": 1.0, "free_bytes": free, **options}
    return Engine("judge", url, KINDS[kind]("m"), WEIGHTS, options.pop("free_bytes"), **options)


@pytest.fixture(params=list(KINDS))
async def engine(request: pytest.FixtureRequest, start: Start) -> AsyncIterator[Engine]:
    found = engine_at(start(request.param), request.param)
    await found.load()
    yield found
    await found.close()


async def fault(engine: Engine, name: str) -> None:
    await engine._http.post("/_fault", params={"name": name})


async def calls(engine: Engine) -> list[str]:
    found: list[str] = (await engine._http.get("/_calls")).json()
    return found


async def test_it_begins_asleep_and_scores_when_it_is_awake(engine: Engine) -> None:
    assert engine.phase is Phase.EVICTED
    with pytest.raises(Failed, match="asked nothing"):
        await engine.score(["a"])
    for _ in range(3):
        await engine.restore()
        assert await engine.score(["a", "bcd", "ef"]) == [1.0, 3.0, 2.0]
        await engine.evict()
    assert engine.phase is Phase.EVICTED


async def test_going_or_coming_twice_asks_once(engine: Engine) -> None:
    await asyncio.gather(*(engine.restore() for _ in range(4)))
    await asyncio.gather(*(engine.evict() for _ in range(4)))
    asked = [each for each in await calls(engine) if "wake" in each or "resume" in each]
    assert len(asked) == (1 if "/wake_up" in asked else 2)  # SGLang's weights, then its cache


async def test_an_answer_before_the_memory_is_free_is_waited_for(engine: Engine) -> None:
    await engine.restore()
    await fault(engine, "early")
    await engine.evict()
    assert int((await engine._http.get("/_free")).json()) == WEIGHTS


async def test_memory_that_is_never_free_is_not_taken_for_free(engine: Engine) -> None:
    await engine.restore()
    await fault(engine, "never-free")
    with pytest.raises(Failed, match="0 of 1,000,000 bytes"):
        await engine.evict()
    assert engine.phase in (Phase.UNKNOWN, Phase.DEAD)


async def test_an_answer_from_a_dying_server_is_not_believed(engine: Engine) -> None:
    await fault(engine, "dies")
    with pytest.raises(Failed) as caught:
        await engine.restore()
    assert caught.value.kind == "died"
    assert engine.phase is Phase.DEAD


async def test_what_was_done_without_an_answer_is_seen_and_not_asked_again(engine: Engine) -> None:
    if isinstance(engine._speaks, Sglang):
        await engine.restore()
        await fault(engine, "gone-quiet")
        await engine.evict()  # seen by the memory alone
    else:
        await fault(engine, "gone-quiet")
        await engine.restore()
    await fault(engine, "")
    before = await calls(engine)
    assert len(before) == len(set(before)) or isinstance(engine._speaks, Sglang)
    assert engine.phase is (Phase.EVICTED if isinstance(engine._speaks, Sglang) else Phase.RESIDENT)


async def test_a_server_that_hangs_is_unknown_until_it_can_be_seen(start: Start) -> None:
    engine = engine_at(start("vllm"), "vllm", patience_s=3.0, observe_s=0.3)
    await engine.load()
    await fault(engine, "hangs")
    with pytest.raises(Failed):
        await engine.restore()
    assert engine.phase is Phase.UNKNOWN
    await fault(engine, "")
    await engine.restore()
    assert await engine.score(["a"]) == [1.0]
    await engine.close()


async def test_no_room_to_wake_leaves_it_asleep_to_be_woken_later(engine: Engine) -> None:
    await fault(engine, "oom")
    for _ in range(3):
        with pytest.raises(Failed) as caught:
            await engine.restore()
        assert (caught.value.kind, engine.phase) == ("memory", Phase.EVICTED)
    await fault(engine, "")
    await engine.restore()
    assert await engine.score(["a"]) == [1.0]


async def test_two_failures_and_it_is_dead(engine: Engine) -> None:
    await engine.restore()
    await fault(engine, "refuses")
    with pytest.raises(Failed) as first:
        await engine.evict()
    with pytest.raises(Failed) as second:
        await engine.evict()
    assert (first.value.kind, second.value.kind) == ("broken", "died")
    assert engine.phase is Phase.DEAD


@pytest.mark.parametrize(("name", "words"), [("nan", "score of item 0 is nan"), ("short", "1 scores for 2 items")])
async def test_bad_scores_are_errors(name: str, words: str, engine: Engine) -> None:
    await engine.restore()
    await fault(engine, name)
    with pytest.raises(Failed, match=words):
        await engine.score(["a", "b"])
    await fault(engine, "")
    assert await engine.score(["a"]) == [1.0]


async def test_a_batch_that_was_given_up_on_is_aborted_before_it_sleeps(engine: Engine) -> None:
    await engine.restore()
    await fault(engine, "hangs")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await engine.score(["a"])
    await fault(engine, "")
    await engine.evict()
    assert any("abort" in each or "pause_generation" in each for each in await calls(engine))


@pytest.mark.parametrize(
    ("kind", "flag", "words"),
    [("vllm", "no-dev-mode", "VLLM_SERVER_DEV_MODE=1"), ("sglang", "no-backup", "--enable-weights-cpu-backup")],
)
async def test_a_server_that_cannot_keep_its_weights_is_refused(kind: str, flag: str, words: str, start: Start) -> None:
    engine = engine_at(start(kind, flag), kind)
    with pytest.raises(Failed, match=words):
        await engine.load()
    await engine.close()


async def test_a_server_that_does_not_answer_is_named() -> None:
    engine = engine_at("http://127.0.0.1:9", "vllm")
    with pytest.raises(Failed, match=r"127\.0\.0\.1:9"):
        await engine.load()
    await engine.close()


async def test_without_a_device_to_look_at_silence_is_no_success(start: Start) -> None:
    engine = engine_at(start("sglang"), "sglang", free_bytes=None, patience_s=3.0, observe_s=0.3)
    await engine.load()
    await fault(engine, "hangs")
    with pytest.raises(Failed):
        await engine.restore()
    assert engine.phase is Phase.UNKNOWN
    await engine.close()
