"""What a payload asks of a back end."""

import asyncio
import time

from msgspec.structs import replace

from tangram import messages as m
from tangram.executors.backend import Backend, Ended, Grant, OnOutput, SessionKey
from tangram.executors.core import Attempt
from tangram.outcomes import Outcome, RejectReason


async def perform(backend: Backend, start: m.Start, attempt: Attempt, payload: m.Payload, on_output: OnOutput) -> Ended:
    """Lets a back end do what an attempt is for. on_output: called if its output is wanted while it runs. Raises TimeoutError for
    what is no program."""
    # A fraction is charged as such; whole cores, and the cores that a session has reserved, are all its own.
    millicores = min(start.amounts.get("cpu", 1000), 1000) * len(start.cores)
    grant = Grant(cores=start.cores, millicores=millicores, memory_mib=start.amounts.get("memory", 0))
    session = SessionKey(start.task, start.client, start.session) if start.session else None
    if isinstance(payload, m.Run):
        return await backend.run(
            attempt.action,
            attempt.attempt,
            session,
            payload,
            grant,
            timeout_ms=start.timeout_ms,
            env={"TRACEPARENT": start.traceparent} if start.traceparent else {},
            on_output=on_output if payload.stream else None,
        )
    if isinstance(payload, m.Score):
        return await backend.score(attempt.action, payload, start.service, start.gpus, start.evicts, timeout_ms=start.timeout_ms)
    if isinstance(payload, m.Call):
        return await backend.call(
            attempt.action, attempt.attempt, start.nonce, payload, start.service, timeout_ms=start.timeout_ms
        )
    if isinstance(payload, m.Noop):
        return _NOOP
    return await _timed(backend, start, payload, grant, session)


async def _timed(backend: Backend, start: m.Start, payload: m.Payload, grant: Grant, session: SessionKey | None) -> Ended:
    """What is no program: it has no time-out and no run time of its own. Raises TimeoutError."""
    started_ns = time.monotonic_ns()
    async with asyncio.timeout(start.timeout_ms / 1e3):
        match payload:
            case m.SessionOpen():
                ended = await backend.open(SessionKey(start.task, start.client, start.n), payload, grant)
            case m.SessionClose() if session is not None:
                ended = await backend.close(session)
            case m.FileWrite() if session is not None:
                ended = await backend.write(session, payload)
            case m.FileRead() if session is not None:
                ended = await backend.read(session, payload)
            case _:
                return Ended(outcome=Outcome.REJECTED, reason=RejectReason.INVALID, detail="session: needs one")
    return replace(ended, run_ns=time.monotonic_ns() - started_ns)


_NOOP = Ended(outcome=Outcome.OK)
