"""One value of every type that travels with nothing but what it must have ("least"), and one with every field set ("full").

`python -m tests.messages.golden_values` adds the bytes of new names to golden.json; it never changes what stands there:
bytes that were once written stay in logs.
"""

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from tangram import messages as m
from tangram.outcomes import Outcome

GOLDEN_FILE: Final = Path(__file__).with_name("golden.json")
VERSION: Final = 1

NONCE: Final = bytes(range(1, 9))
SPEC_LEAST: Final = m.ActionSpec(nonce=NONCE, kind="run")
SPEC_FULL: Final = m.ActionSpec(
    nonce=NONCE,
    kind="my.kind",
    cost={"memory": m.Demand(low=512), "cpu": m.Demand(low=1000, high=4000, legal=(1000, 2000, 4000))},
    timeout_ms=1_234,
    deadline_ms=5_678,
    retry="safe",
    session=3,
    idle_ttl_ms=9_000,
    hint=m.Hint(duration_us=2_000_000, parallel_ppm=900_000),
    key="order-17",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    payload_blob="sha256-abc",
)
RUN_FULL: Final = m.Run(argv=("/bin/echo", "é", ""), stdin=b"\x00in", env={"B": "2", "A": "1"}, cwd="src", stream=True)
RESULT_LEAST: Final = m.Result(nonce=NONCE, outcome=Outcome.OK)
RESULT_FULL: Final = m.Result(
    nonce=NONCE,
    attempt=2,
    outcome=Outcome.ERROR,
    reason="disk",
    detail="full",
    exit_code=-9,
    units=4,
    queued_ns=1,
    startup_ns=2,
    run_ns=3,
    cpu_ns=4,
    memory_peak_bytes=1 << 33,
    retry_after_ms=250,
)
OUTPUT_FULL: Final = m.Output(stdout=b"out\xff", stderr=b"err", stdout_bytes=1 << 20, stderr_bytes=3, data=b"d", blob="b")
RETURNED_FULL: Final = m.Returned(task="t", client="c", n=7, attempt=2, number=3, reason="draining", retry_after_ms=100)
ENDED_FULL: Final = m.SessionEnded(task="t", client="c", session=7, reason="idle")
START_LEAST: Final = m.Start(task="t", client="c", n=7, nonce=NONCE, kind="run", timeout_ms=1_000)
START_FULL: Final = m.Start(
    task="t",
    client="c",
    n=7,
    attempt=2,
    nonce=NONCE,
    kind="run",
    session=3,
    amounts={"memory": 512, "cpu": 2000},
    cores=(0, 300),
    units=2,
    timeout_ms=1_000,
    queued_ns=5,
    predicted_us=6,
    traceparent="00-trace",
    payload=m.encode(RUN_FULL),
    payload_blob="sha256-abc",
)
CANCEL: Final = m.Cancel(task="t", client="c", n=7, attempt=2)
NOTE_FULL: Final = m.WindowNote(policy="tangram", count=2, evicted=[("t", "c", 7)], fallback=True)

