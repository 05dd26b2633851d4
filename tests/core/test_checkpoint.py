"""A checkpoint stands for the log before it. (That every invariant holds behind one is tested by the state machine, where
taking one is an event among the others.)"""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram import limits
from tangram import messages as m
from tangram.scheduler import checkpoint
from tangram.scheduler.checkpoint import UnreadableCheckpoint, dump, load
from tangram.scheduler.compose import compose
from tangram.scheduler.fold import step
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.state import State
from tangram.scheduler.window import plan
from tests.core.chaos import Chaos
from tests.core.world import World


def chaotic(seed: int, steps: int) -> Chaos:
    chaos = Chaos(Random(seed), sorted(POLICIES)[seed % len(POLICIES)])
    chaos.join()
    chaos.run(steps, check_every=steps)
    return chaos


def decided(state: State) -> list[bytes]:
    return [m.encode(message) for _, message in compose(state, plan(state), lambda _: b"")]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(10, 150), st.integers(0, 100))
def test_the_rest_of_a_log_gives_the_same_behind_a_checkpoint(seed: int, steps: int, percent: int) -> None:
    log = chaotic(seed, steps).world.log
    cut = len(log) * percent // 100
    whole, state = State(), State()
    for record in log[:cut]:
        step(whole, record)
        step(state, record)
    restored = load(dump(state))
    for record in log[cut:]:
        step(whole, record)
        step(restored, record)
        assert restored.digest == whole.digest
        assert restored.owed == whole.owed
        assert decided(restored) == decided(whole)


@pytest.mark.parametrize("seed", range(20))
def test_a_checkpoint_of_a_restored_state_has_the_same_bytes(seed: int) -> None:
    state = chaotic(seed, 200).world.state
    assert state.actions, "nothing to restore"
    written = dump(state)
    assert dump(load(written)) == written


def test_a_host_with_more_cores_than_an_integer_on_the_wire_has_bits() -> None:
    world = World()
    world.lead()
    worker = world.join(nodes=[list(range(128)), list(range(128, 300))])
    world.submit(cpu=200_000)
    world.decide()
    restored = load(dump(world.state))
    (host,) = restored.hosts.values()
    assert host.pool.free().bit_count() == 100
    assert restored.incarnations[worker.incarnation].cores_mask.bit_count() == 300


@pytest.mark.parametrize(
    "hint", [m.Hint(duration_us=limits.NUMBER_MAX), m.Hint(table_us=((1, limits.NUMBER_MAX),))], ids=["duration", "table"]
)
def test_a_duration_of_ages_leaves_a_state_that_can_be_written(hint: m.Hint) -> None:
    world = World()
    world.lead()
    world.join()
    world.submit(cpu=1_000, hint=hint, timeout_ms=5_000)
    (start,) = world.decide()
    assert start.predicted_us == 5_000_000
    assert dump(load(dump(world.state))) == dump(world.state)


def test_what_an_older_version_did_not_write_has_its_default() -> None:
    raw = msgspec.msgpack.decode(dump(State(seq=5)))
    assert "finished" not in raw["state"], "defaults are not written, so a field that was added later reads like this one"
    assert load(dump(State(seq=5))).finished == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"[]", msgspec.msgpack.encode({"format": checkpoint.FORMAT}), dump(State())[:-1], b"\x91" * 100_000],
    ids=["empty", "no-msgpack", "json", "no-state", "cut-off", "deep"],
)
def test_what_is_no_checkpoint_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableCheckpoint):
        load(data)


def test_a_newer_format_is_refused_by_its_number() -> None:
    newer = {**msgspec.msgpack.decode(dump(State())), "format": checkpoint.FORMAT + 1}
    with pytest.raises(UnreadableCheckpoint, match=f"format {checkpoint.FORMAT + 1}"):
        load(msgspec.msgpack.encode(newer))


def test_a_checkpoint_that_refers_to_what_it_does_not_have_is_refused() -> None:
    world = World()
    world.lead()
    world.submit(cpu=1_000)
    raw = msgspec.msgpack.decode(dump(world.state))
    raw["state"]["actions"] = []
    with pytest.raises(UnreadableCheckpoint):
        load(msgspec.msgpack.encode(raw))
