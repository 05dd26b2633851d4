"""What an executor asks of the thing that runs actions on its host.

A back end owns sessions, programs and their limits; which action runs when, and on which cores, is decided elsewhere.
What an action did is never an exception: it is an `Ended`. Times are integer nanoseconds, memory is in MiB or bytes as
named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from tangram.messages import Call, FileRead, FileWrite, Output, Resident, Run, Score, Service, SessionOpen
from tangram.outcomes import Outcome, RejectReason


class SessionKey(NamedTuple):
    """A sandbox: `session` is the number of the action that opened it."""

    task: str
    client: str
    session: int

    def __str__(self) -> str:
        return f"{self.task}/{self.client}/{self.session}"


class ActionKey(NamedTuple):
    task: str
    client: str
    n: int

    def __str__(self) -> str:
        return f"{self.task}/{self.client}/{self.n}"


class Grant(Struct, frozen=True, kw_only=True):
    """What an action may use: exactly these core ids; at most this much cpu time (1000 is one core); memory (0: no
    limit). File actions have cores () and millicores 0."""

    cores: tuple[int, ...] = ()
    millicores: int = 0
    memory_mib: int = 0


class Ended(Struct, frozen=True, kw_only=True):
    """How one attempt ended.

    exit_code: of the program; -N if signal N ended it; None where there was no program. startup_ns: from the call of
    `run` to the program's start; run_ns: from there to the end of its main process. session_lost: the session is gone.
    unkillable: a process of the action is still alive after SIGKILL and the kill budget, so its units are in use.
    not_begun: the host has no descriptors or processes left, or nobody could be reached, and nothing was started: the action
    can be decided again. retry_after_ms: who was asked refuses more for so long. failed: it was begun, failed, and may be tried
    again. spent: tokens by quota that it really took.
    """

    outcome: Outcome
    reason: str = ""
    detail: str = ""
    exit_code: int | None = None
    output: Output = Output()
    startup_ns: int = 0
    run_ns: int = 0
    cpu_ns: int = 0
    memory_peak_bytes: int = 0
    session_lost: bool = False
    unkillable: bool = False
    not_begun: bool = False
    retry_after_ms: int = 0
    failed: bool = False
    spent: Mapping[str, int] = {}


OnOutput = Callable[[str, bytes], None]
"""Called with "stdout" or "stderr" and a chunk of bytes, which may end in the middle of a character."""


class NoModels:
    """For back ends that have none."""

    async def prefetch(self, service: str, gpus: tuple[int, ...], evicts: Sequence[Resident]) -> None:
        """There is nothing to bring."""

    async def score(
        self,
        key: ActionKey,
        payload: Score,
        service: str,
        gpus: tuple[int, ...],
        evicts: Sequence[Resident],
        *,
        timeout_ms: int,
    ) -> Ended:
        return Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail="this executor serves no models")


class NoCalls:
    """For back ends that call nobody."""

    async def call(self, key: ActionKey, attempt: int, nonce: bytes, payload: Call, endpoint: str, *, timeout_ms: int) -> Ended:
        return Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail="this executor calls nobody")


class NoServices(NoModels, NoCalls):
    """For back ends that run programs only."""

    async def begin(self) -> None:
        """Nothing has to be made."""

    def services(self) -> dict[str, Service]:
        return {}


class NoPrograms:
    """For back ends that run none."""

    async def run(
        self,
        key: ActionKey,
        attempt: int,
        session: SessionKey | None,
        payload: Run,
        grant: Grant,
        *,
        timeout_ms: int,
        env: Mapping[str, str],
        on_output: OnOutput | None,
    ) -> Ended:
        return _NO_PROGRAMS

    async def write(self, session: SessionKey, payload: FileWrite) -> Ended:
        return _NO_PROGRAMS

    async def read(self, session: SessionKey, payload: FileRead) -> Ended:
        return _NO_PROGRAMS


_NO_PROGRAMS = Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail="this executor runs no programs")


class Backend(Protocol):
    """Runs actions: programs, batches on models, or calls. All methods belong to one event loop; none raises for what an action
    or its session did."""

    name: str
    unkillable: set[ActionKey]
    """Actions of which a process is still alive after SIGKILL and the kill budget. One leaves when it is really gone."""

    async def begin(self) -> None:
        """Before it joins. May raise what ends the executor."""

    def services(self) -> dict[str, Service]:
        """The models or endpoints that it serves, as they are to be announced now."""

    async def score(
        self,
        key: ActionKey,
        payload: Score,
        service: str,
        gpus: tuple[int, ...],
        evicts: Sequence[Resident],
        *,
        timeout_ms: int,
    ) -> Ended:
        """Scores a batch; `output.data` is a MessagePack array of numbers."""

    async def prefetch(self, service: str, gpus: tuple[int, ...], evicts: Sequence[Resident]) -> None:
        """Brings a service's weights onto GPUs that nobody uses. What fails is told, and tried again by who needs it."""

    async def call(self, key: ActionKey, attempt: int, nonce: bytes, payload: Call, endpoint: str, *, timeout_ms: int) -> Ended:
        """Sends a request; `output.data` is a `Response`. nonce: the action's, the same at each attempt."""

    async def open(self, key: SessionKey, payload: SessionOpen, grant: Grant) -> Ended:
        """Makes a session; `grant.memory_mib` is held until it ends. ok, rejected or error."""

    async def close(self, key: SessionKey) -> Ended:
        """Ends a session, known or not: afterwards its processes, limits and files are gone. ok or error."""

    async def run(
        self,
        key: ActionKey,
        attempt: int,
        session: SessionKey | None,
        payload: Run,
        grant: Grant,
        *,
        timeout_ms: int,
        env: Mapping[str, str],
        on_output: OnOutput | None,
    ) -> Ended:
        """Runs a program to the end of its main process. Cancelling the awaiting task ends the program too."""

    async def write(self, session: SessionKey, payload: FileWrite) -> Ended:
        """Puts a file into a session, whole or not at all."""

    async def read(self, session: SessionKey, payload: FileRead) -> Ended:
        """The content of a session's regular file, in `output.data`."""

    def kill(self, key: ActionKey) -> None:
        """Ends a run: the pending `run` returns `cancelled`. Works from the moment `run` was called, whether or not its
        coroutine has begun; without a pending run it does nothing."""

    async def stop(self) -> None:
        """Kills and removes everything of this incarnation, in bounded time. Nothing can be run afterwards."""
