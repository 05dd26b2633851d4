"""The Docker Engine's HTTP API, as much of it as is used here. Owns time-outs and errors; knows nothing of actions.

Each call has a connection of its own, so a daemon that hangs blocks nothing but the calls that wait for it, each no
longer than its time-out. There are no threads.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote, urlencode

from msgspec import Struct

SOCKET_DEFAULT: Final = "unix:///var/run/docker.sock"
API_OLDEST: Final = (1, 40)
API_NEWEST: Final = (1, 47)
"""The newest version that was read; a newer engine speaks it too."""
CALL_S: Final = 30.0
CONNECT_S: Final = 5.0
HEADER_BYTES_MAX: Final = 65_536
BODY_BYTES_MAX: Final = 16 << 20
PART_BYTES: Final = 1 << 20


class DockerUnavailable(Exception):
    """There is no engine to work with: not running, not answering, or not one that can be used. One line."""


class EngineError(Exception):
    """The engine refused a call. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Response(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body or b"null")


class Engine:
    """An engine at unix:///PATH or tcp://HOST:PORT. May be used from any event loop."""

    def __init__(self, url: str = "", *, call_s: float = CALL_S) -> None:
        """Without `url`, DOCKER_HOST or the default socket. Raises DockerUnavailable for one that is not understood."""
        self.url = url or os.environ.get("DOCKER_HOST", "") or SOCKET_DEFAULT
        self.call_s = call_s
        self.prefix = ""
        scheme, _, self._address = self.url.partition("://")
        if scheme not in ("unix", "tcp") or not self._address or os.environ.get("DOCKER_TLS_VERIFY"):
            raise DockerUnavailable(f"docker: {self.url}: only unix:// and tcp:// without TLS are supported")
        self._unix = scheme == "unix"

    async def check(self, image: str = "") -> None:
        """Settles the version of the API, and sees that `image` is there. Raises DockerUnavailable."""
        try:
            answer = (await self.call("GET", "/version", timeout_s=min(10.0, self.call_s))).json()
            newest = min(API_NEWEST, _version(answer["ApiVersion"]))
            oldest = _version(answer.get("MinAPIVersion") or answer["ApiVersion"])
            if answer.get("Os") != "linux" or newest < max(oldest, API_OLDEST):
                raise DockerUnavailable(
                    f"docker: {self.url}: {answer.get('Os')} engine, API {answer['ApiVersion']}, cannot be used"
                )
        except (EngineError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise DockerUnavailable(f"docker: {self.url}: not a Docker engine ({error})") from None
        self.prefix = f"/v{newest[0]}.{newest[1]}"
        if image:
            try:
                await self.call("GET", f"/images/{image}/json")
            except EngineError as error:
                raise DockerUnavailable(f"docker: image {image!r} is not on this host: docker pull {image} ({error})") from None

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        tar: bytes | None = None,
        timeout_s: float = 0.0,
        size_max: int = BODY_BYTES_MAX,
    ) -> Response:
        """One call to its end. Raises EngineError for a refusal, DockerUnavailable if no whole answer comes."""
        timeout_s = timeout_s or self.call_s
        try:
            async with asyncio.timeout(timeout_s), self._connection() as (reader, writer):
                writer.write(self._head(method, path, query, body, tar))
                for at in range(0, len(tar or b""), PART_BYTES):
                    writer.write((tar or b"")[at : at + PART_BYTES])
                    await writer.drain()
                await writer.drain()
                response = await _response(reader, size_max, empty=method == "HEAD")
        except TimeoutError:
            raise DockerUnavailable(f"docker: {self.url} did not answer {method} {path} within {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise DockerUnavailable(f"docker: {self.url}: {error or 'closed the connection'}") from None
        if response.status >= 400:
            raise EngineError(response.status, _message(response))
        return response

    @asynccontextmanager
    async def hijack(self, path: str, body: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A call that turns its connection into a raw stream. Only the answer has a time-out. Raises as `call`."""
        async with self._connection() as (reader, writer):
            try:
                async with asyncio.timeout(self.call_s):
                    writer.write(self._head("POST", path, None, body, None, upgrade=True))
                    await writer.drain()
                    status, headers = await _status(reader)
                    if status not in (101, 200):
                        response = Response(status, headers, await _body(reader, headers, BODY_BYTES_MAX))
                        raise EngineError(status, _message(response))
            except TimeoutError:
                raise DockerUnavailable(f"docker: {self.url} did not answer POST {path} within {self.call_s:g} s") from None
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                raise DockerUnavailable(f"docker: {self.url}: {error or 'closed the connection'}") from None
            yield reader, writer

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._unix:
                    reader, writer = await asyncio.open_unix_connection(self._address, limit=HEADER_BYTES_MAX)
                else:
                    host, _, port = self._address.rstrip("/").rpartition(":")
                    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=HEADER_BYTES_MAX)
        except (OSError, ValueError, TimeoutError) as error:
            raise DockerUnavailable(f"docker: no engine answers at {self.url} ({error or 'time-out'})") from None
        try:
            yield reader, writer
        finally:
            # Aborted, not closed: what was not sent yet is of no use to anyone.
            writer.transport.abort()

    def _head(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, tar: bytes | None, *, upgrade: bool = False
    ) -> bytes:
        """The head of a call, with its body unless that is `tar`."""
        data = tar if tar is not None else b"" if body is None else json.dumps(body).encode()
        target = self.prefix + quote(path) + (f"?{urlencode(query)}" if query else "")
        lines = [f"{method} {target} HTTP/1.1", "Host: docker", f"Content-Length: {len(data)}"]
        lines.append("Connection: Upgrade\r\nUpgrade: tcp" if upgrade else "Connection: close")
        if data:
            lines.append(f"Content-Type: application/{'x-tar' if tar is not None else 'json'}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if tar is not None else data)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _message(response: Response) -> str:
    try:
        return " ".join(str(response.json()["message"]).split())
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}"


async def _status(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(first.split(" ")[1]) if first.startswith("HTTP/1.") else 0
    if not status:
        raise ValueError("no HTTP answer")
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _response(reader: asyncio.StreamReader, size_max: int, *, empty: bool) -> Response:
    status, headers = await _status(reader)
    body = b"" if empty or status in (204, 304) else await _body(reader, headers, size_max)
    return Response(status, headers, body)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str], size_max: int) -> bytes:
    """A body of at most `size_max` bytes; a longer one is cut there."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = bytearray()
        while len(body) < size_max and (size := int((await reader.readline()).split(b";")[0], 16)):
            body += await reader.readexactly(min(size, size_max - len(body)))
            if len(body) < size_max:
                await reader.readexactly(2)
        return bytes(body)
    if "content-length" in headers:
        return await reader.readexactly(min(int(headers["content-length"]), size_max))
    body = bytearray()
    while len(body) < size_max and (part := await reader.read(size_max - len(body))):
        body += part
    return bytes(body)
