"""mini-swe-agent's own agents, and its own environment as the reference, against a real stack."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .commands import CASES, ENV
from .conftest import BlockingStack

pytest.importorskip("minisweagent", reason="needs the extra mini-swe-agent")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.environments.docker import DockerEnvironmentConfig
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import Submitted
from minisweagent.models.test_models import DeterministicModel

import tangram
from tangram.errors import SessionError
from tangram.limits import OUTPUT_BYTES_MAX
from tangram.producers.adapters import background, mini_swe_agent
from tangram.producers.adapters.mini_swe_agent import SandboxFailed, TangramEnvironment

NAME = "tangram.producers.adapters.mini_swe_agent.TangramEnvironment"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Make = Callable[..., TangramEnvironment]


@pytest.fixture
def make(stack: BlockingStack) -> Iterator[Make]:
    """Makes environments, and closes them."""
    made: list[TangramEnvironment] = []

    def one(**options: Any) -> TangramEnvironment:
        made.append(TangramEnvironment(**{"nats": stack.url, "task": "test", **options}))
        return made[-1]

    yield one
    for environment in made:
        environment.cleanup()


def run(environment: Any, command: str, **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = environment.execute({"command": command}, **options)
    return answer


def model(*commands: str) -> DeterministicModel:
    made: Any = DeterministicModel
    return made(outputs=outputs(*commands), cost_per_call=0.0)  # type: ignore[no-any-return]


def outputs(*commands: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "extra": {"actions": [{"command": command}]}} for command in commands]


def agent(environment: TangramEnvironment, *commands: str, **options: Any) -> DefaultAgent:
    options |= {"system_template": "{{system}} {{release}} {{version}} {{machine}}", "instance_template": "{{task}}"}
    return DefaultAgent(model(*commands), environment, **options)


def replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: replaced(inner, old, new) for key, inner in value.items()}
    return value.replace(old, new) if isinstance(value, str) else value


def all_answers(environment: Any, folder: str) -> tuple[list[dict[str, Any]], float]:
    started_s = time.monotonic()
    answers = []
    for case in CASES:
        cwd = case.cwd if case.cwd.startswith("/") or not case.cwd else f"{folder}/{case.cwd}"
        answers.append(replaced(run(environment, case.command, cwd=cwd, timeout=case.timeout), folder, "FOLDER"))
    return answers, time.monotonic() - started_s


def test_two_hundred_commands_are_answered_as_the_local_environment_answers_them(
    make: Make, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assert len(CASES) >= 200
    ours = make(env=ENV, timeout=20)
    folder = run(ours, "pwd")["output"].strip()
    found, ours_s = all_answers(ours, folder)
    expected, local_s = all_answers(LocalEnvironment(cwd=str(tmp_path), env=ENV, timeout=20), str(tmp_path))
    record_property("seconds", {"local": round(local_s, 2), "ours": round(ours_s, 2)})
    print(f"{len(CASES)} commands: local {local_s:.2f} s, ours {ours_s:.2f} s")
    wrong = {
        f"{case.command[:80]!r} in {case.cwd!r}": (answer, should)
        for case, answer, should in zip(CASES, found, expected, strict=True)
        if answer != should
    }
    assert not wrong


def test_a_background_process_that_holds_the_output_does_not_hold_the_answer(make: Make) -> None:
    answer = run(make(), "echo started; sleep 60 &")
    assert answer == {"output": "started\n", "returncode": 0, "exception_info": ""}


def test_of_a_long_output_head_and_tail_are_kept_and_a_line_says_so(make: Make) -> None:
    answer = run(make(), "printf head!; yes é | head -n 200000 | tr -d '\\n'; printf tail")
    assert answer["returncode"] == 0
    output = answer["output"]
    assert output.startswith("head!éé")
    assert output.endswith("éétail")
    assert "�" not in output
    line = next(line for line in output.splitlines() if line.startswith("["))
    left_out = int(line[1:].split()[0])
    assert left_out + len(output.replace(f"\n{line}\n", "").encode()) == 400_009


def test_an_agent_works_until_it_submits(make: Make, tmp_path: Path) -> None:
    worker = agent(make(), "echo 'print(6 * 7)' > a.py", "python3 a.py", f"{SUBMIT}; cat a.py", output_path=tmp_path / "t.json")
    info = worker.run("compute")
    assert info == {"exit_status": "Submitted", "submission": "print(6 * 7)\n"}
    kept = json.loads((tmp_path / "t.json").read_text())
    assert kept["info"]["config"]["environment_type"] == NAME
    assert worker.env.config.nats not in json.dumps(kept)  # it has a password
    assert "<output>\n42\n</output>" in kept["messages"][-3]["content"]
    assert kept["messages"][0]["content"].split()[0] == os.uname().sysname


@pytest.mark.parametrize("command", [SUBMIT, f"echo; {SUBMIT}; echo patch", f"echo ' ' >&2; {SUBMIT}"])
def test_the_submit_sentinel(make: Make, tmp_path: Path, command: str) -> None:
    caught = []
    for environment in (make(), LocalEnvironment(cwd=str(tmp_path))):
        with pytest.raises(Submitted) as found:
            run(environment, command)
        caught.append(found.value.messages)
    assert caught[0] == caught[1]


def test_no_sentinel_after_a_failure_or_in_the_middle(make: Make) -> None:
    environment = make()
    assert run(environment, f"{SUBMIT}; exit 1")["returncode"] == 1
    assert run(environment, f"echo first; {SUBMIT}")["returncode"] == 0


def test_a_submission_of_which_a_part_is_missing_is_not_submitted(make: Make) -> None:
    answer = run(make(), f"{SUBMIT}; head -c {OUTPUT_BYTES_MAX} /dev/zero")
    assert (answer["returncode"], answer["extra"]["exception_type"]) == (-1, "submission_too_long")
    assert str(OUTPUT_BYTES_MAX) in answer["exception_info"]


def test_the_command_line_with_one_option_more(stack: BlockingStack, tmp_path: Path) -> None:
    commands = outputs("echo $((6 * 7)); echo kept > a.txt", f"{SUBMIT}; cat a.txt")
    configuration = {
        "agent": {"system_template": "{{system}}", "instance_template": "{{task}}"},
        "model": {"model_class": "deterministic", "model_name": "deterministic", "cost_per_call": 0.0, "outputs": commands},
    }
    (tmp_path / "agent.yaml").write_text(json.dumps(configuration))
    arguments = ["-c", "agent.yaml", "--environment-class", NAME, "-t", "x", "-y", "--exit-immediately", "-o", "out.json"]
    environment = {**os.environ, "TANGRAM_NATS": stack.url, "PYTHONPATH": str(Path(tangram.__file__).parents[1])}
    command = [sys.executable, "-m", "minisweagent.run.mini", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Exception ignored" not in ran.stderr
    kept = json.loads((tmp_path / "out.json").read_text())
    assert (kept["info"]["exit_status"], kept["info"]["submission"]) == ("Submitted", "kept\n")
    assert kept["info"]["config"]["environment_type"] == NAME
    assert not stack.sessions()  # its exit closed the sandbox


def test_sixteen_agents_at_once_share_one_connection(stack: BlockingStack, make: Make) -> None:
    def work(number: int) -> Any:
        environment = make()
        info = agent(environment, f"echo {number} > a.txt", "sleep 0.05; cat a.txt", f"{SUBMIT}; cat a.txt").run("x")
        assert environment._box is not None
        return info["submission"], environment._box._shared

    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(work, range(16)))
    assert [submission for submission, _ in done] == [f"{number}\n" for number in range(16)]
    assert len({id(shared) for _, shared in done}) == 1
    assert sum(thread.name == "tangram-background" for thread in threading.enumerate()) == 1


def test_threads_may_share_an_environment(make: Make) -> None:
    environment = make()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: run(environment, f"echo {number}")["output"], range(32)))
    assert answers == [f"{number}\n" for number in range(32)]


def test_the_last_environment_closes_the_connection(stack: BlockingStack) -> None:
    first, second = (TangramEnvironment(nats=stack.url, task="counted") for _ in range(2))
    first.cleanup()
    first.cleanup()
    assert run(second, "echo still here")["output"] == "still here\n"
    second.cleanup()
    assert background._one is not None
    assert (stack.url, "counted") not in background._one._shared
    assert TangramEnvironment(nats=stack.url, task="counted").get_template_vars()["system"] == os.uname().sysname
    within(lambda: not stack.sessions(), "what nobody refers to any more is closed")
    with pytest.raises(SandboxFailed):
        run(first, "true")


def test_nothing_is_left_of_a_connection_that_could_not_be_made() -> None:
    for _ in range(2):
        with pytest.raises(tangram.BrokerUnavailable, match="cannot connect"):
            background.open_session("nats://127.0.0.1:1", "test", connect_timeout=0.2)
    assert background._one is not None
    assert ("nats://127.0.0.1:1", "test") not in background._one._shared


def test_a_sandbox_that_is_gone_ends_the_agent(make: Make) -> None:
    environment = make()
    gone = agent(environment, 'rm -rf "$HOME"', *["echo another step"] * 300)
    assert gone.run("x") == {
        "exit_status": "environment_lost",
        "submission": "",
        "exception_type": "environment_lost",
        "exception": "the session's folder is gone",
    }
    assert gone.n_calls == 1
    with pytest.raises(SandboxFailed, match="environment_lost") as caught:
        run(environment, "true")
    assert caught.value.outcome == "environment_lost"


def test_an_executor_that_dies_ends_the_agent(stack: BlockingStack, make: Make) -> None:
    def replace_executor() -> None:
        stack.wait(stack.stack.executors[-1].stop(signal.SIGKILL))
        stack.wait(stack.stack.start_executor("--name", "cpu-1"))  # its successor reports what was lost

    environment = make()
    run(environment, "true")
    killer = threading.Timer(0.3, replace_executor)
    killer.start()
    gone = agent(environment, "sleep 60", *["echo another step"] * 300)
    info = gone.run("x")
    killer.join()
    assert info["exit_status"] in ("lost", "environment_lost")
    assert gone.n_calls == 1
    assert run(make(), "echo anew")["output"] == "anew\n"


def test_more_than_any_host_has_ends_the_agent_and_no_step_is_wasted(make: Make) -> None:
    environment = make(units=1_000)
    with pytest.raises(SandboxFailed) as caught:
        run(environment, "true")
    assert (caught.value.outcome, "never_fits" in caught.value.detail) == ("rejected", True)


def test_units_are_granted_to_each_command(make: Make) -> None:
    environment = make(units=[1, 64], parallel=0.99)
    told = int(run(environment, "echo $TANGRAM_UNITS")["output"])
    assert environment.last is not None
    assert environment.last.units == told >= 1


def test_a_configuration_for_docker_is_taken(stack: BlockingStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisweagent.environments._ENVIRONMENT_MAPPING", {})
    monkeypatch.setenv("FORWARDED", "from here")
    monkeypatch.setenv("TANGRAM_NATS", stack.url)
    mini_swe_agent.stand_in_for_docker()
    docker = DockerEnvironmentConfig(image="img", cwd="/tmp", env={"A": "1"}, forward_env=["FORWARDED", "UNSET"]).model_dump()
    with pytest.raises(SessionError, match="'img': this executor runs no images"):  # the image has reached it
        get_environment({"environment_class": "docker", **docker})
    environment = get_environment({"environment_class": "docker", **docker, "image": ""})
    assert isinstance(environment, TangramEnvironment)
    try:
        assert run(environment, "echo $A $FORWARDED; pwd")["output"] == "1 from here\n/tmp\n"
        assert set(docker) <= set(environment.get_template_vars())
    finally:
        environment.cleanup()


def test_template_variables_are_the_sandboxes_and_asked_for_once(make: Make) -> None:
    environment = make(env={"A": "1"})
    found = environment.get_template_vars(more=2)
    uname = os.uname()
    assert {name: found[name] for name in ("system", "release", "version", "machine")} == {
        "system": uname.sysname, "release": uname.release, "version": uname.version, "machine": uname.machine,
    }  # fmt: skip
    assert (found["env"], found["more"]) == ({"A": "1"}, 2)
    assert not {"nats", "task"} & set(found)
    environment.cleanup()
    assert environment.get_template_vars()["system"] == uname.sysname


@pytest.mark.parametrize("wrong", [{"unit": 1}, {"units": [8, 1]}, {"timeout": 0}, {"parallel": 2.0}, {"memory": "lots"}])
def test_a_bad_configuration_is_found_before_the_first_step(stack: BlockingStack, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TangramEnvironment(nats=stack.url, task="test", **wrong)


def within(check: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Polls for what another process brings about."""
    end_s = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)
