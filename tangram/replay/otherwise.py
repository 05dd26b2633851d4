"""What would have happened otherwise: a recording's actions on the virtual clock, under another policy, pool or settings. Pure.

What is kept is what was asked for, how long each action ran (on other units by its kind's curve), and the thinking between an
outcome and the next action; arrivals move with what they waited for. What was never run is not run here either.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from tangram import limits, subjects
from tangram import messages as m
from tangram.errors import ConfigError
from tangram.outcomes import Outcome, RejectReason
from tangram.replay.recording import Recorded, Recording
from tangram.scheduler.fold import Record
from tangram.scheduler.state import ActionId
from tangram.simulation.clock import Clock
from tangram.simulation.driver import Setup, Simulation
from tangram.simulation.leader import Log, payload_of
from tangram.simulation.pool import Machine


class Ran(NamedTuple):
    """One action. Times in nanoseconds from the beginning. unit_ns: cores or GPUs, times how long it had them."""

    id: ActionId
    kind: str
    arrived_ns: int
    queued_ns: int
    run_ns: int
    ended_ns: int
    unit_ns: int


@dataclass(slots=True)
class Column:
    """One course of things. ran: in order of their ends. not_run: how many were not, by why."""

    ran: list[Ran] = field(default_factory=list)
    not_run: Counter[str] = field(default_factory=Counter)
    unfit: set[ActionId] = field(default_factory=set)
    """Of those, what would never run in this pool."""


def _column(recording: Recording) -> Column:
    return Column(not_run=Counter({"number used twice": recording.renumbered} if recording.renumbered else {}))


def recorded(recording: Recording) -> Column:
    """As it was."""
    found = _column(recording)
    for each in recording.actions.values():
        if not each.ran:
            found.not_run[str(each.outcome or "without an outcome")] += 1
            continue
        unit_ns = each.units * each.run_ns
        found.ran.append(Ran(each.id, each.spec.kind, each.arrived_ns, each.queued_ns, each.run_ns, each.ended_ns, unit_ns))
    found.ran.sort(key=lambda each: (each.ended_ns, each.id))
    return found


def setup_of(recording: Recording) -> Setup:
    """How it was scheduled when the recording ended."""
    state = recording.state
    return Setup(
        state.policy,
        dict(state.settings),
        services=dict(recording.services),
        quotas={name: pool.limit for name, pool in state.quotas.items()},
        shares=dict(state.shares),
    )


def played(
    recording: Recording,
    pool: Sequence[Machine],
    setup: Setup,
    observe: Callable[[Record], None] | None = None,
    *,
    unfit: Collection[ActionId] | None = (),
) -> Column:
    """The course of things on this pool. unfit: what may fit nowhere, and is counted then (None: whatever does not). Raises
    TangramError if another action that ran fits nowhere."""
    found = _column(recording)
    crowd: list[_Players] = []

    def make(clock: Clock, log: Log) -> _Players:
        crowd.append(_Players(recording, clock, log, found, unfit))
        return crowd[0]

    Simulation([], pool, setup, crowd=make, observe=observe).run()
    return found


class _Players:
    """Submits each action a thinking time after what it waited for."""

    def __init__(self, recording: Recording, clock: Clock, log: Log, found: Column, unfit: Collection[ActionId] | None) -> None:
        self._recording, self._clock, self._log, self._found, self._unfit = recording, clock, log, found, unfit
        for at in range(0, len(recording.seeds), limits.ENVELOPE_ITEMS_MAX):
            models = recording.seeds[at : at + limits.ENVELOPE_ITEMS_MAX]
            log.put(subjects.CLOCK, m.ModelsSeeded(epoch=log.state.epoch, models=models))
        actions = recording.actions.values()
        self.keys = {each.key for each in actions if each.ran}
        self._arrived: dict[ActionId, int] = {}
        self._ruled: set[ActionId] = set()
        self._left = sum(each.ran for each in actions)
        self._after: dict[tuple[ActionId, bool], list[Recorded]] = {}
        self._unsent: dict[tuple[str, str], list[int]] = {}
        """By client, numbers that may still be sent, falling."""
        for each in sorted(actions, key=lambda each: each.id.n, reverse=True):
            self._unsent.setdefault(each.id[:2], []).append(each.id.n)
        for each in actions:
            if each.after is not None and each.after in recording.actions:
                self._after.setdefault((each.after, each.at_once), []).append(each)
            else:
                clock.at(each.arrived_ns, lambda each=each: self._arrive(each))  # type: ignore[misc]

    def _arrive(self, action: Recorded) -> None:
        now_ns = self._arrived[action.id] = self._clock.now_ns
        self._follow(action.id, at_once=True)
        if action.ran:
            self._submit(action)
        elif action.outcome is not None:
            self._found.not_run[str(action.outcome)] += 1
            self._clock.at(now_ns + action.ended_ns - action.arrived_ns, lambda: self._follow(action.id))
        else:
            self._found.not_run["without an outcome"] += 1

    def _follow(self, action_id: ActionId, *, at_once: bool = False) -> None:
        for each in self._after.pop((action_id, at_once), ()):
            self._clock.at(self._clock.now_ns + each.delay_ns, lambda each=each: self._arrive(each))  # type: ignore[misc]

    def _submit(self, action: Recorded) -> None:
        task, client, n = action.id
        unsent = self._unsent[(task, client)]
        while unsent and ActionId(task, client, unsent[-1]) in self._arrived:
            unsent.pop()
        payload = b"" if action.spec.payload_blob else payload_of(action.spec.kind)
        done_below = min(unsent[-1] if unsent else n, n)
        message = m.ActionsSubmitted(client=client, done_below=done_below, ids=[n], specs=[action.raw], payloads=[payload])
        self._log.put(subjects.actions(action.key, task), message)

    def run_ns(self, action_id: ActionId, units: int) -> int:
        return self._recording.run_ns(action_id, units)

    def outcome(self, action_id: ActionId, units: int) -> Outcome:
        return self._recording.outcome(action_id, units)

    def ended(self, action_id: ActionId, units: int, host: str, started_ns: int, startup_ns: int) -> None:
        if action_id in self._ruled:
            return
        now_ns, arrived_ns = self._clock.now_ns, self._arrived[action_id]
        kind = self._recording.actions[action_id].spec.kind
        ran = Ran(
            action_id, kind, arrived_ns, started_ns - arrived_ns, now_ns - started_ns, now_ns, units * (now_ns - started_ns)
        )
        self._found.ran.append(ran)
        self._left -= 1
        self._follow(action_id)

    def ruled(self, action_id: ActionId, result: m.Result) -> None:
        if result.reason == RejectReason.NEVER_FITS:
            if self._unfit is not None and action_id not in self._unfit:
                words = f"action {action_id} would never run in this pool: {result.detail}"
                raise ConfigError(f"--pool, --policy, --share, --quota: {words}")
            self._found.unfit.add(action_id)
        self._ruled.add(action_id)
        self._left -= 1
        self._found.not_run[str(result.outcome)] += 1
        self._follow(action_id)

    def unfinished(self) -> str:
        return f"{self._left} actions of the recording did not end" if self._left else ""


def with_settings(
    setup: Setup,
    *,
    policy: str = "",
    settings: dict[str, int] | None = None,
    quotas: dict[str, m.Quota] | None = None,
    shares: dict[str, int] | None = None,
    services: dict[str, m.Service] | None = None,
) -> Setup:
    """What is given in place of what was; settings, quotas, shares and services by name."""
    return replace(
        setup,
        policy=policy or setup.policy,
        settings=setup.settings | (settings or {}),
        quotas=setup.quotas | (quotas or {}),
        shares=setup.shares | (shares or {}),
        services=setup.services | (services or {}),
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def figures(column: Column, task: str = "") -> dict[str, float | int]:
    """Of all, or of one task, in seconds."""
    ran = [each for each in column.ran if task in ("", each.id.task)]
    acts = sorted(each.ended_ns - each.arrived_ns for each in ran)
    queued = [each.queued_ns for each in ran]
    first_ns, last_ns = min((each.arrived_ns for each in ran), default=0), max((each.ended_ns for each in ran), default=0)
    return {
        "actions": len(ran),
        "mean_act_s": _seconds(_mean(acts)),
        "p50_act_s": _seconds(_rank(acts, 0.5)),
        "p95_act_s": _seconds(_rank(acts, 0.95)),
        "mean_queue_s": _seconds(_mean(queued)),
        "worst_queue_s": _seconds(max(queued, default=0)),
        "mean_run_s": _seconds(_mean([each.run_ns for each in ran])),
        "makespan_s": _seconds(last_ns - first_ns),
        "unit_seconds": _seconds(sum(each.unit_ns for each in ran)),
    }


def tasks(columns: Iterable[Column]) -> list[str]:
    return sorted({each.id.task for column in columns for each in column.ran})


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _rank(rising: Sequence[int], share: float) -> int:
    return rising[min(len(rising) - 1, int(share * len(rising)))] if rising else 0


def _seconds(nanoseconds: float) -> float:
    return round(nanoseconds / 1e9, 6)


_ROWS: Final = {
    "actions": "actions",
    "mean_act_s": "mean ACT, s",
    "mean_queue_s": "  of it queued",
    "mean_run_s": "  of it running",
    "p50_act_s": "p50 ACT, s",
    "p95_act_s": "p95 ACT, s",
    "worst_queue_s": "longest queued, s",
    "makespan_s": "makespan, s",
    "unit_seconds": "unit-seconds held",
}
_ROWS_OF_TASK: Final = ("mean_act_s", "mean_queue_s", "worst_queue_s")


def text(columns: dict[str, Column]) -> str:
    """A table, one column a course."""
    lines = [f"{'':28}" + "".join(f"{name:>14}" for name in columns)]

    def rows(names: Iterable[str], task: str = "") -> None:
        found = [figures(column, task) for column in columns.values()]
        for name in names:
            cells = "".join(f"{each[name]:>14,.3f}" if name != "actions" else f"{each[name]:>14,}" for each in found)
            lines.append(f"{('  ' if task else '') + _ROWS[name]:28}{cells}")

    rows(_ROWS)
    several = tasks(columns.values())
    for task in several if len(several) > 1 else ():
        lines.append(f"{task}:")
        rows(_ROWS_OF_TASK, task)
    left = {why: None for column in columns.values() for why in sorted(column.not_run)}
    for why in left:
        cells = "".join(f"{column.not_run[why]:>14,}" for column in columns.values())
        lines.append(f"{'not run: ' + why:28}{cells}")
    return "\n".join(lines)
