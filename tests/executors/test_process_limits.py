"""The grant is exact, and what exceeds it is called by its name."""

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tangram import limits
from tangram.executors.backend import Grant
from tangram.executors.cpu.hierarchies import Hierarchies
from tangram.executors.cpu.kernel import parse_cores
from tangram.outcomes import Outcome, RejectReason
from tests.executors.conftest import ONE_CORE, PYTHON, Lab, alive, eventually, hierarchies, read_proc, running


@pytest.fixture(params=["cgroups", "freezer", "marks"])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    async with running(Lab(tmp_path, hierarchies(request.param))) as one:
        yield one


CORES = tuple(sorted(os.sched_getaffinity(0)))
BURN = "import time; end=time.monotonic()+{}\nwhile time.monotonic()<end: pass"
HOG = "x = bytearray({} << 20)\nx[::4096] = b'1' * len(x[::4096])"
several = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def whole(*cores: int) -> Grant:
    return Grant(cores=cores, millicores=1000 * len(cores))


def cpu_s(pid: int, *, after_s: float = 0) -> float:
    """Cpu time that a process has used."""
    time.sleep(after_s)
    fields = read_proc(pid, "stat").rpartition(b") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def without(role: str) -> Hierarchies:
    """This host's control groups, as if one controller were not ours."""
    found = hierarchies("cgroups")
    assert isinstance(found, Hierarchies)
    return Hierarchies(v2=found.v2, top={name: place for name, place in found.top.items() if name != role})


@several
async def test_a_program_sees_exactly_the_cores_it_was_granted(lab: Lab) -> None:
    seen = "import os; print(*sorted(os.sched_getaffinity(0)))"
    for cores in ((CORES[0],), (CORES[1],), CORES[:2]):
        ended = await lab.sh(f'nproc; {shlex.join(PYTHON)} "{seen}"; echo $TANGRAM_UNITS', grant=whole(*cores))
        assert ended.output.stdout.split() == [b"%d" % n for n in (len(cores), *cores, len(cores))]
    assert tuple(sorted(os.sched_getaffinity(0))) == CORES


@several
async def test_a_session_gets_other_cores_with_each_action(lab: Lab) -> None:
    async with lab.session() as session:
        for cores in ((CORES[1],), CORES[:2], (CORES[0],)):
            ended = await lab.sh("nproc; taskset -cp $$", session=session, grant=whole(*cores))
            assert ended.output.stdout.startswith(b"%d\n" % len(cores))
        # Without a grant of cores it is on none in particular; nproc would repeat OMP_NUM_THREADS.
        ended = await lab.sh("taskset -cp $$", session=session, grant=Grant())
        cores = ended.output.stdout.decode().rpartition(": ")[2]
        assert parse_cores(cores) == frozenset(CORES)


@several
async def test_sessions_at_once_stay_on_their_own_cores(lab: Lab) -> None:
    sessions = [await lab.open() for _ in CORES]

    async def use(index: int) -> None:
        for _ in range(5):
            ended = await lab.run(
                *PYTHON, "import os; print(os.sched_getaffinity(0))",
                session=sessions[index], grant=whole(CORES[index]),
            )  # fmt: skip
            assert ended.output.stdout == f"{{{CORES[index]}}}\n".encode()

    await asyncio.gather(*(use(index) for index in range(len(CORES))))
    for session in sessions:
        assert (await lab.backend.close(session)).outcome is Outcome.OK


async def test_cores_that_do_not_exist_are_an_error_not_a_guess(lab: Lab) -> None:
    ended = await lab.sh("true", grant=whole(100_000))
    assert ended.outcome is Outcome.ERROR
    async with lab.session() as session:
        assert (await lab.sh("true", session=session, grant=whole(100_000))).outcome is Outcome.ERROR
        assert (await lab.sh("true", session=session)).outcome is Outcome.OK


async def test_what_is_exact_is_said(limited: Lab) -> None:
    assert limited.backend.enforces == {"cores", "cpu", "memory", "processes", "kill"}


async def test_a_program_cannot_leave_its_cores(limited: Lab) -> None:
    script = "import os; os.sched_setaffinity(0, range(os.cpu_count())); print(os.sched_getaffinity(0))"
    ended = await limited.run(*PYTHON, script, grant=whole(ONE_CORE))
    assert ended.output.stdout == f"{{{ONE_CORE}}}\n".encode()


@pytest.mark.parametrize("inside", [False, True])
async def test_a_fraction_of_a_core_is_no_more_than_that(limited: Lab, inside: bool) -> None:
    session = await limited.open() if inside else None
    ended = await limited.run(*PYTHON, BURN.format(0.6), session=session, grant=Grant(cores=(ONE_CORE,), millicores=200))
    assert ended.outcome is Outcome.OK
    assert 0.05e9 < ended.cpu_ns < 0.3 * ended.run_ns


async def test_a_whole_core_follows_a_fraction(limited: Lab) -> None:
    async with limited.session() as session:
        for millicores in (100, 1000, 30, 1000):
            grant = Grant(cores=(ONE_CORE,), millicores=millicores)
            assert (await limited.sh("true", session=session, grant=grant)).outcome is Outcome.OK


async def test_cores_that_cannot_be_pinned_are_bounded_by_time(tmp_path: Path) -> None:
    script = "import os,time\nos.fork()\nos.sched_setaffinity(0, range(os.cpu_count()))\n" + BURN.format(0.5) + "\nos.wait()"
    async with running(Lab(tmp_path, without("cpuset"))) as lab:
        assert lab.backend.enforces == {"cpu", "memory", "processes", "kill"}
        ended = await lab.run(*PYTHON, script, grant=whole(ONE_CORE))
        assert ended.cpu_ns < 1.25 * ended.run_ns
        assert (await lab.sh("nproc", grant=whole(*CORES))).output.stdout == b"%d\n" % len(CORES)


async def test_what_runs_on_is_frozen_where_its_cpu_time_cannot_be_bounded(tmp_path: Path) -> None:
    async with running(Lab(tmp_path, without("cpu"))) as lab, lab.session() as session:
        ended = await lab.sh("while :; do :; done >/dev/null 2>&1 & echo $!", session=session)
        pid = int(ended.output.stdout)
        await eventually(lambda: cpu_s(pid) == cpu_s(pid, after_s=0.05))
        before = cpu_s(pid)
        await lab.sh("sleep 0.3", session=session)
        assert cpu_s(pid) > before
        assert alive(pid)


async def test_what_runs_on_between_actions_gets_almost_no_cpu(limited: Lab) -> None:
    async with limited.session() as session:
        ended = await limited.sh("while :; do :; done >/dev/null 2>&1 & echo $!", session=session)
        pid = int(ended.output.stdout)

        before = cpu_s(pid)
        await asyncio.sleep(1)
        assert cpu_s(pid) - before < 0.1
        assert alive(pid)
        before = cpu_s(pid)
        await limited.sh("sleep 0.5", session=session)
        # While an action runs, what others left shares its grant.
        assert cpu_s(pid) - before > 0.05


async def test_cpu_time_counts_children_that_nobody_waited_for(limited: Lab) -> None:
    script = f"import os,time\nif os.fork()==0:\n  exec({BURN.format(0.3)!r})\n  os._exit(0)\ntime.sleep(0.4)"
    ended = await limited.run(*PYTHON, script)
    assert ended.cpu_ns > 0.15e9


async def test_too_much_memory_is_out_of_memory(limited: Lab) -> None:
    ended = await limited.run(*PYTHON, HOG.format(100), grant=Grant(cores=(ONE_CORE,), memory_mib=40))
    assert (ended.outcome, ended.exit_code) == (Outcome.OUT_OF_MEMORY, -9)
    assert 30 << 20 < ended.memory_peak_bytes <= 40 << 20


async def test_a_childs_lack_of_memory_is_seen_through_its_shell(limited: Lab) -> None:
    hog = f'{shlex.join(PYTHON)} "{HOG.format(100)}"'
    ended = await limited.sh(hog + "; exit $?", grant=Grant(memory_mib=40))
    assert (ended.outcome, ended.exit_code) == (Outcome.OUT_OF_MEMORY, 137)
    ended = await limited.sh(hog + "; exit 0", grant=Grant(memory_mib=40))
    assert (ended.outcome, ended.detail) == (Outcome.OK, "oom_kills=1")


async def test_a_sessions_memory_bounds_its_actions(limited: Lab) -> None:
    async with limited.session(memory_mib=40) as session:
        ended = await limited.run(*PYTHON, HOG.format(100), session=session)
        assert ended.outcome is Outcome.OUT_OF_MEMORY
        assert (await limited.sh("true", session=session)).outcome is Outcome.OK


async def test_a_plain_kill_is_not_out_of_memory(limited: Lab) -> None:
    ended = await limited.sh("kill -9 $$", grant=Grant(memory_mib=40))
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, -9)


