"""The back end that runs nothing: for measuring the path of an action without a program at its end."""

from collections.abc import Mapping

from tangram.executors.backend import ActionKey, Ended, Grant, NoModels, OnOutput, SessionKey
from tangram.messages import FileRead, FileWrite, Run, SessionOpen
from tangram.outcomes import Outcome, RejectReason

_REFUSED = Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail="this executor runs no programs")


class NoBackend(NoModels):
    """Opens and closes sessions that are names only, and refuses whatever would need a program or a file."""

    name = "none"

    def __init__(self) -> None:
        self.unkillable: set[ActionKey] = set()

    async def open(self, key: SessionKey, payload: SessionOpen, grant: Grant) -> Ended:
        return Ended(outcome=Outcome.OK)

    async def close(self, key: SessionKey) -> Ended:
        return Ended(outcome=Outcome.OK)

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
        return _REFUSED

    async def write(self, session: SessionKey, payload: FileWrite) -> Ended:
        return _REFUSED

    async def read(self, session: SessionKey, payload: FileRead) -> Ended:
        return _REFUSED

    def kill(self, key: ActionKey) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing is left."""
