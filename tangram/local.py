"""A whole Tangram on this machine: embedded broker, scheduler and executors as processes of their own, which end with us.

`tangram up`, the demo, the bench and the tests use this one way to start it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Self

from tangram.broker import Broker, EmbeddedServer, apply
from tangram.errors import TangramError
from tangram.roles import PARENT, READY_FD

READY_TIMEOUT_S: Final = 600.0
"""A scheduler reads the whole log first: 1.3 million actions take over half a minute. One that fails says so at once."""
STOP_TIMEOUT_S: Final = 15.0


class ProcessFailed(TangramError):
    """A process of the local stack did not start, or ended by itself; the message has its last words."""


class RoleProcess:
    """`python -m MODULE ARGUMENTS...`, in a session of its own: Ctrl-C is for us, and we end it in order."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        module: str = "tangram",
    ) -> Self:
        """Returns when the process says that it is ready. Raises ProcessFailed."""
        reading, writing = os.pipe()
        try:
            with log.open("ab") as out:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", module, *arguments,
                    stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                    pass_fds=(writing,), start_new_session=True,
                    env={**os.environ, **(environment or {}), PARENT: str(os.getpid()), READY_FD: str(writing)},
                )  # fmt: skip
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        role = cls(name, process, log)
        try:
            ready = await asyncio.wait_for(_first_line(reading), READY_TIMEOUT_S)
        except TimeoutError:
            await role.stop(signal.SIGKILL)
            raise ProcessFailed(f"{name} was not ready after {READY_TIMEOUT_S:.0f} s: {role.last_words()}") from None
        except BaseException:
            await role.stop(signal.SIGKILL)
            raise
        if not ready:
            await process.wait()
            raise ProcessFailed(f"{name} did not start: {role.last_words()}")
        return role

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    async def stop(self, number: int = signal.SIGINT) -> None:
        """Sends a signal and waits for its end; kills it after STOP_TIMEOUT_S. Idempotent."""
        if self.process.returncode is not None:
            return
        try:
            self.process.send_signal(number)
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except ProcessLookupError:
            await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}, and it said nothing"


async def _first_line(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.readline()
    finally:
        transport.close()


class LocalStack:
    """Broker, streams, scheduler and executors in `folder`; an async context manager.

    policy, settings, shares, quotas (as for its command): of the scheduler. executors: how many on this machine's cores;
    gpu_arguments, api_arguments: of one on its GPUs, and of one that calls endpoints, if there is to be one. nats: use this
    broker instead of an embedded one. cores: how many of this machine's cores to offer; 0 for all. max_bytes: of streams, where
    not as declared.
    """

    def __init__(
        self,
        folder: Path,
        *,
        policy: str = "tangram",
        settings: Mapping[str, int] | None = None,
        shares: Mapping[str, int] | None = None,
        quotas: Sequence[str] = (),
        executors: int = 1,
        sync: Literal["always", "default"] = "always",
        port: int = 0,
        nats: str | None = None,
        cores: int = 0,
        max_bytes: Mapping[str, int] | None = None,
        scheduler_arguments: Sequence[str] = (),
        executor_arguments: Sequence[str] = (),
        gpu_arguments: Sequence[str] = (),
        api_arguments: Sequence[str] = (),
        verbose: bool = False,
    ) -> None:
        self.folder = folder
        self.policy, self.settings, self.executor_count = policy, dict(settings or {}), executors
        self.shares, self.quotas = dict(shares or {}), list(quotas)
        self.url = nats or ""
        self.server: EmbeddedServer | None = None
        self.scheduler: RoleProcess | None = None
        self.executors: list[RoleProcess] = []
        self._sync: Literal["always", "default"] = sync
        self._port, self._cores, self._max_bytes = port, cores, max_bytes
        self._scheduler_arguments = list(scheduler_arguments)
        self._executor_arguments = list(executor_arguments)
        self._gpu_arguments = list(gpu_arguments)
        self._api_arguments = list(api_arguments)
        self._verbose = ["--verbose"] if verbose else []
        self._started = 0

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises ProcessFailed, BrokerError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.url:
            self.server = await asyncio.to_thread(EmbeddedServer.start, self.folder / "broker", port=self._port, sync=self._sync)
            self.url = self.server.url
        broker = await Broker.connect(self.url, name="tangram streams apply")
        try:
            await apply(broker, max_bytes=self._max_bytes)
        finally:
            await broker.close()
        await self.start_scheduler()
        for _ in range(self.executor_count):
            await self.start_executor()
        if self._gpu_arguments:
            await self.start_gpu_executor(*self._gpu_arguments)
        if self._api_arguments:
            await self.start_api_executor(*self._api_arguments)

    async def start_scheduler(self) -> RoleProcess:
        arguments = ["scheduler", "--policy", self.policy, *self._verbose]
        arguments += self._scheduler_arguments
        for name, value in self.settings.items():
            arguments += ["--set", f"{name}={value}"]
        for task, weight in self.shares.items():
            arguments += ["--share", f"{task}={weight}"]
        for quota in self.quotas:
            arguments += ["--quota", quota]
        self.scheduler = await self._role("scheduler", arguments)
        return self.scheduler

    async def start_executor(self, *arguments: str) -> RoleProcess:
        """One more executor on this machine; further arguments as for `tangram executor cpu`."""
        cores = ["--cores", str(self._cores)] if self._cores else []
        return await self._executor("cpu", [*cores, *self._executor_arguments, *arguments])

    async def start_gpu_executor(self, *arguments: str) -> RoleProcess:
        """Arguments as for `tangram executor gpu`."""
        return await self._executor("gpu", arguments)

    async def start_api_executor(self, *arguments: str) -> RoleProcess:
        """Arguments as for `tangram executor api`."""
        return await self._executor("api", arguments)

    async def _executor(self, kind: str, arguments: Sequence[str]) -> RoleProcess:
        self._started += 1
        name = f"{kind}-{self._started}"
        named = [] if "--name" in arguments else ["--name", name]
        given = ["executor", kind, "--state", str(self.folder / "executors"), *self._verbose, *named]
        role = await self._role(name, [*given, *arguments])
        self.executors.append(role)
        return role

    async def _role(self, name: str, arguments: Sequence[str]) -> RoleProcess:
        # By the environment, because a command line can be read by every user of the machine.
        environment = {"TANGRAM_NATS": self.url}
        return await RoleProcess.start(name, arguments, self.folder / f"{name}.log", environment)

    async def wait_for_an_end(self) -> str:
        """Returns what a process said that ended by itself."""
        roles = [role for role in (self.scheduler, *self.executors) if role is not None]
        waits = {asyncio.create_task(role.process.wait()): role for role in roles}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        role = waits[next(iter(done))]
        return f"{role.name} ended: {role.last_words()}"

    async def stop(self) -> None:
        """Executors first, so that they can still report; the broker last."""
        await asyncio.gather(*(role.stop() for role in self.executors))
        if self.scheduler is not None:
            await self.scheduler.stop()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)
