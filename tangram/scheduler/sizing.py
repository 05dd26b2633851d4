"""How many units each candidate of one host gets, and how many candidates are left for later.

A rule is given the candidates that would all fit at their minimum, in arrival order, and says how many units each gets;
0 units for the last ones of them: they are evicted, that is left in the queue for the good of the others.

Rules: `fixed` (each the same), `marginal` (spare units by marginal gain, nobody evicted), `paper` (ARL-Tangram, arXiv 2603.13019:
marginal gain, and the last candidate is evicted as long as the objective improves), and `priced`: a unit has a shadow price, the
waiting that a core-second taken now causes to others, and each candidate takes the size at which its own time and the price of
what it uses are least together. Only + - * / and sqrt, in a fixed order.
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tangram.scheduler.allocate import Plan, by_marginal_gain, each, exactly
from tangram.scheduler.elasticity import Curve

BEHIND_MAX: Final = 64
"""Queued actions behind the candidates that an objective looks at; those beyond count by their number alone."""
WAITS_MAX: Final = 8
"""Release times at which a candidate that waits by choice might start."""
WAIT_GAIN: Final = 1.2
"""By so much it has to be better to wait by choice: when units come back is a guess. Mean ACT beside the best fixed size on 30
settings (`tests.simulation.settings`): 0.933 at 1.1 and 1.2, 0.937 at 1.5, 0.939 at 1, 0.949 if nobody waits."""
FEW: Final = 6
"""Candidates up to which each number of them to start is weighed; of more, three."""
NEAR: Final = 4
"""Of those after them, for how many starting at once is weighed against waiting. (Completion times of small cases lie above the
best by 1.1 % in the mean at 4 as at 8; by 3.2 % if only the first is weighed, and only when the plan is chosen.)"""
EXACT_MAX: Final = 4_096
"""Legal sizes of all candidates, times spare units, up to which gaps and tables are shared out exactly: half a millisecond, and
the rule `paper` shares out up to 64 times."""
PRICE_MIN: Final = 0.01
"""Of a unit that nobody else wants: what hardly gets any faster leaves it alone."""
UTILISATION_MAX: Final = 0.98
"""Beyond it the price of a unit would grow without bound; measured to make no difference between 0.95 and this."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """sizes: legal units, rising. Candidates with equal `curve` and `sizes` should share the
    object: rules compute once for each."""

    curve: Curve
    sizes: Sequence[int]

    def step(self, size: int) -> tuple[float, int] | None:
        """What each unit of the next step up from `size` gains, and the size after it; None if none gains. The law is convex,
        so that is the next size; a table may have steps that gain nothing before one that does."""
        after = bisect_right(self.sizes, size)
        if after == len(self.sizes):
            return None
        now_us = self.curve.at(size)
        best = (0.0, size)
        for following in self._faster(after) if self.curve.table else (self.sizes[after],):
            gain = (now_us - self.curve.at(following)) / (following - size)
            if gain > best[0]:
                best = gain, following
        return best if best[0] > 0 else None

    def best(self, price: float, most: int) -> int:
        """The legal size of at most `most` units at which duration * (1 + price * units) is least; at least the smallest."""
        sizes = self.sizes
        serial, parallel, overhead, table = self.curve
        if table:
            allowed = [size for size in self._faster(0) if size <= most]
            return min(allowed, key=lambda size: (self.curve.at(size) * (1 + price * size), size), default=sizes[0])
        low, high = 0, len(sizes) - 1
        while low < high:  # the cost is convex in the size, so it falls and then rises
            middle = (low + high) >> 1
            size, more = sizes[middle], sizes[middle + 1]
            less = (serial + parallel / size + overhead * size) * (1 + price * size)
            if more <= most and (serial + parallel / more + overhead * more) * (1 + price * more) < less:
                low = middle + 1
            else:
                high = middle
        return sizes[low]

    def _faster(self, after: int) -> list[int]:
        """Of the sizes from the index `after` on, the smallest for each entry of the table."""
        places = {max(after, bisect_left(self.sizes, amount)) for amount, _ in self.curve.table}
        return [self.sizes[at] for at in sorted(places) if at < len(self.sizes)]


def _has_gaps(sizes: Sequence[int]) -> bool:
    return sizes[-1] - sizes[0] >= len(sizes)


class Group:
    """Candidates in order, by kind: what is alike is computed once and counted. kinds: each once; of: the kind of each;
    members: the indices of each kind, rising."""

    def __init__(self, candidates: list[Candidate]) -> None:
        members: dict[Candidate, list[int]] = {}
        for index, candidate in enumerate(candidates):
            members.setdefault(candidate, []).append(index)
        self.kinds = list(members)
        self.members = list(members.values())
        self.least = [kind.sizes[0] for kind in self.kinds]
        self.is_uneven = any(kind.curve.table or _has_gaps(kind.sizes) for kind in self.kinds)
        self.of = [0] * len(candidates)
        for kind, who in enumerate(self.members):
            for index in who:
                self.of[index] = kind

    def __len__(self) -> int:
        return len(self.of)

    def total(self, sizes: list[int], count: int) -> int:
        """Units of the first `count`, on `sizes` by kind."""
        return sum([size * bisect_left(who, count) for size, who in zip(sizes, self.members, strict=True)])

    def plan(self, sizes: list[int], count: int) -> Plan:
        """The first `count` on `sizes` by kind."""
        return [{size: bisect_left(who, count)} for size, who in zip(sizes, self.members, strict=True)]

    def each(self, plan: Plan) -> list[int]:
        """Units of all candidates: 0 for those that are not in it."""
        sizes = each(plan, self.members)
        return sizes + [0] * (len(self) - len(sizes))

    def started(self, plan: Plan) -> Iterator[tuple[float, int, int]]:
        """(duration, size, how many) of what is in it."""
        for kind, numbers in zip(self.kinds, plan, strict=True):
            for size, number in numbers.items():
                if number:
                    yield kind.curve.at(size), size, number

    def best(self, price: float, most: int) -> list[int]:
        """By kind."""
        return [kind.best(price, most) if len(kind.sizes) > 1 else kind.sizes[0] for kind in self.kinds]

    def from_minimum(self, view: "View", count: int) -> Plan:
        """The first `count`, each from its minimum up by marginal gain."""
        if view.wide_waits:
            return self.plan(self.least, count)
        members = [who[: bisect_left(who, count)] for who in self.members]
        spare = view.free - self.total(self.least, count)
        if self.is_uneven:
            choices = sum([len(kind.sizes) * len(who) for kind, who in zip(self.kinds, members, strict=True)])
            if spare * choices <= EXACT_MAX:
                sizes = [self.kinds[kind].sizes for kind in self.of[:count]]
                chosen = exactly(sizes, lambda index, units: self.kinds[self.of[index]].curve.at(units), spare)
                return [Counter([chosen[index] for index in who]) for who in members]
        return by_marginal_gain(self.least, [kind.step for kind in self.kinds], members, spare)


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
    group = Group(candidates)
    return group.each(group.from_minimum(view, len(group)))


def paper(view: View, candidates: list[Candidate]) -> list[int]:
    """Evicts the last candidate while the sum of completion times, with an estimate for all that is left, falls."""
    group = Group(candidates)
    if view.wide_waits:
        return group.each(group.from_minimum(view, len(group)))
    on_least = [(kind.curve.at(size), size) for kind, size in zip(group.kinds, group.least, strict=True)]
    best: Plan = []
    least = math.inf
    for count in range(len(group), max(0, len(group) - BEHIND_MAX - 2), -1):
        plan = group.from_minimum(view, count)
        following = [on_least[kind] for kind in group.of[count : count + BEHIND_MAX]]
        objective = completion_us(view.releases, view.free, group.started(plan), following)
        if objective >= least:
            break
        best, least = plan, objective
    return group.each(best)


def completion_us(
    releases: Iterable[tuple[float, int]],
    free: int,
    started: Iterable[tuple[float, int, int]],
    following: Iterable[tuple[float, int]],
) -> float:
    """Sum of completion times in microseconds: of what starts now, and of those that follow, which start in order as units come
    back (a heap of finish times).

    releases: (microseconds from now, units) of what runs. started: (duration, units, how many). following: (duration, units).
    """
    total = 0.0
    heap = list(releases)
    for took, size, number in started:
        total += number * took
        free -= number * size
        heap.append((took, number * size))
    heapq.heapify(heap)
    now = 0.0
    for took, size in following:
        while free < size and heap:
            now, back = heapq.heappop(heap)
            free += back
        total += now + took
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


def priced(view: View, candidates: list[Candidate]) -> list[int]:
    """Each takes its size at the price; if they do not all fit at that, as many as is best start at once, and those after them
    start or wait, each as is best for it."""
    group = Group(candidates)
    every = len(group)
    if view.wide_waits:
        return group.each(group.from_minimum(view, every))
    prices = Prices(view, every)
    for _ in range(2):  # what the candidates take makes the future dearer, which makes them take less
        sizes = group.best(prices.at(every), view.cores)
        left = view.free - group.total(sizes, every)
        if left < 0:
            break
        prices.expect_free(left)
    sizes = group.best(prices.at(every), view.cores)
    if group.total(sizes, every) <= view.free:
        return [sizes[kind] for kind in group.of]
    low, high = 0, every - 1
    while low < high:  # the largest prefix that fits at the price with it started
        middle = (low + high + 1) // 2
        if group.total(group.best(prices.at(middle), view.cores), middle) <= view.free:
            low = middle
        else:
            high = middle - 1
    least, units = 0.0, list[int]()
    for count in range(min(low, 1), every + 1) if every <= FEW else sorted({low, (low + every) // 2, every}):
        sizes = group.best(prices.at(count), view.cores)
        fits = group.total(sizes, count) <= view.free
        plan = group.plan(sizes, count) if fits else group.from_minimum(view, count)
        cost, following = _play(view, group, plan, count, sizes, prices)
        if not units or cost < least:
            least, units = cost, group.each(plan)
            units[count : count + len(following)] = following
    return units


def _play(view: View, group: Group, plan: Plan, count: int, usual: list[int], prices: Prices) -> tuple[float, list[int]]:
    """The first `count` start now as planned, and those after them in turn, each when and on what is best for it; the
    farther ones when what `usual` says (by kind) is there. Returns the sum of completion times, with what the used core-time
    costs those to come, in microseconds; and the sizes of those after the first `count` that start now, too."""
    to_come = prices.future(0)
    total, free = 0.0, view.free
    ends = list(view.releases)
    for took, size, number in group.started(plan):
        total += number * took * (1 + to_come * size)
        free -= number * size
        ends.append((took, number * size))
    ends.sort()
    now, passed = 0.0, 0
    following: list[int] = []
    for place, at in enumerate(group.of[count : count + BEHIND_MAX], count + 1):
        kind = group.kinds[at]
        is_near = place - count <= NEAR
        size = kind.sizes[0] if is_near else usual[at]
        while free < size and passed < len(ends):
            now, back = ends[passed]
            free += back
            passed += 1
        if is_near:
            waited_us = view.waited_us if place == 1 else 0.0
            waits, size = _turn(kind, prices.at(place), view.cores, free, now, ends[passed : passed + WAITS_MAX], waited_us)
            for _ in range(waits):
                now, back = ends[passed]
                free += back
                passed += 1
        if not passed:
            following.append(size)
        took = kind.curve.at(size)
        total += now + took * (1 + to_come * size)
        free -= size
        insort(ends, (now + took, size), passed)
    return total, following


def _turn(
    kind: Candidate, price: float, cores: int, free: int, now_us: float, ends: list[tuple[float, int]], waited_us: float
) -> tuple[int, int]:
    """For how many of the next ends it is best to wait instead of starting on what is free, and the size then. Nobody waits
    who has waited for longer than it would run on that."""
    want = kind.best(price, cores)
    if want <= free:
        return 0, want
    size = kind.best(price, free)
    took_us = kind.curve.at(size)
    found = 0, size
    if waited_us >= took_us:
        return found
    least = took_us * (1 + price * size) / WAIT_GAIN
    available = free
    for count, (end_us, back) in enumerate(ends, 1):
        available += back
        size = kind.best(price, available)
        cost = (end_us - now_us) * (1 + price * free) + kind.curve.at(size) * (1 + price * size)
        if cost < least:
            found, least = (count, size), cost
        if size >= want:
            break
    return found
