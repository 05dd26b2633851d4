"""Callers of a provider with a limit, over several executors; and the same with a limiter in each worker, as frameworks do it."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

from tangram.local import LocalStack, RoleProcess
from tangram.producers.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RATE: Final = 50
BURST: Final = 5
EXECUTORS: Final = 3
WORKERS: Final = 8
CLIENTS: Final = 4
QUOTAS: Final = {"bucket": f"search=requests:{RATE}/1,burst:{BURST}", "window": f"search=requests:{RATE}/1"}
_ENDPOINT: Final = """[endpoints.search]
url = "{url}/search"
takes = {{ search = 1 }}
"""


async def run(callers: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {"rate": RATE, "burst": BURST, "callers": callers, "executors": EXECUTORS}
    with tempfile.TemporaryDirectory() as name:
        for kind in QUOTAS:
            folder = Path(name) / kind
            folder.mkdir()
            async with _provider(kind, folder) as url:
                found[kind] = await _tangram(kind, url, folder, callers, seconds)
                say(f"{kind}: {_words(found[kind])}")
                if kind == "bucket":
                    found["per_process"] = await _workers(url, folder, [RATE] * WORKERS, [callers // WORKERS] * WORKERS, seconds)
                    say(f"a limiter of the whole rate in each of {WORKERS} workers: {_words(found['per_process'])}")
                    uneven = [callers // 2, callers // 2, *[0] * (WORKERS - 2)]
                    found["per_process_divided"] = await _workers(url, folder, [RATE / WORKERS] * WORKERS, uneven, seconds)
                    say(f"an eighth of it in each, two of them busy: {_words(found['per_process_divided'])}")
    return found


def _words(row: dict[str, Any]) -> str:
    return (
        f"{row['used']:.1%} of the allowed rate used, {row['violations']} violations, "
        f"{row['violations_after_1s']} of them after the first second; {row['requests']} requests"
    )


@asynccontextmanager
async def _provider(kind: str, folder: Path) -> "AsyncIterator[str]":
    arguments = [kind, str(RATE), str(BURST), str(folder)]
    role = await RoleProcess.start("provider", arguments, folder / "provider.log", module="tangram.bench.provider")
    try:
        yield (folder / "url").read_text()
    finally:
        await role.stop()


async def _tangram(kind: str, url: str, folder: Path, callers: int, seconds: float) -> dict[str, Any]:
    path = folder / "endpoints.toml"
    path.write_text(_ENDPOINT.format(url=url))
    arguments = ["--endpoints", str(path), "--calls", "1000"]
    async with LocalStack(folder / "stack", executors=0, quotas=[QUOTAS[kind]], api_arguments=arguments) as stack:
        for _ in range(EXECUTORS - 1):
            await stack.start_api_executor(*arguments)
        clients = [Client(stack.url, task="bench") for _ in range(CLIENTS)]
        for client in clients:
            await client.connect()
        end_s = time.monotonic() + seconds

        async def caller(client: Client) -> None:
            while time.monotonic() < end_s:
                await client.call("search", deadline=3_600)

        # No more than the measured time: what still waits then is given up.
        calls = [asyncio.create_task(caller(clients[number % CLIENTS])) for number in range(callers)]
        done, _ = await asyncio.wait(calls, timeout=seconds)
        found = await _seen(url, seconds)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for each in done:
            each.result()
        for client in clients:
            await client.close()
        return found


async def _workers(url: str, folder: Path, rates: Sequence[float], callers: Sequence[int], seconds: float) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False) as http:
        await http.get(f"{url}/reset")
    roles = []
    for number, (rate, count) in enumerate(zip(rates, callers, strict=True)):
        if count:
            arguments = [url, str(rate), str(BURST), str(count), str(seconds)]
            log = folder / f"worker-{number}.log"
            roles.append(await RoleProcess.start(f"worker-{number}", arguments, log, module="tangram.bench.worker"))
    await asyncio.sleep(seconds)
    found = await _seen(url, seconds)
    for role in roles:
        await role.stop()
    return found


async def _seen(url: str, seconds: float) -> dict[str, Any]:
    """Of what the provider saw, by its own clock, from its first request on."""
    async with httpx.AsyncClient(trust_env=False) as http:
        seen: list[tuple[float, bool]] = (await http.get(f"{url}/stats")).json()
    last_s = max((at_s for at_s, _ in seen), default=seconds)
    taken = sum(was_taken for _, was_taken in seen)
    return {
        "requests": len(seen),
        "seconds": round(last_s, 3),
        "used": taken / (RATE * max(last_s, 0.5 * seconds)),
        "violations": len(seen) - taken,
        "violations_after_1s": sum(at_s > 1 and not was_taken for at_s, was_taken in seen),
    }
