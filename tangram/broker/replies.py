"""One inbox for all answers of a connection: a subject per question, told apart by its last token.

A subscription per question would cost two commands each; here an answer is one dictionary look-up. Owns the futures of
publishes (`acks`) and the sinks of everything else; says nothing on when they fail: the connection does.
"""

import asyncio
from collections.abc import Callable

import msgspec

from tangram.broker.errors import BrokerError, Busy, refusal
from tangram.broker.wire import Delivery, PubAck, decode_pub_answer

Sink = Callable[[Delivery | BrokerError], None]
"""Takes an answer, or the reason why none will come. Called in the loop's thread; must not block or raise."""


class Inbox:
    """A reply subject that may receive any number of answers, until closed."""

    def __init__(self, replies: "Replies", token: str) -> None:
        self._replies, self._token = replies, token
        self.subject = replies.prefix + token

    def close(self) -> None:
        """Forgets the inbox; answers that still come are dropped."""
        self._replies.sinks.pop(self._token, None)


class Replies:
    """What is waited for. `prefix` ends in a dot; the connection subscribes to `prefix*` and passes everything to `take`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.sinks: dict[str, Sink] = {}
        self._acks: dict[str, tuple[asyncio.Future[PubAck], float]] = {}
        self._counter = 0

    @property
    def acks_outstanding(self) -> int:
        return len(self._acks)

    def expect_ack(self, future: asyncio.Future[PubAck], deadline_s: float) -> str:
        """Returns the reply subject for a publish. `deadline_s` (loop time) must not fall from call to call."""
        token = self._token()
        self._acks[token] = (future, deadline_s)
        return self.prefix + token

    def forget_ack(self, reply: str) -> None:
        self._acks.pop(reply[len(self.prefix) :], None)

    def open(self, sink: Sink) -> Inbox:
        token = self._token()
        self.sinks[token] = sink
        return Inbox(self, token)

    def take(self, delivery: Delivery) -> None:
        """Hands an answer to whoever waits for it; unknown tokens (given up, closed) are dropped."""
        token = delivery.subject[len(self.prefix) :]
        waiting = self._acks.pop(token, None)
        if waiting is not None:
            _settle(waiting[0], delivery)
            return
        sink = self.sinks.get(token)
        if sink is not None:
            sink(delivery)

    def expire(self, now_s: float, error: BrokerError) -> None:
        """Fails the publishes whose deadline has passed. Deadlines rise with insertion, so this looks at the front only."""
        while self._acks:
            token = next(iter(self._acks))
            future, deadline_s = self._acks[token]
            if deadline_s > now_s and not future.done():
                return
            del self._acks[token]
            _fail(future, error)

    def fail_all(self, for_acks: BrokerError, for_sinks: BrokerError) -> None:
        """The connection is gone: nothing that was asked on it will be answered."""
        acks, self._acks = self._acks, {}
        for future, _ in acks.values():
            _fail(future, for_acks)
        for sink in list(self.sinks.values()):
            sink(for_sinks)

    def _token(self) -> str:
        self._counter += 1
        return str(self._counter)


def _settle(future: asyncio.Future[PubAck], delivery: Delivery) -> None:
    if future.done():
        return
    if delivery.status == "503":
        _fail(future, Busy(503, "no stream takes this subject (yet)"))
        return
    try:
        answer = decode_pub_answer(delivery.data)
    except msgspec.MsgspecError as error:
        _fail(future, BrokerError(f"not a publish acknowledgement: {error}"))
        return
    if answer.error is None:
        future.set_result(PubAck(answer.seq, answer.duplicate))
    else:
        _fail(future, refusal(answer.error.code, answer.error.err_code, answer.error.description))


def _fail(future: asyncio.Future[PubAck], error: BrokerError) -> None:
    if not future.done():
        future.set_exception(error)
        # A caller that gave the future up does not want asyncio's complaint that nobody looked at it.
        future.exception()
