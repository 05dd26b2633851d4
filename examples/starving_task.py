"""Makes the recording that docs/debugging.md looks at: one task's flood, and another task that starves behind it.

python examples/starving_task.py starving.log
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import tangram
from tangram.local import LocalStack

FLOOD = 240
"""Actions at once, of a fifth of a second each, on two cores: 24 seconds of work."""
ROLLOUTS, STEPS = 3, 6


async def flood(client: tangram.Client) -> None:
    await asyncio.gather(*(client.run("sleep 0.2", kind="lint") for _ in range(FLOOD)))


async def rollout(client: tangram.Client) -> None:
    async with client.session() as box:
        for step in range(STEPS):
            await asyncio.sleep(0.2)  # the model thinks
            await box.write("answer.txt", str(step))
            await box.run("cat answer.txt", kind="check")


async def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with LocalStack(Path(folder), cores=2) as stack:
            async with tangram.Client(stack.url, task="backfill") as one, tangram.Client(stack.url, task="eval") as other:
                flooding = asyncio.create_task(flood(one))
                await asyncio.sleep(0.5)
                await asyncio.gather(flooding, *(rollout(other) for _ in range(ROLLOUTS)))
            export = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tangram", "streams", "export", str(path), "--without-payloads", "--nats", stack.url
            )
            if await export.wait():
                raise SystemExit("the export failed")


asyncio.run(main(Path(sys.argv[1])))
