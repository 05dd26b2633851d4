"""mini-swe-agent's environment on Tangram: each agent has a session, each of its commands is an action with units of its own.

In an agent's configuration: `environment_class: tangram.producers.adapters.mini_swe_agent.TangramEnvironment`.
Written against mini-swe-agent 2.4; what its LocalEnvironment answers is the reference, also for what went wrong.
"""

import errno
import logging
import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from tangram import limits
from tangram.errors import ClientClosed
from tangram.outcomes import Outcome, RejectReason
from tangram.producers import request
from tangram.producers.adapters.background import SharedSession, open_session
from tangram.producers.result import Result

try:
    from minisweagent.exceptions import InterruptAgentFlow, Submitted
    from minisweagent.utils.serialize import recursive_merge
    from pydantic import BaseModel, ConfigDict, Field
except ImportError as error:
    raise ImportError(f"this needs mini-swe-agent ({error}): pip install 'tangram[mini-swe-agent]'") from error

log = logging.getLogger("minisweagent.environment")

SENTINEL: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CHUNK_CHARACTERS: Final = limits.ARGUMENT_BYTES_MAX // 4
"""A command longer than one argument may be travels in several, which the shell joins again."""
COMMAND_BYTES_MAX: Final = 128 * 1024 - 1
"""Linux's MAX_ARG_STRLEN, less the NUL: beyond it the local environment fails too."""
UNAME: Final = ("system", "node", "release", "version", "machine")


class TangramEnvironmentConfig(BaseModel):
    """nats: the broker's url, as for `tangram.Client`. It may hold a password, so it is in no trajectory and no template.

    units, parallel: of each command, as for `Client.run`. memory: of the sandbox, held while it lives. idle_ttl: seconds
    without a command after which the sandbox is closed. interpreter: as in the Docker environment; by default `bash -lc` where
    an image is named, else `/bin/sh -c`. cwd: by default the sandbox's own folder. forward_env: names of variables of this
    process. The last four fields are the Docker environment's: they are taken, and have no effect.
    """

    model_config = ConfigDict(extra="forbid")

    nats: str | None = Field(default=None, exclude=True, repr=False)
    task: str = "mini-swe-agent"
    image: str = ""
    cwd: str = ""
    env: dict[str, str] = {}
    forward_env: list[str] = []
    timeout: int | float = Field(default=30, gt=0)
    units: int | float | tuple[int, int] = 1
    parallel: float | None = None
    memory: int | str | None = None
    interpreter: list[str] = []
    idle_ttl: float = Field(default=limits.SESSION_IDLE_MS_DEFAULT / 1e3, gt=0)
    executable: str = ""
    run_args: list[str] = []
    container_timeout: str = ""
    pull_timeout: int = 0

    def model_post_init(self, context: Any, /) -> None:
        # Found here once, and not by an agent in each of its steps.
        request.cpu(self.units)
        request.hint(self.parallel, None)
        if not self.interpreter:
            self.interpreter = ["bash", "-lc"] if self.image else ["/bin/sh", "-c"]


class SandboxFailed(InterruptAgentFlow):  # type: ignore[misc, unused-ignore]  # its base is Any where it is not installed
    """The infrastructure failed, not the command: the agent's run ends with this outcome as its exit status. It says nothing
    about the model, so mask it. Attributes: outcome ("environment_lost", "lost", "error", ...), detail."""

    def __init__(self, outcome: str, detail: str) -> None:
        self.outcome, self.detail = outcome, detail
        extra = {"exit_status": outcome, "submission": "", "exception_type": outcome, "exception": detail}
        super().__init__({"role": "exit", "content": str(self), "extra": extra})

    def __str__(self) -> str:
        return f"the sandbox failed: {self.outcome}" + (f" - {self.detail}" if self.detail else "")


