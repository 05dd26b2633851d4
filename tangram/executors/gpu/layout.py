"""Where each tensor of some objects lies in one arena: every storage that is seen once, however many tensors view it.

Found are parameters, buffers (persistent or not), and whatever other tensor is reached through attributes (of modules, of other
objects, of tensors), lists, tuples, sets, deques and the values of dicts; not what only a closure, or code in C, holds. Of a
storage only the range that some tensor sees is kept. Parameters come first; what a forward pass may write, last.
"""

import functools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tangram.executors.gpu.errors import Refused

ALIGN: Final = 512
OBJECTS_MAX: Final = 1_000_000
"""Looked at, at each move: so many take about a second."""
_OWN: Final = ("_parameters", "_buffers", "_modules")
_UNMADE: Final = (UninitializedParameter, UninitializedBuffer)
_LEAVES: Final = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    logging.Logger,
)
"""Nothing of a service is behind them; behind some, the whole process."""


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor. names: where it was found; at: where its first element lies, in bytes from the arena's begin."""

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

    @property
    def end(self) -> int:
        """In the arena."""
        return self.at + -(-(self.high - self.low) // ALIGN) * ALIGN


@dataclass(slots=True)
class Layout:
    """size: of the arena. mutable_at: from there on lies what may be written."""

    slots: list[Slot]
    parts: list[Part]
    size: int
    mutable_at: int


def tensors(service: str, roots: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
    """With names, as often as each is found. Raises Refused."""
    todo: deque[tuple[str, Any]] = deque((f".{number}" if len(roots) > 1 else "", root) for number, root in enumerate(roots))
    seen: set[int] = set()
    while todo:
        name, value = todo.popleft()
        if isinstance(value, torch.Tensor):
            yield name.removeprefix("."), value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > OBJECTS_MAX:
            raise Refused(service, f"more than {OBJECTS_MAX:,} objects hang on it, so that its tensors cannot be told")
        if isinstance(value, torch.nn.Module) and hasattr(value, "_hf_hook"):
            raise Refused(service, f"{name.removeprefix('.') or 'the module'} has hooks of another offloader (_hf_hook)")
        for form, key, each in _inside(value):
            if not isinstance(each, _LEAVES) and not (isinstance(each, dict) and not each):  # as most hooks are
                todo.append((name + form.format(key), each))


def _inside(value: Any) -> Iterator[tuple[str, object, Any]]:
    """(how a name of it ends, with what, and what is there). Copies, because a thread of the service may change what it reads."""
    if isinstance(value, dict):
        for key, each in list(value.items()):
            yield "[{!r}]", key if isinstance(key, str | int) else type(key), each
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for index, each in enumerate(list(value)):
            yield "[{}]", index, each
    is_module = isinstance(value, torch.nn.Module)
    for own in _OWN if is_module else ():
        for key, each in getattr(value, own).items():
            yield ".{}", key, each
    for key, each in list(getattr(value, "__dict__", {}).items()):
        if not (is_module and key in _OWN):
            yield ".{}", key, each
    for member in _members(value.__class__):
        yield ".{}", member, getattr(value, member, None)


@functools.lru_cache(10_000)
def _members(kind: type) -> list[str]:
    """What its instances hold in slots."""
    slotted = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
    return [member.__name__ for each in slotted for member in each.values() if isinstance(member, MemberDescriptorType)]


def layout(service: str, roots: Sequence[object]) -> Layout:
    """Raises Refused."""
    slots: dict[int, Slot] = {}
    parts: dict[int, Part] = {}
    for name, tensor in tensors(service, roots):
        known = slots.get(id(tensor))
        if known is not None:
            known.names.append(name)
            continue
        _check(service, name, tensor)
        slot = Slot(tensor, [name], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.is_inference())
        slots[id(tensor)] = slot
        storage = tensor.untyped_storage()
        low, high = _span(tensor)
        part = parts.setdefault(storage._cdata, Part(storage, False, low, high))
        part.low, part.high = min(part.low, low), max(part.high, high)
        # torch does not count what is written to an inference tensor
        part.is_mutable |= slot.is_inference or not isinstance(tensor, torch.nn.Parameter)
        part.slots.append((slot, int(tensor.storage_offset()) * tensor.element_size()))
    if not slots:
        raise Refused(service, "no tensor hangs on what its factory returned")
    _check_apart(service, list(parts.values()))
    at = mutable_at = 0
    ordered = sorted(parts.values(), key=lambda part: part.is_mutable)
    for part in ordered:
        # From an element's boundary on, so that every view keeps the alignment of its type.
        part.low -= part.low % 16
        part.at = at
        for slot, begin in part.slots:
            slot.at = at + begin - part.low
        at = part.end
        if not part.is_mutable:
            mutable_at = at
    return Layout(list(slots.values()), ordered, at, mutable_at)


def _check(service: str, name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or isinstance(tensor, _UNMADE):
        raise Refused(service, f"{name} is a {kind.__name__}: its content is not in memory of its own")
    if tensor.is_meta:
        raise Refused(service, f"{name} is a meta tensor: it has no content")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise Refused(service, f"{name} is a {tensor.layout} tensor: only dense ones have one storage")
    if tensor.is_conj() or tensor.is_neg():
        raise Refused(service, f"{name} is lazily conjugated or negated: store its resolve_conj().resolve_neg()")
    if tensor.grad_fn is not None:
        raise Refused(service, f"{name} hangs on an autograd graph: make the module under torch.no_grad()")


def _check_apart(service: str, parts: Sequence[Part]) -> None:
    """Several storages may have been made of one buffer: apart, a write to one would not be seen in the other."""
    placed = []
    for part in parts:
        begin = part.storage.data_ptr()
        if part.high > part.low:
            placed.append((str(part.storage.device), begin + part.low, begin + part.high, part.slots[0][0].names[0]))
    for one, two in pairwise(sorted(placed)):
        if one[0] == two[0] and two[1] < one[2]:
            raise Refused(service, f"{one[3]} and {two[3]} share memory through two storages: make one a view of the other")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor sees."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    last: int = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * size
