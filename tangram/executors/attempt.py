"""What the back ends share: an attempt at a program as it was asked for, and those that are under way."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from tangram import limits
from tangram.executors.backend import ActionKey, Ended, Grant, OnOutput, SessionKey
from tangram.executors.cpu import environment
from tangram.executors.cpu.output import Held
from tangram.executors.cpu.supervise import now_ns
from tangram.messages import Run
from tangram.outcomes import ErrorReason, Outcome, RejectReason


def error(reason: ErrorReason, detail: object) -> Ended:
    return Ended(outcome=Outcome.ERROR, reason=reason, detail=str(detail)[: limits.DETAIL_LENGTH_MAX])


def invalid(detail: str) -> Ended:
    return Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail=detail)


def lost_session() -> Ended:
    return Ended(outcome=Outcome.ENVIRONMENT_LOST, detail="the session does not exist here", session_lost=True)


class Started(Protocol):
    def end(self, cause: Outcome) -> None: ...


class Attempt:
    """`end` may be called at any time. held: what its back end keeps of outputs, all together. program: set when it has begun.
    early: why it was ended before; `stopped` is set then."""

    def __init__(
        self,
        incarnation: str,
        key: ActionKey,
        attempt: int,
        payload: Run,
        grant: Grant,
        timeout_ms: int,
        env: Mapping[str, str],
        on_output: OnOutput | None,
        held: Held,
    ) -> None:
        self.incarnation, self.key, self.attempt = incarnation, key, attempt
        self.payload, self.grant, self.timeout_ms, self.on_output = payload, grant, timeout_ms, on_output
        self.held = held
        self._env = env
        self.called_ns = now_ns()
        self.program: Started | None = None
        self.early: Outcome | None = None
        self.stopped = asyncio.Event()

    def end(self, cause: Outcome) -> None:
        """Asks for the end; without effect once the program has ended or another reason was given."""
        if self.program is not None:
            self.program.end(cause)
        elif self.early is None:
            self.early = cause
            self.stopped.set()

    def not_begun(self, cause: Outcome) -> Ended:
        return Ended(outcome=cause, detail="ended before it began", session_lost=cause is Outcome.ENVIRONMENT_LOST)

    def environment(self, base: Mapping[str, str], session: SessionKey | None, session_env: Mapping[str, str]) -> dict[str, str]:
        """The program's whole environment; `base` is what its back end gives to all."""
        layers = (session_env, self.payload.env, self._env)
        units = max(1, len(self.grant.cores))
        return environment.build(base, self.incarnation, self.key, self.attempt, session, units, layers)


A = TypeVar("A", bound=Attempt)


class Attempts(Generic[A]):
    """Those under way in a back end, and the `tasks` that perform them."""

    def __init__(self) -> None:
        self._attempts: dict[ActionKey, A] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.over = False
        """No further one is begun."""

    def add(self, attempt: A) -> bool:
        """Makes it known, so that it can be ended from now on; false if its action is under way already."""
        return self._attempts.setdefault(attempt.key, attempt) is attempt

    async def run(self, attempt: A, added: bool, perform: Callable[[A], Awaitable[Ended]]) -> Ended:
        """Performs it, after the checks that all back ends make."""
        if not added:
            return error(ErrorReason.INTERNAL, "the action is running already")
        # A task of its own, so that whoever stops waiting does not stop the cleaning up.
        task = asyncio.create_task(self._perform(attempt, perform))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            attempt.end(Outcome.CANCELLED)
            raise

    async def _perform(self, attempt: A, perform: Callable[[A], Awaitable[Ended]]) -> Ended:
        try:
            if self.over:
                return error(ErrorReason.INTERNAL, "the executor is stopping")
            if why := environment.objection(attempt.payload):
                return invalid(why)
            return await perform(attempt)
        finally:
            del self._attempts[attempt.key]

    def end(self, key: ActionKey) -> None:
        if (attempt := self._attempts.get(key)) is not None:
            attempt.end(Outcome.CANCELLED)

    def end_all(self) -> None:
        self.over = True
        for attempt in list(self._attempts.values()):
            attempt.end(Outcome.CANCELLED)
