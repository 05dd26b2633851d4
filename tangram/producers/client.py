"""The client: publishes actions, and resolves each with the first outcome that the log has for it.

Submissions are grouped: what queued up while the last message was on its way travels as one. Results come as the stream
republishes them; what is missed (a reconnect, a gap, silence) is asked for.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, BrokerError, BrokerTimeout, BrokerUnavailable, Delivery, GroupedPublisher, PubAck
from tangram.config import broker_url
from tangram.errors import CallError, ClientClosed, InvalidRequest, ScoreError
from tangram.outcomes import ErrorReason, Outcome
from tangram.producers import build, request
from tangram.producers.large import Large
from tangram.producers.options import CallOptions, OnOutput, RunOptions, ScoreOptions, SessionOptions
from tangram.producers.pending import Ledger, Pending, republished, size_bytes
from tangram.producers.presence import beat, instance_at
from tangram.producers.recall import Recall, checked_key, number_of
from tangram.producers.result import Result
from tangram.producers.session import Session
from tangram.producers.waiting import Waiting
from tangram.producers.watch import Watcher

if TYPE_CHECKING:
    from tangram.producers.blocking import BlockingClient

log = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0
"""An action without an outcome is asked for after this long, then ever more rarely."""
ASK_TIMEOUT_S: Final = 5.0
RECALL_TIMEOUT_S: Final = 30.0
"""For a question that may make a scheduler read all of this client's outcomes."""
HELLO_TIMEOUT_S: Final = 1.0
CONNECT_RETRY_S: Final = 0.1
CLOSE_TIMEOUT_S: Final = 5.0

_CANCELS: Final = "cancels"
_NOT_CONNECTED: Final = "the client is not connected: use it in an `async with` block, or call connect()"


