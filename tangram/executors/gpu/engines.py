"""Services that are servers of their own, vLLM or SGLang, put to sleep and woken over HTTP.

An answer of 200 proves little: it can come before the memory is free, or from a server that dies. What counts is what can be
observed behind it: what the server says of itself, and the free memory of its device. A call without an answer is never made
again, because waking or sleeping twice ends some servers; what became of it is observed.

    RESIDENT -> EVICTING -> EVICTED -> RESTORING -> RESIDENT;  no answer: UNKNOWN;  twice failed, or gone: DEAD
"""

import asyncio
import math
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, Protocol

import httpx

from tangram.executors.gpu.places import Failed

BYTES_PER_S: Final = 5e9
"""Less than any link on which this is worth doing."""
PATIENCE_S: Final = 2.0
OBSERVE_S: Final = 5.0
"""For memory to come back: drivers take up to a second or two."""
POLL_S: Final = 0.05
MOVED_SHARE: Final = 0.75
"""Of the expected bytes; the rest is what allocators round, and what others do at the same time."""
FAILURES_MAX: Final = 2


class Phase(StrEnum):
    RESIDENT = "resident"
    EVICTING = "evicting"
    EVICTED = "evicted"
    RESTORING = "restoring"
    UNKNOWN = "unknown"
    DEAD = "dead"


class Speaks(Protocol):
    """How one kind of server is spoken to. None of it raises but httpx.HTTPError and Failed."""

    async def check(self, http: httpx.AsyncClient) -> None:
        """Raises Failed("load") if it cannot be put to sleep and woken with its weights intact."""

    async def is_asleep(self, http: httpx.AsyncClient) -> bool | None:
        """As it says itself; None if it does not."""

    async def sleep(self, http: httpx.AsyncClient, *, abort: bool, timeout_s: float) -> httpx.Response: ...

    async def wake(self, http: httpx.AsyncClient, timeout_s: float) -> httpx.Response: ...

    async def score(self, http: httpx.AsyncClient, batch: list[Any]) -> list[Any]:
        """For each item a number, or lists in lists with one number."""


