"""The scheduler as a process: reads the log into the core, writes what the core decides and owes, answers questions.

There is no decision in here. One window is on its way at a time: it is planned again when the last one has come back
in the log, so what arrives meanwhile is the next window, and when it is quiet an action is decided at once.
"""

import asyncio
import gc
import logging
import platform
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import (
    Broker,
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
    Delivery,
    LeaderWriter,
    LogReader,
    NotLeader,
    StoredMessage,
    ensure_consumer,
    next_stored,
    read_log,
)
from tangram.errors import TangramError
from tangram.scheduler.answers import answer
from tangram.scheduler.compose import compose
from tangram.scheduler.fold import Folded, Record, step
from tangram.scheduler.payloads import PayloadCache
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.state import BEHAVIOUR, Action, ActionId, State
from tangram.scheduler.window import Window, plan
from tangram.version import __version__

log = logging.getLogger(__name__)

ASK_PATIENCE_S = 10.0
"""A question about something that this scheduler has not read yet waits this long, then it is dropped: it comes again."""
LEAD_RETRY_S = 0.25
CONSUMER_RETRY_S = 0.25
CONSUMER_IDLE_S = 3_600.0
"""The server forgets an executor's consumer that nobody has read for so long."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """leader: name in the log. settings: of `policies.SETTINGS`, all integers."""

    leader: str = "scheduler"
    policy: str = "tangram"
    settings: dict[str, int] = field(default_factory=dict)
    silence_s: float = 30.0
    """An executor without a heartbeat for so long, while our own connection works, is lost."""


class Superseded(Exception):
    """Another scheduler has stored a newer leader's record. Nothing that this one writes is accepted any more."""


