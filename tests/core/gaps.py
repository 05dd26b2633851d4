"""How far a rule stays behind the best schedule there is, found by branch and bound, for small random cases: up to 6 actions that
are there at once, more than run side by side, on any of 1, 2, 4 or 8 units; the sum of their completion times.

`python -m tests.core.gaps COUNT` prints the distribution, against all schedules that start the actions in arrival order, and
against all.
"""

import sys
from collections.abc import Sequence
from random import Random

from tangram.scheduler import sizing
from tangram.scheduler.elasticity import Curve
from tangram.scheduler.sizing import Candidate, Rule, View

Running = tuple[tuple[float, int], ...]
"""(end, units)"""


def amdahl(seconds: float, parallel: float, sizes: Sequence[int]) -> Candidate:
    return Candidate(Curve(1e6 * seconds * (1 - parallel), 1e6 * seconds * parallel), sizes)


def case(seed: int) -> tuple[int, list[Candidate]]:
    """The cores of a host, and what arrives."""
    random = Random(seed)
    cores = random.choice((4, 6, 8))
    sizes = [size for size in (1, 2, 4, 8) if size <= cores]
    count = random.randint(2, 6)
    return cores, [amdahl(random.uniform(0.2, 3), random.choice((0.3, 0.6, 0.8, 0.95)), sizes) for _ in range(count)]


def best(cores: int, candidates: list[Candidate], *, in_order: bool) -> float:
    """The least sum of completion times over all schedules that start each candidate at once or at a later end, on any of its
    sizes; in order: none before an earlier one. What is left is taken to start at once and run as fast as it can, to leave out
    what cannot be better."""
    fastest = [min(each.curve.at(size) for size in each.sizes) for each in candidates]
    least = float("inf")

    def search(rest: tuple[int, ...], at_us: float, running: Running, total: float) -> None:
        nonlocal least
        if not rest:
            least = min(least, total)
            return
        floor = sum(fastest[index] for index in rest)
        for start_us in sorted({at_us, *(end for end, _ in running if end > at_us)}):
            if total + len(rest) * start_us + floor >= least:
                return
            still = tuple(each for each in running if each[0] > start_us)
            free = cores - sum(units for _, units in still)
            for index in rest[:1] if in_order else rest:
                others = tuple(other for other in rest if other != index)
                for size in reversed(candidates[index].sizes):
                    if size <= free:
                        end = start_us + candidates[index].curve.at(size)
                        if total + end + len(others) * start_us + floor - fastest[index] < least:
                            search(others, start_us, (*still, (end, size)), total + end)

    search(tuple(range(len(candidates))), 0.0, (), 0.0)
    return least


def played(cores: int, candidates: list[Candidate], rule: Rule) -> float:
    """The sum of completion times when the rule decides at each end."""
    now_us, total = 0.0, 0.0
    running: list[tuple[float, int]] = []
    waiting = list(candidates)
    while waiting:
        free = cores - sum(units for _, units in running)
        fitting: list[Candidate] = []
        for candidate in waiting:
            if sum(each.sizes[0] for each in fitting) + candidate.sizes[0] > free:
                break
            fitting.append(candidate)
        if fitting:
            busy = View(
                cores=cores,
                free=free,
                behind=len(waiting) - len(fitting),
                thinking=0,
                utilisation=(cores - free) / cores,
                releases=sorted((end - now_us, units) for end, units in running),
                waited_us=now_us,
            )
            for candidate, amount in zip(fitting, rule(busy, fitting), strict=True):
                if amount:
                    waiting.remove(candidate)
                    running.append((now_us + candidate.curve.at(amount), amount))
                    total += running[-1][0]
        if waiting:
            running.sort()
            assert running, "nothing runs and nothing starts"
            now_us = running[0][0]
            running = [each for each in running if each[0] > now_us]
    return total


def gaps(rule: Rule, count: int, *, in_order: bool = True) -> list[float]:
    """The rule's sum beside the best one, less 1, for each case."""
    found = []
    for seed in range(count):
        cores, candidates = case(seed)
        found.append(played(cores, candidates, rule) / best(cores, candidates, in_order=in_order) - 1)
    return found


def main(count: int) -> None:
    for name, rule in (("tangram", sizing.priced), ("paper", sizing.paper), ("marginal-gain", sizing.marginal)):
        for in_order in (True, False):
            found = sorted(gaps(rule, count, in_order=in_order))
            at = [found[int(part * (len(found) - 1))] for part in (0.5, 0.9, 1)]
            percent = " ".join(f"{100 * gap:.1f}" for gap in (sum(found) / count, *at))
            print(f"{name}, {'arrival order' if in_order else 'any order'}, {count} cases: mean, median, p90, worst {percent} %")


if __name__ == "__main__":
    main(int(sys.argv[1]))
