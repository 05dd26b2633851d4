"""What only a GPU can show. `deploy/gpu/check.sh` runs it where there is one."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="the gpu extra is not installed")

from tangram.executors.gpu import inventory
from tangram.executors.gpu.device import CudaDevice
from tangram.executors.gpu.ledger import DeviceFull
from tangram.executors.gpu.weights import Weights
from tangram.executors.gpu.workers import Nursery, Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
MIB = 1 << 20


def module() -> "torch.nn.Module":
    """256 MiB."""
    return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4)))


def test_an_evicted_arena_is_free_for_other_processes() -> None:
    """As the driver counts, not the allocator."""
    device = CudaDevice()
    made = module()
    weights = Weights("s", [made], device)
    before = device.free_bytes()
    for _ in range(3):
        weights.restore()
        assert before - device.free_bytes() >= weights.size
        with weights.lease(), torch.inference_mode():
            assert made(torch.ones(2, 4096, device="cuda")).isfinite().all()
        gc.collect()
        torch.cuda.synchronize()
        weights.evict()
    lost = before - device.free_bytes()
    assert lost < weights.size / 2, f"{lost / MIB:.0f} MiB stay with this process"  # what cuBLAS keeps for itself
    weights.close()


def test_what_it_computes_is_what_the_cpu_does_whatever_came_between() -> None:
    torch.manual_seed(1)
    made = module()
    given = torch.rand(4, 4096)
    with torch.inference_mode():
        expected = made(given)
    weights = Weights("s", [made], CudaDevice())
    for _ in range(3):
        weights.restore()
        with torch.inference_mode():
            found = made(given.cuda()).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        weights.evict()
    weights.close()


def test_no_room_is_said_and_leaves_nothing_behind() -> None:
    device = CudaDevice()
    weights = Weights("s", [module()], device)
    before = device.free_bytes()
    taken = torch.empty(max(before - weights.size // 2, 0), dtype=torch.uint8, device="cuda")
    with pytest.raises(DeviceFull):
        weights.restore()
    del taken
    torch.cuda.empty_cache()
    weights.restore()
    weights.close()


async def test_a_worker_on_its_gpu() -> None:
    (gpu, *_) = inventory.read()
    nursery = Nursery("test")
    try:
        worker = Worker(nursery, {"service": "two", "factory": "tests.gpu.models:two", "uuid": gpu.uuid})
        assert await worker.load() > 0
        await worker.restore()
        assert len(await worker.score([[1.0, 2.0]])) == 1
        await worker.evict()
        await worker.close()
    finally:
        await nursery.close()
