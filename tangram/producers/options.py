"""What a caller can say about an action and a session: one list, for the asyncio client and its blocking twin."""

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypedDict

from tangram import limits
from tangram.producers.request import Parallel, Units

OnOutput = Callable[[str, bytes], None]
"""Called with "stdout" or "stderr" and bytes, while the program runs; best effort."""

TIMEOUT_S: Final = limits.TIMEOUT_MS_DEFAULT / 1e3
DEADLINE_S: Final = limits.DEADLINE_MS_DEFAULT / 1e3
STARTUP_S: Final = limits.STARTUP_MS_MAX / 1e3
IDLE_TTL_S: Final = limits.SESSION_IDLE_MS_DEFAULT / 1e3


class SessionRunOptions(TypedDict, total=False):
    """units: cores: whole, (least, most), a set of legal amounts, or a fraction below 1. timeout: seconds of run time.
    deadline: seconds to wait for its start. stdin, env, cwd: as for any program; nothing of the executor's environment is
    passed on. parallel: the fraction of the run time that scales with cores, or seconds by units, or a callable that is asked,
    before anything is sent, for the seconds on each legal number of units; duration: seconds on one core. output_max: bytes of
    each of stdout and stderr that are kept, head and tail; the rest is counted. kind: names what this does; actions of one task
    and kind are taken to last alike. traceparent: W3C trace context. key: of your own, up to 200 characters: what this client,
    or a later one of its name, asks for again under it within an hour is not run again and shares the outcome; something else
    under it is rejected (conflict). quotas: tokens by the name of a quota that the scheduler has; of each it also holds a place
    while it runs."""

    units: Units
    timeout: float
    deadline: float
    stdin: bytes | str
    env: Mapping[str, str] | None
    cwd: str
    parallel: Parallel | None
    duration: float | None
    kind: str
    output_max: int
    on_output: OnOutput | None
    traceparent: str | None
    key: str
    quotas: Mapping[str, int] | None


class RunOptions(SessionRunOptions, total=False):
    """And, for an action that has a sandbox of its own: memory: MiB or "2GiB", no limit without it; retry: "safe" if it may
    run again after its executor was lost."""

    memory: int | str | None
    retry: Literal["never", "safe"]


class ScoreOptions(TypedDict, total=False):
    """units: GPUs: 1, 2, 4 or 8, (least, most), or a set of them. retry: "safe" (the default) scores again after a loss of the
    executor. duration, parallel: on one GPU, and how it scales. The others: as of a program (`RunOptions`)."""

    units: Units
    timeout: float
    deadline: float
    retry: Literal["never", "safe"]
    parallel: Parallel | None
    duration: float | None
    kind: str
    traceparent: str | None
    key: str
    quotas: Mapping[str, int] | None


class CallOptions(TypedDict, total=False):
    """body: what is sent as it is, instead of the arguments as JSON; content_type: of it. timeout: seconds for the answer.
    retry: "safe" (the default) asks again if the executor is lost or the endpoint fails, where the endpoint is declared
    idempotent; what is not is never sent twice. quotas: tokens, beside or instead of what the endpoint is declared to take; the
    others: as of a program (`RunOptions`)."""

    body: bytes | str
    content_type: str
    timeout: float
    deadline: float
    retry: Literal["never", "safe"]
    duration: float | None
    kind: str
    traceparent: str | None
    key: str
    quotas: Mapping[str, int] | None


class SessionOptions(TypedDict, total=False):
    """image: of the sandbox. memory: held as long as the session lives. env: of all its programs. idle_ttl: seconds without an
    action after which it is closed. deadline: seconds to wait for it. timeout: seconds to make it. key: of your own; while the
    session lives, opening it again under this key (by this client, or a later one of its name) returns the same session."""

    image: str
    memory: int | str | None
    env: Mapping[str, str] | None
    idle_ttl: float
    deadline: float
    timeout: float
    key: str
