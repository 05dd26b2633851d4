"""Quotas of a real scheduler: programs that name one start within it, wherever they run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tangram
from tangram import messages as m
from tangram.cli.main import main
from tangram.local import LocalStack
from tests.e2e.conftest import fold, whole_log
from tests.e2e.test_cli import tangram as tangram_command


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    async with LocalStack(tmp_path_factory.mktemp("stack"), quotas=["one=1", "few=0,2/1"]) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_one_at_a_time(client: tangram.Client, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    program = f"echo in >> {witness}; sleep 0.05; echo out >> {witness}"
    runs = [client.run(program, units=0.1, quotas={"one": 0}) for _ in range(6)]
    assert {result.outcome for result in await asyncio.gather(*runs)} == {tangram.Outcome.OK}
    assert witness.read_text().split() == ["in", "out"] * 6


@pytest.mark.asyncio(loop_scope="module")
async def test_no_second_sees_more_tokens_than_there_are(stack: LocalStack, client: tangram.Client) -> None:
    runs = [client.run("true", units=0.1, quotas={"few": 1}) for _ in range(7)]
    results = await asyncio.gather(*runs)
    assert {result.outcome for result in results} == {tangram.Outcome.OK}
    log = await whole_log(stack.url)
    state = fold(log)
    assert state.quotas["few"].limit == m.Quota(tokens=2, interval_ms=1_000)
    started_ns = [
        each.stamp_ns
        for each in log
        if ".decisions.cpu." in each.subject
        for item in m.decode(each.subject, each.data)[1].items  # type: ignore[union-attr]
        if isinstance(item, m.Start) and "few" in item.amounts
    ]
    assert len(started_ns) == 7
    assert all(third - first >= 1e9 for first, third in zip(started_ns, started_ns[2:], strict=False))


@pytest.mark.asyncio(loop_scope="module")
async def test_more_tokens_than_there_ever_are(client: tangram.Client) -> None:
    result = await client.run("true", quotas={"few": 3})
    assert (result.outcome, result.reason) == (tangram.Outcome.REJECTED, "never_fits")
    for tokens in (0, 1):
        result = await client.run("true", quotas={"unheard": tokens})
        assert (result.outcome, result.reason) == (tangram.Outcome.REJECTED, "never_fits")
        assert "no quota unheard" in result.detail


@pytest.mark.asyncio(loop_scope="module")
async def test_from_the_shell(stack: LocalStack) -> None:
    arguments = ["run", "--units", "0.1", "--take", "one", "--take", "few=2", "--", "echo", "here"]
    done = await tangram_command(*arguments, url=stack.url)
    assert (done.returncode, done.stdout) == (0, b"here\n")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("quotas", [{"cpu": 1}, {"a b": 1}, {"few": -1}, {"few": 1.5}, ["few"]])
async def test_what_is_no_quota_is_refused_by_the_client(client: tangram.Client, quotas: object) -> None:
    with pytest.raises(tangram.InvalidRequest, match="quotas"):
        await client.run("true", quotas=quotas)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["few", "few=", "few=x", "cpu=1", "few=1,2", "few=1,2/0", "few=1,0/9", "a b=1"])
def test_what_is_no_quota_is_refused_by_the_scheduler(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "--quota", text]) == 2
    assert f"--quota {text}" in capsys.readouterr().err
