"""The order in which several workers take the files."""

from pathlib import Path

import pytest

LONGEST = ("clusters", "e2e", "docker", "executors")
"""Folders whose files take longest: begun last, one of them would be waited for alone."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    if hasattr(config, "workerinput"):
        items.sort(key=rank)