class Engine:
    """A `Place` on a server that somebody else has started. free_bytes: of its device; None: nobody can say, and the server's own
    word has to do. patience_s, observe_s: for tests."""

    def __init__(
        self,
        service: str,
        url: str,
        speaks: Speaks,
        weights_bytes: int,
        free_bytes: Callable[[], int] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        observe_s: float = OBSERVE_S,
    ) -> None:
        self.service, self.phase = service, Phase.UNKNOWN
        self._speaks, self._bytes, self._free = speaks, weights_bytes, free_bytes
        self._patience_s, self._observe_s = patience_s, observe_s
        self._http = httpx.AsyncClient(base_url=url, timeout=patience_s)
        self._turn = asyncio.Lock()
        self._failures = 0
        self._was_cut = False
        """A batch was given up on, and may be under way there yet."""

    @property
    def is_resident(self) -> bool:
        return self.phase is Phase.RESIDENT

    async def load(self) -> int:
        """Asleep afterwards, whatever it was."""
        async with self._turn:
            try:
                await self._speaks.check(self._http)
                asleep = await self._speaks.is_asleep(self._http)
            except httpx.HTTPError as error:
                raise Failed("load", f"{self.service}: {self._http.base_url} does not answer: {_words(error)}") from None
            self.phase = Phase.EVICTED if asleep else Phase.RESIDENT
            await self._evict()
        return self._bytes

    async def evict(self) -> None:
        async with self._turn:
            await self._evict()

    async def restore(self) -> None:
        async with self._turn:
            await self._settle()
            if self.phase is Phase.RESIDENT:
                return
            before = self._now_free()
            timeout_s = self._patience_s + self._bytes / BYTES_PER_S
            self.phase = Phase.RESTORING
            answer = await self._call(self._speaks.wake(self._http, timeout_s), timeout_s)
            if answer is not None and answer.status_code != httpx.codes.OK:
                self.phase = Phase.EVICTED
                if "out of memory" in answer.text.lower():
                    raise Failed("memory", f"{self.service}: its device has no room to wake it")
                raise self._failed(f"waking it answered {answer.status_code}")
            await self._observe(asleep=False, moved=lambda: before - self._now_free(), answered=answer is not None)
            self.phase = Phase.RESIDENT
            self._failures = 0

    async def score(self, batch: list[Any]) -> list[float]:
        async with self._turn:
            if self.phase is not Phase.RESIDENT:
                raise Failed("broken", f"{self.service}: it is {self.phase}, and is asked nothing")
            try:
                found = await self._speaks.score(self._http, batch)
            except httpx.HTTPError as error:
                await self._alive()
                raise Failed("score", f"{self.service}: {_words(error)}") from None
            except asyncio.CancelledError:
                self._was_cut = True
                raise
        if len(found) != len(batch):
            raise Failed("answer", f"{self.service}: {len(found)} scores for {len(batch)} items")
        return [self._number(index, each) for index, each in enumerate(found)]

    def kill(self) -> None:
        """It is not ours to end; what it still does is aborted before it sleeps."""
        self._was_cut = True

    async def close(self) -> bool:
        """It stays as it is."""
        await self._http.aclose()
        return True

    # --- below -------------------------------------------------------------------------------------------------

    async def _evict(self) -> None:
        await self._settle()
        if self.phase is Phase.EVICTED:
            return
        before = self._now_free()
        timeout_s = self._patience_s + self._bytes / BYTES_PER_S
        self.phase = Phase.EVICTING
        answer = await self._call(self._speaks.sleep(self._http, abort=self._was_cut, timeout_s=timeout_s), timeout_s)
        if answer is not None and answer.status_code != httpx.codes.OK:
            self.phase = Phase.RESIDENT
            await self._alive()
            raise self._failed(f"putting it to sleep answered {answer.status_code}")
        await self._observe(asleep=True, moved=lambda: self._now_free() - before, answered=answer is not None)
        self.phase = Phase.EVICTED
        self._was_cut = False
        self._failures = 0

    async def _call(self, call: Any, timeout_s: float) -> httpx.Response | None:
        """None: there was no answer, and it may have happened."""
        try:
            async with asyncio.timeout(timeout_s):
                answer: httpx.Response = await call
                return answer
        except (httpx.HTTPError, TimeoutError):
            self.phase = Phase.UNKNOWN
            return None

    async def _observe(self, *, asleep: bool, moved: Callable[[], int], answered: bool) -> None:
        """Returns when all that can be seen says so. Raises Failed if that does not come, or if nothing at all can be seen."""
        end_s = time.monotonic() + self._observe_s
        while True:
            says = await self._says_asleep()
            is_moved = self._free is None or moved() >= MOVED_SHARE * self._bytes
            is_seen = answered or says is not None or self._free is not None
            if is_seen and says in (None, asleep) and is_moved:
                break
            if time.monotonic() >= end_s:
                self.phase = Phase.UNKNOWN
                await self._alive()
                words = "says nothing" if says is None else "says that it sleeps" if says else "says that it is awake"
                raise self._failed(f"it {words}, and {moved():,} of {self._bytes:,} bytes have moved on its device")
            await asyncio.sleep(POLL_S)
        await self._alive()

    async def _says_asleep(self) -> bool | None:
        try:
            return await self._speaks.is_asleep(self._http)
        except httpx.HTTPError:
            await self._alive()
            return None

    async def _settle(self) -> None:
        """What became of a call without an answer, or of a dead server that was started again. Raises Failed."""
        if self.phase in (Phase.UNKNOWN, Phase.DEAD):
            await self._alive()
            asleep = await self._says_asleep()
            if asleep is None:
                raise Failed("broken", f"{self.service}: nobody can say whether it sleeps; start it again")
            self.phase, self._failures = (Phase.EVICTED if asleep else Phase.RESIDENT), 0

    async def _alive(self) -> None:
        """Raises Failed("died") if it is not."""
        try:
            healthy = (await self._http.get("/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            healthy = False
        if not healthy:
            self.phase = Phase.DEAD
            raise Failed("died", f"{self.service}: its server at {self._http.base_url} is gone; start it again")

    def _failed(self, what: str) -> Failed:
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self.phase = Phase.DEAD
            return Failed("died", f"{self.service}: {what}, again: start its server anew")
        return Failed("broken", f"{self.service}: {what}")

    def _now_free(self) -> int:
        return self._free() if self._free is not None else 0

    def _number(self, index: int, found: Any) -> float:
        while isinstance(found, list) and len(found) == 1:
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise Failed("answer", f"{self.service}: the score of item {index} is {found!r:.100}")
        return float(found)


class Vllm:
    """With VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode; a reward model by `/pooling`. level and mode are read from the query
    alone."""

    def __init__(self, model: str) -> None:
        self._model = model

    async def check(self, http: httpx.AsyncClient) -> None:
        if (await http.get("/is_sleeping")).status_code == httpx.codes.NOT_FOUND:
            needs = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
            raise Failed("load", f"{http.base_url}: has no /is_sleeping: start vLLM with {needs}")

    async def is_asleep(self, http: httpx.AsyncClient) -> bool | None:
        answer = await http.get("/is_sleeping")
        return bool(answer.raise_for_status().json()["is_sleeping"])

    async def sleep(self, http: httpx.AsyncClient, *, abort: bool, timeout_s: float) -> httpx.Response:
        query = {"level": "1", "mode": "abort" if abort else "wait"}
        return await http.post("/sleep", params=query, timeout=timeout_s)

    async def wake(self, http: httpx.AsyncClient, timeout_s: float) -> httpx.Response:
        return await http.post("/wake_up", timeout=timeout_s)

    async def score(self, http: httpx.AsyncClient, batch: list[Any]) -> list[Any]:
        answer = await http.post("/pooling", json={"model": self._model, "input": batch}, timeout=None)
        rows = sorted(answer.raise_for_status().json()["data"], key=lambda row: row["index"])
        return [row["data"] for row in rows]


class Sglang:
    """With --enable-memory-saver and --enable-weights-cpu-backup (without the second, its weights are garbage afterwards); awake
    when its executor starts, because it does not say whether it sleeps. A reward model by `/classify`."""

    TAGS: Final = ("kv_cache", "weights")

    def __init__(self, model: str) -> None:
        self._model = model

    async def check(self, http: httpx.AsyncClient) -> None:
        info = (await http.get("/get_server_info")).raise_for_status().json()
        for flag in ("enable_memory_saver", "enable_weights_cpu_backup"):
            if not info.get(flag):
                raise Failed("load", f"{http.base_url}: start SGLang with --{flag.replace('_', '-')}")

    async def is_asleep(self, http: httpx.AsyncClient) -> bool | None:
        return None

    async def sleep(self, http: httpx.AsyncClient, *, abort: bool, timeout_s: float) -> httpx.Response:
        if abort:
            await http.post("/pause_generation", json={"mode": "abort"}, timeout=timeout_s)
        await http.post("/flush_cache", timeout=timeout_s)
        return await http.post("/release_memory_occupation", json={"tags": list(self.TAGS)}, timeout=timeout_s)

    async def wake(self, http: httpx.AsyncClient, timeout_s: float) -> httpx.Response:
        answer = await http.post("/resume_memory_occupation", json={"tags": ["weights"]}, timeout=timeout_s)
        if answer.status_code != httpx.codes.OK:
            return answer
        return await http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}, timeout=timeout_s)

    async def score(self, http: httpx.AsyncClient, batch: list[Any]) -> list[Any]:
        answer = await http.post("/classify", json={"model": self._model, "text": batch}, timeout=None)
        return [row["embedding"] for row in answer.raise_for_status().json()]


def _words(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()
