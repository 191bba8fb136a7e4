"""The caching allocator with expandable segments, on paper."""

from __future__ import annotations

import pytest
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


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """A request that the segment's free end would serve is served by a larger free block inside: the end can grow."""
    allocator = CachingAllocator(2**40, expandable=True)
    inside, held = allocator.allocate(40 * MIB), allocator.allocate(2 * MIB)
    end = allocator.allocate(30 * MIB)
    allocator.release(inside)
    allocator.release(end)
    taken = allocator.allocate(25 * MIB)
    assert taken.before is None
    assert held.before is not taken  # what is left of the block inside lies between them
    assert allocator.peak_reserved == 80 * MIB


@pytest.mark.parametrize(
    ("size", "fixed", "expandable"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (10 * MIB - 1024, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (21 * MIB, 22 * MIB, 40 * MIB),
    ],
)
def test_what_a_first_request_reserves(size: int, fixed: int, expandable: int) -> None:
    """`CUDACachingAllocator.cpp`: 2 MiB for small ones, 20 below 10, else whole 2 MiB; expandable by whole pages."""
    for kind, reserved in ((False, fixed), (True, expandable)):
        allocator = CachingAllocator(2**40, kind)
        allocator.allocate(size)
        assert allocator.peak_reserved == reserved
        assert allocator.allocated == -(-size // 512) * 512 or not kind


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
