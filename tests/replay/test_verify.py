"""A log that the core has decided verifies, from wherever it is read; what was changed in it, or in the core, is found."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tangram import messages as m
from tangram import subjects
from tangram.cli.replay import verified
from tangram.outcomes import Outcome
from tangram.replay import verdict
from tangram.replay.logfile import LogWriter
from tangram.replay.planned import Planned
from tangram.replay.redact import Redaction
from tangram.replay.sources import FileSource
from tangram.replay.verify import Report, Verifier
from tangram.scheduler.compose import compose
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import BEHAVIOUR, State
from tangram.scheduler.window import plan
from tests.core.world import World, cores
from tests.replay.record import chaos
from tests.replay.synthetic import busy_log

ROOT = Path(__file__).parents[2]
LOG = busy_log(400)


def verify(log: Sequence[Record], state: State | None = None, *, without_payloads: bool = False) -> Report:
    planned = Planned()
    for record in log:
        if record.subject.startswith("tangram.decisions."):
            planned.add(record)
    verifier = Verifier(state, planned, without_payloads=without_payloads)
    for record in log:
        verifier.add(record)
    return verifier.complete()


def windows(log: Sequence[Record]) -> set[tuple[int, int]]:
    decisions = [m.decode(each.subject, each.data)[1] for each in log if each.subject.count(".") == 3]
    return {(each.epoch, each.window) for each in decisions if isinstance(each, m.DecisionsMade)}


def test_what_the_core_has_decided_verifies() -> None:
    report = verify(LOG)
    assert report.ok
    assert report.windows == len(windows(LOG)) > 100
    assert report.rulings > 0
    assert (report.unmade, report.others, report.fallbacks) == (0, {}, 0)
    assert (report.first_seq, report.last_seq, report.actions) == (1, len(LOG), len({*ended(LOG)}))
    assert verdict.text(report).endswith(f"0 of {report.windows} windows differ")


def ended(log: Sequence[Record]) -> list[tuple[str, int]]:
    found = []
    for each in log:
        if each.subject.startswith("tangram.completions."):
            message = m.decode(each.subject, each.data)[1]
            assert isinstance(message, m.ActionsFinished)
            found += [(each.subject, n) for n in message.ids]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_verifies(seed: int) -> None:
    report = verify(chaos(seed, 800).world.log)
    assert report.ok, verdict.text(report)
    assert report.windows > 20


@pytest.mark.parametrize("seq", range(100, len(LOG), 200))
def test_from_any_checkpoint_on_it_verifies(seq: int) -> None:
    state = State()
    for record in LOG[:seq]:
        step(state, record)
    report = verify(LOG[seq:], state)
    assert report.ok, verdict.text(report)
    assert report.unmade <= 1
    assert report.windows + report.unmade >= len(windows(LOG[seq:]))


def test_without_payloads_it_verifies() -> None:
    redaction = Redaction(b"s")
    report = verify([redaction.record(record) for record in LOG], without_payloads=True)
    assert (report.ok, report.windows) == (True, len(windows(LOG)))


# --- what was changed ----------------------------------------------------------------------------------------------


def changed(change: Callable[[m.LogMessage], m.LogMessage | None], after: int = 500) -> tuple[list[Record], int]:
    """The log with the first message behind `after` changed to which `change` says something else, and its sequence."""
    for index, record in enumerate(LOG[after:], after):
        other = change(m.decode(record.subject, record.data)[1])
        if other is not None:
            return [*LOG[:index], record._replace(data=m.encode(other)), *LOG[index + 1 :]], record.seq
    raise AssertionError("nothing to change")


def start_of(message: m.LogMessage) -> m.Start | None:
    starts = [item for item in message.items if isinstance(item, m.Start)] if isinstance(message, m.DecisionsMade) else []
    return next((each for each in starts if each.cores), None)


def with_start(change: Callable[[m.Start], m.Start]) -> Callable[[m.LogMessage], m.LogMessage | None]:
    def of(message: m.LogMessage) -> m.LogMessage | None:
        start = start_of(message)
        if start is None or not isinstance(message, m.DecisionsMade):
            return None
        return replace(message, items=[change(each) if each is start else each for each in message.items])

    return of


DECISIONS: dict[str, tuple[Callable[[m.Start], m.Start], str]] = {
    "other cores": (lambda start: replace(start, cores=(15,)), "core 15"),
    "a longer prediction": (lambda start: replace(start, predicted_us=start.predicted_us + 1_000_000), "predicted"),
    "another payload": (lambda start: replace(start, payload=m.encode(m.Run(argv=("evil",)))), "evil"),
    "another nonce": (lambda start: replace(start, nonce=b"x" * 8), "nonce"),
    "another action": (lambda start: replace(start, n=start.n + 1), "nothing"),
}


@pytest.mark.parametrize("what", DECISIONS)
def test_a_changed_decision_is_found_and_told(what: str) -> None:
    change, says = DECISIONS[what]
    log, seq = changed(with_start(change))
    report = verify(log)
    assert not report.ok
    first = report.differences[0]
    assert (first.seq, first.same_state) == (seq, True)
    original = start_of(m.decode(LOG[seq - 1].subject, LOG[seq - 1].data)[1])
    assert original is not None
    assert any(f"{original.task}/{original.client}/{original.n}" in each.what for each in first.changes)
    text = verdict.text(report)
    assert says in text
    assert "the state was the leader's" in text
    assert f"window {first.window} differs at sequence {seq}" in text


def test_a_decision_that_is_missing_is_found() -> None:
    def of(message: m.LogMessage) -> m.LogMessage | None:
        return replace(message, items=message.items[1:]) if isinstance(message, m.DecisionsMade) and message.items else None

    log, seq = changed(of)
    report = verify(log)
    assert (report.differences[0].seq, report.differences[0].changes[0].decided) == (seq, "")


def test_a_whole_message_of_a_window_that_is_missing_is_found() -> None:
    of_window: dict[int, list[int]] = {}
    for record in LOG:
        message = m.decode(record.subject, record.data)[1]
        if isinstance(message, m.DecisionsMade):
            of_window.setdefault(message.window, []).append(record.seq)
    seq = next(seqs[-1] for seqs in of_window.values() if len(seqs) > 1)
    tick = m.encode(m.Ticked(epoch=1))
    log = [record._replace(subject=subjects.CLOCK, data=tick) if record.seq == seq else record for record in LOG]
    report = verify(log)
    assert not report.ok
    first = report.differences[0]
    assert first.changes[0].decided == ""
    assert first.through_seq < seq


def other_outcome(message: m.LogMessage) -> m.LogMessage | None:
    if not isinstance(message, m.ActionsFinished) or not message.incarnation:
        return None
    result = replace(m.decode_result(message.results[0]), outcome=Outcome.CANCELLED)
    return replace(message, results=[m.encode(result), *message.results[1:]])


def other_cost(message: m.LogMessage) -> m.LogMessage | None:
    if not isinstance(message, m.ActionsSubmitted):
        return None
    spec = m.decode_spec(message.specs[0])
    if "cpu" not in spec.cost:
        return None
    spec = replace(spec, cost={"cpu": m.Demand(low=7_000)})
    return replace(message, specs=[m.encode(spec), *message.specs[1:]])


def other_capacity(message: m.LogMessage) -> m.LogMessage | None:
    return replace(message, cores=[[0, 1]]) if isinstance(message, m.ExecutorJoined) else None


@pytest.mark.parametrize("change", [other_outcome, other_cost, other_capacity])
def test_a_changed_event_is_found_and_its_place_narrowed_down(change: Callable[[m.LogMessage], m.LogMessage | None]) -> None:
    log, seq = changed(change, 0 if change is other_capacity else 500)
    report = verify(log)
    assert not report.ok
    first = report.differences[0]
    assert first.seq > seq
    if not first.same_state:
        assert first.agreed_seq < seq <= first.through_seq
        assert f"a message from {first.agreed_seq + 1} to {first.through_seq}" in verdict.text(report)


def test_a_changed_stamp_is_found() -> None:
    log = [record._replace(stamp_ns=record.stamp_ns + 1_000_000_000) if record.seq == 600 else record for record in LOG]
    first = verify(log).differences[0]
    assert not first.same_state
    assert first.agreed_seq < 600 <= first.through_seq


def test_a_changed_ruling_is_found() -> None:
    def of(message: m.LogMessage) -> m.LogMessage | None:
        if not isinstance(message, m.ActionsFinished) or message.incarnation:
            return None
        result = replace(m.decode_result(message.results[0]), reason="no reason")
        return replace(message, results=[m.encode(result), *message.results[1:]])

    log, seq = changed(of, 0)
    report = verify(log)
    assert (report.rulings_differ, report.differences[0].seq, report.ok) == (1, seq, False)
    assert "no reason" in verdict.text(report)


# --- versions and fallbacks ----------------------------------------------------------------------------------------


def test_windows_of_another_behaviour_are_told_apart() -> None:
    def of(message: m.LogMessage) -> m.LogMessage | None:
        return replace(message, behaviour=BEHAVIOUR + 1) if isinstance(message, m.LeaderStarted) else None

    log, _ = changed(of, 0)
    broken, _ = changed(with_start(lambda start: replace(start, cores=(15,))))
    report = verify([log[0], *broken[1:]])
    assert (report.ok, report.windows, report.others) == (True, 0, {BEHAVIOUR + 1: len(windows(LOG))})
    assert f"behaviour {BEHAVIOUR + 1} (here: {BEHAVIOUR})" in verdict.text(report)


def test_a_window_of_the_fallback_is_made_by_its_policy() -> None:
    world = World()
    world.lead()
    world.join("cpu-0", nodes=cores(8))
    spec = m.ActionSpec(nonce=bytes(8), kind="run", cost={"cpu": m.Demand(low=1_000, high=8_000)})
    payload = m.encode(m.Run(argv=("true",)))
    world.put(subjects.actions("cpu", "t"), m.ActionsSubmitted(client="c", ids=[1], specs=[m.encode(spec)], payloads=[payload]))
    assert plan(world.state).decisions[0].units > 1
    window = plan(world.state, "fcfs-minimum")
    world.in_flight.extend(compose(world.state, window, lambda _: payload))
    (start,) = world.deliver()
    assert start.units == 1
    report = verify(world.log)
    assert (report.ok, report.windows, report.fallbacks) == (True, 1, 1), verdict.text(report)


def test_a_leader_that_dies_in_the_middle_of_a_window_is_no_difference() -> None:
    world = World()
    world.lead()
    for host in ("a", "b"):
        world.join(host, host=host, nodes=cores(1))
    spec = m.ActionSpec(nonce=bytes(8), kind="run", cost={"cpu": m.Demand(low=1_000)})
    specs, payloads = [m.encode(spec)] * 2, [m.encode(m.Run(argv=("true",)))] * 2
    world.put(subjects.actions("cpu", "t"), m.ActionsSubmitted(client="c", ids=[1, 2], specs=specs, payloads=payloads))
    world.plan()
    assert len(world.in_flight) == 2
    world.deliver(1)
    world.lead()
    world.decide()
    report = verify(world.log)
    assert (report.ok, report.windows) == (True, 2), verdict.text(report)


# --- the command ---------------------------------------------------------------------------------------------------


def written(path: Path, log: Sequence[Record]) -> Path:
    with LogWriter(path, None) as writer:
        for record in log:
            writer.message(record)
    return path


def replayed(file: Path, *arguments: str, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tangram", "replay", "--verify", "--file", str(file), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=60, check=False)


CONSTANTS = {
    "how a kind is taken to scale": ("policies.py", "Setting(600_000, 0, 1_000_000)", "Setting(900_000, 0, 1_000_000)"),
    "log time": ("../limits.py", "LOG_TIME_STEP_NS_MAX: Final = 2_000_000_000", "LOG_TIME_STEP_NS_MAX: Final = 1_000"),
    "how many one pass considers": ("../limits.py", "CANDIDATES_MAX: Final = 2_048", "CANDIDATES_MAX: Final = 1"),
}


@pytest.mark.parametrize("what", CONSTANTS)
def test_a_changed_constant_of_the_core_is_found(tmp_path: Path, what: str) -> None:
    name, before, after = CONSTANTS[what]
    shutil.copytree(ROOT / "tangram", tmp_path / "tangram", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "tangram" / "scheduler" / name
    text = source.read_text()
    assert text.count(before) == 1, f"{before} is gone: change the test"
    source.write_text(text.replace(before, after))
    file = written(tmp_path / "log", LOG)
    assert replayed(file).returncode == 0
    done = replayed(file, package=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "would be:" in done.stdout or "this code folds otherwise" in done.stdout


def test_the_command_says_it_as_json_too(tmp_path: Path) -> None:
    done = replayed(written(tmp_path / "log", LOG), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["ok"], said["differ"], said["windows"], said["problem"]) == (True, 0, len(windows(LOG)), "")
    log, seq = changed(with_start(lambda start: replace(start, cores=(15,))))
    done = replayed(written(tmp_path / "log", log), "--json")
    assert (done.returncode, json.loads(done.stdout)["differences"][0]["seq"]) == (1, seq)


def test_a_damaged_file_is_refused_or_verified_as_far_as_it_goes(tmp_path: Path) -> None:
    file = written(tmp_path / "log", LOG)
    file.write_bytes(file.read_bytes()[:-2_000])
    done = replayed(file)
    assert (done.returncode, "cut off" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    done = replayed(file, "--partial")
    assert (done.returncode, "only a part" in done.stderr) == (0, True)
    assert done.stdout.splitlines()[-1].startswith("0 of ")


@pytest.mark.parametrize("arguments", ["", "--verify --partial", "--verify --file x --from 1h", "--timeline no/folder/x"])
def test_what_cannot_be_meant_is_exit_code_2(arguments: str) -> None:
    command = [sys.executable, "-m", "tangram", "replay", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_file_is_verified_in_this_process_too(tmp_path: Path) -> None:
    report = asyncio.run(verified(FileSource(written(tmp_path / "log", LOG))))
    assert report.ok
