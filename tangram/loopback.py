"""A small HTTP/1.1 server on loopback: providers that are played, for the bench, the demo and the tests."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Self
from urllib.parse import parse_qsl, unquote, urlsplit

BODY_BYTES_MAX = 64 << 20


class Request(NamedTuple):
    """headers: names in lower case. query: the last of each name."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}


Handler = Callable[[Request], Awaitable[Answer | None]]
"""None: the connection is closed without an answer."""


class LoopbackServer:
    """An async context manager. url: without a slash at its end, once it is open."""

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self.url = ""
        self._handler, self._port = handler, port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1_024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while (request := await _read(reader)) is not None:
                answer = await self._handler(request)
                if answer is None:
                    return
                lines = [f"HTTP/1.1 {answer.status} -", f"content-length: {len(answer.body)}"]
                if answer.content_type:
                    lines.append(f"content-type: {answer.content_type}")
                lines += [f"{name}: {value}" for name, value in answer.headers.items()]
                writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + answer.body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """None at the end. Raises ValueError for what is no request."""
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= BODY_BYTES_MAX:
        raise ValueError("content-length")
    body = await reader.readexactly(length)
    parts = urlsplit(target)
    return Request(method, unquote(parts.path), dict(parse_qsl(parts.query, keep_blank_values=True)), headers, body)
