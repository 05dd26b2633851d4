"""Executors that die, and limits that change, while calls are under way."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tangram
from tangram.cli.main import main
from tangram.executors.api import declared
from tangram.local import LocalStack
from tangram.loopback import Answer
from tangram.outcomes import Outcome
from tests.api.conftest import SECRET
from tests.api.provider import Provider, declare
from tests.e2e.conftest import fold, whole_log
from tests.e2e.test_cli import tangram as command

ASYNC = pytest.mark.asyncio(loop_scope="function")


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider() as found:
        yield found


@pytest_asyncio.fixture
async def stack(provider: Provider, tmp_path: Path) -> AsyncIterator[LocalStack]:
    arguments = ["--endpoints", str(declare(tmp_path, provider.url, SECRET))]
    quotas = ["one=concurrency:1", "calm=concurrency:4", "budget=tokens:1000/3600"]
    async with LocalStack(
        tmp_path / "stack", executors=0, quotas=quotas, api_arguments=arguments, scheduler_arguments=["--silence", "2"]
    ) as found:
        yield found


@ASYNC
async def test_a_place_comes_back_when_an_executor_dies_and_an_idempotent_call_goes_on_elsewhere(
    stack: LocalStack, provider: Provider, tmp_path: Path
) -> None:
    """The host of the one that died never says a word again: another has to do."""
    provider.answers["/single"] = ["wait"]
    provider.answers["/post"] = ["wait"]
    async with tangram.Client(stack.url, task="t") as client:
        repeated = asyncio.create_task(client.called("single", timeout=2))
        waits = asyncio.create_task(client.called("single"))
        once = asyncio.create_task(client.called("post", timeout=2))
        await provider.count("/single", 1)
        await provider.count("/post", 1)
        await stack.executors[0].stop(signal.SIGKILL)
        await stack.start_api_executor("--endpoints", str(tmp_path / "endpoints.toml"), "--host", "another")
        assert (await once).outcome is Outcome.LOST
        assert len([each for each in provider.requests if each.path == "/post"]) == 1, "it is not sent twice"
        for result in await asyncio.gather(repeated, waits):
            assert result.outcome is Outcome.OK
        assert (await repeated).attempt == 2
    state = fold(await whole_log(stack.url))
    assert state.quotas["one"].in_use == 0


@ASYNC
async def test_places_of_a_client_that_dies_come_back(stack: LocalStack, provider: Provider) -> None:
    provider.answers["/single"] = ["wait"]
    async with tangram.Client(stack.url, task="t", cancel_on_disconnect=True) as gone:
        await gone.submit(*_call("single"), key="api")
        await provider.count("/single", 1)
    async with tangram.Client(stack.url, task="t") as client:
        assert (await client.called("single")).outcome is Outcome.OK


def _call(endpoint: str) -> tuple[object, ...]:
    from tangram.producers import build

    return build.calling(endpoint, None, "0" * 32)


@ASYNC
async def test_a_limit_changes_at_once(stack: LocalStack, provider: Provider) -> None:
    provider.answers["/single"] = ["wait"] * 6
    async with tangram.Client(stack.url, task="t") as client:
        calls = [asyncio.create_task(client.called("single")) for _ in range(6)]
        await provider.count("/single", 1)
        done = await command("quota", "one=concurrency:3", "--json", url=stack.url)
        assert done.returncode == 0
        await provider.count("/single", 3)
        assert provider.most["/single"] == 3
        assert (await command("quota", "one=none", url=stack.url)).returncode == 0
        await provider.count("/single", 6)
        unknown = await command("quota", "nobody=none", url=stack.url)
        assert (unknown.returncode, b"no quota nobody" in unknown.stderr) == (2, True)
        shown = await command("quota", "one=none", url=stack.url)
        assert b"calm: 0 of 4 at a time" in shown.stdout
        assert b"one: 6 in use; no limit" in shown.stdout
        provider.gate.set()
        await asyncio.gather(*calls)
        assert (await client.called("single")).ok, "what takes of it still runs"


@ASYNC
async def test_another_scheduler_goes_on_with_the_same_pools(stack: LocalStack, provider: Provider) -> None:
    provider.answers["/single"] = ["wait"]
    async with tangram.Client(stack.url, task="t") as client:
        first = asyncio.create_task(client.called("single"))
        second = asyncio.create_task(client.called("single"))
        await provider.count("/single", 1)
        assert stack.scheduler is not None
        await stack.scheduler.stop(signal.SIGKILL)
        stack.quotas = []
        await stack.start_scheduler()
        provider.gate.set()
        assert [(await each).outcome for each in (first, second)] == [Outcome.OK] * 2
    assert provider.most["/single"] == 1
    assert len(provider.requests) == 2


@ASYNC
async def test_a_provider_that_refuses_is_left_alone(stack: LocalStack, provider: Provider) -> None:
    provider.answers["/search/i"] = [Answer(429, headers={"retry-after": "2"})] * 4
    async with tangram.Client(stack.url, task="t") as client:
        calls = [client.called("search", {"index": "i", "q": str(number)}) for number in range(40)]
        results = await asyncio.gather(*calls)
    assert {result.outcome for result in results} == {Outcome.OK}
    assert len(provider.requests) == 44
    assert provider.most["/search/i"] <= 4


# --- what is declared --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('url = "ftp://a/"', "endpoints.e.url: must begin with http"),
        ('url = "http://{host}/"', "endpoints.e.url: takes arguments in its path"),
        ('url = "http://me:pass@a/"', "neither a user"),
        ('url = "http://a:x/"', "endpoints.e.url"),
        ('url = "http://a/ b"', "endpoints.e.url: must not have spaces"),
        ('url = "http://a/"\nmethod = "TRACE"', ".method: Invalid enum value"),
        ('url = "http://a/"\nheaders = {"x y" = "1"}', "endpoints.e.headers: 'x y'"),
        ('url = "http://a/"\nheaders = {x = "a\\nb"}', "endpoints.e.headers.x"),
        ('url = "http://a/"\nheaders = {x = "${env:TANGRAM_UNSET}"}', "endpoints.e.headers.x: $TANGRAM_UNSET is not set"),
        ('url = "http://a/"\nheaders = {x = "${file:/nonexistent}"}', "endpoints.e.headers.x: /nonexistent"),
        ('url = "http://a/"\ntakes = {cpu = 1}', "endpoints.e.takes.cpu: is no quota"),
        ('url = "http://a/"\nspent = {q = "a"}', "endpoints.e.spent.q"),
        ('url = "http://a/"\nsecrets = ["a"]', "endpoints.e.secrets"),
        ('url = "http://a/"\nmehtod = "GET"', "mehtod"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: str) -> None:
    path = tmp_path / "e.toml"
    path.write_text(f"[endpoints.e]\n{lines}\n")
    assert main(["executor", "api", "--endpoints", str(path)]) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert words in told


def test_secrets_come_from_the_environment_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").write_text("from-a-file\n")
    monkeypatch.setenv("TANGRAM_TEST_SECRET", "from-the-environment")
    path = tmp_path / "e.toml"
    path.write_text(
        f'[endpoints.e]\nurl = "http://a/?k=${{file:{tmp_path}/s}}"\nheaders = {{x = "Bearer ${{env:TANGRAM_TEST_SECRET}}"}}'
    )
    endpoint = declared.load(path)["e"]
    assert endpoint.url == "http://a/?k=from-a-file"
    assert endpoint.headers == {"x": "Bearer from-the-environment"}
    assert set(endpoint.secrets) == {"from-a-file", "from-the-environment"}
