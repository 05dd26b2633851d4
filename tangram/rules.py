"""Rules across the fields of a request, which its types alone cannot say. The client and the scheduler apply the same."""

from itertools import pairwise
from typing import Final

from tangram import limits, subjects
from tangram import messages as m

_PAYLOAD_OF: Final = {
    "session.open": m.SessionOpen,
    "session.close": m.SessionClose,
    "file.write": m.FileWrite,
    "file.read": m.FileRead,
    "noop": m.Noop,
}
GPU_CHUNKS: Final = (1, 2, 4, 8)
"""GPUs are given in aligned groups of these sizes, as they are linked."""
CALLS: Final = "calls"
"""What an api executor's host has of so many at a time; each call takes one."""
HOST_RESOURCES: Final = ("cpu", "gpu", "memory", CALLS)
"""What a host has: no quota can have one of these names."""
_NEEDS_SESSION: Final = frozenset({"session.close", "file.write", "file.read"})


def broken_rule(key: str, spec: m.ActionSpec, payload: object) -> str:
    """The first rule that a request breaks, as "field: rule", or "". payload: None if it is a blob, which whoever reads it
    checks by `broken_payload_rule`."""
    if spec.payload_blob and subjects.parse_blob(spec.payload_blob) is None:
        return f"payload_blob: must be <sha256>-<bytes>-<pieces>, of at most {limits.BLOB_BYTES_MAX} bytes"
    if payload is not None and (broken := broken_payload_rule(spec.kind, payload)):
        return broken
    if spec.kind in _NEEDS_SESSION and not spec.session:
        return f"session: kind {spec.kind} needs one"
    if spec.kind == "session.open" and spec.session:
        return "session: cannot be opened inside a session"
    if spec.hint is not None and any(a >= b for (a, _), (b, _) in pairwise(spec.hint.table_us)):
        return "hint.table_us: must rise in units"
    if spec.service and (spec.session or not (key == "api" or (key == "gpu" and "gpu" in spec.cost))):
        return "service: takes key gpu and a cost in gpu, or key api, and no session"
    if isinstance(payload, m.Score | m.Call) and not spec.service:
        return f"service: {'a batch to score' if isinstance(payload, m.Score) else 'a call'} needs one"
    for name, demand in spec.cost.items():
        high = demand.high or demand.low
        if high < demand.low:
            return f"cost.{name}.high: must not be below low"
        if high > demand.low and name != key:
            return f"cost.{name}: only the key resource ({key}) can be a range"
        legal = demand.legal
        if legal and (legal[0] != demand.low or legal[-1] != high or any(a >= b for a, b in pairwise(legal))):
            return f"cost.{name}.legal: must rise from low to high"
        if name == "gpu" and (key != "gpu" or spec.session):
            return "cost.gpu: takes key gpu, and no session"
        if name == "gpu" and any(amount not in GPU_CHUNKS for amount in legal or {demand.low, high}):
            return "cost.gpu: must be 1, 2, 4 or 8, or a range or set of them"
        if name == "cpu":
            whole = not (demand.low % 1000 or high % 1000 or (legal and any(amount % 1000 for amount in legal)))
            if not whole and (demand.low >= 1000 or high != demand.low or demand.low < 10):
                return "cost.cpu: must be whole cores, or a fixed fraction of 10 to 999 millicores"
    return ""


def broken_payload_rule(kind: str, payload: object) -> str:
    """The first rule that a payload breaks by itself, as "field: rule", or ""."""
    expected: type = _PAYLOAD_OF.get(kind, m.Run)
    if expected is m.Run and isinstance(payload, m.Score | m.Call):
        return ""
    if not isinstance(payload, expected):
        return f"payload: kind {kind} takes a {expected.__name__}"
    if isinstance(payload, m.Run) and not payload.argv[0]:
        return "argv: must begin with the name of a program"
    if isinstance(payload, m.Run) and (broken := _too_long(payload)):
        return broken
    if isinstance(payload, m.FileWrite | m.FileRead) and len(payload.path.encode()) > limits.PATH_BYTES_MAX:
        return f"path: must be at most {limits.PATH_BYTES_MAX} bytes"
    if isinstance(payload, m.FileWrite) and len(payload.data) > limits.FILE_BYTES_MAX:
        return f"data: must be at most {limits.FILE_BYTES_MAX} bytes"
    return ""


def _too_long(run: m.Run) -> str:
    """Linux counts bytes, the types above count characters."""
    if 4 * sum(map(len, run.argv)) > limits.ARGUMENT_BYTES_MAX:  # a character has at most 4
        sizes = [len(argument.encode()) for argument in run.argv]
        if max(sizes) > limits.ARGUMENT_BYTES_MAX:
            return f"argv: must be at most {limits.ARGUMENT_BYTES_MAX} bytes each"
        if sum(sizes) > limits.ARGUMENTS_BYTES_MAX:
            return f"argv: must be at most {limits.ARGUMENTS_BYTES_MAX} bytes together"
    if run.env and sum(len(name) + len(value.encode()) + 2 for name, value in run.env.items()) > limits.ENVIRONMENT_BYTES_MAX:
        return f"env: must be at most {limits.ENVIRONMENT_BYTES_MAX} bytes together"
    if len(run.cwd.encode()) > limits.PATH_BYTES_MAX:
        return f"cwd: must be at most {limits.PATH_BYTES_MAX} bytes"
    return ""
