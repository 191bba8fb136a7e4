"""PyTorch's caching allocator on paper: what it reserves for a sequence of requests, and when it gives up.

The rules are those of `CUDACachingAllocator` without expandable segments: sizes are rounded to 512 bytes; requests
of up to 1 MiB come from segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their own size
rounded to 2 MiB; the smallest free block that is large enough is taken, and split if more than 512 bytes (small)
or 1 MiB (large) would be left; neighbours are joined when both are free. When the card is full, whole free segments
are given back and the request is tried once more.

With expandable segments a pool is one segment that grows at its end, by pages of 2 MiB (small) or 20 MiB (large), and
every block is split. Its free end counts as large as the segment can grow, so that a larger free block inside is taken
before it (`get_free_block`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
_SMALL_LIMIT, _SMALL_SEGMENT = MIB, 2 * MIB
_MEDIUM_LIMIT, _MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
_ROUNDING, _PAGE = 512, 2 * MIB


class OutOfMemory(Exception):
    """A request that the card cannot serve."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment, handed out or free."""

    size: int
    number: int
    small: bool
    free: bool = False
    unmapped: int = 0
    """Bytes of it that the driver has, which maps them again when they are handed out."""
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Serves requests from a card of `capacity` bytes."""

    capacity: int
    expandable: bool = False
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    reserved: int = 0
    """Bytes taken from the driver now."""
    peak_reserved: int = 0
    allocated: int = 0
    """Bytes handed out now, rounded."""
    peak_allocated: int = 0
    _free: dict[bool, list[tuple[int, int, MemoryBlock]]] = field(default_factory=lambda: {True: [], False: []})
    _held_back: list[MemoryBlock] = field(default_factory=list)
    _count: int = 0
    _ends: dict[bool, MemoryBlock] = field(default_factory=dict)

    def allocate(self, size: int) -> MemoryBlock:
        """Serve `size` bytes.

        Raises:
            OutOfMemory: neither a free block nor the card has room.
        """
        size = -(-size // _ROUNDING) * _ROUNDING
        small = size <= _SMALL_LIMIT
        block = self._take(size, small) or (self._extend if self.expandable else self._grow)(size, small)
        if block.unmapped:
            self._map(block, size)
        left = block.size - size
        if left >= _ROUNDING if small or self.expandable else left > MIB:
            self._count += 1
            rest = MemoryBlock(left, self._count, small, unmapped=block.unmapped, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size, block.unmapped = rest, size, 0
            if self._ends.get(small) is block:
                self._ends[small] = rest
            self._give(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Take a block back and join it with free neighbours."""
        self.allocated -= block.size
        self._join(block)

    def hold_back(self, block: MemoryBlock) -> None:
        """Take back a block that another stream may still use: it is free once the host waits for the device."""
        self.allocated -= block.size
        self._held_back.append(block)

    def wait(self) -> None:
        """The host waits for the device: what was held back is free."""
        for block in self._held_back:
            self._join(block)
        self._held_back.clear()

    def empty_cache(self) -> None:
        """Give what is free back to the driver: whole segments, of an expandable one all pages that are free."""
        self.wait()
        if not self.expandable:
            self._give_back()
            return
        for end in self._ends.values():
            page = _page(end.small)
            stop = _place(end) + end.size
            block: MemoryBlock | None = end
            while block is not None:
                start = stop - block.size
                pages = max(0, stop // page - -(-start // page)) if block.free else 0
                self.reserved -= pages * page - block.unmapped
                block.unmapped = pages * page
                block, stop = block.before, start

    def _map(self, block: MemoryBlock, size: int) -> None:
        page, mapped = _page(block.small), block.size - block.unmapped
        added = min(block.unmapped, max(0, -(-(size - mapped) // page) * page))
        if self.reserved + added > self.capacity:
            raise OutOfMemory
        block.unmapped -= added
        self._reserve(added)

    def _join(self, block: MemoryBlock) -> None:
        if block.before is not None and block.before.free:
            other = block.before
            self._withdraw(other)
            other.size += block.size
            other.unmapped += block.unmapped
            other.after = block.after
            self._move_end(block, other)
            block = other
            if block.after is not None:
                block.after.before = block
        if block.after is not None and block.after.free:
            other = block.after
            self._withdraw(other)
            block.size += other.size
            block.unmapped += other.unmapped
            block.after = other.after
            self._move_end(other, block)
            if block.after is not None:
                block.after.before = block
        self._give(block)

    def _take(self, size: int, small: bool) -> MemoryBlock | None:
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        if place == len(pool):
            return None
        if self.expandable and pool[place][2] is self._ends.get(small) and place + 1 < len(pool):
            place += 1
        block = pool.pop(place)[2]
        block.free = False
        return block

    def _grow(self, size: int, small: bool) -> MemoryBlock:
        segment = _SMALL_SEGMENT
        if not small:
            segment = _MEDIUM_SEGMENT if size < _MEDIUM_LIMIT else -(-size // _PAGE) * _PAGE
        if self.reserved + segment > self.capacity:
            self.wait()
            self._give_back()
            if self.reserved + segment > self.capacity:
                raise OutOfMemory
        self._reserve(segment)
        self._count += 1
        return MemoryBlock(segment, self._count, small)

    def _extend(self, size: int, small: bool) -> MemoryBlock:
        end = self._ends.get(small)
        free = end.size if end is not None and end.free else 0
        page = _page(small)
        added = -(-(size - free) // page) * page
        if self.reserved + added > self.capacity:
            raise OutOfMemory
        self._reserve(added)
        if end is not None and free:
            self._withdraw(end)
            end.size += added
            return end
        self._count += 1
        block = MemoryBlock(added, self._count, small, before=end)
        if end is not None:
            end.after = block
        self._ends[small] = block
        return block

    def _reserve(self, added: int) -> None:
        self.reserved += added
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _move_end(self, gone: MemoryBlock, into: MemoryBlock) -> None:
        if self._ends.get(gone.small) is gone:
            self._ends[gone.small] = into

    def _give_back(self) -> None:
        """Return segments that nobody uses any part of."""
        for pool in self._free.values():
            whole = [entry for entry in pool if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            gone = {entry[1] for entry in whole}
            pool[:] = [entry for entry in pool if entry[1] not in gone]

    def _give(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _withdraw(self, block: MemoryBlock) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.number)))
        block.free = False


def _page(small: bool) -> int:
    """What an expandable segment grows by."""
    return _SMALL_SEGMENT if small else _MEDIUM_SEGMENT


def _place(block: MemoryBlock) -> int:
    """Where a block begins in its segment."""
    place, before = 0, block.before
    while before is not None:
        place += before.size
        before = before.before
    return place
