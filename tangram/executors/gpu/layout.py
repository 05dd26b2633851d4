"""Where each tensor of some modules lies in one arena: every storage that is seen once, however many tensors view it.

Found are parameters, buffers (persistent or not) and plain tensor attributes of every submodule, in lists, tuples and dicts to
depth 2. Of a storage only the range that some tensor sees is kept. Parameters come first; what a forward pass may write, last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tangram.executors.gpu.errors import Refused

ALIGN: Final = 512
DEPTH: Final = 2


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor: where its first element lies, in bytes from the arena's begin. names: where it was found; holders: (container,
    key), in which it must still be found later."""

    tensor: torch.Tensor
    names: list[str]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_inference: bool
    at: int = 0
    version: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """A storage, or what of it is seen. low, high: bytes in it; at: in the arena."""

    storage: torch.UntypedStorage
    is_mutable: bool
    low: int = 0
    high: int = 0
    at: int = 0
    slots: list[tuple[Slot, int]] = field(default_factory=list)
    """With the byte in the storage at which each begins."""


@dataclass(slots=True)
class Layout:
    """size: of the arena. mutable_at: from there on lies what may be written."""

    slots: list[Slot]
    parts: list[Part]
    size: int
    mutable_at: int


def tensors(service: str, roots: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, whether it is a parameter), as often as it is found. Raises Refused."""
    for number, root in enumerate(roots):
        prefix = f"{number}." if len(roots) > 1 else ""
        for path, module in root.named_modules(remove_duplicate=True):
            here = prefix + (path + "." if path else "")
            if hasattr(module, "_hf_hook"):
                raise Refused(service, f"{here or 'the module'} has hooks of another offloader (_hf_hook)")
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield here + name, parameter, True
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield here + name, buffer, False
            for name, value in vars(module).items():
                if name not in _OWN:
                    for where, tensor in _in(value, DEPTH):
                        yield here + name + where, tensor, isinstance(tensor, torch.nn.Parameter)


_OWN: Final = frozenset({"_parameters", "_buffers", "_modules"})


def _in(value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
    elif depth and isinstance(value, list | tuple):
        for index, each in enumerate(value):
            for where, tensor in _in(each, depth - 1):
                yield f"[{index}]{where}", tensor
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            for where, tensor in _in(each, depth - 1):
                yield f"[{key!r}]{where}", tensor


def layout(service: str, roots: Sequence[torch.nn.Module]) -> Layout:
    """Raises Refused."""
    slots: dict[int, Slot] = {}
    parts: dict[int, Part] = {}
    for name, tensor, is_parameter in tensors(service, roots):
        known = slots.get(id(tensor))
        if known is not None:
            known.names.append(name)
            if not is_parameter:
                parts[tensor.untyped_storage()._cdata].is_mutable = True
            continue
        _check(service, name, tensor)
        slot = Slot(tensor, [name], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.is_inference())
        slots[id(tensor)] = slot
        storage = tensor.untyped_storage()
        part = parts.get(storage._cdata)
        low, high = _span(tensor)
        if part is None:
            part = parts[storage._cdata] = Part(storage, not is_parameter, low, high)
        part.low, part.high = min(part.low, low), max(part.high, high)
        part.is_mutable = part.is_mutable or not is_parameter
        part.slots.append((slot, int(tensor.storage_offset()) * tensor.element_size()))
    at = mutable_at = 0
    ordered = sorted(parts.values(), key=lambda part: part.is_mutable)
    for part in ordered:
        # From an element's boundary on, so that every view keeps the alignment of its type.
        part.low -= part.low % 16
        part.at = at
        for slot, begin in part.slots:
            slot.at = at + begin - part.low
        at += -(-(part.high - part.low) // ALIGN) * ALIGN
        if not part.is_mutable:
            mutable_at = at
    return Layout(list(slots.values()), ordered, at, mutable_at)


def _check(service: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise Refused(service, f"{name} is a meta tensor: it has no content")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Refused(service, f"{name} is a {tensor.layout} tensor: only dense ones have one storage")
    if tensor.grad_fn is not None:
        raise Refused(service, f"{name} hangs on an autograd graph: make the module under torch.no_grad()")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor sees."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    last: int = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * size
