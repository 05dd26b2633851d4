"""`python -m tangram.bench.provider KIND RATE BURST FOLDER`: a provider that enforces its limit on its own clock. It writes where
it listens into FOLDER/url, and tells what it saw at /stats; /reset forgets that."""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path

from tangram import roles
from tangram.demo.limits import made
from tangram.loopback import Answer, LoopbackServer, Request


class Provider:
    def __init__(self, kind: str, rate: float, burst: int) -> None:
        self._made = partial(made, kind, rate, burst)
        self._reset()

    def _reset(self) -> None:
        self._limit = self._made()
        self._first_s = 0.0
        self._seen: list[tuple[float, bool]] = []

    async def handle(self, request: Request) -> Answer:
        if request.path == "/reset":
            self._reset()
            return Answer()
        if request.path == "/stats":
            return Answer(body=json.dumps(self._seen).encode())
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        taken = self._limit.takes(now_s)
        self._seen.append((now_s - self._first_s, taken))
        return Answer(body=b"{}") if taken else Answer(429, headers={"retry-after": "1"})


async def _main(kind: str, rate: str, burst: str, folder: str) -> int:
    async with LoopbackServer(Provider(kind, float(rate), int(burst)).handle) as server:
        (Path(folder) / "url").write_text(server.url)
        roles.say_ready()
        await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    roles.end_with_parent()
    sys.exit(roles.run_loop(_main(*sys.argv[1:])))
