"""The caching allocator with expandable segments, on paper."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triweave.planner.allocator import MIB, CachingAllocator


def test_free_pieces_of_an_expandable_segment_are_joined() -> None:
    """Two freed neighbours serve one larger request, which without expandable segments needs a new segment."""
    reserved = {}
    for expandable in (True, False):
        allocator = CachingAllocator(2**40, expandable)
        pieces = [allocator.allocate(40 * MIB) for _ in range(2)]
        for piece in pieces:
            allocator.release(piece)
        allocator.allocate(80 * MIB)
        reserved[expandable] = allocator.peak_reserved
    assert reserved == {True: 80 * MIB, False: 160 * MIB}


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), max_size=60))
def test_an_expandable_segment_keeps_account(requests: list[tuple[int, bool]]) -> None:
    """Whatever is asked for and freed, what is allocated is what is held, and all of it is reserved in pages."""
    allocator, held = CachingAllocator(2**50, expandable=True), []
    for size, frees in requests:
        if frees and held:
            allocator.release(held.pop(len(held) // 2))
        held.append(allocator.allocate(size))
        assert allocator.allocated == sum(block.size for block in held)
        assert allocator.allocated <= allocator.reserved
        assert allocator.reserved % (2 * MIB) == 0
    for block in held:
        allocator.release(block)
    assert allocator.allocated == 0
    assert sum(size for pool in allocator._free.values() for size, _, _ in pool) == allocator.reserved
