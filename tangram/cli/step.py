"""`tangram replay --step`: a debugger's prompt for a recorded log."""

import asyncio
import cmd
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tangram.errors import TangramError

if TYPE_CHECKING:
    from tangram.replay.sources import Source
    from tangram.replay.walk import Breakpoint, Step, Walker

T = TypeVar("T")

_INTRO = "The log event by event. n next, b back, c continue, rc back to a breakpoint, g SEQ, help."


async def run(source: "Source") -> None:
    """Until the user quits, or its input ends. Raises TangramError if the log cannot be read."""
    from tangram.replay.walk import Walker

    walker = Walker(source.batches, source.state)
    await walker.start()
    await asyncio.to_thread(_Prompt(walker, asyncio.get_running_loop()).cmdloop)


class _Prompt(cmd.Cmd):
    """Commands run in a thread, the walking in the event loop."""

    def __init__(self, walker: "Walker", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._walker, self._loop = walker, loop
        self._breakpoints: list[Breakpoint] = []
        self.use_rawinput = sys.stdin.isatty()
        self.intro = _INTRO if self.use_rawinput else None
        self.prompt = ""
        self._show_prompt()

    def _show_prompt(self) -> None:
        self.prompt = f"{self._walker.at}> " if self.use_rawinput else ""

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def onecmd(self, line: str) -> bool:
        try:
            return super().onecmd(line)
        except (TangramError, ValueError) as error:
            self._say(f"*** {error}")
            return False

    def postcmd(self, stop: bool, line: str) -> bool:
        self._show_prompt()
        return stop

    def emptyline(self) -> bool:
        return False

    def default(self, line: str) -> None:
        self._say(f"*** {line.split(maxsplit=1)[0]}: no such command; help lists them")

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.stdout.write(_printable(line) + "\n")
        self.stdout.flush()

    def _show(self, step: "Step | None", otherwise: str) -> None:
        self._say(*(step.lines if step is not None else [otherwise]))

    # --- going ---

    def do_next(self, argument: str) -> None:
        """n, next [N]: the next event, or the next N."""
        for _ in range(int(argument or 1)):
            step = self._wait(self._walker.forward())
            self._show(step, "the end of the log")
            if step is None:
                return

    def do_back(self, argument: str) -> None:
        """b, back [N]: one event back, or N."""
        target = max(self._walker.at - int(argument or 1), self._walker.begin)
        self._show(self._wait(self._walker.goto(target)), "the beginning of the log")

    def do_goto(self, argument: str) -> None:
        """g, goto SEQ: to after the event with this sequence."""
        self._show(self._wait(self._walker.goto(int(argument))), "the beginning of the log")

    def do_continue(self, _: str) -> None:
        """c, continue: to the next event that meets a breakpoint, or to the end."""
        self._show(self._wait(self._walker.until(self._breakpoints)), "the end of the log")

    def do_reverse_continue(self, _: str) -> None:
        """rc, reverse_continue: back to the last event before this one that meets a breakpoint, or to the beginning."""
        self._show(self._wait(self._walker.back_until(self._breakpoints)), "the beginning of the log")

    # --- breakpoints ---

    def do_break(self, argument: str) -> None:
        """break action TASK/CLIENT/N | task T | outcome O: stop where an event names it."""
        self._breakpoints.append(_breakpoint(argument))
        self._say(f"{len(self._breakpoints)}: {self._breakpoints[-1]}")

    def do_breaks(self, _: str) -> None:
        """breaks: the breakpoints, by number."""
        self._say(*(f"{number}: {each}" for number, each in enumerate(self._breakpoints, 1)))

    def do_delete(self, argument: str) -> None:
        """delete N: a breakpoint."""
        number = int(argument or 0)
        if not 1 <= number <= len(self._breakpoints):
            raise ValueError(f"there is no breakpoint {number}")
        del self._breakpoints[number - 1]

    # --- looking ---

    def do_state(self, _: str) -> None:
        """s, state: what there is after this event."""
        from tangram.replay.walk import overview

        self._say(*overview(self._walker.state))

    def do_queue(self, _: str) -> None:
        """q, queue: who waits, in order of arrival."""
        from tangram.replay.walk import queue

        self._say(*queue(self._walker.state))

    def do_pools(self, _: str) -> None:
        """p, pools: hosts and quotas, and what is in use."""
        from tangram.replay.walk import pools

        self._say(*pools(self._walker.state))

    def do_show(self, argument: str) -> None:
        """show TASK/CLIENT/N: an open action."""
        from tangram.cli.why import action_id
        from tangram.replay.walk import about

        self._say(*about(self._walker.state, action_id(argument)))

    def do_quit(self, _: str) -> bool:
        """quit: so does the end of the input."""
        return True

    do_n, do_b, do_g, do_c, do_rc = do_next, do_back, do_goto, do_continue, do_reverse_continue
    do_s, do_q, do_p, do_EOF = do_state, do_queue, do_pools, do_quit  # noqa: N815  # as `cmd` names it


def _breakpoint(argument: str) -> "Breakpoint":
    """Raises ValueError, InvalidRequest."""
    from tangram.cli.why import action_id
    from tangram.outcomes import Outcome
    from tangram.replay.walk import Breakpoint
    from tangram.subjects import token

    kind, _, value = argument.strip().partition(" ")
    match kind:
        case "action":
            return Breakpoint(action=action_id(value.strip()))
        case "task":
            return Breakpoint(task=token(value.strip(), "task"))
        case "outcome" if value.strip() in [*map(str, Outcome), "returned"]:
            return Breakpoint(outcome=value.strip())
        case "outcome":
            raise ValueError(f"outcome: must be one of {', '.join(Outcome)}, returned")
        case _:
            raise ValueError("break: must be action TASK/CLIENT/N, task T, or outcome O")


def _printable(line: str) -> str:
    """What a log says must not steer a terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
