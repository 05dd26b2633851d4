"""Models as they travel: exported by a scheduler, and seeded into another log. Pure."""

from math import sqrt
from typing import Final

from tangram import limits
from tangram import messages as m
from tangram.scheduler.elasticity import FORGET, SPREAD_WEIGHT, Model, Seen
from tangram.scheduler.state import State

PPM: Final = 1_000_000


def exported(task: str, kind: str, model: Model) -> m.LearntModel:
    """Rounded to microseconds and millionths; a duration is at least 1 microsecond."""
    serial, parallel, overhead = (round(part) for part in model.curve)
    return m.LearntModel(
        task=task,
        kind=kind,
        count=model.count,
        serial_us=serial,
        parallel_us=parallel,
        overhead_us=overhead,
        spread_ppm=round(model.spread * PPM),
        sizes=[
            m.SizeSeen(
                units=units,
                duration_us=max(1, round(seen.root_us * seen.root_us)),
                weight_ppm=round(seen.weight * PPM),
                times=seen.times,
            )
            for units, seen in sorted(model.sizes.items())
        ],
    )


def seed(state: State, message: m.ModelsSeeded) -> None:
    """Takes in what was learnt elsewhere. A kind that has a model already keeps it, and none makes room for one that comes."""
    taken = 0
    for each in message.models:
        key = (each.task, each.kind)
        says = each.serial_us or each.parallel_us or each.overhead_us
        if says and key not in state.models and len(state.models) < limits.MODELS_MAX:
            state.models[key] = _model(each)
            taken += 1
    state.story.append(f"seeded {taken} of {len(message.models)} models")


def _model(known: m.LearntModel) -> Model:
    sizes: dict[int, Seen] = {}
    for each in known.sizes:
        root = sqrt(each.duration_us)
        sizes[each.units] = Seen(min(each.weight_ppm / PPM, 1 / FORGET), root, root, each.times, known.count)
    spread = known.spread_ppm / PPM
    curve = (float(known.serial_us), float(known.parallel_us), float(known.overhead_us))
    return Model(sizes, known.count, spread * spread, SPREAD_WEIGHT, curve)
