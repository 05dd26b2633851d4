"""How several workers share the tests: a file goes to one of them, what measures the machine to one and the same."""

from typing import Any

import pytest

MACHINE = ("tests/docker/", "tests/executors/")
"""Tests that fill the machine, or measure what it gives them: one after the other."""
LONG = (*MACHINE, "tests/clusters/", "tests/e2e/test_kills.py")
"""What takes longest begins first: begun last, one of them would be waited for alone."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "machine" if nodeid.startswith(MACHINE) else nodeid.partition("::")[0]

    return Groups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((rank for rank, long in enumerate(LONG) if item.nodeid.startswith(long)), len(LONG))

    if hasattr(config, "workerinput"):
        items.sort(key=rank)
