"""The `process` back end: programs straight on this host, for a laptop without Docker.

There is NO isolation: a program can read and change whatever the executor's user can. What is exact is the grant
(cores, cpu time, memory, where control groups can be written), the time-out, and that nothing is left behind.
"""

import asyncio
import contextlib
import errno
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tangram import limits
from tangram.executors.attempt import Attempts, error, invalid, lost_session
from tangram.executors.backend import ActionKey, Ended, Grant, NoServices, OnOutput, SessionKey
from tangram.executors.cpu import environment, files, folders
from tangram.executors.cpu.action import Action, SessionState, failed
from tangram.executors.cpu.cgroups import GroupGrounds
from tangram.executors.cpu.fence import Fence, Grounds
from tangram.executors.cpu.folders import Folder
from tangram.executors.cpu.hierarchies import Hierarchies, detect
from tangram.executors.cpu.marks import MarkGrounds
from tangram.executors.cpu.output import Held
from tangram.executors.cpu.spawn import check_descriptors, seal_descriptors
from tangram.messages import FileRead, FileWrite, Run, SessionOpen
from tangram.outcomes import ErrorReason, Outcome

BUDGET_S = limits.KILL_BUDGET_MS / 1000
WATCH_S = 0.5


class ProcessBackend(NoServices):
    """See `tangram.executors.backend.Backend`.

    Everything of this incarnation is in `folder` (root/<incarnation>) and in the control groups `paths`; `ledger` is
    the file of process sessions that stands in for control groups where there are none. All three are to be recorded
    before the first action (`presence.Claim.record`), so that a successor can clean up.

    cgroups: None uses them where they can be written, True insists on them, False does without; or exactly the given
    hierarchies. processes_max: processes and threads of a session, or of an action without one, where a group can bound
    them. Raises OSError if the folder or the groups cannot be made.
    """

    name = "process"

    def __init__(
        self,
        root: Path,
        incarnation: str,
        *,
        cgroups: bool | Hierarchies | None = None,
        processes_max: int = limits.PROCESSES_MAX,
    ) -> None:
        self.incarnation, self._processes_max = incarnation, processes_max
        self.folder = Path(root).absolute() / incarnation
        (self.folder / "sessions").mkdir(parents=True, exist_ok=True)
        (self.folder / "single").mkdir(exist_ok=True)
        seal_descriptors()
        self.ledger = self.folder / "processes"
        self.unkillable: set[ActionKey] = set()
        """Actions that have ended but still have a process, so that their cores are in use."""
        self._watches: list[asyncio.Task[None]] = []
        self._grounds = self._make_grounds(cgroups)
        self._sessions: dict[SessionKey, SessionState] = {}
        self._attempts: Attempts[Action] = Attempts()
        self._held = Held()

    def _make_grounds(self, cgroups: bool | Hierarchies | None) -> Grounds:
        found = cgroups if isinstance(cgroups, Hierarchies) else None if cgroups is False else detect()
        if found is not None:
            with contextlib.suppress(*([] if cgroups else [OSError])):
                return GroupGrounds(found, self.incarnation, self._processes_max)
        if cgroups:
            raise OSError(errno.EPERM, "control groups cannot be written on this host")
        return MarkGrounds(self.incarnation, self.ledger)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The control groups of this incarnation; empty without control groups."""
        return tuple(self._grounds.paths)

    @property
    def enforces(self) -> frozenset[str]:
        """Which of "cores", "cpu" (time), "memory", "processes" (how many) and "kill" are exact on this host; the others
        are best effort."""
        return self._grounds.enforces

    # --- sessions ------------------------------------------------------------------------------------------------

    async def open(self, key: SessionKey, payload: SessionOpen, grant: Grant) -> Ended:
        if why := environment.environment_objection(payload.env):
            return invalid(why)
        if payload.image:
            detail = f"image {payload.image!r}: this executor runs no images; start one with --sandbox docker"
            return error(ErrorReason.IMAGE, detail)
        if self._attempts.over or key in self._sessions:
            return error(
                ErrorReason.INTERNAL, "the executor is stopping" if self._attempts.over else "the session is open already"
            )
        name = _name(key)
        folder = Folder(self.folder / "sessions" / name)
        try:
            check_descriptors()
            folder.make()
            enclosure = self._grounds.session(name, [f"{environment.SESSION}={key}"], grant.memory_mib)
        except OSError as problem:
            folders.remove(folder.path)
            return failed(problem, begun=False)
        self._sessions[key] = SessionState(key=key, folder=folder, enclosure=enclosure, env=payload.env)
        return Ended(outcome=Outcome.OK)

    async def close(self, key: SessionKey) -> Ended:
        session = self._sessions.get(key)
        if session is None:
            return Ended(outcome=Outcome.OK)
        session.closing = True
        for action in list(session.actions):
            action.end(Outcome.ENVIRONMENT_LOST)
        async with session.closed:
            if self._sessions.get(key) is not session:
                return Ended(outcome=Outcome.OK)
            if not await session.enclosure.clear(BUDGET_S):
                return Ended(
                    outcome=Outcome.ERROR,
                    reason=ErrorReason.INTERNAL,
                    detail="processes of the session survive SIGKILL",
                    unkillable=True,
                )
            await session.idle()
            session.close_sinks()
            session.enclosure.remove()
            if not session.folder.remove_if_empty():
                removed = await asyncio.to_thread(folders.remove, session.folder.path)
                if not removed:
                    return Ended(outcome=Outcome.ERROR, reason=ErrorReason.DISK, detail="the session's folder cannot be removed")
            del self._sessions[key]
        return Ended(outcome=Outcome.OK)

    def _live(self, key: SessionKey) -> SessionState | None:
        session = self._sessions.get(key)
        return session if session is not None and not session.closing and session.folder.home.is_dir() else None

    async def write(self, session: SessionKey, payload: FileWrite) -> Ended:
        if (state := self._live(session)) is None:
            return lost_session()
        return await asyncio.to_thread(files.write, state.folder.home, payload)

    async def read(self, session: SessionKey, payload: FileRead) -> Ended:
        if (state := self._live(session)) is None:
            return lost_session()
        return await asyncio.to_thread(files.read, state.folder.home, payload)

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
            check_descriptors()
            ended = await (self._perform_single(action) if session is None else self._perform_inside(action, session))
        except OSError as problem:
            ended = failed(problem, begun=action.begun)
        if ended.unkillable and action.fence is not None:
            self.unkillable.add(action.key)
            self._watches.append(asyncio.create_task(self._watch(action.key, action.fence)))
        return ended

    async def _perform_inside(self, action: Action, key: SessionKey) -> Ended:
        state = self._live(key)
        if state is None:
            return lost_session()
        state.enter(action)
        try:
            ended = await action.perform(state.folder, state.enclosure, state)
        finally:
            state.leave(action)
        if not state.folder.home.is_dir():
            return replace(ended, outcome=Outcome.ENVIRONMENT_LOST, detail="the session's folder is gone", session_lost=True)
        return ended

    async def _perform_single(self, action: Action) -> Ended:
        name = f"{_name(action.key)}.{action.attempt}"
        folder = Folder(self.folder / "single" / name)
        folder.make()
        try:
            enclosure = self._grounds.single(name, action.marks)
            try:
                return await action.perform(folder, enclosure, None)
            finally:
                enclosure.remove()
        finally:
            if not folder.remove_if_empty():
                await asyncio.to_thread(folders.remove, folder.path)

    async def _watch(self, key: ActionKey, fence: Fence) -> None:
        """Waits for what SIGKILL could not end; its units are free again when it is gone."""
        while not await fence.empty():  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(WATCH_S)
        fence.remove()
        self.unkillable.discard(key)

    def kill(self, key: ActionKey) -> None:
        self._attempts.end(key)

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        self._attempts.end_all()
        if self._attempts.tasks:
            await asyncio.wait(self._attempts.tasks, timeout=2 * BUDGET_S)
        if self._sessions:
            await asyncio.wait([asyncio.create_task(self.close(key)) for key in self._sessions], timeout=2 * BUDGET_S)
        if await self._grounds.clear(BUDGET_S):
            await asyncio.to_thread(self._grounds.remove)
            await asyncio.to_thread(folders.remove, self.folder)


def _name(key: SessionKey | ActionKey) -> str:
    """A file name: tokens have no dots, so it is unambiguous, and it ends in a number, unlike any control file's."""
    return ".".join(str(part) for part in key)
