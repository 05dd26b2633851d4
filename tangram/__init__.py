"""Tangram: external resources for agentic reinforcement learning, allocated per action.

    async with tangram.Client("nats://127.0.0.1:4222", task="coding") as client:
        result = await client.run("python -m unittest -q", units=(1, 8))

Names are loaded when they are first used, so that the pure parts of the package can be imported without the broker's.
"""

from typing import TYPE_CHECKING, Any

from tangram.errors import (
    AccessDenied,
    BlobError,
    BlobsFull,
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    CallError,
    ClientClosed,
    ConfigError,
    InvalidRequest,
    ResultGone,
    ScoreError,
    SessionError,
    TangramError,
    UnknownAction,
)
from tangram.outcomes import Outcome
from tangram.version import __version__

if TYPE_CHECKING:
    from tangram.producers.blocking import BlockingClient, BlockingSession
    from tangram.producers.client import Client
    from tangram.producers.result import Result
    from tangram.producers.session import Session
    from tangram.producers.waiting import Waiting

__all__ = [
    "AccessDenied",
    "BlobError",
    "BlobsFull",
    "BlockingClient",
    "BlockingSession",
    "BrokerError",
    "BrokerTimeout",
    "BrokerUnavailable",
    "CallError",
    "Client",
    "ClientClosed",
    "ConfigError",
    "InvalidRequest",
    "Outcome",
    "Result",
    "ResultGone",
    "Session",
    "ScoreError",
    "SessionError",
    "TangramError",
    "UnknownAction",
    "Waiting",
    "__version__",
]

_LAZY = {
    "BlockingClient": "tangram.producers.blocking",
    "BlockingSession": "tangram.producers.blocking",
    "Client": "tangram.producers.client",
    "Result": "tangram.producers.result",
    "Session": "tangram.producers.session",
    "Waiting": "tangram.producers.waiting",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tangram' has no attribute {name!r}")
