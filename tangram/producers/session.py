"""A sandbox as its user sees it: made once, idle between actions, one action at a time."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tangram import limits
from tangram import messages as m
from tangram.errors import SessionError
from tangram.producers import request
from tangram.producers.result import Result

if TYPE_CHECKING:
    from tangram.producers.client import Client, OnOutput


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
        return cls(client, n, result)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        units: request.Units = 1,
        timeout: float = limits.TIMEOUT_MS_DEFAULT / 1e3,
        deadline: float = limits.DEADLINE_MS_DEFAULT / 1e3,
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        parallel: float | Mapping[int, float] | None = None,
        duration: float | None = None,
        kind: str = "run",
        on_output: "OnOutput | None" = None,
        traceparent: str | None = None,
    ) -> Result:
        """Runs a program in the session's folder. Parameters as for `Client.run`."""
        spec = self._client._spec(
            kind=kind, units=units, timeout=timeout, deadline=deadline, session=self.n,
            parallel=parallel, duration=duration, traceparent=traceparent,
        )  # fmt: skip
        payload = m.Run(
            argv=request.argv(command),
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            env=dict(env or {}),
            cwd=cwd,
            stream=on_output is not None,
        )
        return await self._client.perform(spec, payload, on_output=on_output)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644, timeout: float = 60.0) -> Result:
        """Puts a file into the session, whole or not at all. `path` is relative to its folder."""
        payload = m.FileWrite(path=path, data=data.encode() if isinstance(data, str) else data, mode=mode)
        return await self._client.perform(self._file("file.write", timeout), payload)

    async def read(self, path: str, *, timeout: float = 60.0) -> Result:
        """Reads a regular file: its content is the result's `data`."""
        return await self._client.perform(self._file("file.read", timeout), m.FileRead(path=path))

    async def close(self) -> Result:
        """Ends the session and everything in it. Called again, it returns the first answer."""
        if self._closed is None:
            spec = self._client._spec(kind="session.close", session=self.n, timeout=60.0)
            self._closed = await self._client.perform(spec, m.SessionClose())
        return self._closed

    def _file(self, kind: str, timeout: float) -> m.ActionSpec:
        return self._client._spec(kind=kind, session=self.n, timeout=timeout)
