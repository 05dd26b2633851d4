"""W3C trace context (https://www.w3.org/TR/trace-context/): each action carries its own `traceparent`."""

import secrets
import sys


def current_traceparent(trace_id: str) -> str:
    """The caller's span if OpenTelemetry is in use in this process; else a new span of `trace_id` (32 hex digits)."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return f"00-{trace_id}-{secrets.token_hex(8)}-01"
