"""A provider that does what it is told: answers, refuses, breaks, hangs, redirects."""

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tangram.loopback import Answer, LoopbackServer, Request

ENDPOINTS = """
[endpoints.search]
url = "{url}/search/{{index}}?q={{q}}&key=${{file:{secret}}}"
headers = {{ Authorization = "Bearer ${{file:{secret}}}" }}
takes = {{ calm = 0 }}
retry_after_s = 0.1

[endpoints.post]
url = "{url}/post"
method = "POST"
takes = {{ budget = 100 }}
spent = {{ budget = "usage.total" }}

[endpoints.keyed]
url = "{url}/keyed"
method = "POST"
idempotency_header = "Idempotency-Key"

[endpoints.small]
url = "{url}/small"
response_bytes = 1000

[endpoints.single]
url = "{url}/single"
takes = {{ one = 0 }}

[endpoints.nowhere]
url = "http://127.0.0.1:9/"
"""


def declare(folder: Path, url: str, secret: str) -> Path:
    (folder / "secret").write_text(secret + "\n")
    path = folder / "endpoints.toml"
    path.write_text(ENDPOINTS.format(url=url, secret=folder / "secret"))
    return path


class Provider:
    """requests: those that came, in order. answers: what to do with the next ones of a path; then they are answered with what
    was asked."""

    def __init__(self) -> None:
        self._server = LoopbackServer(self._handle)
        self.reset()

    def reset(self) -> None:
        self.requests: list[Request] = []
        self.answers: dict[str, list[Answer | Callable[[], Answer] | str]] = {}
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.gate = asyncio.Event()
        """What waits for it is answered."""
        self.arrived = asyncio.Condition()

    @property
    def url(self) -> str:
        return self._server.url

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        await self._server.__aexit__()

    async def count(self, path: str, least: int) -> None:
        """Returns when so many requests for a path have come."""
        async with asyncio.timeout(30), self.arrived:
            await self.arrived.wait_for(lambda: sum(each.path == path for each in self.requests) >= least)

    async def _handle(self, request: Request) -> Answer | None:
        path = request.path
        async with self.arrived:
            self.requests.append(request)
            self.arrived.notify_all()
        self.running[path] += 1
        self.most[path] = max(self.most[path], self.running[path])
        try:
            return await self._answer(request)
        finally:
            self.running[path] -= 1

    async def _answer(self, request: Request) -> Answer | None:
        planned = self.answers.get(request.path)
        what = planned.pop(0) if planned else None
        if isinstance(what, Answer):
            return what
        if what == "break":
            return None
        if what == "wait":
            await self.gate.wait()
        if what == "gzip":
            return Answer(body=gzip.compress(bytes(10_000_000)), headers={"content-encoding": "gzip"})
        asked = {
            "path": request.path,
            "query": dict(request.query),
            "authorization": request.headers.get("authorization", ""),
            "cookie": request.headers.get("cookie", ""),
            "type": request.headers.get("content-type", ""),
            "body": request.body.decode(),
        }
        return Answer(body=json.dumps(asked).encode(), headers={"set-cookie": "whose=mine; Path=/"})
