"""The back end that runs nothing: for measuring the path of an action without a program at its end."""

from tangram.executors.backend import ActionKey, Ended, Grant, NoPrograms, NoServices, SessionKey
from tangram.messages import SessionOpen
from tangram.outcomes import Outcome


class NoBackend(NoPrograms, NoServices):
    """Opens and closes sessions that are names only, and refuses whatever would need a program or a file."""

    name = "none"

    def __init__(self) -> None:
        self.unkillable: set[ActionKey] = set()

    async def open(self, key: SessionKey, payload: SessionOpen, grant: Grant) -> Ended:
        return Ended(outcome=Outcome.OK)

    async def close(self, key: SessionKey) -> Ended:
        return Ended(outcome=Outcome.OK)

    def kill(self, key: ActionKey) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing is left."""
