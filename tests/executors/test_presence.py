"""Who is dead is proven, and nothing of the dead is left."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram.executors.presence import (
    ExecutorAlreadyRunning,
    claim,
    find_dead,
    host_cores,
    host_identity,
    host_memory_mib,
)
from tests.executors.conftest import alive, hierarchies, survivors

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}

OWNER = """
import asyncio, json, os, sys
from pathlib import Path
from tangram.executors.backend import ActionKey, Grant, SessionKey
from tangram.executors.cpu.hierarchies import detect
from tangram.executors.cpu.process import ProcessBackend
from tangram.executors.presence import claim
from tangram.messages import Run, SessionOpen

state, kind = sys.argv[1:]
SCRIPTS = [
    "echo $$; exec sleep 1000",
    "setsid sh -c 'echo $$; exec sleep 1000' & wait",
    "(setsid -f sh -c 'echo $$; exec sleep 1000' &); sleep 1000",
    "env -i sh -c 'echo $$; exec sleep 1000' & wait",
]

async def main():
    held = claim(Path(state), "host", "one")
    backend = ProcessBackend(
        held.folder / "work", held.incarnation,
        cgroups=False if kind == "marks" else detect(unified=kind == "cgroups"),
    )
    held.record("process", backend.paths, [backend.folder], [backend.ledger])
    session = SessionKey("t", "c", 1)
    await backend.open(session, SessionOpen(), Grant())
    started = asyncio.Queue()
    def run(n, script, session=None):
        return backend.run(ActionKey("t", "c", n), 1, session, Run(argv=("sh", "-c", script)), Grant(),
                           timeout_ms=60_000, env={}, on_output=lambda _, data: started.put_nowait(int(data)))
    left = await run(2, "sleep 1000 >/dev/null 2>&1 & echo $!", session)
    tasks = [asyncio.create_task(run(3 + n, script)) for n, script in enumerate(SCRIPTS)]
    pids = [await started.get() for _ in range(1 + len(SCRIPTS))]
    print(json.dumps([held.incarnation, str(backend.folder), [str(path) for path in backend.paths], pids]), flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


class Owner:
    """An executor in a process of its own, with actions of all shapes running."""

    def __init__(self, state: Path, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(state), kind],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner could not start"
        self.incarnation, folder, paths, self.pids = json.loads(line)
        self.traces = [Path(folder), *map(Path, paths)]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(params=["cgroups", "freezer", "marks"])
def owner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Owner]:
    hierarchies(request.param)
    owner = Owner(tmp_path, request.param)
    yield owner
    if owner.process.returncode is None:
        owner.kill()
    for dead in find_dead(tmp_path, "host", ""):
        assert dead.clean()
        dead.forget()
    assert survivors(owner.incarnation) == []


def test_nothing_of_a_killed_owner_is_left(owner: Owner, tmp_path: Path) -> None:
    assert all(alive(pid) for pid in owner.pids)
    assert find_dead(tmp_path, "host", "") == []
    owner.kill()
    # Its programs live on and must not hold its locks.
    assert any(alive(pid) for pid in owner.pids)
    [dead] = find_dead(tmp_path, "host", "")
    assert (dead.incarnation, dead.executor, dead.back_end) == (owner.incarnation, "one", "process")
    assert find_dead(tmp_path, "host", "") == [], "one successor at a time"
    assert dead.clean()
    assert [pid for pid in owner.pids if alive(pid)] == []
    assert survivors(owner.incarnation) == []
    assert [path for path in owner.traces if path.exists()] == []
    # It is remembered until its death was announced.
    dead.close()
    [dead] = find_dead(tmp_path, "host", "")
    assert dead.clean()
    dead.forget()
    assert find_dead(tmp_path, "host", "") == []


def test_the_living_are_not_touched(owner: Owner, tmp_path: Path) -> None:
    with pytest.raises(ExecutorAlreadyRunning):
        claim(tmp_path, "host", "one")
    other = claim(tmp_path, "host", "two")
    assert find_dead(tmp_path, "host", other.incarnation) == []
    assert all(alive(pid) for pid in owner.pids)
    other.release(forget=True)


def test_a_name_is_free_again_when_its_process_is_dead(owner: Owner, tmp_path: Path) -> None:
    owner.kill()
    with_name = claim(tmp_path, "host", "one")
    assert with_name.incarnation != owner.incarnation
    [dead] = find_dead(tmp_path, "host", with_name.incarnation)
    assert dead.incarnation == owner.incarnation
    dead.close()
    with_name.release()


def test_a_released_incarnation_is_found_dead_unless_forgotten(tmp_path: Path) -> None:
    first = claim(tmp_path, "host", "one")
    first.release()
    first.release()
    second = claim(tmp_path, "host", "one")
    [dead] = find_dead(tmp_path, "host", second.incarnation)
    assert dead.incarnation == first.incarnation
    assert dead.clean()
    dead.forget()
    dead.forget()
    second.release(forget=True)
    assert find_dead(tmp_path, "host", "") == []


def test_another_boots_processes_are_not_looked_for(tmp_path: Path) -> None:
    """Numbers of processes mean nothing after a boot: only folders are removed."""
    held = claim(tmp_path, "host", "one")
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    work, ledger = tmp_path / "work", tmp_path / "ledger"
    work.mkdir()
    ledger.write_text(f"{bystander.pid} 1\n")
    held.record("process", [], [work], [ledger])
    info = held.folder / "info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"boot_id": "another"}))
    held.release()
    [dead] = find_dead(tmp_path, "host", "")
    assert dead.clean()
    assert not work.exists()
    assert alive(bystander.pid)
    dead.forget()
    bystander.kill()
    bystander.wait()


def test_a_recorded_leader_with_another_start_is_somebody_else(tmp_path: Path) -> None:
    held = claim(tmp_path, "host", "one")
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    ledger = tmp_path / "ledger"
    ledger.write_text(f"{bystander.pid} 1\n{bystander.pid}")
    held.record("process", [], [], [ledger])
    held.release()
    [dead] = find_dead(tmp_path, "host", "")
    assert dead.clean()
    assert alive(bystander.pid)
    dead.forget()
    bystander.kill()
    bystander.wait()


def test_an_incarnation_whose_record_is_torn_is_found_dead(tmp_path: Path) -> None:
    held = claim(tmp_path, "host", "one")
    (held.folder / "info.json").write_text('{"executor": "on')
    held.release()
    [dead] = find_dead(tmp_path, "host", "")
    assert dead.clean()
    dead.forget()
    assert find_dead(tmp_path, "host", "") == []


def test_many_claims_at_once_have_one_winner(tmp_path: Path) -> None:
    won, lost = [], []

    def attempt() -> None:
        try:
            won.append(claim(tmp_path, "host", "one"))
        except ExecutorAlreadyRunning:
            lost.append(1)

    threads = [threading.Thread(target=attempt) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 15)
    won[0].release()


def test_the_host_is_named_by_tokens() -> None:
    machine, boot = host_identity()
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", machine)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", boot)
    assert host_identity() == (machine, boot)


def test_cores_and_memory_are_those_this_process_may_use() -> None:
    cores = host_cores()
    assert sorted(core for node in cores for core in node) == sorted(os.sched_getaffinity(0))
    assert all(node == sorted(node) and node for node in cores)
    one = subprocess.run(
        [sys.executable, "-c", "from tangram.executors.presence import *; print(host_cores())"],
        env=ENVIRONMENT,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[0][:1]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert one.stdout == f"[[{cores[0][0]}]]\n"
    total_kib = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1))  # type: ignore[union-attr]
    assert 0 < host_memory_mib() <= total_kib // 1024
