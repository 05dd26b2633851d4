"""From a caller's options to the spec and payload of an action."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Unpack

from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.errors import InvalidRequest
from tangram.observe.trace import current_traceparent
from tangram.producers import request
from tangram.producers.options import (
    DEADLINE_S,
    IDLE_TTL_S,
    STARTUP_S,
    TIMEOUT_S,
    CallOptions,
    RunOptions,
    ScoreOptions,
    SessionOptions,
)
from tangram.rules import GPU_CHUNKS
from tangram.subjects import token


def spec(
    trace_id: str,
    *,
    kind: str,
    units: request.Units = 0,
    memory: int | str | None = None,
    timeout: float = TIMEOUT_S,
    deadline: float = DEADLINE_S,
    retry: str = "never",
    session: int = 0,
    idle_ttl: float = IDLE_TTL_S,
    parallel: request.Parallel | None = None,
    duration: float | None = None,
    traceparent: str | None = None,
    key: str = "",
    quotas: Mapping[str, int] | None = None,
) -> m.ActionSpec:
    """The spec of an action. trace_id: of whoever asks, if there is no span. Raises InvalidRequest."""
    cost: dict[str, m.Demand] = {}
    demand = request.cpu(units)
    if callable(parallel) and not isinstance(parallel, Mapping):
        demand, parallel = request.tabulated(parallel, demand)
    if demand is not None:
        cost["cpu"] = demand
    if memory is not None:
        cost["memory"] = m.Demand(low=request.memory_mib(memory))
    if quotas is not None:
        cost |= request.quotas(quotas)
    if not isinstance(retry, str) or retry not in ("never", "safe"):
        raise InvalidRequest("retry", 'must be "never" or "safe"', retry)
    return m.ActionSpec(
        nonce=secrets.token_bytes(limits.NONCE_BYTES),
        kind=kind,
        cost=cost,
        timeout_ms=request.milliseconds("timeout", timeout, 1, limits.TIMEOUT_MS_MAX),
        deadline_ms=request.milliseconds("deadline", deadline, 0, limits.DEADLINE_MS_MAX),
        retry=retry,  # type: ignore[arg-type]  # checked above
        session=session,
        idle_ttl_ms=request.milliseconds("idle_ttl", idle_ttl, 1, limits.DEADLINE_MS_MAX),
        hint=request.hint(parallel, duration),
        key=key,
        traceparent=traceparent if traceparent is not None else current_traceparent(trace_id),
    )


def program(
    command: str | Sequence[str], trace_id: str, *, session: int = 0, **options: Unpack[RunOptions]
) -> tuple[m.ActionSpec, m.Run]:
    """A program to run. Raises InvalidRequest."""
    on_output = options.get("on_output")
    if on_output is not None and not callable(on_output):
        raise InvalidRequest("on_output", "must be callable", on_output)
    payload = m.Run(
        argv=request.argv(command),
        stdin=request.content("stdin", options.get("stdin", b"")),
        env=request.environment(options.get("env")),
        cwd=options.get("cwd", ""),
        stream=on_output is not None,
        output_max=options.get("output_max", limits.OUTPUT_BYTES_MAX),
    )
    made = spec(
        trace_id,
        kind=options.get("kind", "run"),
        units=options.get("units", 1),
        memory=options.get("memory"),
        timeout=options.get("timeout", TIMEOUT_S),
        deadline=options.get("deadline", DEADLINE_S),
        retry=options.get("retry", "never"),
        session=session,
        parallel=options.get("parallel"),
        duration=options.get("duration"),
        traceparent=options.get("traceparent"),
        key=options.get("key", ""),
        quotas=options.get("quotas"),
    )
    if "cpu" not in made.cost:
        raise InvalidRequest("units", "must not be 0: a program needs a core, or a fraction of one", 0)
    unknown = options.keys() - RunOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"run() takes no {', '.join(sorted(unknown))}: see tangram.producers.options.RunOptions")
    return made, payload


def scoring(
    service: str, items: Sequence[object], trace_id: str, **options: Unpack[ScoreOptions]
) -> tuple[m.ActionSpec, m.Score]:
    """A batch for a service. Raises InvalidRequest."""
    unknown = options.keys() - ScoreOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"score() takes no {', '.join(sorted(unknown))}: see tangram.producers.options.ScoreOptions")
    demand, parallel = request.gpus(options.get("units", 1)), options.get("parallel")
    if callable(parallel) and not isinstance(parallel, Mapping):
        sizes = [size for size in demand.legal or GPU_CHUNKS if demand.low <= size <= max(demand.low, demand.high)]
        parallel = {size: parallel(size) for size in sizes}
    made = spec(
        trace_id,
        kind=options.get("kind", "score"),
        timeout=options.get("timeout", TIMEOUT_S),
        deadline=options.get("deadline", DEADLINE_S),
        retry=options.get("retry", "safe"),
        parallel=parallel,
        duration=options.get("duration"),
        traceparent=options.get("traceparent"),
        key=options.get("key", ""),
        quotas=options.get("quotas"),
    )
    made = replace(made, service=token(service, "service"), cost={**made.cost, "gpu": demand})
    return made, m.Score(batch=request.batch(items))


def calling(
    endpoint: str, arguments: Mapping[str, object] | None, trace_id: str, **options: Unpack[CallOptions]
) -> tuple[m.ActionSpec, m.Call]:
    """A request to an endpoint. Raises InvalidRequest."""
    unknown = options.keys() - CallOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"call() takes no {', '.join(sorted(unknown))}: see tangram.producers.options.CallOptions")
    made = spec(
        trace_id,
        kind=options.get("kind", "call"),
        timeout=options.get("timeout", TIMEOUT_S),
        deadline=options.get("deadline", DEADLINE_S),
        retry=options.get("retry", "safe"),
        duration=options.get("duration"),
        traceparent=options.get("traceparent"),
        key=options.get("key", ""),
        quotas=options.get("quotas"),
    )
    payload = m.Call(
        arguments=request.arguments(arguments),
        body=request.content("body", options.get("body", b"")),
        content_type=options.get("content_type", ""),
    )
    return replace(made, service=token(endpoint, "endpoint")), payload


def opening(trace_id: str, **options: Unpack[SessionOptions]) -> tuple[m.ActionSpec, m.SessionOpen]:
    """A session to open. Raises InvalidRequest."""
    unknown = options.keys() - SessionOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"session() takes no {', '.join(sorted(unknown))}: see tangram.producers.options.SessionOptions")
    made = spec(
        trace_id,
        kind="session.open",
        memory=options.get("memory"),
        timeout=options.get("timeout", STARTUP_S),
        deadline=options.get("deadline", DEADLINE_S),
        # Making an empty sandbox twice harms nobody, so an executor's loss need not end the trajectory before it began.
        retry="safe",
        idle_ttl=options.get("idle_ttl", IDLE_TTL_S),
        key=options.get("key", ""),
    )
    return made, m.SessionOpen(image=options.get("image", ""), env=request.environment(options.get("env")))