async def test_peak_memory_is_the_programs_own(limited: Lab) -> None:
    ballast = bytearray(64 << 20)
    small = await limited.run("true")
    large = await limited.run(*PYTHON, HOG.format(50))
    del ballast
    assert small.memory_peak_bytes < 10 << 20
    assert large.memory_peak_bytes > 50 << 20


async def test_the_environment_is_an_allow_list(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    async with lab.session(env={"LAYER": "session", "FIRST": "1"}) as session:
        ended = await lab.run(
            "env", session=session, env={"LAYER": "action", "OMP_NUM_THREADS": "7", "TANGRAM_UNITS": "99"},
            more_env={"TRACEPARENT": "00-a-b-01"}, attempt=2,
        )  # fmt: skip
        env = dict(line.split("=", 1) for line in ended.output.stdout.decode().splitlines())
        home = str(lab.home(session))
    assert "SECRET_KEY" not in env
    assert env.pop("PWD") == env.pop("HOME") == home
    assert os.path.dirname(env.pop("TMPDIR")) == os.path.dirname(home)
    env.pop("OLDPWD", None)
    assert env.pop("PATH")
    assert env.pop("LANG")
    threads = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PYTHON_CPU_COUNT", "GOMAXPROCS")
    assert [env.pop(name) for name in threads] == ["1"] * len(threads)
    assert env == {
        "LAYER": "action", "FIRST": "1", "OMP_NUM_THREADS": "7", "TANGRAM_UNITS": "1", "TRACEPARENT": "00-a-b-01",
        "TANGRAM_INCARNATION": lab.incarnation, "TANGRAM_ATTEMPT": "2", "TANGRAM_ACTION": "task/client/2",
        "TANGRAM_SESSION": "task/client/1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


async def test_no_descriptor_of_the_executor_is_inherited(lab: Lab) -> None:
    ended = await lab.run(*PYTHON, "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert ended.output.stdout == b"[0, 1, 2, 3]\n"


async def test_what_cannot_be_started_fails_as_in_a_shell(lab: Lab) -> None:
    async with lab.session() as session:
        await lab.write(session, "plain", b"no program", mode=0o644)
        for options, code, text in (
            ({"argv": ["no-such-command"]}, 127, b"not found"),
            ({"argv": ["-no-such"]}, 127, b"not found"),
            ({"argv": ["./plain"]}, 126, b"ermission denied"),
            ({"argv": ["/tmp"]}, 126, b"ermission denied"),
            ({"argv": ["true"], "cwd": "missing"}, 126, b"missing"),
        ):
            argv = options.pop("argv")
            ended = await lab.run(*argv, session=session, **options)
            assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, code)
            assert text in ended.output.stderr


async def test_arguments_arrive_as_they_were_given(lab: Lab) -> None:
    words = ["", " ", "$HOME `id` $(id)", "a\nb", "'\"\\", "-n", "*", "é𝄞", "a=b"]
    ended = await lab.run(*PYTHON, "import sys; print(sys.argv[1:])", *words)
    assert ended.output.stdout.decode() == f"{words}\n"
    async with lab.session() as session:
        await lab.write(session, "-dash=$x 'q'", b"#!/bin/sh\necho ran $1", mode=0o755)
        assert (await lab.run("./-dash=$x 'q'", "A=(); false", session=session)).output.stdout == b"ran A=(); false\n"


async def test_folders_of_a_program(lab: Lab) -> None:
    async with lab.session() as session:
        assert (await lab.sh("mkdir sub", session=session)).outcome is Outcome.OK
        ended = await lab.sh("pwd", session=session, cwd="sub")
        assert ended.output.stdout.decode() == f"{lab.home(session) / 'sub'}\n"
        assert (await lab.sh("pwd", session=session, cwd="/")).output.stdout == b"/\n"


async def test_requests_that_break_a_rule_are_rejected_by_field(lab: Lab) -> None:
    argument = "x" * limits.ARGUMENT_BYTES_MAX
    cases = (
        (lab.run("true", *[argument] * 17), "argv"),
        (lab.run("true", env={"A": argument}), "env"),
        (lab.run("true", env={"LD_PRELOAD": "/x.so"}), "env.LD_PRELOAD"),
        (lab.run(""), "argv"),
    )
    for task, field in cases:
        ended = await task
        assert (ended.outcome, ended.reason) == (Outcome.REJECTED, RejectReason.INVALID)
        assert ended.detail.startswith(f"{field}:")


async def test_the_largest_arguments_and_environment_are_accepted(lab: Lab) -> None:
    argument = "x" * (limits.ARGUMENT_BYTES_MAX - 1)
    env = {"A": "e" * (limits.ENVIRONMENT_BYTES_MAX - 100)}
    ended = await lab.run(*PYTHON, "import sys; print(len(sys.argv))", *[argument] * 15, env=env)
    assert ended.output.stdout == b"16\n"


async def test_times_add_up(lab: Lab) -> None:
    began = time.monotonic_ns()
    ended = await lab.sh("sleep 0.2")
    took = time.monotonic_ns() - began
    # Its start is known when the executor reads of it, which a busy machine may let it do late.
    assert ended.startup_ns > 0
    assert 0.1e9 < ended.run_ns <= took - ended.startup_ns


async def test_a_fork_bomb_is_bounded_and_its_neighbour_is_not_affected(tmp_path: Path) -> None:
    bomb = """
import os, time
made = 0
for _ in range(2000):
    try:
        if os.fork() == 0: time.sleep(97)
        made += 1
    except BlockingIOError: pass
print(made)
"""
    async with running(Lab(tmp_path, hierarchies("cgroups"), processes_max=256)) as lab:
        ended = await lab.run(*PYTHON, bomb)
        assert (ended.outcome, int(ended.output.stdout)) == (Outcome.OK, 255)
        session, neighbour = await lab.open(), await lab.open()
        full = asyncio.Event()
        script = bomb.replace("print(made)", "print(made, flush=True); time.sleep(97)")
        key = lab.key()
        bombing = lab.run(*PYTHON, script, key=key, session=session, timeout_ms=100_000, on_output=lambda *_: full.set())
        await full.wait()
        ended = await lab.sh("for i in 1 2 3 4 5; do sleep 0.01 & done; wait", session=neighbour)
        assert (ended.outcome, ended.output.stderr) == (Outcome.OK, b"")
        lab.backend.kill(key)
        assert (await bombing).outcome is Outcome.CANCELLED
        # What the bomb was is gone, and as soon as init has noticed, its session can be used again.
        end = time.monotonic() + 20
        while (await lab.sh("sleep 0 & wait", session=session)).outcome is not Outcome.OK:
            assert time.monotonic() < end
