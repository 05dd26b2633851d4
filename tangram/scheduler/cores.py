"""Which cores of a host are taken. Sets of cores are integers with one bit a core: 256 cores fit one small object, and
copying a pool for a pass costs next to nothing.

A core is free, taken whole, or shared by fractions (millicores). Two half-free cores are never counted as one free core.
"""

from collections.abc import Iterable, Sequence
from typing import Final

MILLI: Final = 1000
"""Millicores of one core."""


def mask_of(cores: Iterable[int]) -> int:
    mask = 0
    for core in cores:
        mask |= 1 << core
    return mask


def cores_of(mask: int) -> tuple[int, ...]:
    """The ids in a mask, rising."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)


class CorePool:
    """The cores of one host.

    nodes: masks of the NUMA nodes announced by live executors; used: whole cores granted; shared: core id to millicores
    granted on it. What is granted stays so when the announced set shrinks, hence free is always computed.
    """

    __slots__ = ("all", "nodes", "shared", "used")

    def __init__(self, nodes: tuple[int, ...] = (), used: int = 0, shared: dict[int, int] | None = None) -> None:
        self.announce(nodes)
        self.used = used
        self.shared: dict[int, int] = {} if shared is None else shared

    def announce(self, nodes: tuple[int, ...]) -> None:
        """Replaces the set of cores; `all` is their mask."""
        self.nodes = nodes
        self.all = 0
        for node in nodes:
            self.all |= node

    def copy(self) -> "CorePool":
        return CorePool(self.nodes, self.used, dict(self.shared))

    def free(self, within: int = -1) -> int:
        """Mask of the cores, among `within`, that nobody holds any part of."""
        taken = self.used
        for core in self.shared:
            taken |= 1 << core
        return self.all & within & ~taken

    def fits(self, millicores: int, within: int = -1) -> bool:
        """Whether `millicores` (whole cores, or less than one) are free among `within`."""
        if millicores >= MILLI:
            return self.free(within).bit_count() * MILLI >= millicores
        return millicores == 0 or self._shareable(millicores, within) is not None or self.free(within) != 0

    def choose(self, millicores: int, within: int = -1) -> tuple[int, ...]:
        """Core ids for `millicores`, in one NUMA node where possible. Raises ValueError if they are not free."""
        if millicores == 0:
            return ()
        if millicores < MILLI:
            core = self._shareable(millicores, within)
            return self.extend((), 1, within) if core is None else (core,)
        return self.extend((), millicores // MILLI, within)

    def claim(self, count: int, within: int = -1) -> int:
        """Takes `count` whole cores, no matter which, until `choose_each` says which. Returns their mask. Raises ValueError if
        there are not so many."""
        free = left = self.free(within)
        for _ in range(count):
            if not left:
                raise ValueError(f"{count - free.bit_count()} cores short")
            left &= left - 1
        self.used |= free ^ left
        return free ^ left

    def choose_each(self, counts: Sequence[int], claimed: int, within: int = -1) -> list[tuple[int, ...]]:
        """Gives back what was claimed and takes whole cores for each in turn, the same as by `choose` and `take`. Raises
        ValueError if there are not so many."""
        self.used &= ~claimed
        if len(counts) == 1:
            alone = self.extend((), counts[0], within)
            self.used |= mask_of(alone)
            return [alone]
        free = self.free(within)
        shelves = [tuple([core for core, bit in enumerate(bin(node & free)[:1:-1]) if bit == "1"]) for node in self.nodes]
        left = [len(shelf) for shelf in shelves]
        chosen: list[tuple[int, ...]] = []
        for count in counts:
            cores: tuple[int, ...] = ()
            more = count
            while more:
                most = max(left, default=0)
                if not most:
                    raise ValueError(f"{more} cores short")
                node = left.index(most)
                shelf = shelves[node]
                at = len(shelf) - most
                found = shelf[at : at + more]
                left[node] -= len(found)
                more -= len(found)
                cores = tuple(sorted(cores + found)) if cores else found
            chosen.append(cores)
        for shelf, rest in zip(shelves, left, strict=True):
            self.used |= mask_of(shelf[: len(shelf) - rest])
        return chosen

    def extend(self, cores: tuple[int, ...], more: int, within: int = -1) -> tuple[int, ...]:
        """`cores` and `more` free ones, from the nodes that `cores` lie in first, then the node that has most free.

        Raises ValueError if there are not so many.
        """
        held = mask_of(cores)
        free = self.free(within) & ~held
        if more == 1 and not held and len(self.nodes) == 1 and free:
            return ((free & -free).bit_length() - 1,)
        # A stable order: nodes already used, then the one that holds all of it most tightly, then the emptiest.
        ranked = sorted(
            range(len(self.nodes)),
            key=lambda i: (
                not self.nodes[i] & held,
                (self.nodes[i] & free).bit_count() < more,
                -(self.nodes[i] & free).bit_count(),
                i,
            ),
        )
        chosen = held
        for index in ranked:
            rest = self.nodes[index] & free
            while rest and more:
                low = rest & -rest
                chosen |= low
                rest ^= low
                more -= 1
        if more:
            raise ValueError(f"{more} cores short")
        return cores_of(chosen)

    def take(self, cores: tuple[int, ...], millicores: int) -> None:
        """Grants as written, even if the set has shrunk in between."""
        if 0 < millicores < MILLI:
            core = cores[0]
            self.shared[core] = self.shared.get(core, 0) + millicores
        elif millicores:
            self.used |= mask_of(cores)

    def give(self, cores: tuple[int, ...], millicores: int) -> None:
        if 0 < millicores < MILLI:
            core = cores[0]
            left = self.shared[core] - millicores
            assert left >= 0, f"core {core} given back more than was taken"
            if left:
                self.shared[core] = left
            else:
                del self.shared[core]
        elif millicores:
            mask = mask_of(cores)
            assert self.used & mask == mask, f"cores {cores} given back but not taken"
            self.used &= ~mask

    def _shareable(self, millicores: int, within: int) -> int | None:
        """The fullest shared core that still has room: fractions fill up cores instead of spoiling whole ones."""
        best: tuple[int, int] | None = None
        mask = self.all & within & ~self.used
        for core, used in self.shared.items():
            if mask >> core & 1 and used + millicores <= MILLI and (best is None or (-used, core) < best):
                best = (-used, core)
        return None if best is None else best[1]
