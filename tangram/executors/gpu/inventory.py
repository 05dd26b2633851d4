"""The GPUs of this host, through nvidia-ml-py. No GPU is one answer, a broken one is another, and neither is guessed."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tangram.errors import TangramError

MIB: Final = 1 << 20


class NoGpus(TangramError):
    """This host has none to offer; the message says why."""


class BrokenGpus(TangramError):
    """There is a driver, or a GPU, and it does not work: this host must not pass for one without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """id: place in the order of the inventory, in which aligned pairs, fours and eights are the best linked. index: the driver's.
    links: ids of those that NVLink joins to it. numa: its node, -1 if unknown. is_mig: a slice of one."""

    id: int
    index: int
    uuid: str
    name: str
    memory_mib: int
    free_mib: int
    links: frozenset[int] = field(default_factory=frozenset)
    numa: int = -1
    is_mig: bool = False


def read(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES (of `environment`) leaves. Raises NoGpus, BrokenGpus."""
    try:
        import pynvml  # noqa: PLC0415  # an extra
    except ImportError:
        raise NoGpus("no GPUs, because nvidia-ml-py is not installed: pip install 'tangram[gpu]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _why(pynvml, error) from None
    try:
        found = _visible(_ordered(pynvml, _devices(pynvml)), environment)
    except pynvml.NVMLError as error:
        raise BrokenGpus(f"the GPUs cannot be read: {error}") from None
    finally:
        pynvml.nvmlShutdown()
    return found


def free_bytes(uuid: str) -> int:
    """Of a GPU, now. Raises BrokenGpus."""
    import pynvml  # noqa: PLC0415  # an extra

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise BrokenGpus(f"{uuid} cannot be read: {error}") from None


def _why(pynvml: Any, error: Any) -> TangramError:
    none = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no NVIDIA driver library",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    }
    if error.value in none:
        return NoGpus(f"no GPUs, because {none[error.value]}")
    return BrokenGpus(f"the NVIDIA driver does not work: {error}")


def _devices(pynvml: Any) -> list[tuple[int, Any, bool]]:
    """(driver's index, handle, whether it is a slice); a GPU in slices is not one itself. Raises NVMLError."""
    found: list[tuple[int, Any, bool]] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        slices = _optional(pynvml, None, pynvml.nvmlDeviceGetMigMode, handle)
        if not (slices and slices[0]):
            found.append((index, handle, False))
            continue
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                found.append((index, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number), True))
            except pynvml.NVMLError_NotFound:
                continue
    if not found:
        raise NoGpus("no GPUs, because the driver knows of none")
    return found


def _optional(pynvml: Any, default: Any, read: Callable[..., Any], *arguments: Any) -> Any:
    """What not every GPU or driver can say."""
    try:
        return read(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return default


def _ordered(pynvml: Any, devices: Sequence[tuple[int, Any, bool]]) -> list[Gpu]:
    handles = [(number, handle) for number, (_, handle, is_slice) in enumerate(devices) if not is_slice]
    nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    linked = {
        (a, b)
        for a, one in handles
        for b, other in handles
        if a != b and _optional(pynvml, 1, pynvml.nvmlDeviceGetP2PStatus, one, other, nvlink) == pynvml.NVML_P2P_STATUS_OK
    }
    order = grouped(len(devices), linked)
    places = {number: place for place, number in enumerate(order)}
    found = []
    for number in order:
        index, handle, is_slice = devices[number]
        memory = _optional(pynvml, None, pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
        memory = memory or pynvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            Gpu(
                id=places[number],
                index=index,
                uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                memory_mib=memory.total // MIB,
                free_mib=memory.free // MIB,
                links=frozenset(places[other] for a, other in linked if a == number),
                numa=_optional(pynvml, -1, pynvml.nvmlDeviceGetNumaNodeId, handle),
                is_mig=is_slice,
            )
        )
    return found


def grouped(count: int, linked: set[tuple[int, int]]) -> list[int]:
    """An order in which aligned pairs, then fours, then eights have as many links as a greedy choice finds; that of the driver
    where links make no difference."""
    groups = [[number] for number in range(count)]
    for _ in range(3):
        merged: list[list[int]] = []
        left = list(groups)
        while left:
            first = left.pop(0)
            if not left:
                merged.append(first)
                break
            best = max(range(len(left)), key=lambda i: (sum((a, b) in linked for a in first for b in left[i]), -i))
            merged.append(first + left.pop(best))
        groups = merged
    return [number for group in groups for number in group]


def _visible(gpus: list[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """As CUDA would: indices or UUIDs (or their beginnings), up to the first that is none."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    chosen: set[int] = set()
    for text in (each.strip() for each in wanted.split(",")):
        found = [gpu for gpu in gpus if (text.isdigit() and int(text) == gpu.index) or (text and gpu.uuid.startswith(text))]
        if not found:
            break
        chosen |= {gpu.id for gpu in found}
    if not chosen:
        raise NoGpus(f"no GPUs, because CUDA_VISIBLE_DEVICES is {wanted!r}")
    return [gpu for gpu in gpus if gpu.id in chosen]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
