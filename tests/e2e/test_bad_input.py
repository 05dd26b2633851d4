"""Bytes that no client of ours writes, on every subject, from a connection that goes past our clients: what can be answered is
answered, the rest is kept as dead letters, and everything goes on in the same processes."""

import asyncio
import resource
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

import tangram
from tangram import Outcome, limits, subjects
from tangram import messages as m
from tangram.broker import Broker, BrokerTimeout, Delivery, EmbeddedServer, StoredMessage, read_log, stream_state
from tangram.local import LocalStack
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State
from tests.messages.golden_values import golden

from .conftest import eventually, processes_with, whole_log

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOLDEN = golden()
BODIES = {
    "empty": b"",
    "garbage": bytes(range(256)) * 4,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "truncated": GOLDEN["ActionsSubmitted.full"][:-3],
    "trailing": GOLDEN["CancelsRequested.full"] + b"\0",
    "depth": b"\x91" * 100_000,
    "depth in a field": b"\x82\xa4type\xb0ActionsSubmitted\xa1x" + b"\x91" * 100_000,
    "length": b"\xdd\xff\xff\xff\xff",
    "length of a name": b"\x81\xa4type\xdb\xff\xff\xff\xff",
    "not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "wrong type": GOLDEN["Answer.least"],
    "JSON": b'{"type":"Ticked","epoch":1}',
    "1 MiB": b"\x00" * (1 << 20),
}
"""None of these is the message of a newer version: that, from a leader or an executor, stops everything on purpose."""
WRITTEN = {kind: GOLDEN[f"{kind}.least"] for kind in ("ActionsSubmitted", "CancelsRequested", "ActionsFinished", "Ticked")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rogue(stack: LocalStack) -> AsyncIterator[Broker]:
    connected = await Broker.connect(stack.url, name="test rogue")
    yield connected
    await connected.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def the_same_processes(stack: LocalStack, client: tangram.Client) -> AsyncIterator[None]:
    """After each test an ordinary action runs, in the processes that were there before."""
    roles = [stack.scheduler, *stack.executors]
    pids = [role.pid for role in roles if role is not None]
    yield
    async with asyncio.timeout(30):
        result = await client.run("echo still here")
    assert (result.outcome, result.stdout) == (Outcome.OK, b"still here\n")
    assert all(role.is_running for role in roles if role is not None)
    assert pids == [role.pid for role in (stack.scheduler, *stack.executors) if role is not None]


async def letters(broker: Broker) -> dict[int, m.DeadLetter]:
    """By the sequence of what they hold."""
    found: list[StoredMessage] = []
    while messages := await read_log(broker, "TANGRAM_DEAD", found[-1].seq + 1 if found else 1):
        found += messages
    return {letter.origin_seq: letter for each in found if (letter := msgspec.msgpack.decode(each.data, type=m.DeadLetter))}


async def dead(broker: Broker, seqs: list[int]) -> dict[int, m.DeadLetter]:
    """Waits for the letters of these."""
    async with asyncio.timeout(20):
        while not (found := await letters(broker)).keys() >= set(seqs):
            await asyncio.sleep(0.05)
    return found


@pytest.mark.parametrize("role", ["actions", "cancels", "executors", "completions", "decisions", "leader", "clock"])
async def test_bad_bytes_on_every_subject_of_the_log(rogue: Broker, stack: LocalStack, client: tangram.Client, role: str) -> None:
    subject = {
        "actions": subjects.actions("cpu", client.task),
        "cancels": subjects.cancels(client.task),
        "executors": subjects.executors("cpu-1"),
        "completions": subjects.completions(client.task, client.name),
        "decisions": subjects.decisions("cpu", "cpu-1"),
        "leader": subjects.LEADER,
        "clock": subjects.CLOCK,
    }[role]
    running = asyncio.ensure_future(client.run("sleep 0.3; echo meanwhile"))
    fits = {"actions": "ActionsSubmitted", "cancels": "CancelsRequested", "completions": "ActionsFinished", "clock": "Ticked"}
    bodies = [*BODIES.values(), *(data for kind, data in WRITTEN.items() if kind != fits.get(role))]
    sent = {(await rogue.publish(subject, body)).seq: body for body in bodies}
    found = await dead(rogue, list(sent))
    for seq, body in sent.items():
        letter = found[seq]
        assert (letter.subject, letter.data) == (subject, body[: limits.ENVELOPE_BYTES_MAX])
        assert letter.reason.startswith("malformed: ")
    assert (await running).stdout == b"meanwhile\n"


async def test_names_that_are_none_reach_no_consumer(rogue: Broker) -> None:
    """The stream stores them, since its subjects are wildcards; they are dead letters like any other."""
    body = GOLDEN["ActionsSubmitted.full"]
    named = ["tangram.actions.cpu.é", "tangram.actions.cpu." + "a" * 65, "tangram.actions.$x.t", "tangram.cancels.a!b"]
    seqs = [(await rogue.publish(subject, body)).seq for subject in named]
    found = await dead(rogue, seqs)
    assert [found[seq].subject for seq in seqs] == named


async def test_a_body_that_disagrees_with_its_subject_does_nothing(
    rogue: Broker, client: tangram.Client, stack: LocalStack
) -> None:
    """What others say about an executor, and outcomes without the action's nonce, change nothing."""
    running = asyncio.ensure_future(client.run("sleep 0.3; echo mine"))
    await eventually("it is submitted", lambda: client.open_actions == 1)
    joined = next(
        message
        for stored in await whole_log(stack.url)
        if stored.subject == subjects.executors("cpu-1")
        and isinstance(message := _decoded(stored), m.ExecutorJoined)
    )  # fmt: skip
    for said in (
        m.ExecutorLeft(incarnation=joined.incarnation, k=1 << 40),
        m.ExecutorDraining(incarnation=joined.incarnation, k=1 << 41),
    ):
        await rogue.publish(subjects.executors("somebody-else"), m.encode(said))
    n = max(client._ledger.open)
    result = m.encode(m.Result(nonce=b"not mine", outcome=Outcome.FAILED))
    forged = m.ActionsFinished(ids=[n], results=[result], outputs=[b""], epoch=0)
    await rogue.publish(subjects.completions(client.task, client.name), m.encode(forged))
    decided = m.DecisionsMade(
        epoch=1 << 40, incarnation=joined.incarnation, number=1 << 40, window=1, through_seq=1, digest=b"", items=[]
    )
    await rogue.publish(subjects.decisions("cpu", "somebody-else"), m.encode(decided))
    assert (await running).stdout == b"mine\n"


def _decoded(stored: StoredMessage) -> object:
    try:
        return m.decode(stored.subject, stored.data)[1]
    except m.Malformed:
        return None


async def test_a_bad_item_is_rejected_with_its_field_and_its_neighbours_run(rogue: Broker) -> None:
    name = f"raw{secrets.token_hex(4)}"
    answer = m.decode_answer(await rogue.request(subjects.ask("raw", name), m.encode(m.Ask()), timeout_s=5))
    outcomes: dict[int, m.Result] = {}

    def on_result(delivery: Delivery) -> None:
        finished = m.decode(subjects.completions("raw", name), delivery.data)[1]
        assert isinstance(finished, m.ActionsFinished)
        outcomes.update(zip(finished.ids, map(m.decode_result, finished.results), strict=True))

    await rogue.subscribe(subjects.results("raw", name), on_result)
    good = {"nonce": bytes(8), "kind": "run", "cost": {"cpu": {"low": 1000}}}
    run = {"type": "Run", "argv": ["true"]}
    items: list[tuple[object, object, str]] = [
        (good, run, ""),
        ({**good, "timeout_ms": float("nan")}, run, "timeout_ms"),
        ({**good, "priority": 5}, run, "priority"),
        ({**good, "cost": {"cpu": {"low": -1}}}, run, "low"),
        (good, {**run, "argv": []}, "argv"),
        (good, {**run, "argv": ["a\0b"]}, "argv"),
        (good, {**run, "argv": ["x" * 65_537]}, "argv"),
        (good, {**run, "env": {"A\nB": ""}}, "env"),
        (good, {**run, "privileged": True}, "privileged"),
        (good, {"type": "Noop"}, "payload"),
        ({**good, "session": 1, "kind": "file.read"}, {"type": "FileRead", "path": ""}, "path"),
        (good, run, ""),
    ]
    ids = list(range(1, len(items) + 1))
    pack = msgspec.msgpack.encode
    submitted = m.ActionsSubmitted(
        client=name,
        born=answer.through_seq,
        ids=ids,
        specs=[pack(s) for s, _, _ in items],
        payloads=[pack(p) for _, p, _ in items],
    )
    await rogue.publish(subjects.actions("cpu", "raw"), m.encode(submitted))
    await eventually("all are answered", lambda: outcomes.keys() == set(ids), within_s=30)
    for n, (_, _, field) in zip(ids, items, strict=True):
        if field:
            assert (outcomes[n].outcome, outcomes[n].reason) == (Outcome.REJECTED, "invalid")
            assert field in outcomes[n].detail
        else:
            assert outcomes[n].outcome is Outcome.OK


# --- what is not stored ------------------------------------------------------------------------------------------


async def test_bad_questions_and_heartbeats_are_dropped(rogue: Broker) -> None:
    for body in BODIES.values():
        rogue.send_soon(subjects.ask("test", "x"), body, reply=rogue.new_inbox())
        rogue.send_soon(subjects.heartbeats("cpu-1"), body)
    for index in range(1_000):
        rogue.send_soon(subjects.heartbeats("cpu-1"), m.encode(m.Heartbeat(incarnation=f"nobody-{index}", number=1)))
    too_many = msgspec.msgpack.encode({"type": "Ask", "ids": list(range(limits.ENVELOPE_ITEMS_MAX + 1))})
    with pytest.raises(BrokerTimeout):
        await rogue.request(subjects.ask("test", "x"), too_many, timeout_s=0.5)
    answer = await rogue.request(subjects.ask("test", "x"), m.encode(m.Ask()), timeout_s=10)
    assert m.decode_answer(answer).through_seq > 0


async def test_an_answer_goes_to_an_inbox_and_nowhere_else(rogue: Broker, client: tangram.Client) -> None:
    """The asker names where the answer goes, and the scheduler may write where the asker may not."""
    before = await stream_state(rogue, subjects.STREAM)
    for reply in (
        subjects.LEADER, subjects.CLOCK, subjects.actions("cpu", "test"), subjects.completions("test", client.name),
        f"$JS.API.STREAM.PURGE.{subjects.STREAM}", f"$JS.API.STREAM.DELETE.{subjects.STREAM}", "_INBOX_other.x", "_INBOXES.x",
    ):  # fmt: skip
        rogue.send_soon(subjects.ask("test", "x"), m.encode(m.Ask()), reply=reply)
    inbox = rogue.new_inbox()
    answered = asyncio.Event()
    await rogue.subscribe(inbox, lambda _: answered.set())
    rogue.send_soon(subjects.ask("test", "x"), m.encode(m.Ask()), reply=inbox)
    await asyncio.wait_for(answered.wait(), 10)  # it is served after all those before it
    last = await rogue.publish(subjects.cancels("test"), b"stored after whatever the answers have put there")
    stored = await read_log(rogue, subjects.STREAM, before.last_seq + 1)
    assert [each.seq for each in stored if each.seq >= last.seq]
    assert not [each.subject for each in stored if b"Answer" in each.data[:20]]
    assert (await stream_state(rogue, subjects.STREAM)).first_seq == before.first_seq


async def test_an_acknowledgement_that_the_broker_writes_into_the_log_is_a_dead_letter(rogue: Broker) -> None:
    """Whoever publishes says where it is acknowledged, and the broker may write everywhere, on the leader's subject too."""
    before = await stream_state(rogue, subjects.STREAM)
    rogue.send_soon(subjects.cancels("test"), b"", reply=subjects.LEADER)
    async with asyncio.timeout(20):
        while not [letter for letter in (await letters(rogue)).values() if letter.data.startswith(b'{"stream"')]:
            await asyncio.sleep(0.05)
    assert (await stream_state(rogue, subjects.STREAM)).last_seq > before.last_seq


async def test_a_scheduler_full_of_questions_still_greets(rogue: Broker, stack: LocalStack) -> None:
    """Questions about what it has not read yet wait; there can be any number of those, and of who asks them."""
    for index in range(limits.ASKS_WAITING_MAX + 500):
        reply = rogue.new_inbox()
        rogue.send_soon(subjects.ask("flood", f"c{index}"), m.encode(m.Ask(stored_seq=1 << 60)), reply=reply)
    await rogue.flush()  # so all of them are before what comes now
    async with tangram.Client(stack.url, task="flood", connect_timeout=5) as late:
        assert (await late.noop()).ok


async def test_a_client_asks_again_when_its_greeting_is_lost_or_answered_with_nonsense(tmp_path: Path) -> None:
    server = await asyncio.to_thread(EmbeddedServer.start, tmp_path / "broker")
    try:
        broker = await Broker.connect(server.url, name="test answers")
        questions: list[Delivery] = []

        def on_ask(delivery: Delivery) -> None:
            questions.append(delivery)
            if len(questions) == 2:
                broker.send_soon(delivery.reply, b"\xc1")
            elif len(questions) > 2:
                broker.send_soon(delivery.reply, m.encode(m.Answer(through_seq=1)))

        await broker.subscribe("tangram.ask.*.*", on_ask)
        async with tangram.Client(server.url, task="t", connect_timeout=20):
            assert len(questions) == 3
        await broker.close()
    finally:
        await asyncio.to_thread(server.stop)


async def test_forged_results_are_ignored(rogue: Broker, client: tangram.Client) -> None:
    running = asyncio.ensure_future(client.run("sleep 0.5; echo true"))
    await eventually("it is submitted", lambda: client.open_actions == 1)
    n = max(client._ledger.open)
    result = m.encode(m.Result(nonce=bytes(8), outcome=Outcome.FAILED))
    forged = m.encode(m.ActionsFinished(ids=[n], results=[result], outputs=[b""]))
    subject = subjects.results(client.task, client.name)
    log = {"Nats-Stream": subjects.STREAM, "Nats-Subject": subjects.completions(client.task, client.name)}
    for body in (forged, *BODIES.values()):
        if len(body) < 1 << 19:
            rogue.send_soon(subject, body)
            rogue.send_soon(subject, body, headers={**log, "Nats-Sequence": "9" * 18, "Nats-Last-Sequence": "0"})
            rogue.send_soon(subject, body, headers={**log, "Nats-Sequence": "1", "Nats-Last-Sequence": "9" * 5_000})
            rogue.send_soon(subject, body, headers={**log, "Nats-Sequence": "²", "Nats-Last-Sequence": "-1"})
            rogue.send_soon(
                subject, body, headers={**log, "Nats-Stream": "OTHER", "Nats-Sequence": "1", "Nats-Last-Sequence": "0"}
            )
    assert (await running).stdout == b"true\n"
    assert (await client.run("echo again")).stdout == b"again\n"


async def test_forged_output_does_not_change_the_result(rogue: Broker, client: tangram.Client) -> None:
    """Live output is best effort and can be forged where tasks share a credential; what the result holds cannot."""
    seen: list[bytes] = []
    running = asyncio.ensure_future(client.run("sleep 0.3; echo real", on_output=lambda _, data: seen.append(data)))
    await eventually("it is submitted", lambda: client.open_actions == 1)
    n = max(client._ledger.open)
    subject = subjects.output(client.task, client.name)
    for body in BODIES.values():
        rogue.send_soon(subject, body)
    late = m.OutputChunk(n=n, stream="stdout", offset=1 << 60, data=b"late")
    for chunk in (late, m.OutputChunk(n=1 << 60, stream="stdout", data=b"none")):
        rogue.send_soon(subject, m.encode(chunk))
    assert (await running).stdout == b"real\n"
    assert b"late" not in seen
    assert b"none" not in seen


# --- a host that has nothing left --------------------------------------------------------------------------------


async def test_an_executor_without_descriptors_gives_back_what_it_cannot_begin(stack: LocalStack, client: tangram.Client) -> None:
    (executor,) = stack.executors
    before = resource.prlimit(executor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(executor.pid, resource.RLIMIT_NOFILE, (limits.DESCRIPTORS_RESERVED, before[1]))
    try:
        once = asyncio.ensure_future(client.run("echo once"))
        box = asyncio.ensure_future(client.open_session())
        await eventually("it is given back", lambda: "given back" in executor.log.read_text(), within_s=20)
        assert not once.done()
        assert not box.done()
    finally:
        resource.prlimit(executor.pid, resource.RLIMIT_NOFILE, before)
    async with asyncio.timeout(30):
        result = await once
        assert (result.outcome, result.stdout, result.attempt) == (Outcome.OK, b"once\n", 1)
        await (await box).close()


# --- a producer that is there and says nothing ------------------------------------------------------------------

SILENT = """
import asyncio, sys, tangram
async def main():
    async with tangram.Client(sys.argv[1], task="silent") as client:
        box = await client.open_session(idle_ttl=3)
        print((await box.run("nohup sleep 7654.5 >/dev/null 2>&1 & echo open")).text, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_client_that_hangs_holds_its_session_no_longer_than_it_said(stack: LocalStack) -> None:
    """Its connection stays open, half or whole: nothing depends on that."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SILENT, stack.url, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"open\n"
        await eventually("it lives on", lambda: processes_with("sleep\0007654.5"))
        process.send_signal(signal.SIGSTOP)
        await eventually("what it left running is gone", lambda: not processes_with("sleep\0007654.5"), within_s=20)
    finally:
        process.kill()
        await process.wait()


# --- much of it --------------------------------------------------------------------------------------------------


async def test_a_flood_is_answered_to_the_last(tmp_path: Path) -> None:
    """What is too much is refused with a time to come back, nothing is lost, and nobody's memory grows with it."""
    async with (
        LocalStack(tmp_path, settings={"pending_max": 200}) as stack,
        tangram.Client(stack.url, task="flood") as client,
    ):
        results = await asyncio.gather(*(client.noop(units=0.1) for _ in range(5_000)))
        assert stack.scheduler is not None
        assert resident_mib(stack.scheduler.pid) < 200
        assert (await client.run("true")).ok
    assert len({result.id for result in results}) == 5_000
    refused = {(result.outcome, result.reason, result.retry_after_s) for result in results if not result.ok}
    assert refused == {(Outcome.REJECTED, "over_limit", limits.RETRY_AFTER_MS / 1e3)}
    assert any(result.ok for result in results)


def resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20


async def test_an_outage_is_a_few_lines_in_each_log(tmp_path: Path) -> None:
    async with LocalStack(tmp_path) as stack, tangram.Client(stack.url, task="outage") as client:
        assert (await client.run("true")).ok
        roles = [role for role in (stack.scheduler, *stack.executors) if role is not None]
        before = [len(role.log.read_text().splitlines()) for role in roles]
        assert stack.server is not None
        await asyncio.to_thread(stack.server.kill)
        await asyncio.sleep(4)  # the outage itself, not a wait for something
        await asyncio.to_thread(stack.server.restart)
        async with asyncio.timeout(30):
            assert (await client.run("true")).ok
        said = [role.log.read_text().splitlines()[count:] for role, count in zip(roles, before, strict=True)]
    assert all(0 < len(lines) <= 6 for lines in said), "\n".join(line for lines in said for line in lines)


async def test_the_log_of_all_this_folds(stack: LocalStack) -> None:
    """What was bad is skipped by every fold in the same way, and nothing of it broke one."""
    state = State()
    skipped = [
        step(state, Record(each.seq, each.stamp_ns, each.subject, each.data)).skipped for each in await whole_log(stack.url)
    ]
    assert any(skipped)
    assert not [why for why in skipped if why.startswith("broken")]
    assert not state.actions
