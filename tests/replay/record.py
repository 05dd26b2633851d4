"""`python -m tests.replay.record` records logs of this behaviour version into `recorded/`, which every later version must read.

`demo`: a real run on this machine, of a broker, a scheduler and two executors, one of which is killed. `chaos`: whatever can
happen to a log, by the pure core: GPUs, quotas, policies, leaders, conflicts, refusals.
"""

import asyncio
import signal
import tempfile
from pathlib import Path
from random import Random

import tangram
from tangram.broker import Broker
from tangram.local import LocalStack
from tangram.replay.logfile import LogWriter
from tangram.replay.sources import BrokerSource
from tangram.replay.transfer import export
from tangram.scheduler.state import BEHAVIOUR
from tests.core.chaos import Chaos

FOLDER = Path(__file__).parent / "recorded"
TRAJECTORIES = 6
ROUNDS = 4


class Kept(Chaos):
    """Everything but lost payloads: of those the log knows nothing."""

    def plan(self) -> None:
        if not self.world.in_flight:
            self.world.plan()


def chaos(seed: int, steps: int) -> Kept:
    made = Kept(Random(seed))
    made.run(steps, check_every=steps)
    made.heal()
    return made


async def trajectory(client: tangram.Client, number: int) -> None:
    async with client.session() as box:
        for step in range(ROUNDS):
            await box.write("step", str(step).encode())
            await box.run(f"sleep 0.0{number}; cat step", units=(1, 4), parallel=0.8)
        await box.run(f"exit {number % 2}", units=1)


async def demo(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with LocalStack(Path(folder), executors=2, cores=2) as stack:
            async with tangram.Client(stack.url, task="coding") as client, tangram.Client(stack.url, task="math") as other:
                work = [trajectory((client, other)[number % 2], number) for number in range(TRAJECTORIES)]
                work += [_alone(other, number) for number in range(TRAJECTORIES)]
                await asyncio.gather(*work[: len(work) // 2])
                await stack.executors[1].stop(signal.SIGKILL)
                await stack.start_executor()
                await asyncio.gather(*work[len(work) // 2 :])
                await client.run("sleep 5", units=1, timeout=0.2)
            broker = await Broker.connect(stack.url, name="record")
            try:
                await export(await BrokerSource.open(broker), path, without_payloads=True)
            finally:
                await broker.close()


async def _alone(client: tangram.Client, number: int) -> None:
    result = await client.run("true", units=(1, 2), kind="score")
    assert result.ok or number, result


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with LogWriter(FOLDER / f"behaviour-{BEHAVIOUR}-chaos.log", None) as writer:
        for record in chaos(seed=11, steps=3_000).world.log:
            writer.message(record)
    asyncio.run(demo(FOLDER / f"behaviour-{BEHAVIOUR}-demo.log"))
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
