"""Containers from their making to their removal. Whatever fails or is cancelled on the way, none is left behind."""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from tangram.executors.docker.engine import DockerUnavailable, Engine, EngineError
from tangram.executors.docker.profiles import HOME, LABEL_INCARNATION, DockerConfig, container
from tangram.outcomes import ErrorReason

POLL_S: Final = 0.05
REMOVE_S: Final = 10.0
STOP_S: Final = 5.0
LIFT_S: Final = 5.0
UNANSWERED_MAX: Final = 3
UNANSWERED_S: Final = 3.0
"""An engine that leaves so many questions unanswered for so long is given up."""
UNSURE_S: Final = 60.0
"""How long a container is looked for whose creation had no answer."""
BURY_PAUSE_S: Final = 5.0


class Container(Struct, frozen=True, kw_only=True):
    """A running one. pid: of its main process as its host counts. home: where programs run. user: as the
    image says, "" is root."""

    id: str
    name: str
    pid: int
    home: str
    user: str
    strict: bool


class NotCreated(Exception):
    """The engine could not make it; the text says why."""

    def __init__(self, message: str, reason: ErrorReason = ErrorReason.DAEMON) -> None:
        super().__init__(message)
        self.reason = reason


class NameTaken(NotCreated):
    """There is a container of that name."""


