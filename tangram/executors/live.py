"""What a program writes, told while it runs: best effort, and in order."""

from typing import Final

from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker
from tangram.executors.backend import OnOutput

BACKLOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Beyond that it is dropped: a fast writer must not fill our memory."""


def live_output(broker: Broker, start: m.Start) -> OnOutput:
    subject = subjects.output(start.task, start.client)
    offsets = {"stdout": 0, "stderr": 0}

    def send(stream: str, data: bytes) -> None:
        for at in range(0, len(data), limits.OUTPUT_BYTES_MAX):
            part = data[at : at + limits.OUTPUT_BYTES_MAX]
            if broker.backlog_bytes < BACKLOG_BYTES_MAX:
                chunk = m.OutputChunk(n=start.n, stream=stream, offset=offsets[stream], data=part)  # type: ignore[arg-type]
                broker.send_soon(subject, m.encode(chunk))
            offsets[stream] += len(part)

    return send
