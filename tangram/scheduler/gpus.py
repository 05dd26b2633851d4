"""Which GPUs of a host are taken, and whose weights lie on them. Sets of GPUs are integers with one bit a GPU.

GPUs are given in chunks of 1, 2, 4 or 8 that are aligned by id, as they are linked, so that what is left can be put together
again (buddy allocation). A copy of a service lies on one chunk and is split evenly over it; copies of several services can lie
on the same GPUs, as far as their memory goes, and one at a time is used.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from tangram.rules import GPU_CHUNKS


def chunks(mask: int, size: int) -> Iterator[int]:
    """The aligned chunks of `size` GPUs that lie wholly in a mask, rising."""
    chunk = (1 << size) - 1
    while chunk <= mask:
        if chunk & mask == chunk:
            yield chunk
        chunk <<= size


def free_in_chunks(mask: int) -> dict[int, int]:
    """For each chunk size, how many GPUs of a mask lie in chunks that large: chunks can be placed exactly if for each size the
    GPUs that are asked for in chunks of at least that size are no more than this."""
    return {size: size * sum(1 for _ in chunks(mask, size)) for size in GPU_CHUNKS}


@lru_cache(4_096)
def around(mask: int, chunk: int) -> int:
    """How many GPUs the largest aligned chunk of a mask has in which a chunk lies: what taking it would break. 0: it is not in
    the mask."""
    first = (chunk & -chunk).bit_length() - 1
    found = 0
    for size in GPU_CHUNKS:
        whole = ((1 << size) - 1) << first - first % size
        if chunk & ~whole == 0 and whole & mask == whole:
            found = size
    return found


@dataclass(slots=True, eq=False)
class Copy:
    """A service's weights. mib: on each of its GPUs. holder: the incarnation that keeps it, which alone can drop it. used_ns:
    when it last began to serve."""

    service: str
    gpus: int
    mib: int
    holder: str
    used_ns: int = 0


@dataclass(slots=True, eq=False)
class GpuPool:
    """The GPUs of one host. all: announced by live executors; used: granted; memory_mib: of each, for weights."""

    all: int = 0
    used: int = 0
    memory_mib: int = 0
    copies: list[Copy] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.all & ~self.used

    def copy_of(self, service: str, gpus: int, holder: str) -> Copy | None:
        for each in self.copies:
            if (each.service, each.gpus, each.holder) == (service, gpus, holder):
                return each
        return None

    def take(self, gpus: int, copy: Copy, evicts: Iterable[tuple[str, int]]) -> list[Copy]:
        """Grants GPUs as written, with a copy that serves there, after others of its holder have made room. Returns those."""
        gone = [each for name in evicts if (each := self.copy_of(*name, copy.holder)) is not None]
        for each in gone:
            self.copies.remove(each)
        self.used |= gpus
        known = self.copy_of(copy.service, gpus, copy.holder)
        if known is None:
            self.copies.append(copy)
        else:
            known.used_ns = copy.used_ns
        return gone

    def give(self, gpus: int) -> None:
        assert self.used & gpus == gpus, f"GPUs {gpus:b} given back but not taken"
        self.used &= ~gpus

    def drop(self, service: str, gpus: int, holder: str) -> None:
        """A copy is gone, if it was there."""
        self.copies = [each for each in self.copies if (each.service, each.gpus, each.holder) != (service, gpus, holder)]
