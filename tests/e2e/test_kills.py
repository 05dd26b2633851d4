"""Executors and brokers that die at any moment: nothing runs twice, nothing is lost, capacity comes back."""

import asyncio
import itertools
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

import tangram
from tangram import messages as m
from tangram import subjects
from tangram.broker import StoredMessage
from tangram.local import LocalStack, RoleProcess
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State

from .conftest import fold, whole_log

KILLS = 204
HOSTS = 3
OUTCOMES = {tangram.Outcome.OK, tangram.Outcome.LOST, tangram.Outcome.ENVIRONMENT_LOST}


def witness(path: Path) -> str:
    """A program that proves that it ran: it appends its id to a file of the host."""
    return f'echo "$TANGRAM_ACTION" >> {path}; sleep 0.05'


class Load:
    """Callers that go on for ever, each with its next action when the last one has ended."""

    def __init__(self, client: tangram.Client, path: Path, callers: int) -> None:
        self.client, self.path = client, path
        self.results: list[tangram.Result] = []
        self.not_opened: list[tangram.SessionError] = []
        self.stopping = False
        self._progress = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._call(index)) for index in range(callers)]

    async def _call(self, index: int) -> None:
        while not self.stopping:
            if index % 3 == 0:
                await self._in_session()
            else:
                self._take(await self.client.run(witness(self.path), units=0.1))

    async def _in_session(self) -> None:
        try:
            box = await self.client.open_session()
        except tangram.SessionError as error:
            self.not_opened.append(error)  # after three lost attempts
            return
        for _ in range(3):
            self._take(await box.run(witness(self.path), units=0.1))
        await box.close()

    def _take(self, result: tangram.Result) -> None:
        assert result.outcome in OUTCOMES, result
        self.results.append(result)
        self._progress.set()

    async def further(self, count: int) -> None:
        """Returns when `count` more have ended."""
        goal = len(self.results) + count
        while len(self.results) < goal:
            self._progress.clear()
            await self._progress.wait()

    async def stop(self) -> None:
        self.stopping = True
        await asyncio.gather(*self._tasks)


def check(load: Load, log: list[StoredMessage]) -> State:
    """No id twice in the witness; each action one outcome, `ok` only if it has run; nothing is open any more."""
    ran = Counter(load.path.read_text().split())
    assert max(ran.values()) == 1, [name for name, count in ran.items() if count > 1]
    ids = [result.id for result in load.results]
    assert len(ids) == len(set(ids))
    missing = [r.id for r in load.results if r.outcome is tangram.Outcome.OK and r.id not in ran]
    assert not missing
    state = fold(log)
    assert not state.actions
    assert not state.owed
    finished: Counter[tuple[str, int]] = Counter()
    for message in log:
        if message.subject.startswith("tangram.actions."):
            _, submitted = m.decode(message.subject, message.data)
            assert isinstance(submitted, m.ActionsSubmitted)
            finished.update((submitted.client, n) for n in submitted.ids)
    assert state.finished == len(finished)
    return state


def kills_that_mattered(log: list[StoredMessage]) -> tuple[int, int]:
    """(deaths, deaths of incarnations that held a decided action which had not completed), as the log shows them."""
    state, deaths, between = State(), 0, 0
    for message in log:
        if message.subject.startswith("tangram.executors."):
            _, event = m.decode(message.subject, message.data)
            dead = event.dead if isinstance(event, m.ExecutorJoined | m.ExecutorChanged) else []
            for incarnation in dead:
                holder = state.incarnations.get(incarnation)
                if holder is not None:
                    deaths += 1
                    between += any(not grant.holds_session for grant in holder.grants.values())
        step(state, Record(message.seq, message.stamp_ns, message.subject, message.data))
    return deaths, between


@pytest.mark.timeout(300)  # mostly the starts of 200 processes
async def test_executors_killed_two_hundred_times(tmp_path: Path) -> None:
    dice = random.Random(7)
    async with LocalStack(tmp_path / "stack", executors=0) as stack, tangram.Client(stack.url, task="kill") as client:
        start = [["--name", f"e{host}", "--host", f"host{host}"] for host in range(HOSTS)]
        executors = [await stack.start_executor(*arguments) for arguments in start]
        load = Load(client, tmp_path / "witness", callers=48)
        kills = itertools.count()

        async def killer(host: int) -> None:
            while next(kills) < KILLS:
                await load.further(dice.randrange(1, 12))
                executors[host].process.kill()
                await executors[host].process.wait()
                executors[host] = await stack.start_executor(*start[host])

        await asyncio.gather(*(killer(host) for host in range(HOSTS)))
        await load.stop()
        after = await asyncio.gather(*(client.run("true") for _ in range(8)))
        assert all(result.ok for result in after)
        log = await whole_log(stack.url)
        state = check(load, log)
        deaths, between = kills_that_mattered(log)
        ended = dict(Counter(result.outcome.value for result in load.results))
        print(f"{deaths} kills, {between} between decision and completion, {len(load.results)} actions: {ended}")
        assert deaths >= 200
        assert between >= 100
        assert_capacity_is_back(state)


def assert_capacity_is_back(state: State) -> None:
    for host in state.hosts.values():
        assert host.pool.used == 0, host
        assert not host.pool.shared, host
        assert all(amount == 0 for amount in host.used.values()), host.used
    assert len(state.hosts) == HOSTS


async def test_the_broker_killed_and_restarted_under_load(tmp_path: Path) -> None:
    async with LocalStack(tmp_path / "stack", executors=0) as stack, tangram.Client(stack.url, task="kill") as client:
        for host in range(2):
            await stack.start_executor("--name", f"e{host}", "--host", f"host{host}")
        load = Load(client, tmp_path / "witness", callers=24)
        assert stack.server is not None
        for _ in range(5):
            await load.further(60)
            await asyncio.to_thread(stack.server.kill)
            await asyncio.to_thread(stack.server.restart)
        await load.further(60)
        await load.stop()
        assert all(result.ok for result in load.results), Counter(str(result) for result in load.results)
        check(load, await whole_log(stack.url))


async def test_the_scheduler_killed_and_restarted_under_load(tmp_path: Path) -> None:
    async with LocalStack(tmp_path / "stack", executors=0) as stack, tangram.Client(stack.url, task="kill") as client:
        for host in range(2):
            await stack.start_executor("--name", f"e{host}", "--host", f"host{host}")
        load = Load(client, tmp_path / "witness", callers=24)
        for _ in range(5):
            await load.further(60)
            scheduler = stack.scheduler
            assert isinstance(scheduler, RoleProcess)
            await scheduler.stop(signal.SIGKILL)
            await stack.start_scheduler()
        await load.further(60)
        await load.stop()
        assert all(result.ok for result in load.results), Counter(str(result) for result in load.results)
        log = await whole_log(stack.url)
        check(load, log)
        assert sum(message.subject == subjects.LEADER for message in log) == 6


async def test_a_second_scheduler_takes_over_and_the_first_is_refused(tmp_path: Path) -> None:
    async with LocalStack(tmp_path / "stack") as stack, tangram.Client(stack.url, task="kill") as client:
        first = stack.scheduler
        assert first is not None
        load = Load(client, tmp_path / "witness", callers=8)
        await load.further(20)
        await stack.start_scheduler()
        assert await asyncio.wait_for(first.process.wait(), 10) == 1
        assert "another scheduler leads" in first.last_words()
        await load.further(50)
        await load.stop()
        assert all(result.ok for result in load.results)
        check(load, await whole_log(stack.url))
