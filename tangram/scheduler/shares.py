"""Who is entitled to what, for policies that share by task: read by a pass, with what the pass itself has handed out.

`fair`: among the tasks that use a host, cores are shared by weight, and what one leaves the others may have. The next action is
that of the task that holds least of what it asks for, by weight; it may take extra cores up to its task's part.
`split-by-task`: a task has its part of each host and never more.
"""

from collections.abc import Iterable, Iterator

from tangram.scheduler.cores import MILLI
from tangram.scheduler.parts import IDLE_NS, mean_cores
from tangram.scheduler.state import Host, HostKey, QueueKey, State


def weight_of(state: State, task: str) -> int:
    return state.shares.get(task, 1)


def split(cores: int, weights: dict[str, int]) -> dict[str, int]:
    """Whole cores by weight; those that are left over go to the largest remainders, between equals by name."""
    total = sum(weights.values())
    parts = {task: cores * weight // total for task, weight in weights.items()}
    left = cores - sum(parts.values())
    for task in sorted(weights, key=lambda task: (-(cores * weights[task] % total), task))[:left]:
        parts[task] += 1
    return parts


def fixed_part(state: State, cores: int, task: str) -> int:
    """Of a host with so many cores, under `split-by-task`: by the weights that are named, equally if none is."""
    return split(cores, state.shares or dict.fromkeys(state.tasks, 1)).get(task, 0)


class Shares:
    """What each task holds in this pass: what the state says, and what was started since."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._pool: dict[str, dict[str, int]] = {}
        self._of_host: dict[tuple[HostKey, str], dict[str, int]] = {}
        self._capacity: dict[str, int] = {}
        for host in state.hosts.values():
            for name, size in self._sizes(host):
                self._capacity[name] = self._capacity.get(name, 0) + size
            for task, part in host.parts.items():
                held = self._pool.setdefault(task, {})
                for name, amount in part.amounts.items():
                    held[name] = held.get(name, 0) + amount

    @staticmethod
    def _sizes(host: Host) -> Iterator[tuple[str, int]]:
        yield "cpu", host.pool.all.bit_count() * MILLI
        yield from host.capacity.items()

    def held(self, host: Host, task: str) -> dict[str, int]:
        """By resource, on one host. To be read only."""
        found = self._of_host.get((host.key, task))
        if found is None:
            part = host.parts.get(task)
            found = self._of_host[host.key, task] = dict(part.amounts) if part is not None else {}
        return found

    def start(self, host: Host, task: str, amounts: dict[str, int]) -> None:
        for held in (self.held(host, task), self._pool.setdefault(task, {})):
            for name, amount in amounts.items():
                held[name] = held.get(name, 0) + amount

    def rank(self, key: QueueKey) -> float:
        """The largest part that the queue's task holds of anything its actions ask for, by weight: on their host, or of all
        hosts if they may go anywhere. It only rises in a pass."""
        if key.host is None:
            held, sizes = self._pool.get(key.task, {}), self._capacity
        else:
            host = self._state.hosts[key.host]
            held, sizes = self.held(host, key.task), dict(self._sizes(host))
        most = 0.0
        for name in key.resources:
            if held.get(name) and sizes.get(name):
                most = max(most, held[name] / sizes[name])
        return most / weight_of(self._state, key.task)

    def part(self, host: Host, task: str, waiting: dict[str, int]) -> float:
        """Cores of a host that a task may count on under `fair`: the others keep what they use or wait for, up to their share.

        waiting: READY actions by task that could run there."""
        weights: dict[str, int] = {}
        wants: dict[str, float] = {}
        for other in self._users(host, waiting):
            if other != task:
                part = host.parts.get(other)
                lately = mean_cores(part, self._state.now_ns) if part is not None else 0.0
                now = self.held(host, other).get("cpu", 0) / MILLI + waiting.get(other, 0)
                weights[other] = weight_of(self._state, other)
                wants[other] = max(lately, now)
        left, total = float(host.pool.all.bit_count()), weight_of(self._state, task) + sum(weights.values())
        for other in sorted(wants, key=lambda other: (wants[other] / weights[other], other)):
            if wants[other] * total > left * weights[other]:
                break  # this one, and all after it, are held to their share
            left -= wants[other]
            total -= weights[other]
        return left * weight_of(self._state, task) / total

    def _users(self, host: Host, waiting: dict[str, int]) -> Iterable[str]:
        """Tasks that use a host, or did lately, or wait for it."""
        found = {
            task: None
            for task, part in host.parts.items()
            if part.amounts or part.sessions or self._state.now_ns - part.load.at_ns < IDLE_NS
        }
        found.update(dict.fromkeys(waiting))
        return found