SERVICE = m.Service(weights_mib=1, restore_us=2, restore_fixed_us=3)
SIZE_SEEN: Final = m.SizeSeen(units=4, duration_us=350_000, weight_ppm=1_500_000, times=7)
MODEL_FULL: Final = m.LearntModel(
    task="t",
    kind="test",
    count=17,
    serial_us=200_000,
    parallel_us=800_000,
    overhead_us=10_000,
    spread_ppm=480_000,
    sizes=[SIZE_SEEN, m.SizeSeen(units=8, duration_us=300_000, weight_ppm=0)],
)
VALUES: Final[dict[str, msgspec.Struct]] = {
    "Demand.least": m.Demand(low=1),
    "Demand.full": m.Demand(low=1000, high=4000, legal=(1000, 4000)),
    "Hint.least": m.Hint(),
    "Hint.full": m.Hint(duration_us=2_000_000, parallel_ppm=900_000),
    "Hint.table": m.Hint(table_us=((1, 8_000_000), (4, 2_500_000))),
    "ActionSpec.least": SPEC_LEAST,
    "ActionSpec.full": SPEC_FULL,
    "Run.least": m.Run(argv=("true",)),
    "Run.full": RUN_FULL,
    "Run.output": m.Run(argv=("true",), output_max=1 << 24),
    "FileWrite.least": m.FileWrite(path="a", data=b""),
    "FileWrite.full": m.FileWrite(path="a/b", data=b"\x00\xff", mode=0o755),
    "FileRead.least": m.FileRead(path="a"),
    "FileRead.full": m.FileRead(path="a/b", size_max=10),
    "FileRead.large": m.FileRead(path="a/b", size_max=1 << 26),
    "Score.least": m.Score(batch=b""),
    "Score.full": m.Score(batch=b"\x92\x01\x02"),
    "Call.least": m.Call(),
    "Call.full": m.Call(arguments=b"\x81\xa1q\x01", body=b"{}", content_type="application/json"),
    "SessionOpen.least": m.SessionOpen(),
    "SessionOpen.full": m.SessionOpen(image="python:3.12", env={"B": "2", "A": "1"}),
    "SessionClose.least": m.SessionClose(),
    "Noop.least": m.Noop(),
    "ActionsSubmitted.least": m.ActionsSubmitted(client="c", ids=[], specs=[], payloads=[]),
    "ActionsSubmitted.full": m.ActionsSubmitted(
        client="c",
        born=11,
        done_below=5,
        ids=[5, 6],
        specs=[m.encode(SPEC_LEAST), m.encode(SPEC_FULL)],
        payloads=[m.encode(m.Noop()), b""],
        cancel_on_disconnect=True,
    ),
    "CancelsRequested.least": m.CancelsRequested(client="c", ids=[]),
    "CancelsRequested.full": m.CancelsRequested(client="c", born=11, done_below=5, ids=[5, 1 << 62]),
    "ExecutorJoined.least": m.ExecutorJoined(
        incarnation="e-1", key="cpu", host="h", machine_id="m", boot_id="b"
    ),
    "ExecutorJoined.full": m.ExecutorJoined(
        incarnation="e-1",
        k=2,
        key="cpu",
        host="h",
        machine_id="m",
        boot_id="b",
        cores=[[0, 1], [2, 3]],
        capacity={"memory": 4096},
        dead=["e-0"],
        lease_ms=10_000,
        version="0.1.0",
        features=["f"],
    ),
    "ExecutorJoined.gpus": m.ExecutorJoined(
        incarnation="e-1", key="gpu", host="h", machine_id="m", boot_id="b", gpus=[0, 1], capacity={"gpu_memory": 4},
        services={"s": SERVICE},
    ),
    "Service.least": m.Service(),
    "Service.full": SERVICE,
    "Service.seen": m.Service(restored_us=((1, 5),), is_replicated=True, units=(1, 2), idle_value_ppm=3),
    "Service.endpoint": m.Service(cost={"search": 1, "calls": 1}),
    "Resident.full": m.Resident(service="s", gpus=(2, 3)),
    "Quota.least": m.Quota(),
    "Quota.full": m.Quota(concurrency=2, tokens=3, interval_ms=1_000),
    "Quota.bucket": m.Quota(requests=50, interval_ms=1_000, burst=5),
    "LeaderStarted.quotas": m.LeaderStarted(leader="l", behaviour=3, policy="tangram", quotas={"q": m.Quota(tokens=1)}),
    "Settings.quotas": m.Settings(epoch=1, quotas={}),
    "Start.gpus": m.Start(
        task="t", client="c", n=1, nonce=bytes(8), kind="k", timeout_ms=1, gpus=(0, 1), service="s",
        evicts=(m.Resident(service="r", gpus=(0,)),),
    ),
    "ActionSpec.service": m.ActionSpec(nonce=bytes(8), kind="k", service="s"),
    "ExecutorChanged.gpus": m.ExecutorChanged(incarnation="e-1", k=2, gpus=[], services={}),
    "ExecutorChanged.least": m.ExecutorChanged(incarnation="e-1", k=2),
    "ExecutorChanged.full": m.ExecutorChanged(
        incarnation="e-1", k=2, cores=[[0]], capacity={"memory": 1}, residency={"weights": 2}, dead=["e-0"]
    ),
    "ExecutorDraining.least": m.ExecutorDraining(incarnation="e-1", k=2),
    "Returned.least": m.Returned(task="t", client="c", n=7, attempt=2, number=3),
    "Returned.full": RETURNED_FULL,
    "Returned.failed": m.Returned(task="t", client="c", n=7, attempt=2, number=3, reason="500", failed=True),
    "SessionEnded.least": m.SessionEnded(task="t", client="c", session=7),
    "SessionEnded.full": ENDED_FULL,
    "ActionsReturned.least": m.ActionsReturned(incarnation="e-1", k=2),
    "ActionsReturned.full": m.ActionsReturned(incarnation="e-1", k=2, returned=[RETURNED_FULL], ended=[ENDED_FULL]),
    "ExecutorLeft.least": m.ExecutorLeft(incarnation="e-1", k=2),
    "Result.least": RESULT_LEAST,
    "Result.full": RESULT_FULL,
    "Output.least": m.Output(),
    "Output.full": OUTPUT_FULL,
    "ActionsFinished.spent": m.ActionsFinished(ids=[], results=[], outputs=[], spent=[(7, {"judge": 812})]),
    "ActionsFinished.least": m.ActionsFinished(ids=[], results=[], outputs=[]),
    "ActionsFinished.full": m.ActionsFinished(
        executor="e",
        incarnation="e-1",
        k=2,
        epoch=3,
        ids=[7, 8],
        results=[m.encode(RESULT_LEAST), m.encode(RESULT_FULL)],
        outputs=[b"", m.encode(OUTPUT_FULL)],
    ),
    "Start.least": START_LEAST,
    "Start.full": START_FULL,
    "Cancel.least": m.Cancel(task="t", client="c", n=7),
    "Cancel.full": CANCEL,
    "Resize.least": m.Resize(task="t", client="c", n=7),
    "Resize.full": m.Resize(task="t", client="c", n=7, attempt=2, cores=(1, 2)),
    "Interrupt.least": m.Interrupt(task="t", client="c", n=7),
    "Interrupt.full": m.Interrupt(task="t", client="c", n=7, attempt=2),
    "EndSession.least": m.EndSession(task="t", client="c", session=7),
    "EndSession.full": m.EndSession(task="t", client="c", session=7, reason="idle"),
    "Prefetch.least": m.Prefetch(service="s"),
    "Prefetch.full": m.Prefetch(service="s", units=(1, 2)),
    "Prefetch.gpus": m.Prefetch(service="s", gpus=(2, 3), evicts=(m.Resident(service="r", gpus=(2,)),)),
    "Evict.least": m.Evict(service="s"),
    "Evict.full": m.Evict(service="s", units=(1, 2)),
    "Probe.least": m.Probe(),
    "Probe.full": m.Probe(number=4),
    "Dismiss.least": m.Dismiss(),
    "Dismiss.full": m.Dismiss(reason="drained"),
    "WindowNote.least": m.WindowNote(policy="tangram", count=1),
    "WindowNote.full": NOTE_FULL,
    "DecisionsMade.least": m.DecisionsMade(
        epoch=3, incarnation="e-1", number=1, window=1, through_seq=9, digest=b"", items=[]
    ),
    "DecisionsMade.full": m.DecisionsMade(
        epoch=3,
        incarnation="e-1",
        number=2,
        window=4,
        through_seq=9,
        digest=b"\x00\x01\x02\x03\x04\x05\x06\x07",
        items=[
            START_FULL,
            CANCEL,
            m.Resize(task="t", client="c", n=7, attempt=2, cores=(1, 2)),
            m.Interrupt(task="t", client="c", n=7, attempt=2),
            m.EndSession(task="t", client="c", session=7, reason="idle"),
            m.Prefetch(service="s", units=(1, 2)),
            m.Evict(service="s", units=(1, 2)),
            m.Probe(number=4),
            m.Dismiss(reason="drained"),
        ],
        note=NOTE_FULL,
    ),
    "LeaderStarted.least": m.LeaderStarted(leader="l", behaviour=1, policy="tangram"),
    "LeaderStarted.full": m.LeaderStarted(
        leader="l",
        behaviour=1,
        policy="tangram",
        settings={"static_units": 2, "prior_duration_us": -1},
        code_version="0.1.0",
        python_version="3.11.7",
        checkpoint_seq=5,
    ),
    "LeaderStarted.shares": m.LeaderStarted(leader="l", behaviour=3, policy="fair", shares={"train": 3, "eval": 1}),
    "Ticked.least": m.Ticked(epoch=3),
    "ExecutorLost.least": m.ExecutorLost(epoch=3, executor="e", incarnation="e-1"),
    "ExecutorLost.full": m.ExecutorLost(epoch=3, executor="e", incarnation="e-1", reason="silent"),
    "Settings.least": m.Settings(epoch=3),
    "Settings.full": m.Settings(epoch=3, settings={"static_units": 2}, admission_closed=False),
    "Settings.shares": m.Settings(epoch=3, shares={"train": 1_000_000}),
    "SizeSeen.full": SIZE_SEEN,
    "LearntModel.least": m.LearntModel(task="t", kind="test", count=1, sizes=[SIZE_SEEN]),
    "LearntModel.full": MODEL_FULL,
    "ModelsSeeded.full": m.ModelsSeeded(epoch=3, models=[MODEL_FULL]),
    "DeadLetter.least": m.DeadLetter(origin_seq=4, subject="tangram.cancels.t", reason="malformed", data=b"\xc1"),
    "CheckpointPayloads.least": m.CheckpointPayloads(ids=[], payloads=[]),
    "CheckpointPayloads.full": m.CheckpointPayloads(ids=[("t", "c", 7)], payloads=[b"p"]),
    "CheckpointEnded.least": m.CheckpointEnded(
        seq=9, log_created="2026-11-30T00:00:00Z", first_seq=1, parts=1, state_bytes=3, sha256=bytes(32)
    ),
    "CheckpointEnded.full": m.CheckpointEnded(
        seq=9,
        log_created="2026-11-30T00:00:00Z",
        first_seq=4,
        parts=2,
        state_bytes=3,
        sha256=bytes(32),
        payloads=5,
        payload_bytes=6,
        digest=b"\x00\x01\x02\x03\x04\x05\x06\x07",
        code_version="0.1.0",
    ),
    "Heartbeat.least": m.Heartbeat(incarnation="e-1", number=4),
    "Heartbeat.full": m.Heartbeat(incarnation="e-1", number=4, probe=5, running=6),
    "Ask.least": m.Ask(),
    "Ask.full": m.Ask(ids=[1, 2], from_seq=3, stored_seq=4),
    "Answer.least": m.Answer(through_seq=9),
    "Answer.full": m.Answer(through_seq=9, epoch=3, open=[1], unseen=[2], completions=[(8, b"stored")]),
    "Answer.next": m.Answer(through_seq=9, next_n=4),
    "Ask.recall": m.Ask(ids=[1], stored_seq=4, recall=True, keys=["order-17"]),
    "Ask.at": m.Ask(at_seq=8),
    "Answer.recall": m.Answer(through_seq=9, open=[1], nonces=[NONCE], outcomes=[(2, 8)], keys=[("order-17", 2)]),
    "ActionsSubmitted.instance": m.ActionsSubmitted(client="c", ids=[], specs=[], payloads=[], instance=6),
    "CancelsRequested.instance": m.CancelsRequested(client="c", ids=[], instance=6),
    "Result.same": m.Result(nonce=NONCE, outcome=Outcome.OK, same_as=3, at_seq=8),
    "OutputChunk.least": m.OutputChunk(n=7, stream="stderr", data=b"\xff"),
    "OutputChunk.full": m.OutputChunk(n=7, stream="stderr", offset=3, data=b"\xff"),
    "Response.least": m.Response(status=200),
    "Response.full": m.Response(status=404, content_type="text/plain", body=b"\xff"),
    "Control.least": m.Control(),
    "Control.full": m.Control(quotas={"b": m.Quota(concurrency=1)}, without=["a"]),
    "Controlled.least": m.Controlled(),
    "Controlled.full": m.Controlled(error="e"),
}  # fmt: skip

