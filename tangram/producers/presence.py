"""Which process of its name a client is, and that it lives."""

import asyncio
import secrets
from typing import Final

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker

_INSTANCE_BITS: Final = 16
"""They tell those apart that connected at the same sequence."""


def instance_at(seq: int) -> int:
    """Of a client that has learnt the log's sequence `seq` when it connected: higher than that of any earlier one."""
    return seq << _INSTANCE_BITS | secrets.randbits(_INSTANCE_BITS) | 1


async def beat(broker: Broker, task: str, name: str) -> None:
    """Says for ever that the client lives. Nobody stores it, and what is said while not connected is dropped."""
    number = 0
    while True:
        number += 1
        heartbeat = m.encode(m.Heartbeat(incarnation=name, number=number))
        broker.send_soon(subjects.client_heartbeats(task, name), heartbeat)
        await asyncio.sleep(limits.HEARTBEAT_S)