class SchedulerService:
    """Leads until `stop` is set. One instance a process."""

    def __init__(self, broker: Broker, config: SchedulerConfig) -> None:
        if config.policy not in POLICIES:
            raise ValueError(f"policy: must be one of {', '.join(POLICIES)} (got {config.policy!r})")
        self.broker, self.config = broker, config
        self.state = State()
        self.leading = asyncio.Event()
        """Set while it leads and has read the log up to its own record."""
        self._payloads = PayloadCache()
        self._reader: LogReader | None = None
        self._written_seq = 0
        self._own: set[int] = set()
        """Sequences of the last window's messages; only asked for membership."""
        self._writes = 0
        self._last_read_s = time.monotonic()
        self._last_tick_s = 0.0
        self._asks: list[tuple[float, Delivery, m.Ask]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard_s: dict[str, float] = {}
        """When each live incarnation was last heard of, or since when we listen."""
        self._checked_s = time.monotonic()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Raises Superseded, NewerVersion, or BrokerError when the connection is closed for good."""
        asks = await self.broker.subscribe("tangram.ask.*.*", self._on_ask)
        beats = await self.broker.subscribe("tangram.heartbeats.*", self._on_heartbeat)
        forget = self.broker.on_reconnect(self._heard_s.clear)
        self._reader = await LogReader.start(self.broker, subjects.STREAM, 1)
        try:
            while not self._stop.is_set():
                try:
                    await self._lead()
                except NotLeader as error:
                    raise Superseded(f"another scheduler leads: {error}") from error
                except (BrokerTimeout, BrokerUnavailable, Busy) as error:
                    if self.broker.is_closed:
                        raise
                    # Our own late writes are fenced only by a newer record: take one, and read up to it.
                    log.warning("the broker does not take what is written, taking the lead again: %s", error)
                    await asyncio.sleep(LEAD_RETRY_S)
        finally:
            forget()
            await beats.unsubscribe()
            await asks.unsubscribe()
            await self._reader.close()
            for task in self._tasks:
                task.cancel()

    def stop(self) -> None:
        self._stop.set()

    async def _lead(self) -> None:
        record = m.LeaderStarted(
            leader=self.config.leader,
            behaviour=BEHAVIOUR,
            policy=self.config.policy,
            settings=self.config.settings,
            code_version=__version__,
            python_version=platform.python_version(),
        )
        self.leading.clear()
        writer = await LeaderWriter.acquire(self.broker, subjects.STREAM, subjects.LEADER, m.encode(record))
        self._written_seq = writer.epoch
        assert self._reader is not None
        self._reader.expect(writer.epoch)
        while self.state.seq < writer.epoch and not self._stop.is_set():
            self._fold(await self._reader.batch(1.0))
        for incarnation in self.state.incarnations.values():
            if incarnation.live:
                self._spawn(self._make_consumer(incarnation.id, incarnation.executor, incarnation.joined_seq))
        # What has been read so far lives long: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        # The fold makes many short-lived objects and few cycles. (Not in executors: there cycles hold outputs.)
        gc.set_threshold(20_000, 20, 100)
        self.leading.set()
        log.info("leading since sequence %d, log read up to %d", writer.epoch, self.state.seq)
        while not self._stop.is_set():
            if self.state.epoch > writer.epoch:
                raise Superseded(f"another scheduler leads since sequence {self.state.epoch}")
            await self._turn(writer)

    async def _turn(self, writer: LeaderWriter) -> None:
        """One round: read what has come, then, if our last window is among it, write the next."""
        assert self._reader is not None
        self._fold(await self._reader.batch(self._wait_s()))
        self._answer_asks()
        if self.state.seq < self._written_seq:
            return
        writes = [*await self._window(), *self._tick(), *await self._silent()]
        if not writes:
            return
        acks = await writer.write_all([(subject, data, self._id(writer)) for subject, data in writes])
        self._own = {ack.seq for ack in acks}
        self._written_seq = max(self._own)
        self._reader.expect(self._written_seq)

    def _id(self, writer: LeaderWriter) -> str:
        self._writes += 1
        return f"{writer.epoch}-{self._writes}"

    # --- reading -----------------------------------------------------------------------------------------------

    def _fold(self, messages: list[StoredMessage]) -> None:
        for message in messages:
            folded = step(self.state, Record(message.seq, message.stamp_ns, message.subject, message.data))
            self._last_read_s = time.monotonic()
            if folded.skipped:
                if message.seq in self._own:  # planning again would write it again, for ever
                    raise TangramError(f"sequence {message.seq} is ours and was skipped: {folded.skipped}")
                self._report(message, folded)
            elif isinstance(folded.message, m.ActionsSubmitted):
                self._keep_payloads(message, folded.message)
            elif isinstance(folded.message, m.ActionsFinished):
                _, task, client = message.subject.rsplit(".", 2)
                for n in folded.message.ids:
                    self._payloads.drop(ActionId(task, client, n))
            elif isinstance(folded.message, m.ExecutorJoined) and self.leading.is_set():
                assert folded.address is not None
                self._spawn(self._make_consumer(folded.message.incarnation, folded.address.first, message.seq))
            elif isinstance(folded.message, m.Ticked):
                self._last_tick_s = self._last_read_s

    def _keep_payloads(self, stored: StoredMessage, message: m.ActionsSubmitted) -> None:
        _, task = stored.subject.rsplit(".", 1)
        for index, n in enumerate(message.ids):
            action = self.state.actions.get(ActionId(task, message.client, n))
            if action is not None and action.order == (stored.seq, index):  # else it is a duplicate
                self._payloads.keep(action.id, message.payloads[index])

    def _report(self, message: StoredMessage, folded: Folded) -> None:
        if not self.leading.is_set():
            return  # it was reported when it came
        log.warning("sequence %d on %s skipped: %s", message.seq, message.subject, folded.skipped)
        letter = m.DeadLetter(
            origin_seq=message.seq,
            subject=message.subject,
            reason=folded.skipped[: limits.DETAIL_LENGTH_MAX],
            data=message.data[: limits.ENVELOPE_BYTES_MAX],
        )
        kind = "broken" if folded.skipped.startswith("broken") else "malformed"
        self.broker.publish_soon(subjects.dead(kind), m.encode(letter), headers={"Nats-Msg-Id": f"dead-{message.seq}"})

    async def _make_consumer(self, incarnation: str, executor: str, joined_seq: int) -> None:
        """Makes the consumer through which one incarnation reads its decisions; idempotent, tried until it is there."""
        while True:
            try:
                await ensure_consumer(
                    self.broker,
                    subjects.STREAM,
                    subjects.consumer(incarnation),
                    # Its own subject too: there it sees, in the log's order, when it is replaced.
                    filter_subjects=[
                        subjects.decisions_of(executor),
                        subjects.executors(executor),
                        subjects.CLOCK,
                        subjects.LEADER,
                    ],
                    start_seq=joined_seq,
                    ack_wait_s=limits.ACK_WAIT_S,
                    max_ack_pending=limits.CONSUMER_ACK_PENDING_MAX,
                    inactive_threshold_s=CONSUMER_IDLE_S,
                )
                return
            except BrokerError as error:
                if self.broker.is_closed:
                    return
                log.warning("consumer of %s: %s", executor, error)
                await asyncio.sleep(CONSUMER_RETRY_S)

    # --- writing -----------------------------------------------------------------------------------------------

    async def _window(self) -> list[tuple[str, bytes]]:
        state = self.state
        if not state.queues and not state.owed:
            return []
        window = self._plan()
        if not window.decisions and not state.owed:
            return []
        missing = [d.action for d in window.decisions if self._payloads.get(d.action.id) is None]
        fetched = await self._read_back(missing) if missing else {}
        outgoing = compose(state, window, lambda action: self._payloads.get(action.id) or fetched.get(action.id))
        return [(subject, m.encode(message)) for subject, message in outgoing]

    def _plan(self) -> Window:
        try:
            return plan(self.state)
        except Exception:
            log.exception("the pass failed; this window is made by fcfs-minimum")
            return plan(self.state, "fcfs-minimum")

    async def _read_back(self, actions: list[Action]) -> dict[ActionId, bytes]:
        """Fetches payloads that the cache did not keep. What is not in the log any more stays absent."""
        found: dict[ActionId, bytes] = {}
        messages: dict[int, m.LogMessage] = {}
        for action in actions:
            seq, index = action.order
            if seq not in messages:
                stored = next(iter(await read_log(self.broker, subjects.STREAM, seq, batch=1)), None)
                if stored is None or stored.seq != seq:
                    # A replica that lags may not have it yet.
                    stored = await next_stored(self.broker, subjects.STREAM, seq)
                if stored is not None and stored.seq == seq:
                    messages[seq] = m.decode(stored.subject, stored.data)[1]
            message = messages.get(seq)
            if isinstance(message, m.ActionsSubmitted):
                found[action.id] = message.payloads[index]
        return found

    def _tick(self) -> list[tuple[str, bytes]]:
        if not self.state.wants_ticks or self._until_tick_s() > 0:
            return []
        self._last_tick_s = time.monotonic()
        return [(subjects.CLOCK, m.encode(m.Ticked(epoch=self.state.epoch)))]

    def _until_tick_s(self) -> float:
        """Seconds until the next tick: one a second, earlier for a due timer, at most 20 a second."""
        now_s = time.monotonic()
        since_tick_s = now_s - self._last_tick_s
        until_s = limits.TICK_NS / 1e9 - since_tick_s
        due_ns = self.state.timers.next_due_ns()
        if due_ns is not None:
            timer_s = (due_ns - self.state.now_ns) / 1e9 - (now_s - self._last_read_s)
            until_s = min(until_s, max(timer_s, limits.TIMER_GRAIN_NS / 1e9 - since_tick_s))
        return max(until_s, 0.0)

    def _wait_s(self) -> float:
        if self.state.seq < self._written_seq or not self.state.wants_ticks:
            return 1.0
        return min(self._until_tick_s(), 1.0)

    # --- silence -----------------------------------------------------------------------------------------------

    def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            self._heard_s[m.decode_heartbeat(delivery.data).incarnation] = time.monotonic()
        except m.MALFORMED as error:
            log.warning("heartbeat on %s dropped: %s", delivery.subject, error)

    async def _silent(self) -> list[tuple[str, bytes]]:
        """Losses to write, once a second. What a lost incarnation holds stays held until somebody proves it dead, so a loss
        that was none costs outcomes and no safety; it reads of it in the log, ends what it runs, and joins anew."""
        now_s = time.monotonic()
        since_s = now_s - self._checked_s
        if since_s < 1.0:
            return []
        self._checked_s = now_s
        if since_s - 1.0 > self.config.silence_s / 2:  # we were stopped ourselves: what was said meanwhile is still unread
            self._heard_s.clear()
        live = [holder for holder in self.state.incarnations.values() if holder.live]
        self._heard_s = {holder.id: self._heard_s.get(holder.id, now_s) for holder in live}
        silent = [holder for holder in live if now_s - self._heard_s[holder.id] > self.config.silence_s]
        if not silent:
            return []
        await self.broker.rtt()  # raises if it is we who hear nothing
        reason = f"silent for {self.config.silence_s:g} s"
        log.warning("lost: %s", ", ".join(f"{holder.executor} ({holder.id})" for holder in silent))
        return [
            (
                subjects.CLOCK,
                m.encode(m.ExecutorLost(epoch=self.state.epoch, executor=holder.executor, incarnation=holder.id, reason=reason)),
            )
            for holder in silent
        ]

    # --- questions ---------------------------------------------------------------------------------------------

    def _on_ask(self, delivery: Delivery) -> None:
        try:
            ask = m.decode_ask(delivery.data)
        except m.MALFORMED as error:
            log.warning("question on %s dropped: %s", delivery.subject, error)
            return
        if delivery.reply and len(self._asks) < limits.ENVELOPE_ITEMS_MAX:
            self._asks.append((time.monotonic() + ASK_PATIENCE_S, delivery, ask))
        if self.leading.is_set():
            self._answer_asks()

    def _answer_asks(self) -> None:
        waiting: list[tuple[float, Delivery, m.Ask]] = []
        now_s = time.monotonic()
        for until_s, delivery, ask in self._asks:
            if ask.stored_seq <= self.state.seq:
                self._spawn(self._answer(delivery, ask))
            elif until_s > now_s:
                waiting.append((until_s, delivery, ask))
        self._asks = waiting

    async def _answer(self, delivery: Delivery, ask: m.Ask) -> None:
        _, _, task, client = delivery.subject.split(".")
        try:
            reply = await answer(self.broker, self.state, task, client, ask)
            await self.broker.send(delivery.reply, m.encode(reply))
        except BrokerError as error:
            log.warning("question on %s not answered: %s", delivery.subject, error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