SUBJECTS: Final[dict[str, tuple[type[msgspec.Struct], ...]]] = {
    "tangram.actions.cpu.t": (m.ActionsSubmitted,),
    "tangram.cancels.t": (m.CancelsRequested,),
    "tangram.executors.e": (
        m.ExecutorJoined, m.ExecutorChanged, m.ExecutorDraining, m.ActionsReturned, m.ExecutorLeft,
    ),
    "tangram.completions.t.c": (m.ActionsFinished,),
    "tangram.decisions.cpu.e": (m.DecisionsMade,),
    "tangram.decisions.leader": (m.LeaderStarted,),
    "tangram.decisions.clock": (m.Ticked, m.ExecutorLost, m.Settings, m.ModelsSeeded),
}  # fmt: skip
"""Subjects of the log, and the types that may stand on each."""

DECODERS: Final[dict[str, tuple[Any, tuple[type[msgspec.Struct], ...]]]] = {
    "spec": (m.decode_spec, (m.ActionSpec,)),
    "payload": (m.decode_payload, (m.Run, m.FileWrite, m.FileRead, m.SessionOpen, m.SessionClose, m.Noop, m.Score, m.Call)),
    "result": (m.decode_result, (m.Result,)),
    "output": (m.decode_output, (m.Output,)),
    "ask": (m.decode_ask, (m.Ask,)),
    "answer": (m.decode_answer, (m.Answer,)),
    "heartbeat": (m.decode_heartbeat, (m.Heartbeat,)),
    "chunk": (m.decode_chunk, (m.OutputChunk,)),
    "response": (m.decode_response, (m.Response,)),
    "control": (m.decode_control, (m.Control,)),
    "controlled": (m.decode_controlled, (m.Controlled,)),
    "checkpoint-ended": (m.decode_checkpoint_ended, (m.CheckpointEnded,)),
    "checkpoint-payloads": (m.decode_checkpoint_payloads, (m.CheckpointPayloads,)),
}
"""What else messages.py decodes, and to which types."""


def golden() -> dict[str, bytes]:
    """What golden.json holds, by name."""
    return {name: bytes.fromhex(text) for name, text in json.loads(GOLDEN_FILE.read_text())["messages"].items()}


def main() -> None:
    known = golden() if GOLDEN_FILE.exists() else {}
    added = {name: m.encode(value) for name, value in VALUES.items() if name not in known}
    messages = {name: raw.hex() for name, raw in sorted({**known, **added}.items())}
    GOLDEN_FILE.write_text(json.dumps({"version": VERSION, "messages": messages}, indent=1) + "\n")


if __name__ == "__main__":
    main()
