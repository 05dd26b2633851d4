"""What the demo's search provider knows: pages by title, a line each in `corpus.txt`."""

from pathlib import Path
from typing import Final

PAGES: Final[dict[str, str]] = dict(
    line.split(": ", 1) for line in Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines()
)
