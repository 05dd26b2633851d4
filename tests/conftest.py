"""The order in which several workers take the files, and the examples that hypothesis draws."""

import os

import pytest
from hypothesis import settings

# What lands is tested with the same examples by everybody; `HYPOTHESIS_PROFILE=default pytest` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


LONG = ("tests/clusters/", "tests/e2e/test_kills.py")
"""What takes longest begins first: begun last, one of them would be waited for alone."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