class Client:
    """A connection of one producer. Use it in one event loop, as `async with`; any number of actions may be under way.

    url: of the broker; without one, $TANGRAM_NATS, then what `tangram up` has left for this user. task: the RL job whose
    actions these are. name: of this producer, unique in its task; made up if not given. A process that comes back under the
    name of an earlier one takes its place.
    cancel_on_disconnect: what is open, sessions too, ends with this client: at `close`, and when it is not heard of for the
    scheduler's silence (30 s). It says so once a second from this event loop: one that is blocked for longer is dead.
    Cancelling a task that waits for an action cancels the action.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        task: str,
        name: str | None = None,
        connect_timeout: float = 10.0,
        cancel_on_disconnect: bool = False,
    ) -> None:
        self.task = subjects.token(task, "task")
        self.name = subjects.token(name if name is not None else f"c{secrets.token_hex(6)}", "name")
        if url is not None and not isinstance(url, str):
            raise InvalidRequest("url", "must be a text", url)
        self._url = url
        self._connect_timeout_s = request.milliseconds("connect_timeout", connect_timeout, 1) / 1e3
        self._cancel_on_disconnect = cancel_on_disconnect
        self._broker: Broker | None = None
        self._ledger = Ledger()
        self._recall = Recall(f"{self.task}/{self.name}", self._ledger, self._question, self._barrier)
        self._instance = 0
        """Which process of its name this is; later ones are higher."""
        self._room = asyncio.Event()
        self._watcher = Watcher(self._ledger, self._question, self._resend, self._room)
        self._output_wanted = False
        self._publisher: GroupedPublisher[Hashable, Pending | int] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self.sandboxes: set[int] = set()
        """Sessions that were opened here and not closed."""
        self._large: Large | None = None
        self._trace_id = secrets.token_hex(16)

    @staticmethod
    def blocking(
        url: str | None = None,
        *,
        task: str,
        name: str | None = None,
        connect_timeout: float = 10.0,
        cancel_on_disconnect: bool = False,
    ) -> "BlockingClient":
        """The same without an event loop of the caller's, for threads and scripts."""
        from tangram.producers.blocking import BlockingClient  # noqa: PLC0415  # it imports this module

        return BlockingClient(
            url, task=task, name=name, connect_timeout=connect_timeout, cancel_on_disconnect=cancel_on_disconnect
        )

    # --- connection --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connects, and waits for a scheduler that answers. Raises BrokerUnavailable with what to do about it."""
        if self._broker is not None:
            raise ClientClosed("a client connects once: make another")
        deadline_s = time.monotonic() + self._connect_timeout_s
        try:
            self._broker = await Broker.connect(
                broker_url(self._url),
                name=f"tangram client {self.task}/{self.name}",
                connect_timeout_s=self._connect_timeout_s,
                on_closed=self._on_lost_for_good,
                # Of its own, so that a server's permissions can keep what it is answered from other tasks.
                inbox_prefix=f"_INBOX_{self.task}",
            )
        except BrokerUnavailable as error:
            raise BrokerUnavailable(f"{error}; `tangram up` starts one on this machine") from None
        try:
            await self._broker.subscribe(subjects.results(self.task, self.name), self._on_result)
            hello = await self._hello(deadline_s)
        except BaseException:
            await self._broker.close()
            raise
        self._watcher.begin(hello.through_seq)
        self._ledger.next_n = max(self._ledger.next_n, hello.next_n)
        self._instance = instance_at(hello.through_seq)
        self._publisher = GroupedPublisher(
            self._broker,
            self._encode,
            self._on_stored,
            items_max=limits.ENVELOPE_ITEMS_MAX,
            size=size_bytes,
            bytes_max=limits.ENVELOPE_BYTES_MAX,
            on_refused=self._on_refused,
        )
        self._large = Large(self._broker, self.task, self._send, self._on_unsent)
        self._recall.fetch = self._large.fetch
        self._broker.on_reconnect(self._on_reconnect)
        self._watching = asyncio.create_task(self._watcher.run())
        if self._cancel_on_disconnect:
            self._beating = asyncio.create_task(beat(self._broker, self.task, self.name))

    async def _hello(self, deadline_s: float) -> m.Answer:
        """What a scheduler knows: the log's sequence (this client is born there), and the numbers used under its name. Asked
        again and again, because a question is dropped by a scheduler that has too many of them, or that dies."""
        assert self._broker is not None
        while True:
            left_s = max(0.1, deadline_s - time.monotonic())
            try:
                data = await self._broker.request(
                    subjects.ask(self.task, self.name), m.encode(m.Ask()), timeout_s=min(left_s, HELLO_TIMEOUT_S)
                )
                return m.decode_answer(data)
            except (BrokerUnavailable, BrokerTimeout, *m.MALFORMED):
                if time.monotonic() + CONNECT_RETRY_S > deadline_s or self._broker.is_closed:
                    raise BrokerUnavailable(
                        f"no scheduler answers at {self._broker.url}: start one with `tangram up` or `tangram scheduler`"
                    ) from None
            await asyncio.sleep(CONNECT_RETRY_S)

    async def close(self) -> None:
        """Sends what is queued, then disconnects. Actions that are still open go on, unless the client was made with
        `cancel_on_disconnect`: then they are cancelled, and open sessions end. Who waits for what has no outcome
        by then gets ClientClosed."""
        if self._broker is None or self._publisher is None or self._watching is None:
            return
        if self._cancel_on_disconnect:
            for n in [*self._ledger.open, *sorted(self.sandboxes)]:
                self._cancel(n)
        self._watching.cancel()
        if self._beating is not None:
            self._beating.cancel()
        if self._large is not None:
            await self._large.close(CLOSE_TIMEOUT_S)
        await self._publisher.close(CLOSE_TIMEOUT_S)
        await self._broker.close()
        self._give_up(ClientClosed("the client was closed"))

    def _on_lost_for_good(self) -> None:
        self._give_up(ClientClosed("the connection to the broker was closed for good"))

    def _give_up(self, error: Exception) -> None:
        for pending in list(self._ledger.open.values()):
            pending.waiter.fail(error)
        self._ledger.open.clear()
        self._recall.close(error)
        self._room.set()

    # --- what users call ---------------------------------------------------------------------------------------

    async def run(self, command: str | Sequence[str], **options: Unpack[RunOptions]) -> Result:
        """Runs a program in a sandbox of its own, which is gone afterwards, and returns how it ended.

        command: a text for the shell, or a program with its arguments. Options: see `RunOptions`.
        What the program did is an outcome, never an exception. Raises InvalidRequest for a bad request, ClientClosed, and for
        a payload that is too large for the log and cannot be stored BlobsFull, AccessDenied or another BrokerError.
        """
        return await self.perform(*build.program(command, self._trace_id, **options), on_output=options.get("on_output"))

    async def start(self, command: str | Sequence[str], **options: Unpack[RunOptions]) -> Waiting:
        """As `run`, but returns when the action is stored, with what to await for its result. Its `id` can be kept: should
        this process die, `result` finds the outcome in the next one of this name. `cancel()` asks for its end."""
        _, waiting = await self.submit(*build.program(command, self._trace_id, **options), on_output=options.get("on_output"))
        await self.stored()
        return waiting

    async def result(self, id: int | str | None = None, *, key: str = "", timeout: float | None = None) -> Result:  # noqa: A002
        """The result of an action that this client, or an earlier one of its task and name, has submitted: by its id
        (`Result.id`, `Waiting.id`, or the number in it), or by the caller's own key. Waits while it is open; stopping to wait
        does not cancel it.

        Raises UnknownAction if there never was one, ResultGone if its outcome is no longer in the log, TimeoutError after
        `timeout` seconds, InvalidRequest, ClientClosed.
        """
        if (id is None) == (not key):
            raise InvalidRequest("id", "must be given, or else a key", id)
        n = 0 if id is None else number_of(id, self.task, self.name)
        async with asyncio.timeout(timeout):
            return await self._recall.result(n, checked_key(key))

    def cancel(self, id: int | str) -> None:  # noqa: A002
        """Asks for the end of an action of this client, or of an earlier one of its task and name. It still has one outcome,
        which may be another if it had ended already. The id of the action that opened a session ends the session."""
        n = number_of(id, self.task, self.name)
        if self._publisher is None:
            raise ClientClosed(_NOT_CONNECTED)
        if n >= self._ledger.next_n:
            raise InvalidRequest("id", "must be of an action that was submitted", id)
        self._cancel(n)

    async def score(self, service: str, batch: Sequence[object], **options: Unpack[ScoreOptions]) -> list[float]:
        """What a service's model says of each item of a batch, in its order. Items are what MessagePack can hold: texts, numbers,
        bytes, lists and dicts of them. An empty batch asks nobody. Options: see `ScoreOptions`.

        Raises ScoreError if it was not scored; InvalidRequest, ClientClosed, and as `run` for a batch too large for the log.
        """
        spec, payload = build.scoring(service, batch, self._trace_id, **options)
        if not batch:
            return []
        result = await self.perform(spec, payload, key="gpu")
        if not result.ok:
            raise ScoreError(result)
        return m.decode_scores(result.data)

    async def scored(self, service: str, batch: Sequence[object], **options: Unpack[ScoreOptions]) -> Result:
        """As `score`, but returns how it ended, whatever that was; `data` is a MessagePack array of the scores."""
        return await self.perform(*build.scoring(service, batch, self._trace_id, **options), key="gpu")

    async def call(self, endpoint: str, arguments: Mapping[str, object] | None = None, **options: Unpack[CallOptions]) -> Any:
        """What an endpoint answers: parsed if it is JSON, else a text, else bytes. Options: see `CallOptions`.

        Raises CallError if it was not asked, or did not answer with success; InvalidRequest, ClientClosed, and as `run` for what
        is too large for the log.
        """
        result = await self.called(endpoint, arguments, **options)
        response = result.response
        if not result.ok or response is None:
            raise CallError(result)
        return response.content

    async def called(
        self, endpoint: str, arguments: Mapping[str, object] | None = None, **options: Unpack[CallOptions]
    ) -> Result:
        """As `call`, but returns how it ended, whatever that was; `response` is what was answered, if anything was."""
        return await self.perform(*build.calling(endpoint, arguments, self._trace_id, **options), key="api")

    @asynccontextmanager
    async def session(self, **options: Unpack[SessionOptions]) -> AsyncIterator[Session]:
        """A sandbox that lives from here to the end of the block. Its memory is held all the time, cores only by actions.

        Options: see `SessionOptions`. Raises SessionError if it cannot be opened, InvalidRequest, ClientClosed.
        """
        box = await self.open_session(**options)
        try:
            yield box
        finally:
            await box.close()

    async def open_session(self, **options: Unpack[SessionOptions]) -> Session:
        """As `session`, for callers that close it themselves."""
        return await Session.open(self, *build.opening(self._trace_id, **options))

    async def noop(self, *, units: request.Units = 1) -> Result:
        """An action that takes the whole path but starts no program, to measure the path."""
        return await self.perform(build.spec(self._trace_id, kind="noop", units=units), m.Noop())

    # --- for Session and the adapters --------------------------------------------------------------------------

    @property
    def trace_id(self) -> str:
        return self._trace_id

    async def perform(
        self, spec: m.ActionSpec, payload: m.Payload, *, key: str = "cpu", on_output: OnOutput | None = None
    ) -> Result:
        """Submits one action and waits for its outcome. Cancelling the caller cancels the action."""
        _, waiting = await self.submit(spec, payload, key=key, on_output=on_output)
        return await waiting

    async def submit(
        self, spec: m.ActionSpec, payload: m.Payload, *, key: str = "cpu", on_output: OnOutput | None = None
    ) -> tuple[int, "Waiting"]:
        """Submits one action for executors of kind `key`; returns its number and what to await. Waits only while too many numbers
        are open."""
        wire = request.wire(key, spec, payload)
        if self._broker is None or self._publisher is None or self._large is None or self._broker.is_closed:
            raise ClientClosed(_NOT_CONNECTED)
        if on_output is not None and not self._output_wanted:
            self._output_wanted = True
            await self._broker.subscribe(subjects.output(self.task, self.name), self._on_chunk)
        ledger = self._ledger
        while ledger.next_n - ledger.done_below >= limits.CLIENT_SEEN_WIDTH_MAX:
            self._room.clear()
            await self._room.wait()
        now_s = time.monotonic()
        n = ledger.next_n
        waiting = Waiting(f"{self.task}/{self.name}/{n}", now_s, partial(self._cancel, n))
        after_seq = max(
            self._watcher.born, self._watcher.stored_seq
        )  # not what was read: whoever forges a result would choose it
        waiting.fetch = self._large.fetch
        pending = Pending(n, wire, waiting, now_s, PATIENCE_S, after_seq, on_output=on_output)
        if not self._large.take(pending):
            self._send(pending)
        ledger.add(pending)
        return n, waiting

    def _send(self, pending: Pending) -> None:
        """Raises ClientClosed."""
        assert self._publisher is not None
        try:
            self._publisher.add(pending.wire.key, pending)
        except BrokerUnavailable as error:
            raise ClientClosed(str(error)) from None

    def _resend(self, pending: Pending) -> None:
        assert self._publisher is not None
        pending.stored = False
        self._publisher.add(pending.wire.key, pending)

    async def stored(self) -> None:
        """Returns when all that was submitted by now is in the log, or has failed. Raises ClientClosed."""
        assert self._publisher is not None
        assert self._large is not None
        await self._large.sent()
        try:
            await self._publisher.flush()
        except BrokerUnavailable as error:
            raise ClientClosed(str(error)) from None

    def close_orphan(self, n: int, result: m.Result) -> None:
        """A session that opened although its caller had given up: nobody else can close it."""
        if result.outcome is Outcome.OK:
            self._cancel(n)

    @property
    def open_actions(self) -> int:
        """How many of its actions have no outcome."""
        return len(self._ledger.open)

    # --- below -------------------------------------------------------------------------------------------------

    def _cancel(self, n: int) -> None:
        pending = self._ledger.open.get(n)
        if self._publisher is None or (pending is not None and pending.cancelled):
            return
        if pending is not None:
            pending.cancelled = True
            if self._large is not None and self._large.drop(n):
                self._on_unsent(pending, None)
                return
        try:
            self._publisher.add(_CANCELS, n)
        except BrokerUnavailable:
            log.debug("closed: action %d goes on", n)

    def _on_unsent(self, pending: Pending, why: Exception | None) -> None:
        """It will never be in the log. None: it was cancelled."""
        if self._ledger.open.pop(pending.n, None) is None:
            return
        if why is None:
            pending.settle(Outcome.CANCELLED, detail="before it was sent")
        else:
            pending.waiter.fail(why)
        self._room.set()

    async def _question(self, question: m.Ask) -> m.Answer:
        """Asks a scheduler. Raises BrokerError, ClientClosed."""
        if self._broker is None or self._broker.is_closed:
            raise ClientClosed(_NOT_CONNECTED)
        timeout_s = RECALL_TIMEOUT_S if question.recall else ASK_TIMEOUT_S
        return m.decode_answer(
            await self._broker.request(subjects.ask(self.task, self.name), m.encode(question), timeout_s=timeout_s)
        )

    async def _barrier(self) -> int:
        """Stores something that means nothing: who has read so far has read all that was stored before. Raises BrokerError,
        ClientClosed."""
        assert self._broker is not None
        await self.stored()
        nothing = m.CancelsRequested(client=self.name, born=self._watcher.born, ids=[])
        return (await self._broker.publish(subjects.cancels(self.task), m.encode(nothing))).seq

    def _encode(self, key: Hashable, items: list[Pending | int]) -> tuple[str, bytes]:
        done_below = self._ledger.done_below
        if key == _CANCELS:
            ids = [item for item in items if isinstance(item, int)]
            cancels = m.CancelsRequested(
                client=self.name, born=self._watcher.born, done_below=min(done_below, *ids), ids=ids, instance=self._instance
            )
            return subjects.cancels(self.task), m.encode(cancels)
        actions = [item for item in items if isinstance(item, Pending)]
        submitted = m.ActionsSubmitted(
            client=self.name,
            born=self._watcher.born,
            done_below=min(done_below, actions[0].n),
            ids=[item.n for item in actions],
            specs=[item.wire.spec_bytes for item in actions],
            payloads=[item.wire.payload_bytes for item in actions],
            cancel_on_disconnect=self._cancel_on_disconnect,
            instance=self._instance,
        )
        return subjects.actions(str(key), self.task), m.encode(submitted)

    def _on_stored(self, key: Hashable, items: list[Pending | int], ack: PubAck) -> None:
        self._watcher.stored_seq = max(self._watcher.stored_seq, ack.seq)
        for item in items:
            if isinstance(item, Pending):
                item.stored = True

    def _on_refused(self, key: Hashable, items: list[Pending | int], error: BrokerError) -> None:
        for item in items:
            if isinstance(item, Pending) and self._ledger.open.pop(item.n, None) is not None:
                item.settle(Outcome.ERROR, ErrorReason.INTERNAL, f"the broker refused it: {error}")

    def _on_result(self, delivery: Delivery) -> None:
        sequences = republished(delivery.headers or {}, subjects.completions(self.task, self.name))
        if sequences is None:
            log.warning("a message on %s that the log has not republished was ignored", delivery.subject)
            return
        self._ledger.live(*sequences, delivery.data)
        self._room.set()
        if self._ledger.behind:
            self._watcher.look.set()

    def _on_chunk(self, delivery: Delivery) -> None:
        try:
            chunk = m.decode_chunk(delivery.data)
        except m.MALFORMED:
            return
        pending = self._ledger.open.get(chunk.n)
        # Best effort, but never out of order: after a gap the rest of the stream comes with the result alone.
        if pending is not None and pending.on_output is not None and chunk.offset == pending.shown.get(chunk.stream, 0):
            pending.shown[chunk.stream] = chunk.offset + len(chunk.data)
            try:
                pending.on_output(chunk.stream, chunk.data)
            except Exception:
                log.exception("on_output of action %d failed; it is not called any more", chunk.n)
                pending.on_output = None

    def _on_reconnect(self) -> None:
        self._ledger.behind = True
        self._watcher.look.set()
