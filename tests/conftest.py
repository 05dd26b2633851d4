"""The order in which several workers take the files."""

import pytest

LONG = ("tests/clusters/", "tests/e2e/test_kills.py")
"""What takes longest begins first: begun last, one of them would be waited for alone."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
