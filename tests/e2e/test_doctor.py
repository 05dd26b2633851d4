"""`tangram doctor` on this machine, with a stack, without one, and where things hang."""

import argparse
import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from tangram.broker import EmbeddedServer
from tangram.cli import doctor
from tangram.cli.doctor import Check
from tangram.local import LocalStack

DEAD = "nats://someone:hunter2@127.0.0.1:1"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    top = argparse.ArgumentParser()
    doctor.add_to(top.add_subparsers())
    given = top.parse_args(["doctor", *arguments])
    code = given.handler(given)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANGRAM_NATS", raising=False)
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))


def test_the_text_has_one_line_for_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_NATS", DEAD)
    code, out, err = run(capsys)
    assert code == 0, out
    assert "can work here" in err
    lines = [line.split()[:2] for line in out.splitlines()]
    assert {status for status, _ in lines} <= {"ok", "limited", "missing"}
    names = [name for _, name in lines]
    assert names[:2] == ["python", "nats-server"]
    assert {"broker", "docker", "cgroups", "cores", "numa", "memory", "gpu", "disk", "uvloop"} <= set(names)
    assert "missing  broker       nothing takes us in as a broker at nats://127.0.0.1:1" in out
    assert "hunter2" not in out + err


def test_json_and_a_broker_that_was_named_and_is_dead(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--json", "--nats", DEAD)
    found = json.loads(out)
    assert code == 1
    assert not found["ready"]
    assert err == ""
    broker = next(check for check in found["checks"] if check["name"] == "broker")
    assert broker["needed"]
    assert broker["status"] == "missing"
    assert broker["advice"]
    assert "hunter2" not in out


@pytest.mark.parametrize(
    "url", ["nats://u:hunter2@[bad", "nats://u:hunter2@host:hunter2port", "u:hunter2@127.0.0.1:1", "tls://u:hunter2@"]
)
def test_no_url_shows_its_password(capsys: pytest.CaptureFixture[str], url: str) -> None:
    _, out, err = run(capsys, "--nats", url)
    assert "missing  broker" in out
    assert "u:hunter2" not in out + err


async def test_a_whole_stack_is_seen(tmp_path: Path) -> None:
    async with LocalStack(tmp_path / "stack") as stack:
        found = {check.name: check for check in await doctor_in_thread(stack.url)}
    assert [found[name].status for name in ("broker", "streams", "scheduler")] == ["ok"] * 3
    assert found["broker"].needed
    assert not found["nats-server"].needed


async def test_a_broker_without_streams_or_scheduler(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "broker") as server:
        found = {check.name: check for check in await doctor_in_thread(server.url)}
    assert found["broker"].status == "ok"
    assert found["streams"].status == "limited"
    assert "streams apply" in found["streams"].advice
    assert found["scheduler"].status == "missing"


async def doctor_in_thread(url: str) -> list[Check]:
    return await asyncio.to_thread(doctor.examine, url)


def test_what_hangs_or_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Check:
        raise RuntimeError("hunter2")

    end = threading.Event()

    def hangs() -> Check:
        end.wait()
        return Check("late", "ok", "")

    monkeypatch.setattr(doctor, "PROBE_S", 0.5)
    monkeypatch.setattr(doctor, "_docker", hangs)
    monkeypatch.setattr(doctor, "_disk", hangs)
    monkeypatch.setattr(doctor, "_gpu", breaks)
    before_s = time.monotonic()
    found = {check.name: check for check in doctor.examine(DEAD)}
    took_s = time.monotonic() - before_s
    end.set()
    assert took_s < 5, "it does not wait for what hangs"
    assert (found["docker"].status, found["docker"].needed) == ("missing", False)
    assert (found["disk"].status, found["disk"].needed) == ("missing", True)
    assert found["gpu"].found == "could not be looked at: RuntimeError"


def test_a_home_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "file" / "home"))
    code, out, _ = run(capsys)
    assert code == 1
    assert "missing  disk" in out


def test_it_leaves_no_control_group_behind(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "--nats", DEAD)
    assert not list(Path("/sys/fs/cgroup").glob("**/tangram/doctor-*"))
