"""How long an action takes on m units: what its user declared, or what its kind was seen to take.

A curve is duration(m) = serial + parallel/m + overhead*m, all parts >= 0, so it is convex and may rise again. A model learns one
for each (task, kind) from completions: for each size a weighted mean that forgets and that single outliers cannot move far,
then the curve through those means with the least weighted relative error, held by a prior; and how far single durations lie
from those means. Only + - * / and sqrt are used, in one order, so that every machine computes the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Final, NamedTuple

from tangram import limits
from tangram.messages import Hint

FORGET: Final = 1 / 128
"""Of the weight of what was seen, lost with each completion of the kind: about the last 128 count. (With 48 the shape of a
kind whose durations have a heavy tail is noise: mean ACT 1 % longer.)"""
OUTLIER: Final = 3.0
"""A duration beyond so many times its size's mean, or below that part of it, counts as that."""
RECENT: Final = 0.2
CHANGED: Final = 0.6
"""The square root of the last few beyond that of all, or below it, by 1 + so many spreads: the kind is another than it was. (Of
five lognormal durations with sigma 0.5 the root mean lies beyond it once in a hundred.)"""
STALE: Final = 0.3
"""Of the weight of the other sizes then, so that they are tried again."""
TRY_AFTER: Final = 3
TRIES: Final = 2
"""Of each size since the kind last changed; after that only of those next to the fastest: of a convex curve all others are slower
than these."""
TRY_GAP: Final = 3
TRY_GAP_MAX: Final = 256
TRY_HOPELESS: Final = 4
"""Completions of a kind from one try of a size to the next: TRY_GAP for each that the size has had since the kind last changed,
TRY_HOPELESS times as many if it was seen to be slower by more than the spread, and at most TRY_GAP_MAX, so that a size that has
become better is found. (Five kinds with 1,000 completions each, sigma 0.5: 1 to 3 % are tries, after 12 to 15 of the first
hundred.)"""
SPREAD: Final = 0.5
SPREAD_WEIGHT: Final = 4.0
"""The spread of a kind before anything is known of it, and what that counts for, in completions."""
PRIOR_WEIGHT: Final = 12.0
"""Of the prior at each of its sizes, in completions, times the square of the variance of single ones: the means of few are as far
off as that, and a variance is underestimated the more the heavier the tail, as outliers are cut. (Mean ACT beside the best fixed
size, learnt from nothing: 0.944 so, 0.951 with 2 times the variance; 0.934 with shapes that are known.)"""
PRIOR_SIZES: Final = (1, 2, 4, 8, 16)
REFIT_EVERY: Final = 8
"""Completions between two fits once a model has seen REFIT_ALWAYS; the curve hardly moves from one to the next."""
REFIT_ALWAYS: Final = 8


class Curve(NamedTuple):
    """Microseconds. `table`: (units, duration), rising in units, which replaces the law; its entry at, or next below."""

    serial: float
    parallel: float
    overhead: float = 0.0
    table: tuple[tuple[int, int], ...] = ()

    def at(self, units: int) -> float:
        """The duration on `units` (>= 1) in microseconds."""
        if self.table:
            found = self.table[0][1]
            for amount, duration in self.table:
                if amount > units:
                    break
                found = duration
            return float(found)
        return self.serial + self.parallel / units + self.overhead * units


def declared(hint: Hint, prior: Hint) -> Curve:
    """The curve of a hint; `prior` gives the duration that it does not name."""
    if hint.table_us:
        return Curve(0.0, 0.0, 0.0, hint.table_us)
    one = hint.duration_us or prior.duration_us
    parallel = one * hint.parallel_ppm // 1_000_000
    return Curve(float(one - parallel), float(parallel))


@dataclass(slots=True, eq=False)
class Seen:
    """What was seen at one size. root_us: the weighted mean of the square roots of the durations, which a heavy tail moves
    less than their mean; all sizes alike, so the shape is that of the means where the spread is the same."""

    weight: float = 0.0
    root_us: float = 0.0
    recent_us: float = 0.0
    """The same of the last few."""
    times: int = 0
    """Completions since the kind last changed."""
    last: int = 0
    """The model's `count` at the last one."""


@dataclass(slots=True, eq=False)
class Model:
    """Of one (task, kind)."""

    sizes: dict[int, Seen] = field(default_factory=dict)
    count: int = 0
    variance: float = SPREAD * SPREAD
    """Of durations at one size, as parts of their mean: four times that of the roots. compared: the weight that it has."""
    compared: float = SPREAD_WEIGHT
    curve: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """serial, parallel, overhead as of the last fit; all 0 before the first."""

    @property
    def spread(self) -> float:
        """The standard deviation of durations at one size, as a part of their mean; of log-normal ones nearly sigma."""
        return sqrt(self.variance)


