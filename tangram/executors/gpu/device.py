"""What the weight store asks of a device: the same calls on CUDA and, with a ledger for its capacity, on the CPU."""

import ctypes
import mmap
from pathlib import Path
from typing import Final, Protocol

import torch

from tangram.executors.gpu.ledger import DeviceFull, Ledger

PIN_BYTES: Final = 16 * 1024**3
"""Registered with the driver in pieces: one of hundreds of GiB fails on some machines."""

SEGMENT_BYTES: Final = 2 << 20
SEGMENT_BYTES_MIN: Final = 10 << 20
"""From there on torch's allocator takes as much as it is asked for, in whole SEGMENT_BYTES; smaller ones share segments."""


class Device(Protocol):
    name: str
    """As torch names it."""
    keeps: bool
    """What is freed stays with this process, for its next allocation."""

    def allocate(self, size: int) -> torch.Tensor:
        """Bytes of fresh memory. Raises DeviceFull."""

    def free(self, size: int) -> None:
        """After the last reference to what was allocated is gone."""

    def free_bytes(self) -> int: ...

    def pin(self, slab: torch.Tensor) -> None:
        """Makes host memory fit for fast copies, if there is such a thing."""

    def unpin(self, slab: torch.Tensor) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Returns when it is done, and whatever was asked of the device before, too."""


class CpuDevice:
    """A device that is played."""

    name = "cpu"

    def __init__(self, ledger: Ledger) -> None:
        self.keeps = False
        self._ledger = ledger

    def allocate(self, size: int) -> torch.Tensor:
        self._ledger.reserve(size)
        try:
            return torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            self._ledger.release(size)
            raise DeviceFull(size, self.free_bytes()) from None

    def free(self, size: int) -> None:
        if not self.keeps:
            trim_host()
        self._ledger.release(size)

    def free_bytes(self) -> int:
        return self._ledger.free_bytes()

    def pin(self, slab: torch.Tensor) -> None:
        """Nothing copies by itself here."""

    def unpin(self, slab: torch.Tensor) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


class CudaDevice:
    """A GPU, by its number among those that are visible."""

    def __init__(self, index: int = 0) -> None:
        self.name = f"cuda:{index}"
        self.keeps = False
        self._device = torch.device(self.name)
        torch.cuda.set_device(self._device)  # pinning belongs to the context of the current one
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def allocate(self, size: int) -> torch.Tensor:
        # What no cache has is taken from the driver in a segment of its own; whole pages of it, so that no activation fits beside
        # and keeps it. (A memory pool would keep it too: emptying the cache passes over pools that are alive.)
        whole = max(-(-size // SEGMENT_BYTES) * SEGMENT_BYTES, SEGMENT_BYTES_MIN)
        try:
            return torch.empty(whole, dtype=torch.uint8, device=self._device)[:size]
        except torch.OutOfMemoryError:
            self._release_cached()
            raise DeviceFull(size, self.free_bytes()) from None

    def free(self, size: int) -> None:
        if not self.keeps:
            self._release_cached()  # other workers of this device are other processes, to which what is cached here is lost

    def _release_cached(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def pin(self, slab: torch.Tensor) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for at in range(0, slab.numel(), PIN_BYTES):
            size = min(PIN_BYTES, slab.numel() - at)
            code = int(runtime.cudaHostRegister(slab.data_ptr() + at, size, 0))
            if code:
                raise MemoryError(f"cudaHostRegister of {size:,} bytes failed: {code}")

    def unpin(self, slab: torch.Tensor) -> None:
        for at in range(0, slab.numel(), PIN_BYTES):
            torch.cuda.cudart().cudaHostUnregister(slab.data_ptr() + at)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_host() -> None:
    """Gives freed host memory back to the system: the C library keeps what was in small pieces."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def host_slab(size: int) -> tuple[mmap.mmap, torch.Tensor]:
    """Exactly so many bytes of host memory (pinned allocations of torch are rounded up to a power of two). The mapping can be
    closed when no tensor of it is left. Raises MemoryError."""
    try:
        slab = mmap.mmap(-1, max(size, 1))
    except OSError as error:
        raise MemoryError(f"{size:,} bytes of host memory: {error.strerror}") from None
    return slab, torch.frombuffer(slab, dtype=torch.uint8)[:size]


def host_budget_bytes(root: Path = Path("/")) -> int:
    """What this process may still take of the host's memory: what is available, within the limits of its control group and of
    those around it. Raises OSError."""
    available = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:  # a kernel without control groups
        return available
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # ".." is above what is mounted here; and a container's path may be the host's, of which it sees the end only as its root
        for name in ("", *(name for name in path.split("/") if name and name != "..")):
            folder /= name
            try:
                most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
                statistics = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            if most.isdigit():
                available = min(available, max(0, int(most) - used + int(statistics.get(cache, 0))))
    return available
