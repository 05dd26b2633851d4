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
    LogGap,
    LogReader,
    NotLeader,
    StoredMessage,
    ensure_consumer,
    last_for,
    recorded_through,
)
from tangram.errors import TangramError
from tangram.scheduler import checkpoints
from tangram.scheduler.compose import Outgoing, cancels_for, compose
from tangram.scheduler.control import CannotChange, settings_for
from tangram.scheduler.exporter import Exporter
from tangram.scheduler.fold import Folded, Record, step
from tangram.scheduler.keeper import Keeper
from tangram.scheduler.payloads import Payloads
from tangram.scheduler.policies import POLICIES
from tangram.scheduler.questions import Questions
from tangram.scheduler.silence import Silence
from tangram.scheduler.state import BEHAVIOUR, ActionId, State
from tangram.scheduler.window import Window, plan
from tangram.version import __version__

log = logging.getLogger(__name__)

LEAD_RETRY_S = 0.25
SAY_S = 5.0
"""Between two words about an outage."""
RESTORE_TRIES = 5
UNREPORTED_MAX = 64
"""The first of many bad messages tell enough, and each may have a mebibyte."""
COLLECT_S = 60.0
"""Between two full collections of the garbage collector, at most."""
COLLECT_ACTIONS_MAX = 1_000
"""With no more open a full collection takes some milliseconds; with 100,000 it takes more than a pass may."""
CONSUMER_RETRY_S = 0.25
SEEDS_PER_MESSAGE = 150
"""A model with all the sizes that it may have takes up to 3 KB, and an envelope has 512."""
CONSUMER_IDLE_S = 3_600.0
"""The server forgets an executor's consumer that nobody has read for so long."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """leader: name in the log. settings: of `policies.SETTINGS`, all integers. shares: weights by task. quotas: by the name that
    actions use."""

    leader: str = "scheduler"
    policy: str = "tangram"
    settings: dict[str, int] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    quotas: dict[str, m.Quota] = field(default_factory=dict)
    silence_s: float = 30.0
    """An executor without a heartbeat for so long, while our own connection works, is lost; and what a client that asked for
    it (`cancel_on_disconnect`) has open is cancelled."""
    models: tuple[m.LearntModel, ...] = ()
    """What was learnt elsewhere: put into the log once, when this scheduler first leads."""


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
        self._payloads = Payloads(broker)
        self._keeper = Keeper(broker, self._payloads, [])
        self._exporter = Exporter(broker)
        self._models = config.models
        """Those not stored yet."""
        self._restored_seq = self._recorded_seq = 0
        self._reader: LogReader | None = None
        self._written_seq = 0
        self._own: set[int] = set()
        """Sequences of the last window's messages; only asked for membership."""
        self._writes = 0
        self._last_read_s = time.monotonic()
        self._last_tick_s = 0.0
        self._trouble_told_s = 0.0
        self._collected_s = 0.0
        self._own_epoch = 0
        self._unreported: list[tuple[StoredMessage, Folded]] = []
        """What was skipped while nobody led, as far as is known."""
        self._questions = Questions(broker, lambda: self.state)
        self._controls: list[tuple[str, m.Control]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._silence: Silence[str | tuple[str, str]] = Silence(config.silence_s, time.monotonic())
        """Of live incarnations, and of clients (task, name) that asked for it."""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Raises Superseded, NewerVersion, or BrokerError when the connection is closed for good."""
        asks = await self.broker.subscribe(
            "tangram.ask.*.*", lambda delivery: self._questions.take(delivery, is_ready=self.leading.is_set())
        )
        controls = await self.broker.subscribe(subjects.CONTROL, self._on_control)
        beats = await self.broker.subscribe("tangram.heartbeats.*", self._on_heartbeat)
        client_beats = await self.broker.subscribe(subjects.CLIENT_HEARTBEATS, self._on_client_heartbeat)
        forget = self.broker.on_reconnect(self._silence.forget)
        self._reader = await self._start_reading()
        try:
            while not self._stop.is_set():
                try:
                    await self._lead()
                except NotLeader as error:
                    if await self._is_superseded():
                        raise Superseded(f"another scheduler leads: {error}") from error
                    log.warning("what was last written to %s is no other leader's record: taking the lead again", subjects.LEADER)
                    await asyncio.sleep(LEAD_RETRY_S)
                except (BrokerTimeout, BrokerUnavailable, Busy) as error:
                    if self.broker.is_closed:
                        raise
                    # Our own late writes are fenced only by a newer record: take one, and read up to it.
                    if time.monotonic() - self._trouble_told_s >= SAY_S:  # else an outage is a line for each try
                        log.warning("the broker does not take what is written, taking the lead again: %s", error)
                        self._trouble_told_s = time.monotonic()
                    await asyncio.sleep(LEAD_RETRY_S)
        finally:
            forget()
            await client_beats.unsubscribe()
            await beats.unsubscribe()
            await asks.unsubscribe()
            await controls.unsubscribe()
            self._questions.close()
            await self._reader.close()
            for task in self._tasks:
                task.cancel()
        await self._exporter.write(self.state)

    async def _is_superseded(self) -> bool:
        """Whether what fences us is a record, and not our own, which a replica that leads the stream now may not have applied."""
        try:
            last = await last_for(self.broker, subjects.STREAM, subjects.LEADER)
            if last is not None and last.seq == self._own_epoch:
                return False
            return last is not None and m.decode(last.subject, last.data) is not None
        except m.Malformed as error:
            return error.unknown_type
        except BrokerError:
            return True

    async def _start_reading(self) -> LogReader:
        """From the newest checkpoint on. Whoever leads meanwhile may trim past it before we read: then from the next one."""
        for left in range(RESTORE_TRIES, 0, -1):
            restored = await checkpoints.restore(self.broker)
            self._recorded_seq = recorded_through(await self.broker.api(f"STREAM.INFO.{subjects.STREAM}"))
            if restored is not None:
                await checkpoints.read_payloads(self.broker, restored, self._payloads)
                self.state, self._keeper.ends = restored.state, restored.ends
                self._restored_seq = self.state.seq
                log.info("state restored from the checkpoint at sequence %d", self.state.seq)
            try:
                return await LogReader.start(self.broker, subjects.STREAM, self.state.seq + 1)
            except LogGap:
                if left == 1:
                    raise
        raise AssertionError("unreachable")

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
            checkpoint_seq=self._restored_seq,
            shares=self.config.shares,
            quotas=self.config.quotas,
        )
        self.leading.clear()
        writer = await LeaderWriter.acquire(self.broker, subjects.STREAM, subjects.LEADER, m.encode(record))
        self._written_seq = self._own_epoch = writer.epoch
        assert self._reader is not None
        self._reader.expect(writer.epoch)
        while self.state.seq < writer.epoch and not self._stop.is_set():
            self._fold(await self._reader.batch(1.0))
        for incarnation in self.state.incarnations.values():
            if incarnation.live:
                self._spawn(self._make_consumer(incarnation.id, incarnation.executor, incarnation.joined_seq))
        gc.collect()
        gc.freeze()
        self._collected_s = time.monotonic()
        # The fold makes many short-lived objects and few cycles. (Not in executors: there cycles hold outputs.)
        gc.set_threshold(20_000, 20, 100)
        if seeds := self._seeds():
            await self._write(writer, seeds)
        self._models = ()
        self.leading.set()
        self._trouble_told_s = 0.0
        for skipped in self._unreported:
            self._report(*skipped)
        self._unreported.clear()
        if self._keeping is None:
            self._keeping = self._spawn(self._keeper.run(self.state))
            self._spawn(self._exporter.run(self.state))
        log.info("leading since sequence %d, log read up to %d", writer.epoch, self.state.seq)
        while not self._stop.is_set():
            if self.state.epoch > writer.epoch:
                raise Superseded(f"another scheduler leads since sequence {self.state.epoch}")
            await self._turn(writer)
            if writer.epoch <= self._keeper.wants_record_above and self.state.seq >= self._written_seq:
                log.info("the log is to be trimmed past our record: taking a new one")
                return

    async def _turn(self, writer: LeaderWriter) -> None:
        """One round: read what has come, then, if our last window is among it, write the next."""
        assert self._reader is not None
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()  # it returns never: this raises
        self._fold(await self._reader.batch(self._wait_s()))
        self._questions.answer_waiting()
        await self._control(writer)
        if self.state.seq < self._written_seq:
            return
        writes = [*await self._window(), *self._tick(), *await self._silent(), *self._admission()]
        if writes:
            await self._write(writer, writes)

    async def _write(self, writer: LeaderWriter, writes: list[tuple[str, bytes]]) -> None:
        assert self._reader is not None
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
            folded = step(self.state, Record(message.seq, message.recorded_ns(self._recorded_seq), message.subject, message.data))
            self._last_read_s = time.monotonic()
            self._keeper.read(len(message.data))
            if folded.skipped:
                if message.seq in self._own:  # planning again would write it again, for ever
                    raise TangramError(f"sequence {message.seq} is ours and was skipped: {folded.skipped}")
                self._report(message, folded)
            elif isinstance(folded.message, m.DecisionsMade | m.ClockMessage):
                self._unreported.clear()  # a scheduler led after they had come
                if isinstance(folded.message, m.Ticked):
                    self._last_tick_s = self._last_read_s
            elif isinstance(folded.message, m.ActionsSubmitted):
                self._payloads.stored(message, folded.message, self.state.actions)
            elif isinstance(folded.message, m.ActionsFinished):
                _, task, client = message.subject.rsplit(".", 2)
                for n in folded.message.ids:
                    if (action := ActionId(task, client, n)) not in self.state.actions:  # else it was about another
                        self._payloads.drop(action)
            elif isinstance(folded.message, m.ExecutorJoined) and self.leading.is_set():
                assert folded.address is not None
                self._spawn(self._make_consumer(folded.message.incarnation, folded.address.first, message.seq))

    def _report(self, message: StoredMessage, folded: Folded) -> None:
        if not self.leading.is_set():
            if len(self._unreported) < UNREPORTED_MAX:
                self._unreported.append((message, folded))
            return
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
        trouble = False
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
                if not trouble:
                    log.warning("consumer of %s, tried again and again: %s", executor, error)
                trouble = True
                await asyncio.sleep(CONSUMER_RETRY_S)

    # --- writing -----------------------------------------------------------------------------------------------

    async def _window(self) -> list[tuple[str, bytes]]:
        state = self.state
        if not state.queues and not state.owed:
            return []
        window = self._plan()
        if not window.decisions and not window.prefetches and not state.owed:
            return []
        found = await self._payloads.fetch([each.action for each in window.decisions], state.actions, ahead=True)
        outgoing = compose(state, window, lambda action: found.get(action.id))
        return [(subject, m.encode(message)) for subject, message in outgoing]

    def _plan(self) -> Window:
        try:
            return plan(self.state)
        except Exception:
            log.exception("the pass failed; this window is made by fcfs-minimum")
            return plan(self.state, "fcfs-minimum")

    def _admission(self) -> list[tuple[str, bytes]]:
        """Whether submissions are refused is state, so that every fold refuses the same ones."""
        closed = self._keeper.admission_closed
        if closed == self.state.admission_closed:
            return []
        log.warning("submissions are %s", "refused: the log is nearly full" if closed else "accepted again")
        return [(subjects.CLOCK, m.encode(m.Settings(epoch=self.state.epoch, admission_closed=closed)))]

    def _seeds(self) -> list[tuple[str, bytes]]:
        new = [each for each in self._models if (each.task, each.kind) not in self.state.models]
        batches = [new[at : at + SEEDS_PER_MESSAGE] for at in range(0, len(new), SEEDS_PER_MESSAGE)]
        return [(subjects.CLOCK, m.encode(m.ModelsSeeded(epoch=self.state.epoch, models=batch))) for batch in batches]

    def _tick(self) -> list[tuple[str, bytes]]:
        if not self.state.wants_ticks or self._until_tick_s() > 0:
            return []
        self._last_tick_s = time.monotonic()
        self._spare()
        return [(subjects.CLOCK, m.encode(m.Ticked(epoch=self.state.epoch)))]

    def _spare(self) -> None:
        """What has lived for a second waits for something, so the collector need not walk it again and again. What was kept so
        and is garbage after all is found when little waits."""
        if len(self.state.actions) <= COLLECT_ACTIONS_MAX and self._last_tick_s - self._collected_s > COLLECT_S:
            gc.unfreeze()
            gc.collect()
            self._collected_s = self._last_tick_s
        gc.freeze()

    def _until_tick_s(self) -> float:
        """Seconds until the next tick (see `State.next_tick_ns`). Log time has gone on since we last read."""
        now_s = time.monotonic()
        now_ns = self.state.now_ns + round((now_s - self._last_read_s) * 1e9)
        last_ns = now_ns - round((now_s - self._last_tick_s) * 1e9)
        return max(self.state.next_tick_ns(last_ns) - now_ns, 0) / 1e9

    def _wait_s(self) -> float:
        if self.state.seq < self._written_seq or not self.state.wants_ticks:
            return 1.0
        return min(self._until_tick_s(), 1.0)

    # --- silence -----------------------------------------------------------------------------------------------

    def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            incarnation = m.decode_heartbeat(delivery.data).incarnation
        except m.MALFORMED as error:
            log.warning("heartbeat on %s dropped: %s", delivery.subject, error)
            return
        if incarnation in self.state.incarnations:
            self._silence.heard(incarnation, time.monotonic())

    def _on_client_heartbeat(self, delivery: Delivery) -> None:
        _, _, task, client = delivery.subject.split(".")
        self._silence.heard((task, client), time.monotonic())

    async def _silent(self) -> list[tuple[str, bytes]]:
        """Losses to write, once a second, and what ends with a client. What a lost incarnation holds stays held until somebody
        proves it dead, so a loss that was none costs outcomes and no safety; it reads of it in the log, ends what it runs, and
        joins anew."""
        now_s, state = time.monotonic(), self.state
        if not self._silence.due(now_s):
            return []
        live = {holder.id: holder for holder in state.incarnations.values() if holder.live}
        in_sandboxes = {session.id[:2] for session in state.sessions.values()}
        clients = [
            who for who, client in state.clients.items() if client.cancel_on_disconnect and (client.open or who in in_sandboxes)
        ]
        if not self._silence.silent([*live, *clients], now_s):
            return []
        await self.broker.rtt()  # raises if it is we who hear nothing
        silent = self._silence.silent([*live, *clients], now_s)  # without those whose word was on its way
        outgoing = [outgoing for who in silent if isinstance(who, tuple) for outgoing in cancels_for(state, *who)]
        reason = f"silent for {self.config.silence_s:g} s"
        for holder in [live[who] for who in silent if isinstance(who, str)]:
            lost = m.ExecutorLost(epoch=state.epoch, executor=holder.executor, incarnation=holder.id, reason=reason)
            outgoing.append(Outgoing(subjects.CLOCK, lost))
        if outgoing:
            log.warning("%s: %s", reason, ", ".join(who if isinstance(who, str) else "client " + "/".join(who) for who in silent))
        return [(subject, m.encode(message)) for subject, message in outgoing]

    # --- changes while it leads --------------------------------------------------------------------------------

    def _on_control(self, delivery: Delivery) -> None:
        if self._reader is None or not delivery.reply.startswith("_INBOX.") or len(self._controls) >= limits.ASKS_WAITING_MAX:
            return
        try:
            self._controls.append((delivery.reply, m.decode_control(delivery.data)))
        except m.MALFORMED as error:
            log.warning("request on %s dropped: %s", delivery.subject, error)
        self._reader.wake()

    async def _control(self, writer: LeaderWriter) -> None:
        """One change, stored and told by itself: the next is made of what it leaves."""
        if not self._controls or self.state.seq < self._written_seq:
            return
        reply, control = self._controls.pop(0)
        error = ""
        try:
            settings = settings_for(self.state, control)
        except CannotChange as why:
            error = str(why)
        else:
            log.warning("quotas are changed: %s", ", ".join([*control.quotas, *(f"{name} goes" for name in control.without)]))
            await self._write(writer, [(subjects.CLOCK, m.encode(settings))])
        await self.broker.send(reply, m.encode(m.Controlled(error=error)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
