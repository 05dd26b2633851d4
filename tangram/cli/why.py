"""`tangram why ACTION`: what every pass that left an action behind found, and what it got; or the worst of a task."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Final

from tangram import limits, roles
from tangram.cli import common
from tangram.errors import ConfigError, InvalidRequest, UnknownAction
from tangram.subjects import token

if TYPE_CHECKING:
    from tangram.replay.sources import Source
    from tangram.replay.why import Event, Story
    from tangram.scheduler.state import ActionId

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

WORST: Final = 10
WORST_MAX: Final = 1_000
"""Of each, every pass that left it behind is planned anew and kept."""


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("why", help="why an action waited: what each pass found that left it behind, and what it got")
    command.add_argument("action", nargs="?", metavar="ACTION", help="TASK/CLIENT/N, as results and the timeline name it")
    common.add_recording(command)
    command.add_argument("--task", help="in place of an action: those of this task that waited longest")
    command.add_argument("--worst", type=common.positive, default=WORST, metavar="N", help=f"how many (default: {WORST})")
    command.add_argument("--passes", action="store_true", help="each pass on a line of its own")
    command.add_argument("--json", action="store_true")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    if (given.action is None) == (given.task is None):
        raise ConfigError("why: name either an action, TASK/CLIENT/N, or --task")
    if given.worst > WORST_MAX:
        raise ConfigError(f"--worst {given.worst}: must be at most {WORST_MAX}")
    wanted = [action_id(given.action)] if given.action is not None else []
    waits: dict[ActionId, int] = {}
    async with common.recording(given) as source:
        if given.task is not None:
            waits = await worst_of(source, given.task, given.worst)
            wanted = list(waits)
        stories = await stories_of(source, wanted)
        if given.action is not None and not stories:
            raise UnknownAction(f"{given.action} is not in this log")
    if given.json:
        print(json.dumps(_json(stories) if given.action is None else _json(stories)[0]))
    elif given.action is not None:
        print("\n".join(lines(stories[0], passes=given.passes)))
    else:
        print("\n".join(_summary(stories, waits)) or f"no action of task {given.task} is in this log")
    return 0


def action_id(text: str) -> "ActionId":
    """Raises ConfigError."""
    from tangram.scheduler.state import ActionId

    task, _, rest = text.partition("/")
    client, _, n = rest.partition("/")
    try:
        token(task, "task")
        token(client, "client")
    except InvalidRequest as error:
        raise ConfigError(f"{text!r}: must be TASK/CLIENT/N: {error}") from None
    if not (n.isascii() and n.isdigit() and int(n[:20]) <= limits.NUMBER_MAX):
        raise ConfigError(f"{text!r}: must be TASK/CLIENT/N: N is a number")
    return ActionId(task, client, int(n))


async def worst_of(source: "Source", task: str, number: int) -> "dict[ActionId, int]":
    """Nanoseconds that each waited, the longest first. Raises TangramError if the log cannot be read."""
    from tangram.replay.why import Waits

    waits = Waits(await source.state(), task, number)
    async for batch in source.batches():
        for record in batch:
            waits.add(record)
    return {action: waited_ns for waited_ns, action in waits.worst()}


async def stories_of(source: "Source", wanted: "Sequence[ActionId]") -> "list[Story]":
    """Of those that the log knows, in this order. Raises TangramError if it cannot be read."""
    from tangram.replay.planned import Planned
    from tangram.replay.why import Why

    planned = Planned()
    async for batch in source.decisions():
        for record in batch:
            planned.add(record)
    why = Why(await source.state(), planned, wanted)
    async for batch in source.batches():
        for record in batch:
            why.add(record)
    return [why.stories[each] for each in wanted if each in why.stories]


def _json(stories: "Iterable[Story]") -> list[dict[str, object]]:
    return [{**asdict(story), "action": str(story.action)} for story in stories]


def lines(story: "Story", *, passes: bool = False) -> list[str]:
    """One for each event; passes that follow each other are one, with what the first and the last of them found."""
    found = [f"{story.action} ({story.kind}), seconds since its submission:"]
    for is_left, events in groupby(story.events, lambda each: each.what == "left"):
        group = list(events)
        if passes or not is_left or len(group) == 1:
            for each in group:
                begin = f"{(each.at_ns - story.begin_ns) / 1e9:>10.3f}  "
                found.append(begin + (f"window {each.window} left it: {each.text}" if is_left else each.text))
            continue
        first, last = group[0], group[-1]
        at_s, until_s = ((each.at_ns - story.begin_ns) / 1e9 for each in (first, last))
        which = f"windows {first.window} to {last.window}, until {until_s:.3f}, left it"
        found.append(f"{at_s:>10.3f}  {which} ({len(group)} passes: {_kinds(group)})")
        found += [f"{'':12}first: {first.text}", f"{'':12}last:  {last.text}"]
    return found


def _kinds(left: "Iterable[Event]") -> str:
    return ", ".join(f"{number} {reason}" for reason, number in Counter(each.reason for each in left).most_common())


def _summary(stories: "Iterable[Story]", waits: "dict[ActionId, int]") -> list[str]:
    found = []
    for story in stories:
        left = [each for each in story.events if each.what == "left"]
        waited_s = waits[story.action] / 1e9
        found.append(f"{waited_s:>10.3f} s  {story.action} ({story.kind}): left by {len(left)} passes ({_kinds(left) or 'none'})")
        if left:
            found.append(f"{'':14}the last: {left[-1].text}")
    return found
