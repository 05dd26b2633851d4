"""The steps an action may take, as a diagram for people. `python -m tests.house.transitions` prints it."""

from typing import Final

from tangram.scheduler.fold_actions import TRANSITIONS
from tangram.scheduler.state import Phase

BEGIN: Final = "<!-- transitions -->"
END: Final = "<!-- /transitions -->"


def diagram() -> str:
    """`TRANSITIONS` as a mermaid state diagram, in the order of the phases."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.NEW.name}"]
    lines += [f"    {before.name} --> {after.name}" for before, after in sorted(TRANSITIONS)]
    lines += [f"    {Phase.GONE.name} --> [*]", "```"]
    return "\n".join(lines)


def block() -> str:
    """What has to stand in docs/architecture.md, with its markers."""
    return f"{BEGIN}\n{diagram()}\n{END}"


def block_of(text: str) -> str | None:
    """The block of a document, with its markers; None if it has none."""
    begin = text.find(BEGIN)
    end = text.find(END, begin)
    return None if begin < 0 or end < 0 else text[begin : end + len(END)]


if __name__ == "__main__":
    print(block())
