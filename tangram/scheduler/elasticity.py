"""How long an action takes on m units, from what its user declared."""

from tangram.messages import Hint


def duration_us(hint: Hint | None, units: int, prior: Hint) -> int:
    """Predicted run time in microseconds on `units` units.

    Amdahl's law, serial + parallel/units, or the declared table (its entry at, or next below, `units`; else its lowest).
    Without a hint, or where it names no duration, `prior` stands in.
    """
    if hint is None:
        hint = prior
    if hint.table_us:
        known = [duration for amount, duration in hint.table_us if amount <= units]
        return known[-1] if known else hint.table_us[0][1]
    one = hint.duration_us or prior.duration_us
    parallel = one * hint.parallel_ppm // 1_000_000
    return one - parallel + parallel // max(units, 1)
