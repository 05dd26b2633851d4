"""What the demo can be told, in one value that is checked when it is made."""

import sys
from dataclasses import dataclass
from typing import Final

from tangram.errors import ConfigError

STATIC: Final = "static-trajectory"
TANGRAM: Final = "tangram"
POLICIES: Final = (STATIC, TANGRAM)
"""In the order they run. The calibration uses the first one's stack, because a reservation learns nothing from it."""
UNLEARNT: Final = "without-learning"
"""Tangram once more, with `learn=0`: sizes by what is declared alone."""

TASK: Final = "coding"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the demo's main job. Raises ConfigError when made from values that cannot be used.

    seed: everything that is drawn comes from it. broken: how many problems are first answered wrongly.
    suites_low, suites_high: elastic actions of one trajectory. suite_problems: programs that one of them runs.
    suite_units: the most cores it may get. work_s: mean CPU seconds of one problem's tests, which are repeated until
    they have used what was drawn. active_share: part of its life in which a trajectory, alone on one core, has an
    action open. static_units: cores that the baseline reserves for a trajectory's life.
    timeout_s: of one action. limit_s: of the run of one policy.
    python: the interpreter in the sandbox. This one exists wherever the process back end runs, and a name looked up
    on PATH may be a version manager's script that takes ten times as long to start; in an image, say "python3".
    image: of the sandbox; empty for the executor's own. unlearnt: whether `UNLEARNT` runs too, as the last.
    """

    seed: int = 1
    trajectories: int = 16
    broken: int = 10
    suites_low: int = 0
    suites_high: int = 2
    suite_problems: int = 8
    suite_units: int = 8
    work_s: float = 0.12
    active_share: float = 0.47
    static_units: int = 1
    timeout_s: float = 60.0
    limit_s: float = 600.0
    python: str = sys.executable or "python3"
    image: str = ""
    unlearnt: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        return (*POLICIES, UNLEARNT) if self.unlearnt else POLICIES

    def __post_init__(self) -> None:
        _within("trajectories", self.trajectories, 1, 1_024)
        _within("broken", self.broken, 0, 164)
        _within("suites_low", self.suites_low, 0, 100)
        _within("suites_high", self.suites_high, self.suites_low, 100)
        _within("suite_problems", self.suite_problems, 1, 100)
        _within("suite_units", self.suite_units, 1, 1_024)
        _within("work_s", self.work_s, 0.0, 60.0)
        _within("active_share", self.active_share, 0.01, 1.0)
        _within("static_units", self.static_units, 1, 1_024)
        _within("timeout_s", self.timeout_s, 1.0, 86_400.0)
        _within("limit_s", self.limit_s, 1.0, 86_400.0)
        if not self.python:
            raise ConfigError("demo.python: the name of an interpreter")


def _within(name: str, value: float, low: float, high: float) -> None:
    # The comparison is written so that a value that is not a number fails it too.
    if not low <= value <= high:
        raise ConfigError(f"demo.{name}: from {low} to {high} (got {value!r})")
