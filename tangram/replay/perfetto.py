"""A timeline as a Chrome trace, which Perfetto and chrome://tracing open. Pure.

Format: the JSON array of "Trace Event Format". A host is a process, each of its cores and GPUs a thread, with one more for what
overlaps there; waiting is asynchronous, by task; how much waits, and how many units are in use, are counters. Times are
microseconds from the timeline's begin.
"""

import heapq
import json
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

from tangram.replay.facts import Attempt, Timeline

_WAITING: Final = 1
"""The process of what waits; hosts follow."""
_LANES: Final = 1_000
"""Threads of one core or GPU, at most."""

Event = dict[str, Any]


def pieces(timeline: Timeline) -> Iterator[str]:
    """The file, piece by piece."""
    mark = "[\n"
    for event in events(timeline):
        yield mark + json.dumps(event, separators=(",", ":"))
        mark = ",\n"
    yield "\n]\n" if mark != "[\n" else "[]\n"


def events(timeline: Timeline) -> Iterator[Event]:
    """In no order that a reader may rely on, but each thread's in the order of time."""

    def us(at_ns: int) -> float:
        return max(0, at_ns - timeline.begin_ns) / 1_000

    tasks = {task: number for number, task in enumerate(sorted({each.task for each in timeline.attempts}), 1)}
    yield _named("process", _WAITING, 0, "waiting")
    for task, number in tasks.items():
        yield _named("thread", _WAITING, number, task)
    ids = count(1)
    for each in timeline.attempts:
        yield from _waiting(each, tasks[each.task], next(ids), us, timeline.end_ns)
    for queue in timeline.queue:
        numbers = {"ready": queue.ready, "behind others": queue.behind, "running": queue.running}
        yield {"ph": "C", "name": "actions", "pid": _WAITING, "tid": 0, "ts": us(queue.at_ns), "args": numbers}
    for pid, host in enumerate(timeline.hosts, _WAITING + 1):
        yield _named("process", pid, 0, host.name)
        on_host = [each for each in timeline.attempts if each.host == host.name and each.decided_ns is not None]
        yield from _threads(on_host, pid, us, timeline.end_ns)
        yield from _in_use(on_host, pid, us)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _waiting(each: Attempt, tid: int, number: int, us: Any, end_ns: int) -> Iterator[Event]:
    until_ns = next((at for at in (each.decided_ns, each.finished_ns) if at is not None), end_ns)
    common = {"cat": "waiting", "id": number, "name": each.kind, "pid": _WAITING, "tid": tid}
    about = {"action": _id(each), "lacked": each.blocked}
    yield {"ph": "b", "ts": us(each.submitted_ns), "args": about, **common}
    yield {"ph": "e", "ts": us(max(until_ns, each.submitted_ns)), **common}


def _threads(attempts: list[Attempt], pid: int, us: Any, end_ns: int) -> Iterator[Event]:
    """On each core and GPU what ran there, on the first thread of it that is free."""
    lanes: dict[tuple[str, int], list[tuple[int, int]]] = {}
    """By resource, (until when, which thread) of those that were used."""
    order = {"core": 0, "GPU": 1, "no units": 2}
    for each in sorted(attempts, key=lambda each: (each.decided_ns or 0, each.task, each.client, each.n, each.attempt)):
        begin_ns = each.decided_ns or 0
        until_ns = next((at for at in (each.finished_ns, each.freed_ns) if at is not None), end_ns)
        places = [("core", core) for core in each.cores] + [("GPU", gpu) for gpu in each.gpus] or [("no units", 0)]
        for what, number in places:
            used = lanes.setdefault((what, number), [])
            lane = heapq.heappop(used)[1] if used and used[0][0] <= begin_ns else min(len(used), _LANES - 1)
            heapq.heappush(used, (max(until_ns, begin_ns + 1_000), lane))
            tid = (order[what] * 100_000 + number) * _LANES + lane + 1
            if lane == len(used) - 1:
                name = what if what == "no units" else f"{what} {number}"
                yield _named("thread", pid, tid, name if not lane else f"{name} ({lane + 1})")
                sort = {"sort_index": tid}
                yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": sort}
            span_us = max(us(until_ns) - us(begin_ns), 0)
            yield {
                "ph": "X", "name": each.kind or "?", "cat": each.task, "pid": pid, "tid": tid, "ts": us(begin_ns), "dur": span_us,
                "args": _about(each),
            }  # fmt: skip


def _about(each: Attempt) -> dict[str, Any]:
    waited_ns = (each.decided_ns or 0) - each.submitted_ns
    return {
        "action": _id(each),
        "attempt": each.attempt,
        "outcome": str(each.outcome) or "running",
        "units": each.units,
        "executor": each.executor,
        "service": each.service,
        "waited_s": round(waited_ns / 1e9, 6),
        "predicted_s": round(each.predicted_us / 1e6, 6),
        "run_s": round(each.run_ns / 1e9, 6),
    }


def _in_use(attempts: list[Attempt], pid: int, us: Any) -> Iterator[Event]:
    changes: dict[str, list[tuple[int, int]]] = {"cores": [], "GPUs": []}
    for each in attempts:
        for name, units in (("cores", len(each.cores)), ("GPUs", len(each.gpus))):
            if units:
                changes[name].append((each.decided_ns or 0, units))
                if each.freed_ns is not None:
                    changes[name].append((each.freed_ns, -units))
    for name, moments in changes.items():
        used = 0
        for at_ns, change in sorted(moments):
            used += change
            yield {"ph": "C", "name": f"{name} in use", "pid": pid, "tid": 0, "ts": us(at_ns), "args": {name: used}}


def _id(each: Attempt) -> str:
    return f"{each.task}/{each.client}/{each.n}"