class TangramEnvironment:
    """A sandbox of its own for an agent; its files and background processes live until `cleanup`. Safe to use from threads.

    `last` is the Result of the last command: its units, its time in the queue, what it cost.
    Raises BrokerUnavailable, SessionError, InvalidRequest if there can be no sandbox.
    """

    _box: SharedSession | None = None

    def __init__(self, *, config_class: type[TangramEnvironmentConfig] = TangramEnvironmentConfig, **kwargs: Any) -> None:
        self.config = config = config_class(**kwargs)
        self.last: Result | None = None
        self._uname: dict[str, str] = {}
        forwarded = {name: value for name in config.forward_env if (value := os.environ.get(name)) is not None}
        self._box = open_session(
            config.nats, config.task,
            image=config.image, memory=config.memory, env=forwarded | config.env, idle_ttl=config.idle_ttl,
        )  # fmt: skip
        if self._box.opened.detail:
            log.warning("the sandbox was opened, but: %s", self._box.opened.detail)

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Runs a command; how it fails is part of the answer. Raises Submitted, and SandboxFailed where there is none."""
        command = action.get("command", "")
        try:
            output = self._answer(command, cwd or self.config.cwd, timeout or self.config.timeout)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            written = getattr(error, "output", None) or ""
            output = _failure(written, str(error), type(error).__name__)
        _raise_if_submitted(output)
        return output

    def _answer(self, command: str, cwd: str, timeout: float) -> dict[str, Any]:
        """Raises what running it on this machine would have raised, SandboxFailed."""
        argv = _argv(self.config.interpreter, command)
        result = self.last = self._run(argv, cwd=cwd, timeout=timeout, units=self.config.units, parallel=self.config.parallel)
        output = _text(result)
        if result.outcome is Outcome.TIMED_OUT:
            raise subprocess.TimeoutExpired(command, timeout, output=output)
        if result.outcome not in (Outcome.OK, Outcome.FAILED):
            return _failure(output, str(result), result.outcome.value)
        if result.exit_code == 126 and result.stderr and not result.stdout_bytes:
            # The program's stderr is in its stdout: this is its executor's, which could not enter the folder.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), cwd)
        answer = {"output": output, "returncode": result.exit_code, "exception_info": ""}
        if result.stdout_bytes > len(result.stdout) and _submission(answer) is not None:
            why = f"a submission may have {limits.OUTPUT_BYTES_MAX} bytes, this has {result.stdout_bytes}: it was not submitted"
            return _failure(output, why, "submission_too_long")
        return answer

    def _run(self, argv: Sequence[str], **options: Any) -> Result:
        """Any outcome that is the command's own. Raises SandboxFailed for the others."""
        if self._box is None:
            raise SandboxFailed(Outcome.ENVIRONMENT_LOST, "it was cleaned up")
        try:
            result = self._box.run(argv, **options)
        except ClientClosed as error:
            raise SandboxFailed(Outcome.ENVIRONMENT_LOST, str(error)) from error
        if result.is_verdict or result.reason == RejectReason.INVALID:
            return result
        raise SandboxFailed(result.outcome.value, f"{result.reason} {result.detail}".strip())

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What prompts may use: this configuration, and the sandbox's `uname`, which is asked for once."""
        if not self._uname:
            result = self._run(["/bin/sh", "-c", "for o in s n r v m; do uname -$o; done"], timeout=60.0)
            self._uname = dict(zip(UNAME, result.text.splitlines(), strict=False))
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(exclude={"task"}), self._uname, kwargs)
        return merged

    def serialize(self) -> dict[str, Any]:
        kind = f"{self.__class__.__module__}.{self.__class__.__name__}"
        return {"info": {"config": {"environment": self.config.model_dump(mode="json"), "environment_type": kind}}}

    def cleanup(self) -> None:
        """Closes the sandbox. Idempotent; at the process's exit it happens by itself."""
        box, self._box = self._box, None
        if box is not None:
            box.close()

    def __del__(self) -> None:
        if self._box is not None:
            self._box.close_soon()


def stand_in_for_docker() -> None:
    """From now on `environment_class: docker` means this class. mini-swe-agent's SWE-bench runners name an instance's image
    only to the environments they know by a short name."""
    from minisweagent import environments  # noqa: PLC0415  # it reads configuration of the user's

    environments._ENVIRONMENT_MAPPING["docker"] = f"{TangramEnvironment.__module__}.{TangramEnvironment.__qualname__}"


def _argv(interpreter: Sequence[str], command: str) -> list[str]:
    """The interpreter and its command, both streams into one pipe. Raises what `subprocess` would have raised."""
    if "\0" in command:
        raise ValueError("embedded null byte")
    if len(command.encode()) > COMMAND_BYTES_MAX:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG), interpreter[0])
    parts = [command[at : at + CHUNK_CHARACTERS] for at in range(0, len(command), CHUNK_CHARACTERS)]
    joined = "".join(f"${{{number}}}" for number in range(1, len(parts) + 1))
    return ["/bin/sh", "-c", f'exec {shlex.join(interpreter)} "{joined}" 2>&1', "sh", *parts]


def _text(result: Result) -> str:
    """What was written, as `text=True` shows it. Where its middle was left out, a line says how much."""
    data = result.stdout
    left_out = result.stdout_bytes - len(data)
    if left_out <= 0:
        return _decoded(data)
    cut = min(limits.OUTPUT_BYTES_MAX // 2, len(data))
    while 0 < cut < len(data) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return f"{_decoded(data[:cut])}\n[{left_out} bytes of output were left out here]\n{_decoded(data[cut:])}"


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _failure(output: str, why: str, kind: str) -> dict[str, Any]:
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {why}",
        "extra": {"exception_type": kind, "exception": why},
    }


def _submission(output: dict[str, Any]) -> str | None:
    lines = output["output"].lstrip().splitlines(keepends=True)
    if lines and lines[0].strip() == SENTINEL and output["returncode"] == 0:
        return "".join(lines[1:])
    return None


def _raise_if_submitted(output: dict[str, Any]) -> None:
    submission = _submission(output)
    if submission is not None:
        extra = {"exit_status": "Submitted", "submission": submission}
        raise Submitted({"role": "exit", "content": submission, "extra": extra})
