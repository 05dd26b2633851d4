"""The `docker` back end: each session, and each program without one, in a container of its own.

Untrusted code is kept from the network, from the host's files and from more than its grant. It shares the host's
kernel: see docs/docker.md for what that does not protect from.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from tangram import limits
from tangram.executors.attempt import Attempts, error, invalid
from tangram.executors.backend import ActionKey, Ended, Grant, NoServices, OnOutput, SessionKey
from tangram.executors.cpu import environment
from tangram.executors.cpu.output import Held
from tangram.executors.docker import files
from tangram.executors.docker.action import BUDGET_S, Action, Box, lost
from tangram.executors.docker.containers import Containers, NotCreated
from tangram.executors.docker.control import Control
from tangram.executors.docker.engine import DockerUnavailable, Engine, EngineError
from tangram.executors.docker.local import LocalControl, find_groups
from tangram.executors.docker.profiles import HOME, LABEL_ACTION, LABEL_SESSION, DockerConfig
from tangram.executors.docker.remote import RemoteControl
from tangram.messages import FileRead, FileWrite, Run, SessionOpen
from tangram.outcomes import ErrorReason, Outcome

WATCH_S: Final = 0.5
STOP_S: Final = 15.0


class DockerBackend(NoServices):
    """See `tangram.executors.backend.Backend`.

    Everything of this incarnation is a container labelled with it; `leftovers.remove_incarnation` cleans up after a
    dead one. `engine` has been checked.
    """

    name = "docker"

    def __init__(self, engine: Engine, incarnation: str, config: DockerConfig) -> None:
        self.engine, self.incarnation, self.config = engine, incarnation, config
        self.unkillable: set[ActionKey] = set()
        """Actions that have ended but still have a process, so that their cores are in use."""
        self._containers = Containers(engine, config, incarnation)
        self._boxes: dict[SessionKey, Box] = {}
        self._opening: dict[SessionKey, asyncio.Task[Ended]] = {}
        self._attempts: Attempts[Action] = Attempts()
        self._tasks = self._attempts.tasks
        """Also those that end what nobody waits for."""
        self._watches: set[asyncio.Task[None]] = set()
        self._held = Held()

    # --- sessions ------------------------------------------------------------------------------------------------

    async def open(self, key: SessionKey, payload: SessionOpen, grant: Grant) -> Ended:
        if why := environment.environment_objection(payload.env):
            return invalid(why)
        image = payload.image or self.config.image
        if not image:
            return invalid("image: none named, and no default")
        if self._attempts.over or key in self._boxes or key in self._opening:
            return error(
                ErrorReason.INTERNAL, "the executor is stopping" if self._attempts.over else "the session is open already"
            )
        task = asyncio.create_task(self._open(key, image, payload, grant))
        self._opening[key] = task
        try:
            return await task
        except asyncio.CancelledError:
            if (us := asyncio.current_task()) is not None and us.cancelling():
                # It may have been opened at this very moment, and then nobody knows of it.
                self._keep(self.close(key))
                raise
            return Ended(outcome=Outcome.CANCELLED, detail="closed before it was open")
        finally:
            del self._opening[key]

    async def _open(self, key: SessionKey, image: str, payload: SessionOpen, grant: Grant) -> Ended:
        try:
            box = await self._make(_name(self.incarnation, key), image, {LABEL_SESSION: str(key)}, grant, strict=False)
            try:
                box.env, box.session = payload.env, key
                box.owner = await files.owner_of(self.engine, box.container)
                if box.container.home == HOME and box.owner != (0, 0):
                    await files.make_folder(self.engine, box.container.id, HOME, box.owner)
                await box.control.rest()
            except BaseException:
                self._drop(box)
                raise
        except NotCreated as problem:
            return error(problem.reason, problem)
        except (DockerUnavailable, EngineError, OSError) as problem:
            return error(ErrorReason.DAEMON, problem)
        if self._attempts.over:
            self._drop(box)
            return error(ErrorReason.INTERNAL, "the executor is stopping")
        self._boxes[key] = box
        return Ended(outcome=Outcome.OK)

    async def _make(self, name: str, image: str, labels: Mapping[str, str], grant: Grant, *, strict: bool) -> Box:
        container = await self._containers.make(name, image, labels, strict=strict, memory_mib=grant.memory_mib)
        found = None if self.config.cgroups is False else find_groups(container.id, container.pid)
        try:
            control: Control = RemoteControl(self.engine, container.id) if found is None else LocalControl(found, container.pid)
        except OSError:
            self._containers.bury(container.id)
            raise
        return Box(container=container, control=control)

    async def close(self, key: SessionKey) -> Ended:
        if (opening := self._opening.get(key)) is not None:
            opening.cancel()
            await asyncio.wait([opening])
        box = self._boxes.get(key)
        if box is None:
            return Ended(outcome=Outcome.OK)
        box.closing = True
        for action in list(box.actions):
            action.end(Outcome.ENVIRONMENT_LOST)
        async with box.closed:
            if self._boxes.get(key) is not box:
                return Ended(outcome=Outcome.OK)
            killed = await box.control.clear(BUDGET_S)
            if not await self._containers.remove(box.container.id):
                detail = "docker: the session's container cannot be removed"
                return replace(error(ErrorReason.DAEMON, detail), unkillable=not killed)
            box.control.close()
            del self._boxes[key]
        return Ended(outcome=Outcome.OK)

    async def write(self, session: SessionKey, payload: FileWrite) -> Ended:
        return await self._with_files(session, lambda box: files.write(self.engine, box.container, box.owner, payload))

    async def read(self, session: SessionKey, payload: FileRead) -> Ended:
        return await self._with_files(session, lambda box: files.read(self.engine, box.container, payload))

    async def _with_files(self, session: SessionKey, use: Any) -> Ended:
        box = self._boxes.get(session)
        if box is None or box.closing:
            return lost(session)
        try:
            if not await box.control.alive():
                return lost(session)
            ended: Ended = await use(box)
            return ended
        except (DockerUnavailable, EngineError) as problem:
            return error(ErrorReason.DAEMON, problem)

    # --- programs ------------------------------------------------------------------------------------------------

    def run(
        self,
        key: ActionKey,
        attempt: int,
        session: SessionKey | None,
        payload: Run,
        grant: Grant,
        *,
        timeout_ms: int,
        env: Mapping[str, str],
        on_output: OnOutput | None,
    ) -> Coroutine[Any, Any, Ended]:
        # Not a coroutine function: the action is known, and can be killed, before its coroutine has begun.
        action = Action(self.incarnation, key, attempt, payload, grant, timeout_ms, env, on_output, self._held)
        return self._attempts.run(action, self._attempts.add(action), partial(self._perform, session=session))

    async def _perform(self, action: Action, session: SessionKey | None) -> Ended:
        try:
            return await (self._perform_single(action) if session is None else self._perform_inside(action, session))
        except NotCreated as problem:
            return error(problem.reason, problem)
        except (DockerUnavailable, EngineError, OSError) as problem:
            return error(ErrorReason.DAEMON, problem)

    async def _perform_inside(self, action: Action, key: SessionKey) -> Ended:
        box = self._boxes.get(key)
        if box is None or box.closing:
            return lost(key)
        try:
            ended = await action.perform(self.engine, box)
        except (EngineError, OSError):
            if await box.control.alive(sure=True):
                raise
            return lost(key)
        if not ended.unkillable:
            return ended
        # What cannot be ended alone is ended with its container.
        box.closing = True
        for other in list(box.actions):
            other.end(Outcome.ENVIRONMENT_LOST)
        return await self._end_hard(action, box, replace(ended, session_lost=True))

    async def _perform_single(self, action: Action) -> Ended:
        if not self.config.image:
            return invalid("no image for programs without a session")
        name = f"{_name(self.incarnation, action.key)}.a{action.attempt}"
        labels = {LABEL_ACTION: str(action.key)}
        making = self._keep(self._make(name, self.config.image, labels, action.grant, strict=True))
        box: Box | None = await action.unless_ended(making)
        if box is None:
            making.add_done_callback(self._end_unwanted)
            return action.not_begun(action.early or Outcome.CANCELLED)
        try:
            ended = await action.perform(self.engine, box)
        except BaseException:
            self._drop(box)
            raise
        if ended.unkillable:
            return await self._end_hard(action, box, ended)
        if await box.control.clear(BUDGET_S):
            # Nothing runs in it any more: its outcome need not wait for the engine to remove it.
            self._drop(box)
        elif not await self._end(box):
            return await self._end_hard(action, box, ended)
        return ended

    def _end_unwanted(self, making: "asyncio.Task[Box]") -> None:
        """Ends a container that was ready at the moment it was given up."""
        if not making.cancelled() and making.exception() is None:
            self._drop(making.result())

    def _drop(self, box: Box) -> None:
        """Ends a container that nobody waits for."""
        self._keep(self._end_for_good(box))

    async def _end_for_good(self, box: Box) -> None:
        if not await self._end(box):
            self._containers.bury(box.container.id)

    async def _end(self, box: Box) -> bool:
        await box.control.clear(BUDGET_S)
        gone = await self._containers.remove(box.container.id)
        box.control.close()
        return gone

    async def _end_hard(self, action: Action, box: Box, ended: Ended) -> Ended:
        """Ends the whole container of an action that cannot be ended; says whether even that fails."""
        await box.control.clear(BUDGET_S)
        if await self._containers.remove(box.container.id, BUDGET_S):
            self._settle(action, box)
            return replace(ended, unkillable=False)
        self.unkillable.add(action.key)
        watch = asyncio.create_task(self._watch(action, box))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return replace(ended, unkillable=True)

    async def _watch(self, action: Action, box: Box) -> None:
        """Tries on; the action's units are free again when its container is really gone."""
        while not await self._containers.remove(box.container.id, BUDGET_S):  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(WATCH_S)
        self._settle(action, box)
        self.unkillable.discard(action.key)

    def _settle(self, action: Action, box: Box) -> None:
        if action.fence is not None:
            action.fence.close()
        box.control.close()
        if box.session is not None and self._boxes.get(box.session) is box:
            del self._boxes[box.session]

    # --- the end -------------------------------------------------------------------------------------------------

    def _keep(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def kill(self, key: ActionKey) -> None:
        self._attempts.end(key)

    async def settled(self) -> None:
        """Waits until no container of an ended action is left to be removed."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._containers.settled()

    async def stop(self) -> None:
        end = time.monotonic() + STOP_S
        for watch in self._watches:
            watch.cancel()
        self._attempts.end_all()
        closing = [asyncio.create_task(self.close(key)) for key in (*self._boxes, *self._opening)]
        if waiting := [*self._tasks, *closing]:
            await asyncio.wait(waiting, timeout=limits.KILL_BUDGET_MS / 1000)
        await self._containers.stop(max(2.0, end - time.monotonic()))
        for task in (*self._tasks, *closing):
            task.cancel()
        for box in self._boxes.values():
            box.control.close()


def _name(incarnation: str, key: SessionKey | ActionKey) -> str:
    """A container's name: tokens have no dots, so it is unambiguous."""
    return ".".join(("tangram", incarnation, *(str(part) for part in key)))
