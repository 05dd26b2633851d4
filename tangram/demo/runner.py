"""Runs the plans under each policy on a stack that somebody else starts, and gathers what they did."""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from tangram.demo.calibration import calibrate
from tangram.demo.config import STATIC, TASK, DemoConfig
from tangram.demo.plan import Costs, Plan, draw, pauses
from tangram.demo.problems import load
from tangram.demo.progress import Progress
from tangram.demo.records import PolicyRun
from tangram.demo.report import Report, report
from tangram.demo.trajectory import Trajectory
from tangram.errors import TangramError
from tangram.producers.client import Client

Stack = Callable[[str], AbstractAsyncContextManager[str]]
"""stack(policy) starts broker, scheduler and executors under that policy, gives the broker's url, and ends them."""

Load = Callable[[str], tuple[int, int]]
"""load(policy) tells how many actions are (running, queued) in that policy's stack."""

CLOSE_S: Final = 10.0
"""For closing all sessions after an error, in which the executor ends what runs in them."""


async def compare(config: DemoConfig, stack: Stack, progress: Progress, *, command: str, load_of: Load | None = None) -> Report:
    """The demo's main job: the same plans under every policy, one policy after the other.

    Raises ConfigError without the problems; TangramError if the calibration fails or a policy does not finish within
    `config.limit_s`; and what `stack` raises.
    """
    problems = load()
    plans = draw(config, problems)
    costs: Costs | None = None
    runs = []
    for policy in config.policies:
        async with stack(policy) as url, Client(url, task=TASK) as client:
            if costs is None:
                progress.note("measuring what actions cost when nothing else runs")
                costs = await calibrate(client, config, problems)
                progress.note("")
            runs.append(await run_policy(policy, client, config, plans, costs, progress, load_of))
    return report(runs, seed=config.seed, command=command)


async def run_policy(
    policy: str,
    client: Client,
    config: DemoConfig,
    plans: tuple[Plan, ...],
    costs: Costs,
    progress: Progress,
    load_of: Load | None = None,
) -> PolicyRun:
    """All trajectories at once. They share one client, as the many trajectories of one rollout worker do."""
    actions = sum(1 + len(plan.steps) for plan in plans)
    counts = progress.begin(policy, len(plans), actions, load_of and functools.partial(load_of, policy))
    trajectories = [
        Trajectory(client=client, config=config, plan=plan, pauses=pauses(plan, costs, config.active_share), counts=counts)
        for plan in plans
    ]
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(config.limit_s):
            await together([trajectory.run() for trajectory in trajectories])
    except TimeoutError:
        raise TangramError(f"{policy}: not finished after {config.limit_s:.0f} s") from None
    finally:
        progress.end(counts)
    return PolicyRun(
        policy=policy,
        makespan_s=max(trajectory.last_s for trajectory in trajectories) - started_s,
        records=tuple(record for trajectory in trajectories for record in trajectory.records),
        lives=tuple(trajectory.life for trajectory in trajectories if trajectory.life is not None),
        reserved_units=config.static_units if policy == STATIC else 0,
    )


async def together(runs: Sequence[Coroutine[None, None, None]]) -> None:
    """Awaits all; the first error ends the others and is raised as itself, not in a group."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        # The first cancellation lets a trajectory close its session. Where nobody answers, the second ends that too.
        for _ in range(2):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # has been raised above, or came of the cancellation