class Containers:
    """The containers of one incarnation."""

    def __init__(self, engine: Engine, config: DockerConfig, incarnation: str) -> None:
        self.engine, self.config, self.incarnation = engine, config, incarnation
        self._turns = asyncio.Semaphore(config.creates_max)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unwanted: set[str] = set()

    async def make(self, name: str, image: str, labels: Mapping[str, str], *, strict: bool, memory_mib: int) -> Container:
        """Makes and starts one. Cancelled or failed it leaves none, perhaps a moment later. Raises NotCreated,
        DockerUnavailable."""
        task = self._keep(asyncio.create_task(self._make(name, image, labels, strict=strict, memory_mib=memory_mib)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The call is not broken off: only its answer tells for certain what is to be removed.
            if not task.done():
                self._unwanted.add(name)
            elif not task.cancelled() and task.exception() is None:
                self.bury(name)
            raise

    async def _make(self, name: str, image: str, labels: Mapping[str, str], *, strict: bool, memory_mib: int) -> Container:
        asked = False
        try:
            async with asyncio.timeout(self.config.create_s), self._turns:
                home, user = (HOME, "") if strict else await self._home_and_user(image)
                mine = {LABEL_INCARNATION: self.incarnation, **labels}
                body = container(self.config, image, mine, strict=strict, memory_mib=memory_mib, home=home)
                self._check_wanted(name)
                asked = True
                create = await self._create("/containers/create", {"name": name}, body)
                self._check_wanted(name)
                await self._create(f"/containers/{create['Id']}/start", {}, None)
                self._check_wanted(name)
                state = (await self.engine.call("GET", f"/containers/{create['Id']}/json")).json()["State"]
                # Nothing is awaited between this and the end of the task: whoever gives up later finds it done.
                self._check_wanted(name)
                if not state["Running"]:
                    raise NotCreated(f"image {image!r}: its container ended at once (needs /bin/sh and sleep)", ErrorReason.IMAGE)
                return Container(id=create["Id"], name=name, pid=int(state["Pid"]), home=home, user=user, strict=strict)
        except BaseException as error:
            if asked and not isinstance(error, NameTaken):
                # Without an answer it is not known whether, and when, the engine makes it.
                self.bury(name, 0.0 if isinstance(error, NotCreated) else UNSURE_S)
            else:
                self._unwanted.discard(name)
            if isinstance(error, TimeoutError):
                raise DockerUnavailable(f"docker: no container within {self.config.create_s:g} s") from None
            if isinstance(error, EngineError):
                raise NotCreated(f"docker: {error}") from None
            raise

    def _check_wanted(self, name: str) -> None:
        if name in self._unwanted:
            raise NotCreated("given up by its caller")

    async def _home_and_user(self, image: str) -> tuple[str, str]:
        try:
            config = (await self.engine.call("GET", f"/images/{image}/json")).json().get("Config") or {}
        except EngineError as error:
            raise _image_error(image, error) from None
        home = str(config.get("WorkingDir") or "/")
        return HOME if home == "/" else home, str(config.get("User") or "")

    async def _create(self, path: str, query: Mapping[str, str], body: Any) -> dict[str, str]:
        try:
            answer = await self.engine.call("POST", path, query, body=body, timeout_s=self.config.create_s)
        except EngineError as error:
            raise _image_error(body["Image"] if body else "", error) from None
        return dict(answer.json() or {})

    # --- the end of them -----------------------------------------------------------------------------------------

    async def remove(self, name: str, budget_s: float = REMOVE_S) -> bool:
        """Kills and removes one, by name or id; whether it is gone."""
        async with self._turns:
            return await remove(self.engine, name, budget_s)

    def bury(self, name: str, unsure_s: float = 0.0) -> None:
        """Sees to it that one is removed, by name or id, however long the engine takes; where it is not known whether the
        engine makes it, it is looked for during `unsure_s`."""
        self._keep(asyncio.create_task(self._bury(name, unsure_s)))

    async def _bury(self, name: str, unsure_s: float) -> None:
        begun = time.monotonic()
        pause = POLL_S
        while not await remove(self.engine, name, REMOVE_S) or time.monotonic() < begun + unsure_s:
            await asyncio.sleep(pause)
            pause = min(2 * pause, BURY_PAUSE_S)
        self._unwanted.discard(name)

    def _keep(self, task: "asyncio.Task[Any]") -> "asyncio.Task[Any]":
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Its failure, if it has one, was told to whoever still waits for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def settled(self) -> None:
        """Waits until nothing is being made or buried."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self, budget_s: float) -> bool:
        """Removes all of this incarnation, those being made too; whether none is left."""
        end = time.monotonic() + budget_s
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=min(budget_s / 2, STOP_S))
        for task in self._tasks:
            task.cancel()
        return await remove_all(self.engine, self.incarnation, max(1.0, end - time.monotonic()))


def _image_error(image: str, error: EngineError) -> NotCreated:
    text = str(error)
    if error.status == 404 and "image" in text.lower():
        return NotCreated(f"image {image!r} is not on this host: docker pull {image}", ErrorReason.IMAGE)
    if error.status == 409:
        return NameTaken(f"docker: {text}")
    if "no space left" in text:
        return NotCreated(f"docker: {text}", ErrorReason.DISK)
    # The engine answers 400 to what the container's own start ran into, and 500 to some of it in older versions.
    wrong = error.status == 400 or any(sign in text for sign in ("OCI runtime", "unable to find user", "invalid reference"))
    return NotCreated(f"docker: {text}", ErrorReason.IMAGE if wrong else ErrorReason.DAEMON)


async def remove(engine: Engine, name: str, budget_s: float) -> bool:
    """Kills and removes one container; whether it is gone within the budget."""
    end = time.monotonic() + budget_s
    pause = POLL_S
    while True:
        left = max(0.5, end - time.monotonic())
        try:
            await engine.call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"}, timeout_s=min(left, engine.call_s))
        except EngineError as error:
            if error.status == 404:
                return True
        except DockerUnavailable:
            pass
        else:
            return True
        if time.monotonic() > end:
            return False
        await asyncio.sleep(pause)
        pause = min(2 * pause, 1.0)


async def lift(engine: Engine, name: str) -> None:
    """Removes the limit on cpu time: killed processes need some to end, and an engine gives up on many that have none."""
    with contextlib.suppress(EngineError, DockerUnavailable):
        await engine.call("POST", f"/containers/{name}/update", body={"CpuQuota": -1}, timeout_s=min(engine.call_s, LIFT_S))


async def find(engine: Engine, incarnation: str, timeout_s: float = 0.0) -> list[str]:
    """The ids of an incarnation's containers, in whatever state. Raises DockerUnavailable, EngineError."""
    filters = json.dumps({"label": [f"{LABEL_INCARNATION}={incarnation}"]})
    answer = await engine.call("GET", "/containers/json", {"all": "1", "filters": filters}, timeout_s=timeout_s)
    return [str(each["Id"]) for each in answer.json()]


async def remove_all(engine: Engine, incarnation: str, budget_s: float) -> bool:
    """Removes all containers of an incarnation; true only if the engine says, twice, that none is left."""
    end = time.monotonic() + budget_s
    clean, failures = 0, 0
    while clean < 2 and failures < UNANSWERED_MAX:
        left = end - time.monotonic()
        if left <= 0:
            return False
        try:
            found = await find(engine, incarnation, min(left, engine.call_s, UNANSWERED_S))
        except (DockerUnavailable, EngineError):
            failures += 1
            continue
        clean = 0 if found else clean + 1
        await asyncio.gather(*(lift(engine, each) for each in found[:16]))
        await asyncio.gather(*(remove(engine, each, max(0.5, end - time.monotonic())) for each in found[:16]))
        if clean < 2:
            await asyncio.sleep(POLL_S)
    return clean == 2
