"""Whole stacks: embedded broker, scheduler and executors as processes, on the real machine."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tangram
from tangram import messages as m
from tangram import subjects
from tangram.broker import Broker, StoredMessage, read_log
from tangram.local import LocalStack
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """One stack for the tests of a module that do not break it."""
    async with LocalStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: LocalStack) -> AsyncIterator[tangram.Client]:
    async with tangram.Client(stack.url, task="test") as connected:
        yield connected


async def whole_log(url: str, after_seq: int = 0) -> list[StoredMessage]:
    broker = await Broker.connect(url, name="test reader")
    try:
        found: list[StoredMessage] = []
        while messages := await read_log(broker, subjects.STREAM, found[-1].seq + 1 if found else after_seq + 1):
            found += messages
        return found
    finally:
        await broker.close()


def fold(log: list[StoredMessage], state: State | None = None) -> State:
    """Folds a recorded log, from its start or from the state at a checkpoint, and checks what must hold of any: nothing of ours
    broke, no core of a host has two holders, each window's digest is that of the state it considered."""
    state = State() if state is None else state
    digests = {state.seq: state.digest}
    for message in log:
        folded = step(state, Record(message.seq, message.stamp_ns, message.subject, message.data))
        assert not folded.skipped, (message.seq, message.subject, folded.skipped)
        digests[message.seq] = state.digest
        if isinstance(folded.message, m.DecisionsMade):
            known = digests.get(folded.message.through_seq)
            assert known == folded.message.digest or folded.message.through_seq < min(digests), f"window {folded.message.window}"
        assert_within_capacity(state)
    return state


def assert_within_capacity(state: State) -> None:
    held: dict[tuple[object, int], int] = {}
    for incarnation in state.incarnations.values():
        for grant in incarnation.grants.values():
            millicores = grant.amounts.get("cpu", 0)
            for core in grant.cores if millicores else ():
                key = (grant.host, core)
                held[key] = held.get(key, 0) + min(millicores, 1000)
                assert held[key] <= 1000, f"core {core} of {grant.host.name} has two holders"


async def eventually(what: str, check: "object", within_s: float = 10.0) -> None:
    """Polls for a condition that another process brings about."""
    async with asyncio.timeout(within_s):
        while not check():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def processes_with(marker: str) -> list[int]:
    """Live processes (no zombies) whose command line or environment has `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            continue
        if alive and marker.encode() in text:
            found.append(int(entry.name))
    return found
