"""A service's weights: kept once in host memory, brought onto a device by one large copy, evicted by letting that memory go.

                  host slab (exact)                     device arena (only while resident)
    [ parameters ........ | what may be written ]  ->  [ parameters ........ | what may be written ]
                                                   <-    only the tail, and parameters that were written in place

Every tensor that was found (`layout`) is a view of the arena, with the offsets, strides and ties that it had. While evicted it
is of a type that raises Evicted at any use, so that nothing is read that is not there. Whoever wants to be sure that the weights
stay takes a lease.
"""

import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tangram.executors.gpu.device import Device, host_budget_bytes, host_slab, trim_host
from tangram.executors.gpu.errors import Broken, Busy, Evicted
from tangram.executors.gpu.layout import Slot, layout, tensors

HOST_RESERVE: Final = 0.05
"""Of what the host has available, left to others."""
STEP_BYTES: Final = 64 << 20
"""Copied between two looks at the host's memory."""
_CHUNK: Final = 1 << 20
_WORD: Final = (1 << 64) - 1


class Moved(NamedTuple):
    """written_back: bytes that came from the device."""

    size: int
    seconds: float
    written_back: int = 0


class Weights:
    """Takes over what hangs on some objects; it begins evicted. strict: at each restore and eviction a sum of all of it is
    compared, which finds writes that torch does not count, and costs one reading of it.

    Raises Refused, and MemoryError if the host has no room; after that the objects are of no use.
    """

    def __init__(self, service: str, roots: Sequence[object], device: Device, *, strict: bool = False) -> None:
        self.service, self.strict = service, strict
        self._roots, self._device = list(roots), device
        self._lock = threading.RLock()
        self._leases = 0
        self._arena: torch.Tensor | None = None
        self._why = ""
        """Why they cannot be trusted any more."""
        self._layout = layout(service, roots)
        self._mapping, self._slab = host_slab(self._layout.size)
        try:
            self._take()
            device.pin(self._slab)
        except BaseException:
            self.close()
            raise
        self._sum = self._checksum(self._slab, 0, self.size) if strict else 0

    def _take(self) -> None:
        """Storage by storage: each goes as soon as it is copied, unless somebody else has it, so that nothing is there twice."""
        unseen = STEP_BYTES
        for part in self._layout.parts:
            size = part.high - part.low
            unseen += size
            if unseen > STEP_BYTES:
                unseen = size
                trim_host()
                budget = int(host_budget_bytes() * (1 - HOST_RESERVE))
                if max(size, STEP_BYTES) > budget:
                    left = self.size - part.at
                    raise MemoryError(f"{self.service}: {left:,} bytes of weights are left to keep, and the host has {budget:,}")
            self._slab[part.at : part.at + size].copy_(_bytes(part.storage, part.low, size))
            self._bury([slot for slot, _ in part.slots])
            part.storage = None  # type: ignore[assignment]
        trim_host()

    # --- what a worker calls -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes that they take on the device."""
        return self._layout.size

    @property
    def is_resident(self) -> bool:
        return self._arena is not None

    @property
    def names(self) -> list[str]:
        return [name for slot in self._layout.slots for name in slot.names]

    def restore(self) -> Moved:
        """Brings them onto the device, if they are not there. Raises DeviceFull, and Broken if something was rebound or damaged:
        then they are evicted as before."""
        with self._lock:
            begin_s = time.perf_counter()
            self._check()
            if self._arena is not None:
                return Moved(0, time.perf_counter() - begin_s)
            if why := self._audit():
                self._break(why)
            size = self.size
            arena = self._device.allocate(size)
            try:
                self._device.copy(arena, self._slab)
                if self.strict and self._checksum(arena, 0, size) != self._sum:
                    self._break("what is on the device is not what was kept")
                self._raise(arena)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they would keep the arena
                self._bury(self._layout.slots)
                del arena
                self._device.free(size)
                raise
            self._arena = arena
            torch.clear_autocast_cache()
            return Moved(size, time.perf_counter() - begin_s)

    def evict(self) -> Moved:
        """Lets the device's memory go. Raises Busy under a lease; Broken if something was rebound, or if somebody holds a view of
        the weights: they cannot be restored then."""
        with self._lock:
            begin_s = time.perf_counter()
            if self._arena is None:
                return Moved(0, time.perf_counter() - begin_s)
            if self._leases:
                raise Busy(self.service, f"{self._leases} lease(s) are held")
            why = self._audit()
            written = 0 if why else self._write_back()
            size, arena = self.size, self._arena
            if not why and self.strict and self._checksum(arena, 0, size) != self._sum:
                why = "parameters were written past torch's count of writes"
            watch: Any = StorageWeakRef(arena.untyped_storage())  # type: ignore[no-untyped-call]
            self._bury(self._layout.slots)
            self._arena = None
            torch.clear_autocast_cache()
            del arena
            if not watch.expired():
                why = why or "something holds a view of them, and their memory with it"
            self._device.free(size)
            if why:
                self._break(why)
            return Moved(size, time.perf_counter() - begin_s, written)

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """They stay while it is held. Raises Evicted if they are not there."""
        with self._lock:
            self._check()
            if self._arena is None:
                raise Evicted(self.service, "its weights are not on the device")
            self._leases += 1
        try:
            yield
        finally:
            with self._lock:
                self._leases -= 1

    def close(self) -> None:
        """Gives all memory back; the objects are of no use then. Idempotent. Raises Busy under a lease."""
        with self._lock:
            if self._leases:
                raise Busy(self.service, f"{self._leases} lease(s) are held")
            if self._arena is not None:
                self._bury(self._layout.slots)
                self._arena = None
                self._device.free(self.size)
            if not self._mapping.closed:
                self._device.unpin(self._slab)
                del self._slab
                with contextlib.suppress(BufferError):  # while an exception's traceback holds a view of it
                    self._mapping.close()
            self._why = "closed"

    # --- below -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._why:
            raise Broken(self.service, self._why)

    def _break(self, why: str) -> None:
        self._why = why
        raise Broken(self.service, why)

    def _raise(self, arena: torch.Tensor) -> None:
        """Every tensor becomes a view of the arena."""
        storage = arena.untyped_storage()
        for slot in self._layout.slots:
            _revive(slot.tensor)
            with torch.inference_mode(slot.is_inference), torch.no_grad():
                view = torch.empty(0, dtype=slot.dtype, device=arena.device)
                view.set_(storage, slot.at // slot.dtype.itemsize, slot.shape, slot.stride)
                slot.tensor.data = view
            slot.version = 0 if slot.is_inference else slot.tensor._version

    def _bury(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            _revive(slot.tensor)
            with torch.inference_mode(slot.is_inference), torch.no_grad():
                slot.tensor.data = torch.empty(0, dtype=slot.dtype, device=slot.tensor.device)
            slot.tensor.__class__ = _gone(type(slot.tensor), self.service)

    def _audit(self) -> str:
        """What is not as it was registered, or ""."""
        mine = self._arena.untyped_storage()._cdata if self._arena is not None else None
        known = {id(slot.tensor): slot for slot in self._layout.slots}
        found: set[int] = set()
        for name, tensor in tensors(self.service, self._roots):
            slot = known.get(id(tensor))
            if slot is None:
                return f"{name} was added, or put in the place of what was registered"
            found.add(id(tensor))
            if mine is not None and (
                tensor.untyped_storage()._cdata != mine
                or tensor.storage_offset() * slot.dtype.itemsize != slot.at
                or tuple(tensor.shape) != slot.shape
                or tuple(tensor.stride()) != slot.stride
                or tensor.dtype != slot.dtype
            ):
                return f"{name} was given another content"
        missing = [slot.names[0] for slot in self._layout.slots if id(slot.tensor) not in found]
        return f"{missing[0]} was taken out" if missing else ""

    def _write_back(self) -> int:
        """What may have been written; bytes."""
        assert self._arena is not None
        ranges = [(self._layout.mutable_at, self.size)] if self._layout.mutable_at < self.size else []
        for part in self._layout.parts:
            if not part.is_mutable and any(slot.tensor._version != slot.version for slot, _ in part.slots):
                ranges.append((part.at, part.end))
        for low, high in ranges:
            before = self._checksum(self._slab, low, high) if self.strict else 0
            self._device.copy(self._slab[low:high], self._arena[low:high])
            if self.strict:
                self._sum = (self._sum - before + self._checksum(self._arena, low, high)) & _WORD
        return sum(high - low for low, high in ranges)

    def _checksum(self, memory: torch.Tensor, low: int, high: int) -> int:
        """Of a range of words, by their places: those of ranges add up."""
        words = memory[low:high].view(torch.int64)
        total = 0
        for at in range(0, words.numel(), _CHUNK):
            part = words[at : at + _CHUNK]
            places = torch.arange(at, at + part.numel(), device=part.device, dtype=torch.int64) * 2 + (low // 4 + 1)
            total = (total + int((part * places).sum())) & _WORD
        return total


def _bytes(storage: torch.UntypedStorage, low: int, size: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (size,), (1,))


class _Gone:
    """Mixed into the type of a tensor whose weights are not there."""

    _service = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Evicted(cls._service, "its weights are not on the device")


@functools.lru_cache(1_024)
def _gone(kind: type, service: str) -> type:
    return type(f"Evicted{kind.__name__}", (_Gone, kind), {"_service": service, "_alive": kind})


def _revive(tensor: torch.Tensor) -> None:
    alive = getattr(type(tensor), "_alive", None)
    if alive is not None:
        tensor.__class__ = alive
