"""Traces: JSON lines, one action a line, in order of step within a trajectory. docs/simulate.md has the fields."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from tangram import limits
from tangram import messages as m
from tangram.errors import ConfigError
from tangram.messages.fields import Amount, Kind, Name
from tangram.rules import GPU_CHUNKS
from tangram.simulation.work import Trajectory, Work

SECOND_NS: Final = 1_000_000_000

Duration = Annotated[float, Meta(ge=0, le=limits.TIMEOUT_MS_MAX / 1_000)]
"""In seconds; what runs longer would be ended by its time-out."""
Think = Annotated[float, Meta(ge=0, le=limits.DEADLINE_MS_MAX / 1_000)]
"""In seconds; a sandbox that is left alone for longer is ended."""
Units = Annotated[int, Meta(ge=1, le=limits.CORE_ID_MAX + 1)]
Part = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[int, Meta(ge=0, le=1 << 62)]
D = TypeVar("D")
T = TypeVar("T")


class Declared(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user tells the scheduler about an action, true or not."""

    duration_s: Duration = 0.0
    parallel: Part = 0.0


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. cpu_cores, mem_mb: what was seen while it ran; not used. memory_mib: what it asks for. service: whose weights a
    row of GPUs runs on. tokens: by quota."""

    trajectory: Number
    step: Number
    kind: Kind
    think_s: Think
    duration_s: Duration
    cpu_cores: float | None = None
    mem_mb: float | None = None
    start_s: Think | None = None
    task: Name = "trace"
    key: Literal["cpu", "gpu", "api"] = "cpu"
    min_units: Units | None = None
    max_units: Units | None = None
    units: Annotated[tuple[Units, ...], Meta(min_length=1, max_length=limits.LEGAL_AMOUNTS_MAX)] | None = None
    parallel: Part | None = None
    memory_mib: Annotated[int, Meta(ge=0, le=limits.AMOUNT_MAX)] = 0
    hint: Declared | None = None
    service: Name | None = None
    tokens: dict[Name, Amount] | None = None


class Assumption(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a kind scales where its rows do not say. Rows of `rigid_from_s` seconds or more do not get faster (a time-out takes
    as long on any number of cores), though they are submitted like the others."""

    parallel: Part
    max_units: Units
    rigid_from_s: Duration | None = None


Assumptions = dict[str, Assumption]
_rows = msgspec.json.Decoder(Row).decode


def load_assumptions(path: Path) -> Assumptions:
    """kind -> Assumption, from TOML or (by its ending) JSON. Raises ConfigError."""
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    table = decode_file(path, lambda data: decode(data, type=dict[str, Any]))
    return {
        kind: _decode(f"{path}: {kind}", says, lambda says: msgspec.convert(says, Assumption)) for kind, says in table.items()
    }


def decode_file(path: Path, decode: Callable[[bytes], T]) -> T:
    """Raises ConfigError, which names the file and the field."""
    return _decode(str(path), _read(path), decode)


def load(path: Path, assumptions: Assumptions, exclude: Sequence[str] = ()) -> list[Trajectory]:
    """Raises ConfigError, which names the file, the line and the field."""
    found: dict[int, Trajectory] = {}
    steps: dict[int, int] = {}
    kinds: dict[str, None] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _decode(where, line, _rows)
        trajectory = found.get(row.trajectory)
        if trajectory is None:
            start_ns = round((row.start_s or 0.0) * SECOND_NS)
            trajectory = found[row.trajectory] = Trajectory(row.trajectory, row.task, start_ns, [])
        elif row.start_s is not None:
            raise ConfigError(f"{where}: start_s: belongs on the first line of a trajectory")
        elif row.task != trajectory.task:
            raise ConfigError(f"{where}: task: must be that of its trajectory, {trajectory.task}")
        elif row.step <= steps[row.trajectory]:
            raise ConfigError(f"{where}: step: must be above the one before it in its trajectory, {steps[row.trajectory]}")
        steps[row.trajectory] = row.step
        kinds[row.kind] = None
        work = _work(where, row, assumptions.get(row.kind))
        if row.kind not in exclude:
            trajectory.work.append(work)
    for option, named in (("--assume", list(assumptions)), ("--exclude-kind", exclude)):
        for kind in named:
            if kind not in kinds:
                raise ConfigError(f"{option}: {path} has no kind {kind!r}; it has {', '.join(sorted(kinds)) or 'no rows'}")
    left = [trajectory for trajectory in found.values() if trajectory.work]
    if not left:
        raise ConfigError(f"{path}: there is no action in it to simulate")
    return left


def _work(where: str, row: Row, assumption: Assumption | None) -> Work:
    if row.kind in ("session.open", "session.close"):
        raise ConfigError(f"{where}: kind: sandboxes are opened and closed by the simulation itself")
    low, high = row.min_units or 1, row.max_units or row.min_units or 1
    legal = row.units or ()
    if legal:
        if row.min_units or row.max_units:
            raise ConfigError(f"{where}: units: stands for min_units and max_units, which must not be there then")
        if any(a >= b for a, b in pairwise(legal)):
            raise ConfigError(f"{where}: units: must rise")
        low, high = legal[0], legal[-1]
    if high < low:
        raise ConfigError(f"{where}: max_units: must not be below min_units, {low}")
    duration_ns = round(row.duration_s * SECOND_NS)
    parallel = row.parallel
    scales = True
    if parallel is None and assumption is not None:
        parallel = assumption.parallel
        if not (legal or row.max_units):
            high = max(low, assumption.max_units)
        scales = assumption.rigid_from_s is None or row.duration_s < assumption.rigid_from_s
    if parallel is None:
        high, legal = low, ()
    if row.key == "gpu" and not {low, high, *legal} <= set(GPU_CHUNKS):
        raise ConfigError(f"{where}: units: of GPUs must be among {', '.join(map(str, GPU_CHUNKS))}")
    if row.key == "api" and high > 1:
        raise ConfigError(f"{where}: units: a call that needs neither cores nor GPUs has none")
    if row.service is not None and row.key != "gpu":
        raise ConfigError(f"{where}: service: is for a row with key gpu")
    return Work(
        kind=row.kind,
        think_ns=round(row.think_s * SECOND_NS),
        duration_ns=duration_ns,
        scalable_ns=round(duration_ns * (parallel or 0.0)) if scales else 0,
        low=low,
        high=high,
        legal=legal,
        memory_mib=row.memory_mib,
        hint=_hint(row.hint),
        key=row.key,
        service=row.service or "",
        tokens=tuple((row.tokens or {}).items()),
    )


def _hint(declared: Declared | None) -> m.Hint | None:
    if declared is None:
        return None
    return m.Hint(duration_us=round(declared.duration_s * 1e6), parallel_ppm=round(declared.parallel * 1e6))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _decode(where: str, data: D, decode: Callable[[D], T]) -> T:
    """msgspec says "... - at `$.field`"; here the field comes first, as everywhere."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        rule, _, at = str(error).partition(" - at `$")
        field = at.rstrip("`").lstrip(".")
        rule = rule[:1].lower() + rule[1:]
        raise ConfigError(f"{where}: {field}: {rule}" if field else f"{where}: {rule}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
