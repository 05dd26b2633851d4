"""`tangram replay --timeline` against the log of a real stack."""

import argparse
import json
import os
import re
from pathlib import Path

import pytest

import tangram
from tangram.broker import Broker, EmbeddedServer, apply
from tangram.cli import replay
from tangram.errors import ConfigError, TangramError
from tangram.local import LocalStack


def given(url: str, file: Path) -> argparse.Namespace:
    top = argparse.ArgumentParser()
    replay.add_to(top.add_subparsers(dest="command"))
    return top.parse_args(["replay", "--nats", url, "--timeline", str(file)])


async def test_a_real_run_becomes_a_page(tmp_path: Path) -> None:
    page, again = tmp_path / "t.html", tmp_path / "again.html"
    async with LocalStack(tmp_path / "stack") as stack:
        async with tangram.Client(stack.url, task="real") as client:
            async with client.session() as box:
                await box.write("a.txt", b"x")
                good = await box.run("cat a.txt")
                await box.run("exit 3")
            await client.run(["sh", "-c", "echo '<script>'"], units=1)
        assert await replay._run(given(stack.url, page)) == 0
        assert await replay._run(given(stack.url, again)) == 0
    assert good.stdout == b"x"
    assert page.read_bytes() == again.read_bytes()
    assert {"again.html", "t.html"} == {name for name in os.listdir(tmp_path) if "html" in name}
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    texts, columns = data["texts"], data["columns"]
    kinds = [texts[number] for number in columns["kind"]]
    outcomes = [texts[number] for number in columns["outcome"]]
    assert sorted(kinds) == ["file.write", "run", "run", "run", "session.close", "session.open"]
    assert sorted(outcomes) == ["failed", *["ok"] * 5]
    assert data["actions"] == 6
    assert len(data["hosts"]) == 1
    assert all(run > 0 for run, kind in zip(columns["run"], kinds, strict=True) if kind == "run")


async def test_what_cannot_be_written_is_said_before_anything_is_read(tmp_path: Path) -> None:
    nobody = "nats://127.0.0.1:1"
    with pytest.raises(ConfigError, match="is a folder"):
        await replay._run(given(nobody, tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        await replay._run(given(nobody, tmp_path / "no" / "t.html"))


async def test_without_a_log_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "t.html"
    with EmbeddedServer.start(tmp_path / "broker") as server:
        with pytest.raises(TangramError, match="no log"):
            await replay._run(given(server.url, file))
        broker = await Broker.connect(server.url, name="test")
        await apply(broker)
        await broker.close()
        with pytest.raises(TangramError, match="the log is empty"):
            await replay._run(given(server.url, file))
    assert not file.exists()
