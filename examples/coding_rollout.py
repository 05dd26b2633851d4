"""A rollout of a coding agent: many trajectories at once, each with a sandbox that holds cores only while an action runs.

Start `tangram up` in another terminal, then: python examples/coding_rollout.py
"""

import asyncio
import random

import tangram

TRAJECTORIES = 8
TESTS = "import solution\nassert solution.add(2, 3) == 5\n"
ATTEMPTS = ("def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n")


async def think() -> None:
    """Stands in for the model's turn."""
    await asyncio.sleep(random.uniform(0.1, 0.5))


async def trajectory(client: tangram.Client) -> float | None:
    """Returns its reward, or None if the infrastructure failed: such a trajectory is masked, not punished."""
    async with client.session(memory="256MiB") as box:
        await box.write("tests.py", TESTS)
        for attempt in ATTEMPTS:
            await think()
            await box.write("solution.py", attempt)
            result = await box.run("python3 tests.py", timeout=30)
            if not result.is_verdict:
                return None
            if result.ok:
                return 1.0
    return 0.0


async def main() -> None:
    async with tangram.Client(task="coding") as client:
        rewards = await asyncio.gather(*(trajectory(client) for _ in range(TRAJECTORIES)))
    print(rewards)


if __name__ == "__main__":
    asyncio.run(main())
