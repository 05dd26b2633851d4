"""The environment of a program: an allow-list, what it was granted, and the marks by which it is found again."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tangram import limits
from tangram.executors.backend import ActionKey, SessionKey
from tangram.messages import Run

INCARNATION: Final = "TANGRAM_INCARNATION"
SESSION: Final = "TANGRAM_SESSION"
ACTION: Final = "TANGRAM_ACTION"
ATTEMPT: Final = "TANGRAM_ATTEMPT"
UNITS: Final = "TANGRAM_UNITS"
THREADS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "PYTHON_CPU_COUNT",
    "GOMAXPROCS",
)
"""What common run-time libraries size their thread pools by; they do it once, at their start."""
_PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def objection(payload: Run) -> str:
    """Why this program may not be started, naming the field; empty if it may."""
    if sum(len(word.encode()) + 1 for word in payload.argv) > limits.ARGUMENTS_BYTES_MAX:
        return f"argv: at most {limits.ARGUMENTS_BYTES_MAX} bytes in all"
    if not payload.argv[0]:
        return "argv: the program's name is empty"
    return environment_objection(payload.env)


def environment_objection(env: Mapping[str, str]) -> str:
    """Why these variables may not be set; empty if they may."""
    for name in env:
        # The dynamic loader runs code from where these point, in every program.
        if name.startswith("LD_"):
            return f"env.{name}: LD_* may not be set"
    if sum(len(name) + len(value.encode()) + 2 for name, value in env.items()) > limits.ENVIRONMENT_BYTES_MAX:
        return f"env: at most {limits.ENVIRONMENT_BYTES_MAX} bytes in all"
    return ""


def build(
    base: Mapping[str, str],
    incarnation: str,
    key: ActionKey,
    attempt: int,
    session: SessionKey | None,
    units: int,
    layers: Iterable[Mapping[str, str]],
) -> dict[str, str]:
    """The whole environment of one attempt; later `layers` win over earlier ones and over `base`, the marks over all."""
    # A file written twice in one second, with the same size, would be run from the stale bytecode of the first.
    env = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **base, **dict.fromkeys(THREADS, str(units))}
    for layer in layers:
        env.update(layer)
    env.update({UNITS: str(units), INCARNATION: incarnation, ACTION: str(key), ATTEMPT: str(attempt)})
    if session is None:
        env.pop(SESSION, None)
    else:
        env[SESSION] = str(session)
    return env


def of_host(home: Path, tmp: Path) -> dict[str, str]:
    """What a program on this host needs."""
    path, language = os.environ.get("PATH") or _PATH_DEFAULT, os.environ.get("LANG") or "C.UTF-8"
    return {"PATH": path, "LANG": language, "HOME": str(home), "TMPDIR": str(tmp)}