def learn(model: Model, units: int, duration_us: int, prior: Curve) -> None:
    """Takes in one completion on `units` (>= 1) that took `duration_us` (>= 1)."""
    model.count += 1
    for seen in model.sizes.values():
        seen.weight *= 1 - FORGET
    at = model.sizes.get(units)
    if at is None:
        if len(model.sizes) >= limits.MODEL_SIZES_MAX:
            del model.sizes[min(model.sizes, key=lambda size: (model.sizes[size].weight, size))]
        at = model.sizes[units] = Seen()
    root = sqrt(duration_us)
    if at.weight >= 2:
        limit = sqrt(OUTLIER)
        root = min(max(root, at.root_us / limit), at.root_us * limit)
        deviation = 2 * (root / at.root_us - 1)
        certain = at.weight / (at.weight + 1)  # the mean of few is off by itself
        model.compared += certain - FORGET * model.compared
        model.variance += certain * (certain * deviation * deviation - model.variance) / model.compared
    at.weight += 1
    at.times += 1
    at.last = model.count
    at.root_us += (root - at.root_us) / at.weight
    at.recent_us = at.recent_us + RECENT * (root - at.recent_us) if at.recent_us else root
    changed = 1 + CHANGED * model.spread
    if at.weight >= 1 / RECENT and not 1 / changed < at.recent_us / at.root_us < changed:
        at.root_us, at.weight = at.recent_us, 1 / RECENT
        # That was no spread.
        model.compared = min(model.compared, SPREAD_WEIGHT)
        model.variance = min(model.variance, SPREAD * SPREAD)
        for size, other in model.sizes.items():
            if size != units:
                other.weight *= STALE
                other.times = 0
    if model.count <= REFIT_ALWAYS or model.count % REFIT_EVERY == 0:
        model.curve = _fit(model, prior)


def learnt(model: Model) -> Curve:
    return Curve(*model.curve)


def size_to_try(model: Model, sizes: Sequence[int], most: int) -> int | None:
    """When capacity idles: of at most `most` units, among the smallest and its doubles, the size of which least is known and
    whose turn has come, if there is one. None before the first few completions: the prior has the first word."""
    if model.count < TRY_AFTER:
        return None
    ladder: list[int] = []
    for size in sizes:
        if size > most:
            break
        if not ladder or size >= 2 * ladder[-1]:
            ladder.append(size)
    curve = learnt(model)
    fastest = min(range(len(ladder)), key=lambda index: (curve.at(ladder[index]), index), default=0)
    tried: tuple[float, int] | None = None
    for index, size in enumerate(ladder):
        seen = model.sizes.get(size)
        if seen is not None:
            if seen.times >= TRIES and abs(index - fastest) != 1:
                continue
            if model.count - seen.last < _gap(seen, curve.at(ladder[fastest]) * (1 + model.spread)):
                continue
        weight = seen.weight if seen is not None else 0.0
        if tried is None or weight < tried[0]:
            tried = weight, size
    return tried[1] if tried is not None else None


def _gap(seen: Seen, slow_us: float) -> int:
    hopeless = seen.times >= TRIES and seen.root_us * seen.root_us > slow_us
    return min(TRY_GAP * seen.times * (TRY_HOPELESS if hopeless else 1), TRY_GAP_MAX)


def _fit(model: Model, prior: Curve) -> tuple[float, float, float]:
    """Least squares of the relative error over all sizes seen, and over the prior's shape at the scale of what was seen."""
    rows = [(units, seen.root_us * seen.root_us, seen.weight) for units, seen in sorted(model.sizes.items())]
    scale = sum(weight * duration / prior.at(units) for units, duration, weight in rows) / sum(row[2] for row in rows)
    weight = PRIOR_WEIGHT * model.variance * model.variance
    rows += [(units, scale * prior.at(units), weight) for units in PRIOR_SIZES]
    gram = [[0.0] * 3 for _ in range(3)]
    right = [0.0] * 3
    for units, duration, weight in rows:
        basis = (1.0 / duration, 1.0 / (units * duration), units / duration)
        for i in range(3):
            scaled = weight * basis[i]
            right[i] += scaled
            for j in range(i + 1):
                gram[i][j] += scaled * basis[j]
    best: tuple[float, tuple[float, float, float]] | None = None
    for uses in _SUBSETS:
        found = _solve(gram, right, uses)
        # The problem is convex: a solution of all three with none negative is the best there is.
        if found is not None and (best is None or found[0] < best[0]):
            best = found
            if len(uses) == 3:
                break
    assert best is not None, "serial alone always has a solution"
    return best[1]


_SUBSETS: Final = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))
"""Which of serial, parallel, overhead are not 0. The best solution with none negative is that of one of these."""


def _solve(gram: list[list[float]], right: list[float], uses: tuple[int, ...]) -> tuple[float, tuple[float, float, float]] | None:
    """The normal equations of some of the parts by elimination; None if they are singular or one comes out negative. Returns
    the error less that of a curve of 0."""
    size = len(uses)
    matrix = [[gram[max(i, j)][min(i, j)] for j in uses] + [right[i]] for i in uses]
    for column in range(size):
        if matrix[column][column] <= 1e-12 * gram[uses[column]][uses[column]]:
            return None
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                for k in range(column, size + 1):
                    matrix[row][k] -= factor * matrix[column][k]
    parts = [0.0, 0.0, 0.0]
    error = 0.0
    for i, use in enumerate(uses):
        parts[use] = matrix[i][size] / matrix[i][i]
        if parts[use] < 0:
            return None
        error -= parts[use] * right[use]
    return error, (parts[0], parts[1], parts[2])
