"""One task of a log as a report: JSON lines, a header and an action's attempt each. Pure.

Without the other tasks nothing can be folded, so a report cannot be verified or replayed; it says so itself.
"""

import json
import platform
from collections.abc import Iterator
from typing import Final

from tangram.replay.facts import Attempt, Timeline
from tangram.version import __version__

FORMAT: Final = 1
"""Rises when a reader of the version before would misunderstand it."""


def lines(timeline: Timeline, task: str) -> Iterator[str]:
    """In the order of decisions, then what had none. Times in seconds of log time from the report's begin."""
    attempts = [each for each in timeline.attempts if each.task == task]
    header = {
        "tangram_task_report": FORMAT,
        "task": task,
        "attempts": len(attempts),
        "note": "a report of one task: it cannot be folded, verified or replayed",
        "first_seq": timeline.first_seq,
        "last_seq": timeline.last_seq,
        "seconds": _seconds(timeline.end_ns - timeline.begin_ns),
        "code_version": __version__,
        "python_version": platform.python_version(),
    }
    yield json.dumps(header)
    for each in attempts:
        yield json.dumps(_row(each, timeline.begin_ns))


def _row(each: Attempt, begin_ns: int) -> dict[str, object]:
    def at(moment_ns: int | None) -> float | None:
        return None if moment_ns is None else _seconds(moment_ns - begin_ns)

    return {
        "action": f"{each.task}/{each.client}/{each.n}",
        "attempt": each.attempt,
        "kind": each.kind,
        "session": each.session,
        "submitted_s": at(each.submitted_ns),
        "ready_s": at(each.ready_ns),
        "decided_s": at(each.decided_ns),
        "finished_s": at(each.finished_ns),
        "freed_s": at(each.freed_ns),
        "lacked": each.blocked,
        "host": each.host,
        "executor": each.executor,
        "cores": list(each.cores),
        "gpus": list(each.gpus),
        "service": each.service,
        "units": each.units,
        "memory_mib": each.memory_mib,
        "predicted_s": each.predicted_us / 1e6,
        "outcome": str(each.outcome) or "open",
        "reason": each.reason,
        "exit_code": each.exit_code,
        "startup_s": _seconds(each.startup_ns),
        "run_s": _seconds(each.run_ns),
        "cpu_s": _seconds(each.cpu_ns),
        "memory_peak_bytes": each.memory_peak_bytes,
    }


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)
