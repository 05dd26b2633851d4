"""Who is entitled to what, for policies that share by task: read by a pass, with what the pass itself has handed out.

`fair`: the next action is that of the task that holds least of what it asks for, by weight. On each host a task may hold what the
others do not want of its cores, and its share by weight in any case.
`split-by-task`: a task has its part of the cores of each host, and of the GPUs of the pool, and never more.
"""

from collections.abc import Iterator
from math import ceil, sqrt
from typing import Final

from tangram.scheduler.cores import MILLI, cores_of
from tangram.scheduler.parts import is_idle, mean_cores
from tangram.scheduler.state import Host, HostKey, QueueKey, State

MARGIN: Final = 2.0
"""Of what a task held lately, in square roots: there is no preemption, so what others may not borrow is what it finds at once.
Use that comes and goes at random seldom rises further."""


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


def fixed_gpus(state: State, task: str) -> dict[HostKey, int]:
    """A task's GPUs under `split-by-task`, as a mask for each host on which it has any: whole ones by weight, one task behind the
    other, by name, along the hosts, so that most of a part lies in large chunks."""
    every = [(key, gpu) for key, host in state.hosts.items() for gpu in cores_of(host.gpus.all)]
    parts = split(len(every), state.shares or dict.fromkeys(state.tasks, 1))
    first = sum(count for other, count in parts.items() if other < task)
    found: dict[HostKey, int] = {}
    for key, gpu in every[first : first + parts.get(task, 0)]:
        found[key] = found.get(key, 0) | 1 << gpu
    return found


class Shares:
    """What each task holds in this pass: what the state says, and what was started since."""

    def __init__(self, state: State, *, splits: bool) -> None:
        self._state = state
        self._splits = splits
        self._parts: dict[tuple[HostKey, str], int] = {}
        self._waiting: dict[tuple[HostKey | None, str], int] = {}
        """Cores that READY actions would take, by the host they are bound to and task; each as the first of its queue."""
        for key, queue in state.queues.items():
            first = next(iter(queue)).spec.cost.get("cpu")
            if first is not None:
                cores = len(queue) * -(-max(first.low, first.high) // MILLI)
                self._waiting[key.host, key.task] = self._waiting.get((key.host, key.task), 0) + cores
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
        yield "gpu", host.gpus.all.bit_count()
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

    def part(self, host: Host, task: str) -> int:
        """Cores of a host that a task may hold. Of all of them each of the others is left what it wants, up to its share; what
        it wants is what it holds and waits for, or what it held lately and a margin above that."""
        if self._splits:
            return fixed_part(self._state, host.pool.all.bit_count(), task)
        found = self._parts.get((host.key, task))
        if found is None:
            found = self._parts[host.key, task] = self._fair_part(host, task)
        return found

    def allowed(self, host: Host, task: str) -> int | None:
        """Millicores that a task may still take. Under `fair` one that holds none may take any number (None), because an action
        that is wider than its task's part has to run some time."""
        held = self.held(host, task).get("cpu", 0)
        return self.part(host, task) * MILLI - held if held or self._splits else None

    def _fair_part(self, host: Host, task: str) -> int:
        state = self._state
        wants: dict[str, float] = {}
        for other, part in host.parts.items():
            if other != task and not is_idle(state, part):
                lately = mean_cores(part, state.now_ns)
                wants[other] = max(lately + MARGIN * sqrt(lately), part.cores)
        for (where, other), cores in self._waiting.items():
            if other != task and where in (None, host.key):
                held = host.parts[other].cores if other in host.parts else 0.0
                here = cores if where is not None else -(-cores // len(state.hosts))
                wants[other] = max(wants.get(other, 0.0), held + here)
        weight = weight_of(state, task)
        left, total = float(host.pool.all.bit_count()), weight + sum(weight_of(state, other) for other in wants)
        for other in sorted(wants, key=lambda other: (wants[other] / weight_of(state, other), other)):
            if wants[other] * total > left * weight_of(state, other):
                break  # this one, and all after it, are held to their share
            left -= wants[other]
            total -= weight_of(state, other)
        return ceil(left * weight / total)
