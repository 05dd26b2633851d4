"""An executor as a process: reads its decisions, performs what the core says, reports. No decision is made in here."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import (
    Broker,
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
    Delivered,
    PullLoop,
    consumer_exists,
    last_for,
)
from tangram.errors import NewerVersion
from tangram.executors import core as c
from tangram.executors.backend import Backend, Ended, SessionKey
from tangram.executors.large import Large
from tangram.executors.live import live_output
from tangram.executors.outbox import Outbox
from tangram.executors.perform import perform
from tangram.executors.presence import Claim, DeadIncarnation, claim, find_dead, host_identity
from tangram.outcomes import ErrorReason, Outcome, RejectReason
from tangram.rules import broken_payload_rule
from tangram.version import __version__

log = logging.getLogger(__name__)

JOIN_RETRY_S = 0.25
SWEEP_S = 1.0
LEAVE_TIMEOUT_S = 5.0
CONSUMER_PATIENCE_S = 5.0
"""An incarnation whose consumer is not there for so long may have missed decisions for ever: it joins anew."""
HOLE_PATIENCE_S = 20.0
"""A leader that has given up on a message fills its number within a few seconds."""


class ExecutorReplaced(Exception):
    """Another process has joined under this executor's name; two of them would replace each other for ever."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """name: unique among executors. host: name of the machine. cores: ids by NUMA node. gpus: ids. capacity: of other resources
    ("memory" and "gpu_memory", of each GPU, in MiB). state: folder for locks and sandboxes. drain_s: how long a drain waits for
    what runs."""

    name: str
    host: str
    state: Path
    key: str = "cpu"
    cores: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[int, ...] = ()
    capacity: Mapping[str, int] = field(default_factory=dict)
    drain_s: float = 30.0


class MakeBackend(Protocol):
    """Makes the back end of one incarnation."""

    def __call__(self, claim: Claim) -> Backend: ...


class ExecutorService:
    """Runs one incarnation after the other until it is stopped. One instance a process."""

    def __init__(self, broker: Broker, config: ExecutorConfig, make_backend: MakeBackend) -> None:
        self.broker, self.config, self._make_backend = broker, config, make_backend
        self.joined = asyncio.Event()
        """Set while an incarnation is in the log and reads its decisions."""
        self.life: _Life | None = None
        self._stop = asyncio.Event()
        self._now = False

    async def run(self) -> None:
        """Raises ExecutorAlreadyRunning, ExecutorReplaced, or BrokerError when the connection is closed for good."""
        while not self._stop.is_set():
            life = self.life = _Life(self.broker, self.config, self._make_backend, self.joined)
            await life.live(self._stop, lambda: self._now)

    def stop(self, *, now: bool = False) -> None:
        """Drains: takes nothing new, lets what runs end, up to `drain_s`; with `now`, ends what runs at once."""
        self._now = self._now or now
        self._stop.set()
        if now and self.life is not None:
            self.life.hurry.set()


class _Life:
    """One incarnation, from its join to its last word."""

    def __init__(self, broker: Broker, config: ExecutorConfig, make_backend: MakeBackend, joined: asyncio.Event) -> None:
        self.broker, self.config, self._joined = broker, config, joined
        self.claim = claim(config.state, config.host, config.name)
        self.core = c.ExecutorCore(config.name, self.claim.incarnation)
        self.backend = make_backend(self.claim)
        self.hurry = asyncio.Event()
        self._over = asyncio.Event()
        self._abandoned = ""
        self._replaced = False
        self._left = False
        self._ending = False
        self._refusing = False
        self._outbox: Outbox | None = None
        self._tasks: dict[c.Attempt, asyncio.Task[None]] = {}
        self._killed: set[c.Attempt] = set()
        self._large = Large(broker)
        self._fetching: dict[c.Attempt, asyncio.Task[bytes]] = {}
        """Those whose payload is on its way."""
        self._entered: set[c.Attempt] = set()
        """Those whose task has taken its first step."""
        self._others: set[asyncio.Task[None]] = set()
        self._services: dict[str, m.Service] = {}
        """As they were announced."""

    # --- the course of it --------------------------------------------------------------------------------------

    async def live(self, stop: asyncio.Event, now: Callable[[], bool]) -> None:
        try:
            dead = await self._find_dead()
            await self.backend.begin()
            await self._join(dead)
            leader = await last_for(self.broker, subjects.STREAM, subjects.LEADER)
        except BaseException:
            await self.backend.stop()
            self.claim.release()
            raise
        self.core.led(leader.seq if leader is not None else 0)
        self._outbox = Outbox(self.broker, self.config.name, self.core.incarnation)
        for each in dead:
            each.forget()
        reader = await PullLoop.start(self.broker, subjects.STREAM, subjects.consumer(self.core.incarnation))
        self._joined.set()
        log.info("%s joined as %s", self.config.name, self.core.incarnation)
        helpers = [
            asyncio.create_task(self._read(reader)),
            asyncio.create_task(self._beat(reader)),
            asyncio.create_task(self._sweep()),
        ]
        stopping = asyncio.create_task(stop.wait())
        ending = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({stopping, ending, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for helper in helpers:
                if helper.done():
                    helper.result()  # none of them ends by itself: this raises why it did
            if stop.is_set() and not self._over.is_set():
                await self._drain(now())
        finally:
            self._joined.clear()
            stopping.cancel()
            ending.cancel()
            await self._end(helpers, reader)
        if self._replaced:
            raise ExecutorReplaced(f"executor {self.config.name!r}: {self._abandoned}; give each executor a name of its own")

    async def _join(self, dead: list[DeadIncarnation]) -> None:
        """Stores the join, and only then returns. Stored twice it is the same join: the fold ignores the second."""
        machine_id, boot_id = host_identity()
        self._services = self.backend.services()
        joined = m.ExecutorJoined(
            incarnation=self.core.incarnation,
            key=self.config.key,
            host=self.config.host,
            machine_id=machine_id,
            boot_id=boot_id,
            cores=[list(node) for node in self.config.cores],
            capacity=dict(self.config.capacity),
            dead=[each.incarnation for each in dead],
            version=__version__,
            features=[self.backend.name],
            gpus=list(self.config.gpus),
            services=self._services,
        )
        while True:
            try:
                await self.broker.publish(subjects.executors(self.config.name), m.encode(joined))
                return
            except (BrokerTimeout, BrokerUnavailable, Busy) as error:
                if self.broker.is_closed:
                    raise
                log.warning("join of %s: %s", self.config.name, error)
                await asyncio.sleep(JOIN_RETRY_S)

    async def _drain(self, now: bool) -> None:
        assert self._outbox is not None
        self.core.draining = True
        self._outbox.say(m.ExecutorDraining(incarnation=self.core.incarnation, k=1))
        if now:
            self.hurry.set()
        waits = [asyncio.create_task(event.wait()) for event in (self._over, self.hurry)]
        await asyncio.wait(waits, timeout=self.config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _end(self, helpers: list["asyncio.Task[None]"], reader: PullLoop) -> None:
        """Ends what still runs and says the last word, in bounded time. What was ended so is not reported: the scheduler
        decides what becomes of it when it reads that we have left."""
        self._ending = True
        for helper in helpers:
            helper.cancel()
        await asyncio.wait(helpers)
        await reader.close()
        for attempt, task in list(self._tasks.items()):
            self._kill(attempt, task)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=limits.KILL_BUDGET_MS / 1e3 + 1.0)
        await self.backend.stop()
        outbox = self._outbox
        if outbox is not None:
            # While a process of ours is alive its units are not ours to give back: a successor finds it dead, and says so.
            if not self._abandoned and not self.backend.unkillable and not self.broker.is_closed:
                try:
                    async with asyncio.timeout(LEAVE_TIMEOUT_S):
                        await outbox.flush()
                        outbox.say(m.ExecutorLeft(incarnation=self.core.incarnation, k=1))
                        await outbox.flush()
                        self._left = True
                except (TimeoutError, BrokerError) as error:
                    log.warning("%s could not take its leave: %s", self.config.name, error)
            await outbox.close(LEAVE_TIMEOUT_S if self._abandoned else 0.1)
        self.claim.release(forget=self._left)

    async def _find_dead(self) -> list[DeadIncarnation]:
        """Incarnations of this host whose process is dead, cleaned until nothing of them is left."""
        found = await asyncio.to_thread(find_dead, self.config.state, self.config.host, self.core.incarnation)
        return [each for each in found if await asyncio.to_thread(each.clean)]

    # --- helpers that run along --------------------------------------------------------------------------------

    async def _read(self, reader: PullLoop) -> None:
        while True:
            for delivered in await reader.batch():
                try:
                    self._perform(self._fold(delivered))
                except m.Malformed as error:
                    if error.unknown_type:
                        raise NewerVersion(f"a newer scheduler leads: upgrade this executor ({error})") from None
                    log.error("sequence %d on %s: %s", delivered.seq, delivered.subject, error)
                reader.ack(delivered)

    def _fold(self, delivered: Delivered) -> list[c.Instruction]:
        _, message = m.decode(delivered.subject, delivered.data)
        if isinstance(message, m.DecisionsMade):
            return self.core.decisions(message, delivered.seq)
        if isinstance(message, m.Ticked | m.ExecutorLost | m.Settings):
            return self.core.clock(message)
        if isinstance(message, m.LeaderStarted):
            self.core.led(delivered.seq)
        if isinstance(message, m.ExecutorJoined):
            return self.core.joined(message)
        return []

    async def _beat(self, reader: PullLoop) -> None:
        number = 0
        missing_s = hole_s = 0.0
        hole_at = 0
        while True:
            number += 1
            self._heartbeat(number=number)
            await asyncio.sleep(limits.HEARTBEAT_S)
            missing_s = missing_s + limits.HEARTBEAT_S if reader.state == "missing" else 0.0
            if missing_s >= CONSUMER_PATIENCE_S and await self._consumer_is_gone():
                self._perform(self.core.abandon("its consumer is gone"))
            hole_s = hole_s + limits.HEARTBEAT_S if self.core.held and self.core.next_number == hole_at else 0.0
            hole_at = self.core.next_number
            if hole_s >= HOLE_PATIENCE_S:  # the log was trimmed before they were read
                self._perform(self.core.abandon(f"its decisions from {hole_at} on do not come"))

    async def _consumer_is_gone(self) -> bool:
        """A cluster that has lost a node does not answer for its consumers until others have taken over."""
        try:
            return not await consumer_exists(self.broker, subjects.STREAM, subjects.consumer(self.core.incarnation))
        except BrokerError:
            return False

    def _heartbeat(self, *, number: int = 0, probe: int = 0) -> None:
        beat = m.Heartbeat(incarnation=self.core.incarnation, number=number, probe=probe, running=len(self.core.running))
        self.broker.send_soon(subjects.heartbeats(self.config.name), m.encode(beat))

    async def _sweep(self) -> None:
        """Says what has changed of the models, and testifies for neighbours on this host that died and did not come back."""
        assert self._outbox is not None
        while True:
            await asyncio.sleep(SWEEP_S)
            services = self.backend.services()
            if services != self._services:
                self._services = services
                self._outbox.say(m.ExecutorChanged(incarnation=self.core.incarnation, k=1, services=services))
            dead = await self._find_dead()
            if dead:
                self._outbox.say(
                    m.ExecutorChanged(incarnation=self.core.incarnation, k=1, dead=[each.incarnation for each in dead])
                )
                await self._outbox.flush()
                for each in dead:
                    each.forget()

    # --- performing --------------------------------------------------------------------------------------------

    def _perform(self, instructions: list[c.Instruction]) -> None:
        outbox = self._outbox
        assert outbox is not None
        for instruction in instructions:
            match instruction:
                case c.Begin(start, attempt, number):
                    self._tasks[attempt] = asyncio.get_running_loop().create_task(self._attempt(start, attempt, number))
                case c.Finish(action, result, output, spent):
                    outbox.finish(action, result, output, spent)
                case c.Kill(attempt):
                    self._kill(attempt, self._tasks[attempt])
                case c.Fetch(item):
                    self._spawn(self.backend.prefetch(item.service, item.gpus, item.evicts))
                case c.CloseSession(session):
                    self._spawn(self._close_session(session))
                case c.Return(item) | c.Report(item):
                    outbox.give_back(item)
                case c.Answer(probe):
                    self._heartbeat(probe=probe)
                case c.Leave():
                    self._over.set()
                case c.Abandon(reason, replaced):
                    log.warning("%s (%s) is over: %s", self.config.name, self.core.incarnation, reason)
                    self._abandoned, self._replaced = reason, replaced
                    self._over.set()

    def _kill(self, attempt: c.Attempt, task: "asyncio.Task[None]") -> None:
        self._killed.add(attempt)
        self.backend.kill(attempt.action)
        if (fetching := self._fetching.get(attempt)) is not None:
            fetching.cancel()
        # An opening has no program to kill. A task that was never entered would end without a word; it looks at `_killed`.
        if attempt in self._entered and self.core.running[attempt].kind == "session.open":
            task.cancel()

    async def _attempt(self, start: m.Start, attempt: c.Attempt, number: int) -> None:
        self._entered.add(attempt)
        try:
            ended = await self._run(start, attempt)
            if (ended.not_begun or ended.failed) and not ended.retry_after_ms:
                await asyncio.sleep(limits.REFUSAL_S)
                if attempt in self._killed:
                    ended = Ended(outcome=Outcome.CANCELLED)
        except asyncio.CancelledError:
            if attempt not in self._killed:
                raise
            await self.backend.close(SessionKey(start.task, start.client, start.n))
            ended = Ended(outcome=Outcome.CANCELLED)
        except TimeoutError:
            if start.kind == "session.open":
                await self.backend.close(SessionKey(start.task, start.client, start.n))
            # No program ran, so it is no verdict on one.
            ended = Ended(
                outcome=Outcome.ERROR, reason=ErrorReason.INTERNAL, detail=f"{start.kind} took over {start.timeout_ms} ms"
            )
        except Exception as error:
            log.exception("%s", attempt)
            ended = Ended(outcome=Outcome.ERROR, reason=ErrorReason.INTERNAL, detail=f"{type(error).__name__}: {error}")
        while attempt.action in self.backend.unkillable:
            # Its units are in use whatever we say: the answer would give them to the next one.
            log.error("%s: a process survives SIGKILL; its units stay held", attempt.action)
            await asyncio.sleep(SWEEP_S)
        if ended.session_lost and start.session:
            # The answer ends the session and gives its memory back: what still runs in it has to end first.
            await self._clear(SessionKey(start.task, start.client, start.session))
        self._tasks.pop(attempt, None)
        self._entered.discard(attempt)
        if self._ending and attempt in self._killed:
            return
        if ended.not_begun or ended.failed:
            if not self._refusing:  # one line for all that is given back until something runs again
                log.warning("what is decided is given back: %s", ended.detail)
            self._refusing = True
            reason = ended.detail[: limits.DETAIL_LENGTH_MAX]
            given_back = self.core.refused(attempt, number, reason, retry_after_ms=ended.retry_after_ms, failed=ended.failed)
            self._perform(given_back)
            return
        self._refusing = False
        output = ended.output if ended.output != _NO_OUTPUT else None
        result = self._result(start, attempt, ended)
        self._perform(self.core.ended(attempt, result, output, session_lost=ended.session_lost, spent=ended.spent))
        self._killed.discard(attempt)

    def _result(self, start: m.Start, attempt: c.Attempt, ended: Ended) -> m.Result:
        return m.Result(
            nonce=start.nonce,
            attempt=start.attempt,
            outcome=ended.outcome,
            reason=ended.reason,
            detail=ended.detail[: limits.DETAIL_LENGTH_MAX],
            exit_code=ended.exit_code,
            units=start.units,
            queued_ns=start.queued_ns,
            startup_ns=ended.startup_ns,
            run_ns=ended.run_ns,
            cpu_ns=ended.cpu_ns,
            memory_peak_bytes=ended.memory_peak_bytes,
        )

    async def _run(self, start: m.Start, attempt: c.Attempt) -> Ended:
        called_ns = time.monotonic_ns()
        async with self._large.room(start):
            payload = await self._payload(start, attempt)
            if isinstance(payload, Ended):
                return payload
            before_ns = time.monotonic_ns() - called_ns
            on_output = live_output(self.broker, start)
            ended = await perform(self.backend, start, attempt, payload, on_output)
            return await self._large.stored(start, replace(ended, startup_ns=ended.startup_ns + before_ns))

    async def _payload(self, start: m.Start, attempt: c.Attempt) -> m.Payload | Ended:
        """What is to be done, or how the attempt ended because that is not known or not wanted any more."""
        raw = start.payload
        if start.payload_blob and attempt not in self._killed:
            fetching = self._fetching[attempt] = asyncio.get_running_loop().create_task(self._large.payload(start))
            try:
                await asyncio.wait([fetching])
                raw = b"" if fetching.cancelled() else fetching.result()
            except BrokerError as error:
                return Ended(outcome=Outcome.ERROR, reason=ErrorReason.INTERNAL, detail=f"its payload could not be read: {error}")
            finally:
                del self._fetching[attempt]
                fetching.cancel()
        if attempt in self._killed:
            return Ended(outcome=Outcome.CANCELLED)
        try:
            payload = m.decode_payload(raw)
        except m.MALFORMED as error:
            return Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail=f"payload: {error}")
        if broken := broken_payload_rule(start.kind, payload):
            return Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail=broken)
        return payload

    async def _close_session(self, session: SessionKey) -> None:
        await self._clear(session)
        self._perform(self.core.session_closed(session, "closed"))

    async def _clear(self, session: SessionKey) -> None:
        """Returns when nothing of the sandbox is left, however long that takes."""
        while (ended := await self.backend.close(session)).outcome is not Outcome.OK:
            log.error("%s could not be closed, again: %s", session, ended.detail)
            await asyncio.sleep(SWEEP_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


_NO_OUTPUT = m.Output()
