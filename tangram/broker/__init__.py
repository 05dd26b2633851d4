"""The JetStream layer: ours and thin, over nats-py's connection. Nothing else in the project imports nats."""

from tangram.broker.connection import Broker
from tangram.broker.consumers import consumer_exists, delete_consumer, ensure_consumer
from tangram.broker.declared import DeclarationError, StreamDeclaration, load_declared
from tangram.broker.embedded import EmbeddedServer, EmbeddedServerError
from tangram.broker.errors import (
    ApiError,
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
    LogGap,
    LogTruncated,
    MessageTooLarge,
    NotLeader,
    PublishRefused,
)
from tangram.broker.grouped import GroupedPublisher
from tangram.broker.leader import LeaderWriter
from tangram.broker.link import Subscription
from tangram.broker.log import StoredMessage, StreamState, last_for, next_stored, read_log, stream_state
from tangram.broker.pull import Delivered, PullLoop
from tangram.broker.reader import LogReader
from tangram.broker.server_binary import ServerBinaryMissing
from tangram.broker.streams import DestructiveChange, Difference, apply, diff
from tangram.broker.wire import Delivery, PubAck

__all__ = [
    "ApiError",
    "Broker",
    "BrokerError",
    "BrokerTimeout",
    "BrokerUnavailable",
    "Busy",
    "DeclarationError",
    "Delivered",
    "Delivery",
    "DestructiveChange",
    "Difference",
    "EmbeddedServer",
    "EmbeddedServerError",
    "GroupedPublisher",
    "LeaderWriter",
    "LogGap",
    "LogReader",
    "LogTruncated",
    "MessageTooLarge",
    "NotLeader",
    "PubAck",
    "PublishRefused",
    "PullLoop",
    "ServerBinaryMissing",
    "StoredMessage",
    "StreamDeclaration",
    "StreamState",
    "Subscription",
    "apply",
    "consumer_exists",
    "delete_consumer",
    "diff",
    "ensure_consumer",
    "last_for",
    "load_declared",
    "next_stored",
    "read_log",
    "stream_state",
]
