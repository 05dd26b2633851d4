"""The back end of GPU executors: services on devices, restored when an action needs them and evicted to make room (EOE).

The scheduler says on which GPUs an action runs, and which copies make room; who uses a GPU uses it alone. What it does not know
(a worker that died, memory that is fuller than it was said) is put right here, by evicting whoever is not used.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec

from tangram import messages as m
from tangram.executors.attempt import error, invalid
from tangram.executors.backend import ActionKey, Ended, Grant, NoCalls, NoPrograms, SessionKey
from tangram.executors.gpu.places import Failed, Place
from tangram.executors.gpu.workers import Nursery
from tangram.outcomes import ErrorReason, Outcome

log = logging.getLogger(__name__)

MIB: Final = 1 << 20
CANCEL_GRACE_S: Final = 1.0
"""For a batch that is cancelled: after that its workers are killed, and have to load again."""
LEARN: Final = 0.25
"""The weight of a new restore beside those before it."""
TOLD_RATIO: Final = 1.25
"""A restore time is announced again when it has changed by this much."""


class Offer(NamedTuple):
    """What is declared of a service. units: degrees of parallelism. idle_value: see `declared.Service`."""

    units: tuple[int, ...] = (1,)
    idle_value: float = 1.0


class Copy(NamedTuple):
    service: str
    gpus: tuple[int, ...]


class GpuBackend(NoPrograms, NoCalls):
    """places: by service and GPU. swaps: how many copies were evicted for another. restores: of one place each."""

    name = "gpu"

    def __init__(
        self, offers: Mapping[str, Offer], places: Mapping[tuple[str, int], Place], nursery: Nursery | None = None
    ) -> None:
        """nursery: of those places that are workers; it ends with this."""
        self._nursery = nursery
        self.unkillable: set[ActionKey] = set()
        self.swaps = self.restores = 0
        self._offers, self._places = dict(offers), dict(places)
        self._bytes: dict[str, int] = {}
        self._copies: dict[Copy, None] = {}
        """What the scheduler counts on; the first was used longest ago."""
        self._turns = {gpu: asyncio.Lock() for _, gpu in places}
        self._restore_s: dict[tuple[str, int], float] = {}
        self._told: dict[tuple[str, int], float] = {}
        self._tasks: dict[ActionKey, asyncio.Task[list[float]]] = {}

    async def begin(self) -> None:
        """Makes every service ready on every GPU. Raises Failed, with the service's name."""

        async def load(service: str, place: Place) -> None:
            try:
                self._bytes[service] = max(self._bytes.get(service, 0), await place.load())
            except Failed as failed:
                raise Failed(failed.kind, f"service {service}: {failed}") from None

        await asyncio.gather(*(load(service, place) for (service, _), place in self._places.items()))

    def services(self) -> dict[str, m.Service]:
        """What is to be announced: sizes, and restore times as they were seen."""
        for key, seconds in self._restore_s.items():
            told = self._told.get(key, 0.0)
            if not told / TOLD_RATIO <= seconds <= told * TOLD_RATIO:
                self._told[key] = seconds
        return {
            name: m.Service(
                weights_mib=-(-self._bytes.get(name, 0) // MIB),
                is_replicated=True,
                units=offer.units,
                idle_value_ppm=round(offer.idle_value * 1e6),
                restored_us=tuple(
                    sorted((units, round(told * 1e6)) for (service, units), told in self._told.items() if service == name)
                ),
            )
            for name, offer in self._offers.items()
        }

    # --- actions -----------------------------------------------------------------------------------------------

    async def score(
        self,
        key: ActionKey,
        payload: m.Score,
        service: str,
        gpus: tuple[int, ...],
        evicts: Sequence[m.Resident],
        *,
        timeout_ms: int,
    ) -> Ended:
        """Scores a batch on these GPUs, a part on each; `output.data` is a MessagePack array of numbers."""
        try:
            batch = msgspec.msgpack.decode(payload.batch, type=list[Any])
        except m.MALFORMED as why:
            return invalid(f"batch: {why}")
        if service not in self._offers or any((service, gpu) not in self._places for gpu in gpus) or not gpus:
            return invalid(f"service: {service!r} is not served on GPUs {', '.join(map(str, gpus)) or '(none)'}")
        called_s = time.monotonic()
        begun_s = 0.0

        async def work() -> list[float]:
            nonlocal begun_s
            async with self._alone(gpus):
                await self._resident(service, gpus, evicts)
                begun_s = time.monotonic()
                async with asyncio.timeout(timeout_ms / 1e3):
                    return await self._scores(service, gpus, batch)

        task = self._tasks[key] = asyncio.create_task(work())
        try:
            scores = await asyncio.shield(task)
            ended = Ended(outcome=Outcome.OK, output=m.Output(data=msgspec.msgpack.encode(scores)))
        except Failed as failed:
            ended = error(ErrorReason.INTERNAL, failed)
        except TimeoutError:
            ended = Ended(outcome=Outcome.TIMED_OUT, detail=f"no scores within {timeout_ms} ms")
        except asyncio.CancelledError:
            if not task.cancelled():  # whoever waits for it stops, not it
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Failed, TimeoutError):
                    await task
                raise
            ended = Ended(outcome=Outcome.CANCELLED)
        finally:
            self._tasks.pop(key, None)
        end_s = time.monotonic()
        begun_s = begun_s or end_s
        return msgspec.structs.replace(ended, startup_ns=round((begun_s - called_s) * 1e9), run_ns=round((end_s - begun_s) * 1e9))

    def kill(self, key: ActionKey) -> None:
        task = self._tasks.get(key)
        if task is not None:
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, task.cancel)

    async def prefetch(self, service: str, gpus: tuple[int, ...], evicts: Sequence[m.Resident]) -> None:
        if any((service, gpu) not in self._places for gpu in gpus):
            return
        try:
            async with self._alone(gpus):
                await self._resident(service, gpus, evicts)
        except Failed as failed:
            log.warning("%s was not fetched: %s", service, failed)

    # --- weights -----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _alone(self, gpus: Iterable[int]) -> Any:
        """The scheduler gives a GPU to one at a time; but for one that it has given up, whose worker may still end."""
        async with contextlib.AsyncExitStack() as stack:
            for gpu in sorted(gpus):
                await stack.enter_async_context(self._turns[gpu])
            yield

    async def _resident(self, service: str, gpus: tuple[int, ...], evicts: Sequence[m.Resident]) -> None:
        """Brings a service onto GPUs, all or none. Raises Failed."""
        for each in evicts:
            await self._drop(Copy(each.service, each.gpus))
        copy = Copy(service, gpus)
        missing = [gpu for gpu in gpus if not self._places[service, gpu].is_resident]
        if missing:
            began_s = time.monotonic()
            results = await asyncio.gather(*(self._restore(service, gpu) for gpu in missing), return_exceptions=True)
            failures = [each for each in results if isinstance(each, BaseException)]
            if failures:
                await asyncio.gather(*(self._evict(service, gpu) for gpu in missing))
                raise failures[0]
            if len(missing) == len(gpus):
                self._learn(service, len(gpus), time.monotonic() - began_s)
        self._copies.pop(copy, None)
        self._copies[copy] = None

    async def _restore(self, service: str, gpu: int) -> None:
        """Evicts whoever was used longest ago until there is room. Only who holds the GPU's turn comes here, so nobody on it is
        used."""
        place = self._places[service, gpu]
        while True:
            try:
                await place.restore()
                self.restores += 1
                return
            except Failed as failed:
                victim = next((each for each in self._copies if gpu in each.gpus and each.service != service), None)
                if failed.kind != "memory" or victim is None:
                    raise
                await self._drop(victim)

    async def _drop(self, copy: Copy) -> None:
        """Evicts what no other copy of the service needs."""
        if self._copies.pop(copy, self) is self:
            return
        self.swaps += 1
        kept = {gpu for each in self._copies if each.service == copy.service for gpu in each.gpus}
        for gpu in copy.gpus:
            if gpu not in kept:
                await self._evict(copy.service, gpu)

    async def _evict(self, service: str, gpu: int) -> None:
        place = self._places[service, gpu]
        if place.is_resident:
            try:
                await place.evict()
            except Failed as failed:  # its worker is killed, and the device has its memory back
                log.warning("%s on GPU %d: %s", service, gpu, failed)
                place.kill()

    def _learn(self, service: str, units: int, seconds: float) -> None:
        known = self._restore_s.get((service, units))
        self._restore_s[service, units] = seconds if known is None else known + LEARN * (seconds - known)

    async def _scores(self, service: str, gpus: tuple[int, ...], batch: list[Any]) -> list[float]:
        """Of a batch that is split evenly, in its order."""
        bounds = [len(batch) * number // len(gpus) for number in range(len(gpus) + 1)]
        parts = [batch[low:high] for low, high in pairwise(bounds)]
        calls: list[Awaitable[list[float]]] = [
            self._places[service, gpu].score(part) for gpu, part in zip(gpus, parts, strict=True) if part
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return [score for part in results if not isinstance(part, BaseException) for score in part]

    # --- sessions, and the end ---------------------------------------------------------------------------------

    async def open(self, key: SessionKey, payload: m.SessionOpen, grant: Grant) -> Ended:
        return invalid("this executor serves models: it has no sessions")

    async def close(self, key: SessionKey) -> Ended:
        return Ended(outcome=Outcome.OK)

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        closed = await asyncio.gather(*(place.close() for place in self._places.values()))
        if self._nursery is not None:
            await self._nursery.close()
        self.unkillable |= {
            ActionKey("gpu", service, gpu) for (service, gpu), gone in zip(self._places, closed, strict=True) if not gone
        }
