"""From a log to a timeline to a page, on logs made by hand, by chaos and by the thousand."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from random import Random

import pytest

from tangram import messages as m
from tangram.outcomes import Outcome
from tangram.replay.facts import Attempt, Timeline
from tangram.replay.timeline import Collector, collect, render
from tangram.scheduler.fold import Record
from tests.core.chaos import Chaos
from tests.core.world import MS, World, cores
from tests.replay.synthetic import busy_log


@pytest.fixture
def world() -> World:
    made = World()
    made.lead()
    made.after(10)
    return made


def only(timeline: Timeline) -> Attempt:
    (attempt,) = timeline.attempts
    return attempt


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def cell(data: dict[str, object], name: str, row: int) -> object:
    column = data["columns"][name]  # type: ignore[index]
    return column[row] if isinstance(column, list) else column


# --- collect -------------------------------------------------------------------------------------------------------


def test_one_action_from_submission_to_outcome(world: World) -> None:
    worker = world.join("e1", nodes=cores(4))
    world.after(20)
    action = world.submit(cpu=2_000)
    world.after(5)
    world.decide()
    world.after(300)
    worker.finish(action, Outcome.FAILED)
    timeline = collect(world.log)
    attempt = only(timeline)
    assert (attempt.task, attempt.client, attempt.n, attempt.attempt, attempt.kind) == ("t", "c", 1, 1, "run")
    assert (attempt.host, attempt.executor, attempt.cores, attempt.units, attempt.millicores) == ("h1", "e1", (0, 1), 2, 2_000)
    assert attempt.submitted_ns == attempt.ready_ns == 30 * MS
    assert (attempt.decided_ns, attempt.finished_ns, attempt.freed_ns) == (35 * MS, 335 * MS, 335 * MS)
    assert (attempt.outcome, attempt.blocked) == ("failed", "")
    assert timeline.actions == 1
    assert timeline.stamp_ns(335 * MS) == world.stamp_ns
    assert [(event.what, event.executor) for event in timeline.executors] == [("joined", "e1")]
    assert timeline.hosts[0].offers == [(10 * MS, (0, 1, 2, 3))]
    assert [tuple(each)[1:] for each in timeline.queue] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)]


def test_log_time_and_stamps_part_at_a_gap(world: World) -> None:
    world.after(60_000)
    world.tick()
    timeline = collect(world.log)
    assert timeline.end_ns == 2_000 * MS
    assert timeline.stamp_ns(timeline.end_ns) == world.stamp_ns


def test_it_says_what_an_action_waited_for(world: World) -> None:
    world.join("e1", nodes=cores(2))
    first, second, third = (world.submit(cpu=low) for low in (2_000, 1_000, 1_000))
    world.decide()
    late = world.submit(cpu=1_000)
    world.workers["i1"].finish(first)
    world.decide()
    blocked = {attempt.n: attempt.blocked for attempt in collect(world.log).attempts}
    assert blocked[first.n] == ""
    assert blocked[second.n] == "one that came before"
    assert blocked[third.n] == "2 that came before"
    assert blocked[late.n] == "cores: needs 1, 0 of 2 free"


def test_without_an_executor_it_waits_for_one(world: World) -> None:
    world.submit(cpu=1_000)
    attempt = only(collect(world.log))
    assert (attempt.host, attempt.decided_ns, attempt.finished_ns, attempt.outcome) == ("", None, None, "")
    assert attempt.blocked == "no executor"


def test_actions_of_a_session_wait_behind_each_other(world: World) -> None:
    worker = world.join("e1")
    opening = world.submit(kind="session.open", memory=100)
    world.decide()
    worker.finish(opening)
    first, second = (world.submit(session=opening.n, cpu=1_000) for _ in range(2))
    world.decide()
    world.after(50)
    worker.finish(first)
    world.decide()
    found = {attempt.n: attempt for attempt in collect(world.log).attempts}
    assert found[second.n].ready_ns == found[first.n].finished_ns
    assert found[opening.n].session == found[first.n].session == opening.n
    assert found[opening.n].finished_ns is not None
    assert found[opening.n].freed_ns is None, "its memory is held while the sandbox lives"


def test_a_returned_start_is_an_attempt_and_so_is_the_next(world: World) -> None:
    worker = world.join("e1")
    action = world.submit(cpu=1_000)
    world.decide()
    worker.refuse(action)
    world.decide()
    worker.finish(action)
    first, second = collect(world.log).attempts
    assert (first.outcome, first.detail) == ("returned", "busy")
    assert (second.outcome, second.submitted_ns) == ("ok", first.submitted_ns)
    assert second.ready_ns == first.finished_ns


def test_a_lost_attempt_its_held_units_and_the_attempt_after_it(world: World) -> None:
    dying = world.join("e1", host="h1")
    action = world.submit(cpu=1_000, retry="safe")
    single = world.submit(cpu=1_000)
    world.decide()
    world.lose(dying)
    world.join("e2", host="h2")
    world.rule()
    world.after(700)
    dying.die()
    world.join("e3", host="h1", dead=[dying])
    timeline = collect(world.log)
    first, ended, second = timeline.attempts
    assert (first.n, first.outcome, first.detail) == (action.n, "superseded", "silent")
    assert (ended.n, ended.outcome) == (single.n, "lost")
    assert (second.n, second.attempt, second.host, second.outcome) == (action.n, 2, "h2", "")
    assert first.freed_ns is not None
    assert first.finished_ns is not None
    assert first.freed_ns - first.finished_ns >= 700 * MS
    lost = [event for event in timeline.executors if event.what == "lost"]
    assert [(event.executor, event.why) for event in lost] == [("e1", "silent")]
    assert [offer.cores for offer in timeline.hosts[0].offers] == [(0, 1, 2, 3), (), (0, 1, 2, 3)]


def test_what_never_started_has_its_outcome(world: World) -> None:
    world.join("e1")
    never = world.submit(cpu=64_000)
    cancelled = world.submit(cpu=1_000)
    world.cancel(cancelled)
    world.rule()
    found = {attempt.n: attempt for attempt in collect(world.log).attempts}
    assert (found[never.n].outcome, found[never.n].reason, found[never.n].host) == ("rejected", "never_fits", "")
    assert found[cancelled.n].outcome == "cancelled"


def test_a_log_must_rise(world: World) -> None:
    collector = Collector()
    collector.add(world.log[0])
    with pytest.raises(ValueError, match="after"):
        collector.add(world.log[0])


@pytest.mark.parametrize("seed", range(12))
def test_chaos_leaves_a_whole_story(seed: int) -> None:
    chaos = Chaos(Random(seed), ("tangram", "static-trajectory", "fcfs-minimum")[seed % 3])
    chaos.run(250, check_every=1_000)
    chaos.heal()
    timeline = collect(chaos.world.log)
    for attempt in timeline.attempts:
        times = [attempt.submitted_ns, attempt.ready_ns, attempt.decided_ns, attempt.finished_ns, attempt.freed_ns]
        known = [time for time in times if time is not None]
        assert known == sorted(known), attempt
        assert attempt.outcome, f"all is over, so it has ended: {attempt}"
    assert timeline.queue[-1][1:] == (0, 0, 0)
    keys = {(attempt.task, attempt.client, attempt.n) for attempt in timeline.attempts}
    assert len(keys) <= timeline.actions
    final = {"superseded", "returned"}
    for task, client, n in chaos.world.accepted:
        outcomes = [a.outcome for a in timeline.attempts if (a.task, a.client, a.n) == (task, client, n)]
        assert any(outcome not in final for outcome in outcomes), (task, client, n, outcomes)
    assert data_of(render(timeline))["count"] == len(timeline.attempts)


# --- render --------------------------------------------------------------------------------------------------------

EVIL = "</script><img src=x onerror=alert(1)><!--<script>&amp;\u2028'\"${7}@@HASH@@@@DATA@@"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def evil_timeline(world: World) -> Timeline:
    worker = world.join("e1")
    action = world.submit(cpu=1_000)
    world.decide()
    worker.read()
    (key,) = worker.running
    start = worker.running.pop(key).start
    result = m.Result(nonce=start.nonce, outcome=Outcome.ERROR, reason=EVIL[:40], detail=EVIL, exit_code=-9)
    body = m.ActionsFinished(
        executor="e1", incarnation="i1", k=worker._k(), ids=[action.n], results=[m.encode(result)], outputs=[b""]
    )
    world.put("tangram.completions.t.c", body)
    timeline = collect(world.log)
    attempt = only(timeline)
    attempt.task = attempt.client = attempt.kind = attempt.executor = attempt.blocked = EVIL
    timeline.hosts[0].name = attempt.host = EVIL
    timeline.executors[0] = timeline.executors[0]._replace(executor=EVIL, host=EVIL, why=EVIL)
    timeline.policies[0] = (0, EVIL)
    return timeline


def test_text_of_others_stays_text(world: World) -> None:
    page = render(evil_timeline(world))
    clean = Tags(render(Timeline())).found
    assert [tag for tag, _ in Tags(page).found] == [tag for tag, _ in clean], "no element more than without it"
    data = data_of(page)
    texts = data["texts"]
    assert isinstance(texts, list)
    assert texts[cell(data, "detail", 0)] == EVIL  # type: ignore[index]
    assert "onerror=alert(1)>" not in page
    assert "innerHTML" not in page
    assert "insertAdjacentHTML" not in page


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    page = render(Timeline())
    for tag, attributes in Tags(page).found:
        assert not {"src", "href", "srcset", "style"} & set(attributes), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in page
    assert "url(" not in page
    assert not re.search(r"https?://", page)
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", page)


def test_the_same_log_gives_the_same_page() -> None:
    log = busy_log(300, hosts=2, cores_each=4)
    assert render(collect(log)) == render(collect(log))


def test_an_empty_log_is_a_page_too() -> None:
    data = data_of(render(collect([])))
    assert (data["count"], data["end"]) == (0, 0)


def some_columns(data: dict[str, object], names: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
    for row in range(int(str(data["count"]))):
        yield tuple(cell(data, name, row) for name in names)


def test_ten_thousand_actions_keep_a_sane_size() -> None:
    timeline = collect(busy_log(10_000))
    page = render(timeline)
    assert timeline.actions >= 10_000
    assert len(page) < 200 * len(timeline.attempts)
    data = data_of(page)
    starts = [decided if decided >= 0 else finished for decided, finished in some_columns(data, ("decided", "finished"))]  # type: ignore[operator]
    assert starts == sorted(starts)  # type: ignore[type-var]
    held: dict[tuple[str, int], int] = {}
    for attempt in timeline.attempts:  # no core has two at a time
        for core in attempt.cores:
            assert attempt.decided_ns is not None
            assert held.get((attempt.host, core), 0) <= attempt.decided_ns
            held[attempt.host, core] = attempt.freed_ns or timeline.end_ns


def test_records_are_all_it_needs() -> None:
    assert collect(iter([Record(1, 5, "tangram.nowhere", b"\xc1")])).skipped == 1
