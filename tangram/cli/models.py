"""`tangram models`: what was learnt of how long kinds take, from the bucket into which the scheduler exports it."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from tangram import limits, roles, subjects
from tangram import messages as m
from tangram.cli import common
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.broker import Broker

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FORMAT: Final = 1
"""Of an exported file; rises when an older version could not read it."""
US: Final = 1e6


class ModelsFile(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    models: Annotated[list[m.LearntModel], msgspec.Meta(max_length=limits.MODELS_MAX)]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("models", help="what was learnt of how long each kind of action takes")
    common.add_nats(command)
    command.add_argument("--json", action="store_true")
    command.set_defaults(handler=handle, file=None)
    actions = command.add_subparsers(metavar="export FILE")
    export = actions.add_parser("export", help="into a file, for --seed-models of `tangram scheduler` and `tangram up`")
    # Here too, and without a default, so that it may stand in either place.
    export.add_argument("--nats", metavar="URL", default=argparse.SUPPRESS, help="the broker")
    export.add_argument("file", type=Path, metavar="FILE")


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url

    broker = await Broker.connect(broker_url(given.nats), name="tangram models")
    try:
        models = await read_models(broker)
    finally:
        await broker.close()
    if given.file is not None:
        written = msgspec.json.format(msgspec.json.encode(ModelsFile(format=FORMAT, models=models)), indent=1)
        given.file.write_bytes(written + b"\n")
        print(f"{len(models)} models in {given.file}")
    elif given.json:
        print(json.dumps([summary(model) for model in models]))
    else:
        print(_text(models))
    return 0


async def read_models(broker: "Broker") -> list[m.LearntModel]:
    """By task and kind. Raises BrokerError."""
    from tangram.broker import read_log

    found: dict[tuple[str, str], m.LearntModel] = {}
    seq = 1
    while stored := await read_log(broker, subjects.MODELS, seq):
        for each in stored:
            try:
                model = msgspec.json.decode(each.data, type=m.LearntModel)
            except m.MALFORMED:  # what other tools of the bucket leave, such as the mark of a deletion
                continue
            found[(model.task, model.kind)] = model
        seq = stored[-1].seq + 1
    return [found[key] for key in sorted(found)]


def read_file(path: Path) -> tuple[m.LearntModel, ...]:
    """What `export` has written. Raises ConfigError, which names the file and the field."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ModelsFile)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except m.MALFORMED as error:
        raise ConfigError(f"{path}: {error}") from None
    if found.format != FORMAT:
        raise ConfigError(f"{path}: format: it has {found.format}, this version reads {FORMAT}")
    return tuple(found.models)


def summary(model: m.LearntModel) -> dict[str, object]:
    return {
        "task": model.task,
        "kind": model.kind,
        "count": model.count,
        "serial_s": model.serial_us / US,
        "parallel_s": model.parallel_us / US,
        "overhead_s": model.overhead_us / US,
        "spread": model.spread_ppm / 1e6,
        "fastest_units": _fastest(model),
        "sizes": [
            {"units": each.units, "seconds": each.duration_us / US, "weight": each.weight_ppm / 1e6} for each in model.sizes
        ],
    }


def _fastest(model: m.LearntModel) -> int:
    """The size, of those seen, at which the curve is lowest."""

    def predicted(units: int) -> float:
        return model.serial_us + model.parallel_us / units + model.overhead_us * units

    return min((each.units for each in model.sizes), key=lambda units: (predicted(units), units))


def _text(models: list[m.LearntModel]) -> str:
    if not models:
        return "nothing was learnt yet, or no scheduler has exported it (it does within ten seconds)"
    rows = [("task", "kind", "seen", "seconds on m cores", "spread", "fastest", "sizes: seconds seen")]
    for model in models:
        serial, parallel, overhead = model.serial_us / US, model.parallel_us / US, model.overhead_us / US
        rows.append(
            (
                model.task,
                model.kind,
                str(model.count),
                f"{serial:.3f} + {parallel:.3f}/m + {overhead:.3f}*m",
                f"{model.spread_ppm / 1e4:.0f} %",
                str(_fastest(model)),
                ", ".join(f"{each.units}: {each.duration_us / US:.3f}" for each in model.sizes),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
