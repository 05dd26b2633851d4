"""Every step an action may take is listed, no other is taken, and the document shows the same list."""

from itertools import product
from pathlib import Path

import pytest

from tangram import messages as m
from tangram.scheduler.fold_actions import TRANSITIONS, move
from tangram.scheduler.state import Action, ActionId, Phase
from tests.house.transitions import BEGIN, END, block, block_of, diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
PAIRS = list(product(Phase, Phase))


def action(phase: Phase) -> Action:
    spec = m.ActionSpec(nonce=bytes(8), kind="run")
    return Action(id=ActionId("t", "c", 7), order=(1, 0), key="cpu", spec=spec, submitted_ns=0, phase=phase)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda phase: phase.name)
def test_a_step_is_taken_only_if_it_is_listed(before: Phase, after: Phase) -> None:
    moved = action(before)
    if (before, after) in TRANSITIONS:
        move(moved, after)
        assert moved.phase is after
    else:
        with pytest.raises(AssertionError) as caught:
            move(moved, after)
        assert "t/c/7" in str(caught.value)
        assert f"{before.name} -> {after.name}" in str(caught.value)
        assert moved.phase is before, "what was refused has changed nothing"


def test_nothing_leaves_gone_and_nothing_returns_to_new() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is Phase.GONE or pair[1] is Phase.NEW]
    assert not [pair for pair in TRANSITIONS if pair[0] is pair[1]]


def test_every_phase_is_reached_and_reaches_the_end() -> None:
    reached, ends = {Phase.NEW}, {Phase.GONE}
    for _ in Phase:
        reached |= {after for before, after in TRANSITIONS if before in reached}
        ends |= {before for before, after in TRANSITIONS if after in ends}
    assert reached == ends == set(Phase)


def test_what_is_owed_can_only_be_finished() -> None:
    """No outcome is taken back once the leader owes it."""
    assert {after for before, after in TRANSITIONS if before is Phase.OWED} == {Phase.GONE}


def test_the_diagram_shows_every_step_once() -> None:
    lines = [line.strip() for line in diagram().splitlines()]
    for before, after in PAIRS:
        assert lines.count(f"{before.name} --> {after.name}") == ((before, after) in TRANSITIONS)


def test_a_block_is_found_again() -> None:
    assert block_of(f"# A\n\n{block()}\n\nmore") == block()
    assert block_of(f"{BEGIN}\nno end") is None
    assert block_of(f"{END}\n{BEGIN}") is None


def test_the_document_shows_the_same_steps() -> None:
    if ARCHITECTURE.exists():
        found = block_of(ARCHITECTURE.read_text(encoding="utf-8"))
        assert found == block(), f"put this into docs/architecture.md:\n\n{block()}\n"
