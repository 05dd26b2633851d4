"""What bringing weights onto a device costs, beside a plain copy; and what swapping costs on the whole path."""

import asyncio
import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from tangram.demo import teachers
from tangram.executors.gpu.device import CpuDevice, CudaDevice, Device
from tangram.executors.gpu.ledger import Ledger
from tangram.executors.gpu.weights import Weights
from tangram.local import LocalStack
from tangram.producers.client import Client

MIB: Final = 1 << 20
TENSORS: Final = 64
DEVICES: Final = 2
HELD: Final = 3
"""Teachers that fit onto one device."""
TEACHER_MIB: Final = 65
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1


def device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu-sim"


async def run(mib: int, rounds: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """mib: of the weights that are moved alone; seconds: of each load on the whole path."""
    found: dict[str, Any] = {"device": device_name()}
    say(f"device: {found['device']}")
    found |= weights(mib, rounds, say)
    found |= await swaps(seconds, say)
    return found


def weights(mib: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Medians over rounds. Cold: into memory that the system has just given; warm: into memory that was used before."""
    with tempfile.TemporaryDirectory() as folder:
        module = torch.nn.ParameterList(torch.ones(mib * MIB // 4 // TENSORS) for _ in range(TENSORS))
        device: Device = CudaDevice() if torch.cuda.is_available() else CpuDevice(Ledger(Path(folder), 4 * mib * MIB, "bench"))
        moved = Weights("bench", [module], device)
        cold = _rounds(moved, device, rounds)
        with _kept(device):
            warm = _rounds(moved, device, rounds)
        moved.close()
    gigabytes = mib * MIB / 1e9
    for state, (restore_s, copy_s, evict_s) in (("cold", cold), ("warm", warm)):
        say(
            f"{state}: restore {gigabytes / restore_s:6.2f} GB/s, a copy of the same {gigabytes / copy_s:6.2f} GB/s, "
            f"ratio {copy_s / restore_s:.2f}; evict {1e3 * evict_s / gigabytes:.2f} ms/GB"
        )
    return {
        "weights_mib": mib,
        "restore_memcpy_ratio": round(cold[1] / cold[0], 3),
        "restore_memcpy_ratio_warm": round(warm[1] / warm[0], 3),
        "restore_gb_per_s": round(gigabytes / cold[0], 3),
        "evict_ms_per_gb": round(1e3 * cold[2] / gigabytes, 3),
        "evict_ms_per_gb_warm": round(1e3 * warm[2] / gigabytes, 3),
    }


def _rounds(moved: Weights, device: Device, rounds: int) -> tuple[float, float, float]:
    """Seconds of a restore, of a plain copy into the same kind of memory, and of an eviction, by turns."""
    source = torch.ones(moved.size, dtype=torch.uint8)
    device.pin(source)
    restores, copies, evictions = [], [], []
    for _ in range(rounds + 1):
        restores.append(moved.restore().seconds)
        evictions.append(moved.evict().seconds)
        begin_s = time.perf_counter()
        target = device.allocate(moved.size)
        device.copy(target, source)
        copies.append(time.perf_counter() - begin_s)
        del target
        device.free(moved.size)
    device.unpin(source)
    restore_s, copy_s, evict_s = (statistics.median(each[1:]) for each in (restores, copies, evictions))
    return restore_s, copy_s, evict_s


@contextmanager
def _kept(device: Device) -> Iterator[None]:
    """Freed memory stays with this process meanwhile."""
    device.keeps = True
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, 65_536)
        libc.mallopt(_TRIM_THRESHOLD, 128 * 1024)
        device.keeps = False


async def swaps(seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Nine teachers on two devices that hold three each, as the paper's MOPD job has them: every batch another teacher, then
    batches of which most go to a few."""
    with tempfile.TemporaryDirectory() as folder:
        declared = Path(folder, "teachers.toml")
        teachers.declare(declared)
        arguments = ["--services", str(declared)]
        if not torch.cuda.is_available():
            arguments += ["--cpu-sim", str(DEVICES), "--gpu-memory", f"{HELD * TEACHER_MIB}MiB"]
        local = LocalStack(Path(folder, "stack"), executors=0, gpu_arguments=arguments)
        async with local as stack, Client(stack.url, task="bench") as client:
            worst = await _load(client, 1, seconds, lambda _, turn: turn % teachers.TEACHERS, items=1)
            usual = await _load(client, 4 * DEVICES, seconds, _usual, items=32)
    for name, each in (("each batch another teacher", worst), ("usual", usual)):
        say(
            f"{name}: {each['actions_per_s']:.1f} batches/s, {each['swaps_per_s']:.1f} restores/s, hits {each['hit_rate']:.0%}; "
            f"ACT {each['mean_act_s']:.3f} s, restoring {each['restore_share']:.1%} of it, overhead {each['overhead_share']:.1%}"
        )
    return {
        "swaps_per_s": worst["swaps_per_s"],
        "overhead_share": usual["overhead_share"],
        "restore_share": usual["restore_share"],
        "hit_rate": usual["hit_rate"],
        "worst": worst,
        "usual": usual,
    }


def _usual(rng: random.Random, _: int) -> int:
    """Half of the batches go to two of the nine."""
    return rng.choice([0, 1]) if rng.random() < 0.5 else rng.randrange(teachers.TEACHERS)


async def _load(
    client: Client, callers: int, seconds: float, choose: Callable[[random.Random, int], int], items: int
) -> dict[str, Any]:
    """A closed loop. A batch whose start-up took over a millisecond has brought its weights."""
    rng = random.Random(f"gpu {callers}")
    batch = [[rng.randrange(teachers.TOKENS) for _ in range(64)] for _ in range(items)]
    results: list[Any] = []
    turns = iter(range(1 << 60))
    end_s = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end_s:
            results.append(await client.scored(teachers.name(choose(rng, next(turns))), batch))

    await asyncio.gather(*(caller() for _ in range(callers)))
    act_s = sum(each.act_s for each in results)
    restores = sum(each.startup_s > 0.001 for each in results)
    return {
        "actions_per_s": round(len(results) / seconds, 2),
        "swaps_per_s": round(restores / seconds, 2),
        "hit_rate": round(1 - restores / len(results), 4),
        "mean_act_s": round(act_s / len(results), 4),
        "restore_share": round(sum(each.startup_s for each in results) / act_s, 4),
        "overhead_share": round(max(0.0, 1 - sum(each.queued_s + each.run_s + each.startup_s for each in results) / act_s), 4),
    }
