"""What happened on which core, when: a recorded log as one page that needs nothing but a browser.

`collect` gathers, `render` writes. Neither reads a clock: the same log gives the same page, byte for byte.
"""

import base64
import hashlib
import html
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Final

from tangram.replay.collector import Collector
from tangram.replay.facts import Attempt, Timeline
from tangram.scheduler.fold import Record

__all__ = ["Attempt", "Collector", "Timeline", "collect", "render"]

_DATA: Final = "@@DATA@@"
_HASH: Final = "@@HASH@@"
_FRAMES: Final = "body{margin:0;font-family:sans-serif}h1{font-size:1rem;margin:.5rem}iframe{width:100%;height:80vh;border:0}"
_SCRIPT: Final = ("<script>", "</script>")


def collect(records: Iterable[Record]) -> Timeline:
    """Folds a log from its first message on. Raises NewerVersion, and ValueError if records do not come in rising order."""
    collector = Collector()
    for record in records:
        collector.add(record)
    return collector.complete()


def render(timeline: Timeline) -> str:
    """One HTML file with the data in it. It loads nothing, and its policy lets no other script run than its own."""
    template = resources.files("tangram.replay").joinpath("timeline.html").read_text(encoding="utf-8")
    script = template.rpartition(_SCRIPT[0])[2].partition(_SCRIPT[1])[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The data last: whatever stands in it is not searched for placeholders.
    return template.replace(_HASH, f"sha256-{digest}", 1).replace(_DATA, _embed(_data(timeline)), 1)


def beside(pages: Sequence[tuple[str, Timeline]]) -> str:
    """One HTML file with several timelines, one above the other, on one scale of time."""
    longest_ns = max(each.end_ns - each.begin_ns for _, each in pages)
    parts = []
    for title, timeline in pages:
        timeline.end_ns = timeline.begin_ns + longest_ns
        name = html.escape(title)
        parts.append(f'<h1>{name}</h1><iframe title="{name}" srcdoc="{html.escape(render(timeline))}"></iframe>')
    head = f'<meta charset="utf-8"><title>Tangram: {", ".join(html.escape(title) for title, _ in pages)}</title>'
    return f'<!doctype html><html lang="en">{head}<style>{_FRAMES}</style>{"".join(parts)}</html>'


def _embed(data: object) -> str:
    """JSON that no HTML parser sees the end of: every character that could start a tag, a comment or an entity is escaped."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Table:
    """Values by number, each kept once, in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, value: object) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[object]:
        return list(self._numbers)


def _data(timeline: Timeline) -> dict[str, object]:
    """Columns instead of rows, microseconds from the timeline's begin (-1: not yet), and a column whose values are all the same
    as that one value."""

    def us(at_ns: int | None) -> int:
        return -1 if at_ns is None else max(0, at_ns - timeline.begin_ns) // 1000

    texts, core_sets = _Table(), _Table()
    hosts = {host.name: index for index, host in enumerate(timeline.hosts)}
    columns: dict[str, Callable[[Attempt], int | None]] = {
        "task": lambda a: texts.number(a.task),
        "client": lambda a: texts.number(a.client),
        "n": lambda a: a.n,
        "attempt": lambda a: a.attempt,
        "kind": lambda a: texts.number(a.kind),
        "session": lambda a: a.session,
        "submitted": lambda a: us(a.submitted_ns),
        "ready": lambda a: us(a.ready_ns),
        "decided": lambda a: us(a.decided_ns),
        "finished": lambda a: us(a.finished_ns),
        "freed": lambda a: us(a.freed_ns),
        "host": lambda a: hosts.get(a.host, -1),
        "executor": lambda a: texts.number(a.executor),
        "cores": lambda a: core_sets.number(a.cores),
        "millicores": lambda a: a.millicores,
        "units": lambda a: a.units,
        "memory": lambda a: a.memory_mib,
        "predicted": lambda a: a.predicted_us,
        "blocked": lambda a: texts.number(a.blocked),
        "outcome": lambda a: texts.number(str(a.outcome)),
        "reason": lambda a: texts.number(a.reason),
        "detail": lambda a: texts.number(a.detail),
        "exit": lambda a: a.exit_code,
        "startup": lambda a: a.startup_ns // 1000,
        "run": lambda a: a.run_ns // 1000,
        "cpu": lambda a: a.cpu_ns // 1000,
        "peak": lambda a: a.memory_peak_bytes >> 10,
    }
    attempts = sorted(timeline.attempts, key=_order)
    encoded = {name: _column([value(attempt) for attempt in attempts]) for name, value in columns.items()}
    return {
        "end": us(timeline.end_ns),
        "sequences": [timeline.first_seq, timeline.last_seq],
        "actions": timeline.actions,
        "skipped": timeline.skipped,
        "count": len(attempts),
        "policies": [[us(at_ns), policy] for at_ns, policy in timeline.policies],
        "clock": [[us(clock.at_ns), clock.stamp_ns // 1000] for clock in timeline.clock],
        "hosts": [
            {"name": host.name, "cores": host.cores, "offers": [[us(at_ns), cores] for at_ns, cores in host.offers]}
            for host in timeline.hosts
        ],
        "executors": [
            [us(event.at_ns), hosts.get(event.host, -1), event.executor, event.what, event.why] for event in timeline.executors
        ],
        "queue": [
            [us(queue.at_ns) for queue in timeline.queue],
            [queue.ready for queue in timeline.queue],
            [queue.behind for queue in timeline.queue],
            [queue.running for queue in timeline.queue],
        ],
        "columns": encoded,
        "texts": texts.values(),
        "core_sets": core_sets.values(),
    }


def _order(attempt: Attempt) -> tuple[int, str, str, int, int]:
    moments = (attempt.decided_ns, attempt.finished_ns, attempt.submitted_ns)
    first = next(moment for moment in moments if moment is not None)
    return (first, attempt.task, attempt.client, attempt.n, attempt.attempt)


def _column(values: list[int | None]) -> list[int | None] | int | None:
    return values[0] if values and all(value == values[0] for value in values) else values
