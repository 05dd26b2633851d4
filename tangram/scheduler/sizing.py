"""How many units each candidate of one host gets, and how many candidates are left for later.

A rule is given the candidates that would all fit at their minimum, in arrival order, and says how many units each gets;
0 units for the last ones of them: they are evicted, that is left in the queue for the good of the others.

Rules: `fixed` (each the same), `marginal` (spare units by marginal gain, nobody evicted), `paper` (ARL-Tangram, arXiv 2603.13019:
marginal gain, and the last candidate is evicted as long as the objective improves), and `priced`: a unit has a shadow price, the
waiting that a core-second taken now causes to others, and each candidate takes the size at which its own time and the price of
what it uses are least together. Only + - * / and sqrt, in a fixed order.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tangram.scheduler.allocate import by_marginal_gain, exactly
from tangram.scheduler.elasticity import Curve

BEHIND_MAX: Final = 64
"""Queued actions behind the candidates that an objective looks at; those beyond count by their number alone."""
WAITS_MAX: Final = 8
"""Release times at which a candidate that waits by choice might start."""
WAIT_GAIN: Final = 1.2
"""By so much it has to be better to wait by choice: when units come back is a guess. (Between 1.1 and 1.35 the mean completion
time of simulated workloads differs by less than 2 %; at 1 it is up to 4 % higher.)"""
EXACT_MAX: Final = 4_096
"""Legal sizes of all candidates, times spare units, up to which gaps and tables are shared out exactly: half a millisecond, and
the rule `paper` shares out up to 64 times."""
PRICE_MIN: Final = 0.01
"""Of a unit that nobody else wants: what hardly gets any faster leaves it alone."""
UTILISATION_MAX: Final = 0.98
"""Beyond it the price of a unit would grow without bound; measured to make no difference between 0.95 and this."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """sizes: legal units, rising. Candidates with equal `curve` and `sizes` should share the
    object: rules compute once for each."""

    curve: Curve
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class View:
    """One host in one pass.

    cores: all there are; free: of those, before the candidates. behind: queued actions that could run here and are no
    candidates. thinking: how many are expected to submit their next action here (open sessions without one). utilisation: the
    recent share of cores in use, 0..1. releases: (microseconds from now, units) of what runs, rising.
    """

    cores: int
    free: int
    behind: int
    thinking: int
    utilisation: float
    releases: list[tuple[float, int]]
    fixed: int = 1
    """The setting `fixed_units`."""
    wide_waits: bool = False
    """An action waits here for more cores than are free: extras would only make it wait longer."""
    waited_us: float = 0.0
    """By the first candidate, since it became ready."""


Rule = Callable[[View, list[Candidate]], list[int]]


def fixed(view: View, candidates: list[Candidate]) -> list[int]:
    """Each starts on the same number of units, or the nearest it may have here, or waits for them."""
    found: list[int] = []
    free = view.free
    for candidate in candidates:
        possible = [size for size in candidate.sizes if size <= view.cores]
        size = min(possible, key=lambda amount: (abs(amount - view.fixed), amount))
        if size > free:
            break
        found.append(size)
        free -= size
    return found + [0] * (len(candidates) - len(found))


def marginal(view: View, candidates: list[Candidate]) -> list[int]:
    """Every candidate starts; spare units go where the duration falls most."""
    return _from_minimum(view, candidates)


def _from_minimum(view: View, candidates: list[Candidate]) -> list[int]:
    if view.wide_waits:
        return [candidate.sizes[0] for candidate in candidates]
    spare = view.free - sum(candidate.sizes[0] for candidate in candidates)
    sizes = [candidate.sizes for candidate in candidates]
    few = spare * sum(map(len, sizes)) <= EXACT_MAX
    if few and any(each.curve.table or _has_gaps(each.sizes) for each in candidates):
        return exactly(sizes, lambda i, m: candidates[i].curve.at(m), spare)
    return by_marginal_gain(sizes, lambda i, m: candidates[i].curve.at(m), lambda _: spare)


def _has_gaps(sizes: Sequence[int]) -> bool:
    return sizes[-1] - sizes[0] >= len(sizes)


def paper(view: View, candidates: list[Candidate]) -> list[int]:
    """Evicts the last candidate while the sum of completion times, with an estimate for all that is left, falls."""
    if view.wide_waits:
        return _from_minimum(view, candidates)
    best: list[int] | None = None
    least = 0.0
    for count in range(len(candidates), 0, -1):
        units = _from_minimum(view, candidates[:count])
        objective = _objective(view, candidates, units, [candidate.sizes[0] for candidate in candidates[count:]], 0.0)
        if best is not None and objective >= least:
            break
        best, least = units, objective
        if count < len(candidates) - BEHIND_MAX:
            break
    assert best is not None
    return best + [0] * (len(candidates) - len(best))


def _objective(view: View, candidates: list[Candidate], units: list[int], rest: list[int], price: float) -> float:
    """Sum of completion times in microseconds: of what starts now on `units`, and of the other candidates when they start in
    order on `rest` units each, as units come back (a heap of finish times). price: added for each core-microsecond used."""
    total = 0.0
    heap = list(view.releases)
    free = view.free
    for candidate, size in zip(candidates, units, strict=False):
        took = candidate.curve.at(size)
        total += took * (1 + price * size)
        free -= size
        heap.append((took, size))
    heapq.heapify(heap)
    now = 0.0
    for candidate, size in zip(candidates[len(units) : len(units) + BEHIND_MAX], rest, strict=False):
        while free < size and heap:
            now, back = heapq.heappop(heap)
            free += back
        took = candidate.curve.at(size)
        total += now + took * (1 + price * size)
        free -= size
        heapq.heappush(heap, (now + took, size))
    return total


# --- the priced rule ---------------------------------------------------------------------------------------------


class Prices:
    """What a core-microsecond taken now costs others, in action-microseconds of waiting.

    queue: each action that waits is delayed by 1 / (cores * (1 - utilisation)) of it. future: the chance that the state with so
    many free cores reaches saturation, and that somebody comes then (M/M/c, as utilisation^(1 + free/2)), times the same; at
    most what the actions that are expected can be delayed by.
    """

    def __init__(self, view: View, count: int) -> None:
        self._view = view
        rho = min(view.utilisation, UTILISATION_MAX)
        self._rho = rho
        self._inverse = 1 / (view.cores * (1 - rho))
        self.waiting = count + view.behind
        self._each = min(self._inverse, (1 + 16 * view.thinking / max(self.waiting, 1)) / view.cores)
        self._ahead = self.future(view.free)

    def future(self, free: int) -> float:
        chance = 1.0
        power, base = max(free, 0) // 2 + 1, self._rho
        while power:
            if power & 1:
                chance *= base
            base *= base
            power >>= 1
        return min(self._view.thinking / self._view.cores, 4 * self._inverse * chance)

    def expect_free(self, free: int) -> None:
        """So many cores will stay free: the price of the future is that of this state, never lower than it was."""
        self._ahead = max(self._ahead, self.future(free))

    def at(self, started: int) -> float:
        """When the first `started` of the waiting ones start now."""
        return max(PRICE_MIN, self._ahead + (self.waiting - started) * self._each)


def best_size(candidate: Candidate, price: float, most: int) -> int:
    """The legal size of at most `most` units at which duration * (1 + price * units) is least; at least the smallest."""
    curve, sizes = candidate.curve, candidate.sizes
    if curve.table:
        allowed = [size for size in sizes if size <= most] or [sizes[0]]
        return min(allowed, key=lambda size: (curve.at(size) * (1 + price * size), size))
    low, high = 0, len(sizes) - 1
    while low < high:  # the cost is convex in the size, so it falls and then rises
        middle = (low + high) // 2
        size, following = sizes[middle], sizes[middle + 1]
        if following <= most and curve.at(following) * (1 + price * following) < curve.at(size) * (1 + price * size):
            low = middle + 1
        else:
            high = middle
    return sizes[low]


def priced(view: View, candidates: list[Candidate]) -> list[int]:
    """Each takes its size at the price; if they do not all fit at that, the last ones wait, as long as that is better."""
    if view.wide_waits:
        return _from_minimum(view, candidates)
    prices = Prices(view, len(candidates))
    for _ in range(2):  # what the candidates take makes the future dearer, which makes them take less
        units = _sizes(candidates, prices.at(len(candidates)), view.cores)
        if sum(units) > view.free:
            break
        prices.expect_free(view.free - sum(units))
    units = _sizes(candidates, prices.at(len(candidates)), view.cores)
    if sum(units) <= view.free:
        return units
    low, high = 0, len(candidates) - 1
    while low < high:  # the largest prefix that fits at the price with it started
        middle = (low + high + 1) // 2
        if sum(_sizes(candidates[:middle], prices.at(middle), view.cores)) <= view.free:
            low = middle
        else:
            high = middle - 1
    choices = sorted({low, (low + len(candidates)) // 2, len(candidates)} - {0})
    best: list[int] = []
    least: float | None = None
    for count in choices:
        plan = _filled(view, candidates[:count], prices, count)
        rest = [best_size(each, prices.at(count), view.cores) for each in candidates[count : count + BEHIND_MAX]]
        cost = _objective(view, candidates, plan, rest, prices.future(0))
        if least is None or cost < least:
            best, least = plan, cost
    if low == 0 and len(best) == 1:  # not even the first one fits at its price
        best = []
    if len(best) < len(candidates):
        best = _or_wait(view, candidates, best, prices)
    return best + [0] * (len(candidates) - len(best))


def _sizes(candidates: list[Candidate], price: float, most: int) -> list[int]:
    known: dict[int, int] = {}
    found = []
    for candidate in candidates:
        size = known.get(id(candidate))
        if size is None:
            size = known[id(candidate)] = best_size(candidate, price, most)
        found.append(size)
    return found


def _filled(view: View, candidates: list[Candidate], prices: Prices, count: int) -> list[int]:
    """Sizes at the price if they fit, else from the minimum up by marginal gain."""
    units = _sizes(candidates, prices.at(count), view.cores)
    return units if sum(units) <= view.free else _from_minimum(view, candidates)


def _or_wait(view: View, candidates: list[Candidate], started: list[int], prices: Prices) -> list[int]:
    """The next candidate in order starts on what is left, or waits by choice for the next units that come back; it never waits
    longer than it would run on what there is."""
    free = view.free - sum(started)
    head = candidates[len(started)]
    if free < head.sizes[0]:
        return started
    price = prices.at(len(started) + 1)
    now_size = best_size(head, price, free)
    now_us = head.curve.at(now_size)
    least = now_us * (1 + price * now_size)
    if started or view.waited_us < now_us:
        available = free
        for at_us, back in sorted([*view.releases, *((candidates[i].curve.at(m), m) for i, m in enumerate(started))])[:WAITS_MAX]:
            available += back
            size = best_size(head, price, available)
            took_us = head.curve.at(size)
            if WAIT_GAIN * (at_us + took_us * (1 + price * size) + price * free * at_us) < least:
                return started
    return [*started, now_size]
