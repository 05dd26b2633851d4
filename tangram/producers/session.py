"""A sandbox as its user sees it: made once, idle between actions, one action at a time."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Unpack

from tangram import limits
from tangram import messages as m
from tangram.errors import SessionError
from tangram.producers import build, request
from tangram.producers.options import DEADLINE_S, SessionRunOptions
from tangram.producers.result import Result
from tangram.producers.waiting import Waiting

if TYPE_CHECKING:
    from tangram.producers.client import Client


class Session:
    """Actions of one session run in the order of their calls. `opened` is the Result of opening it."""

    def __init__(self, client: "Client", n: int, opened: Result) -> None:
        self._client, self.n, self.opened = client, n, opened
        self._closed: Result | None = None

    @classmethod
    async def open(cls, client: "Client", spec: m.ActionSpec, payload: m.SessionOpen) -> "Session":
        n, waiting = await client.submit(spec, payload)
        waiting.orphan = partial(client.close_orphan, n)
        result = await waiting
        if not result.ok:
            raise SessionError(result)
        number = int(result.id.rpartition("/")[2])  # of the first that was opened under its key
        client.sandboxes.add(number)
        return cls(client, number, result)

    async def run(self, command: str | Sequence[str], **options: Unpack[SessionRunOptions]) -> Result:
        """Runs a program in the session's folder. Options: see `SessionRunOptions`. Raises InvalidRequest, ClientClosed."""
        made = build.program(command, self._client.trace_id, session=self.n, **options)
        return await self._client.perform(*made, on_output=options.get("on_output"))

    async def start(self, command: str | Sequence[str], **options: Unpack[SessionRunOptions]) -> Waiting:
        """As `run`, but returns when the action is stored, with what to await for its result: see `Client.start`."""
        made = build.program(command, self._client.trace_id, session=self.n, **options)
        _, waiting = await self._client.submit(*made, on_output=options.get("on_output"))
        await self._client.stored()
        return waiting

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644, timeout: float = 60.0) -> Result:
        """Puts a file into the session, whole or not at all. `path` is relative to its folder."""
        payload = m.FileWrite(path=path, data=request.content("data", data), mode=mode)
        return await self._client.perform(self._spec("file.write", timeout), payload)

    async def read(self, path: str, *, size_max: int = limits.FILE_BYTES_MAX, timeout: float = 60.0) -> Result:
        """Reads a regular file of at most `size_max` bytes: its content is the result's `data`."""
        return await self._client.perform(self._spec("file.read", timeout), m.FileRead(path=path, size_max=size_max))

    async def close(self) -> Result:
        """Ends the session and everything in it. Called again, it returns the first answer."""
        if self._closed is None:
            self._closed = await self._client.perform(self._spec("session.close", 60.0), m.SessionClose())
            self._client.sandboxes.discard(self.n)
        return self._closed

    def _spec(self, kind: str, timeout: float) -> m.ActionSpec:
        # A session's next action waits for the one before; closing must not wait an hour for what will never answer.
        deadline = timeout if kind == "session.close" else DEADLINE_S
        return build.spec(self._client.trace_id, kind=kind, session=self.n, timeout=timeout, deadline=deadline)
