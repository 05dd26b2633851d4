"""A provider that is played, and a stack whose executor may call it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tangram
from tangram.local import LocalStack
from tests.api.provider import Provider, declare

SECRET = "swordfish-17"
QUOTAS = ("calm=concurrency:4", "budget=tokens:1000/3600", "one=concurrency:1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[Provider]:
    async with Provider() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    folder = tmp_path_factory.mktemp("api")
    path = declare(folder, provider.url, SECRET)
    async with LocalStack(folder / "stack", executors=0, quotas=QUOTAS, api_arguments=["--endpoints", str(path)]) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: LocalStack, provider: Provider) -> AsyncIterator[tangram.Client]:
    provider.reset()
    async with tangram.Client(stack.url, task="t") as found:
        yield found


@pytest.fixture
def logs(stack: LocalStack) -> list[Path]:
    return sorted(stack.folder.glob("*.log"))
