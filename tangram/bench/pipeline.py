"""`tangram bench pipeline`: the path of an action without a program at its end, beside the bare chain and a core NATS
request, each at several numbers in flight; broker on loopback, every role a process of its own."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tangram.bench import bare
from tangram.bench.load import Figures, closed_loop
from tangram.broker import Broker, EmbeddedServer
from tangram.local import LocalStack, RoleProcess
from tangram.producers.client import Client

Sync = Literal["always", "default"]
CORES_OFFERED = 4_096
"""By executors that run nothing, so that the machine's own cores do not bound what is in flight."""


async def run(
    syncs: Sequence[Sync], in_flight: Sequence[int], executors: Sequence[int], seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns {runs, bare, core_request_p50_ms}; see the design for the fields. Raises TangramError."""
    runs: list[dict[str, Any]] = []
    chains: list[dict[str, Any]] = []
    core_ms = 0.0
    for sync in syncs:
        with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
            core_ms = await _bare(Path(folder), sync, in_flight, seconds, chains, say)
        for count in executors:
            with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
                await _ours(Path(folder), sync, count, in_flight, seconds, runs, say)
    return {"runs": runs, "bare": chains, "core_request_p50_ms": core_ms}


def _row(sync: Sync, in_flight: int, executors: int, figures: Figures) -> dict[str, Any]:
    return {
        "sync": sync,
        "in_flight": in_flight,
        "executors": executors,
        "actions_per_s": round(figures.per_s, 1),
        "p50_ms": round(figures.p50_ms, 3),
        "p99_ms": round(figures.p99_ms, 3),
    }


async def _ours(
    folder: Path,
    sync: Sync,
    executors: int,
    in_flight: Sequence[int],
    seconds: float,
    rows: list[dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    arguments = ["--sandbox", "none", "--cores", str(CORES_OFFERED)]
    async with (
        LocalStack(folder, executors=executors, sync=sync, executor_arguments=arguments) as stack,
        Client(stack.url, task="bench") as client,
    ):
        for number in in_flight:
            figures = await closed_loop(client.noop, number, seconds, seconds / 4)
            rows.append(_row(sync, number, executors, figures))
            say(f"tangram    sync {sync:8} executors {executors}  in flight {number:5}  {_words(figures)}")


async def _bare(
    folder: Path,
    sync: Sync,
    in_flight: Sequence[int],
    seconds: float,
    rows: list[dict[str, Any]],
    say: Callable[[str], None],
) -> float:
    server = await asyncio.to_thread(EmbeddedServer.start, folder / "broker", sync=sync)
    processes: list[RoleProcess] = []
    broker: Broker | None = None
    try:
        broker = await Broker.connect(server.url, name="bare client")
        await bare.prepare(broker)
        for what in ("decide", "complete", "echo"):
            log = folder / f"{what}.log"
            role = await RoleProcess.start(what, [what], log, {"TANGRAM_NATS": server.url}, module="tangram.bench.bare")
            processes.append(role)
        core = await closed_loop(lambda: broker.request(bare.ECHO, bare.ITEM, timeout_s=5.0), 1, seconds, seconds / 4)
        say(f"core NATS request and reply: p50 {core.p50_ms:.3f} ms")
        client = bare.BareClient(broker)
        await broker.subscribe(bare.RESULTS, client.on_answer)
        for number in in_flight:
            figures = await closed_loop(client.call, number, seconds, seconds / 4)
            rows.append(_row(sync, number, 1, figures))
            say(f"bare chain sync {sync:8}              in flight {number:5}  {_words(figures)}")
        await client.close()
        return round(core.p50_ms, 4)
    finally:
        for role in processes:
            await role.stop()
        if broker is not None:
            await broker.close()
        await asyncio.to_thread(server.stop)


def _words(figures: Figures) -> str:
    return f"{figures.per_s:9.0f}/s  p50 {figures.p50_ms:8.2f} ms  p99 {figures.p99_ms:8.2f} ms"
