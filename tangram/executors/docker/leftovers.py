"""Clean-up after an incarnation whose process is dead."""

import asyncio
import threading

from tangram.executors.docker.containers import remove_all
from tangram.executors.docker.engine import DockerUnavailable, Engine

BUDGET_S = 10.0


def remove_incarnation(incarnation: str, url: str = "", budget_s: float = BUDGET_S) -> bool:
    """Removes the containers of a dead incarnation, whatever their state; true only if none is left. Blocking, for
    little more than the budget; also where an event loop is running."""
    done: list[bool] = []

    async def clean() -> bool:
        engine = Engine(url, call_s=budget_s)
        await engine.check()
        return await remove_all(engine, incarnation, budget_s)

    def work() -> None:
        try:
            done.append(asyncio.run(clean()))
        except DockerUnavailable:
            done.append(False)

    thread = threading.Thread(target=work, name="tangram-docker-clean")
    thread.start()
    thread.join()
    return done == [True]
