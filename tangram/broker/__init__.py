"""The JetStream layer: ours and thin, over nats-py's connection. Nothing else in the project imports nats."""

from tangram.broker.blobs import Blobs
from tangram.broker.connection import Broker
from tangram.broker.consumers import consumer_exists, delete_consumer, ensure_consumer, read_up_to
from tangram.broker.declared import DeclarationError, StreamDeclaration, load_declared
from tangram.broker.embedded import EmbeddedServer, EmbeddedServerError
from tangram.broker.errors import (
    AccessDenied,
    ApiError,
    BlobCorrupt,
    BlobError,
    BlobMissing,
    BlobsFull,
    BlobTooLarge,
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
from tangram.broker.log import (
    RECORDED_STAMP,
    StoredMessage,
    StreamState,
    last_for,
    next_stored,
    read_log,
    state_of,
    stream_state,
)
from tangram.broker.pull import Delivered, PullLoop
from tangram.broker.reader import LogReader
from tangram.broker.server_binary import ServerBinaryMissing
from tangram.broker.streams import (
    DestructiveChange,
    Difference,
    apply,
    begin_recorded,
    bytes_limit,
    diff,
    has_reserve,
    lend_reserve,
    purge,
    recorded_through,
)
from tangram.broker.wire import Delivery, PubAck

__all__ = [
    "RECORDED_STAMP",
    "AccessDenied",
    "ApiError",
    "BlobCorrupt",
    "BlobError",
    "BlobMissing",
    "BlobTooLarge",
    "Blobs",
    "BlobsFull",
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
    "begin_recorded",
    "bytes_limit",
    "consumer_exists",
    "delete_consumer",
    "diff",
    "ensure_consumer",
    "has_reserve",
    "last_for",
    "lend_reserve",
    "load_declared",
    "next_stored",
    "purge",
    "read_log",
    "read_up_to",
    "recorded_through",
    "state_of",
    "stream_state",
]
