"""What actions cost on this machine when nothing else runs: all policies' pauses are made from that."""

from typing import Final

from tangram.demo.config import DemoConfig
from tangram.demo.plan import SUITE_PATH, TEST_PATH, Costs, Kind, Step
from tangram.demo.problems import Problem, right, suite
from tangram.demo.trajectory import act
from tangram.errors import TangramError
from tangram.outcomes import Outcome
from tangram.producers.client import Client

TESTS: Final = 6
SUITES: Final = 2
"""Enough that one of each kind is not disturbed; together they take about three seconds."""


def steps(config: DemoConfig, problems: tuple[Problem, ...]) -> list[Step]:
    """The actions that are timed: the kinds that plans are made of, with the mean amount of work."""
    work_s = config.work_s
    timed = []
    for problem in problems[:TESTS]:
        timed.append(Step(kind=Kind.WRITE, path=TEST_PATH, text=right(problem, work_s)))
        timed.append(Step(kind=Kind.TEST, path=TEST_PATH, programs=1, work_s=work_s))
    many = config.suite_problems
    for _ in range(SUITES):
        timed.append(Step(kind=Kind.WRITE, path=SUITE_PATH, text=suite([right(problem, work_s) for problem in problems[:many]])))
        timed.append(Step(kind=Kind.SUITE, path=SUITE_PATH, programs=many, work_s=many * work_s))
    return timed


async def calibrate(client: Client, config: DemoConfig, problems: tuple[Problem, ...]) -> Costs:
    """Runs `steps` one after the other in a session of their own, an elastic one on one core.

    The fixed cost of a kind is the least of (ACT - CPU seconds of its programs): whatever else happens on the machine
    can only add to it. Raises TangramError if an action does not end well, because then no trajectory's would.
    """
    beyond_s: dict[Kind, list[float]] = {}
    async with client.session(image=config.image) as box:
        for step in steps(config, problems):
            result = await act(box, step, config, units=1)
            if result.outcome is not Outcome.OK:
                text = result.stderr[-300:].decode(errors="replace").strip()
                raise TangramError(f"the demo's first {step.kind}: {result} {text}".rstrip())
            beyond_s.setdefault(step.kind, []).append(max(0.0, result.act_s - step.work_s))
    return Costs(fixed_s={kind: min(values) for kind, values in beyond_s.items()})
