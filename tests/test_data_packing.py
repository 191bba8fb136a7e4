"""Examples into sequences."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.data.packing import one_each, pack

LENGTHS = st.lists(st.integers(1, 50), max_size=80)


def slow_best_fit_decreasing(lengths: list[int], seq_len: int) -> list[int]:
    """Fill of each sequence by the textbook's words: look at every sequence for the tightest room."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, fill in enumerate(fills) if fill + length <= seq_len]
        if fitting:
            fills[max(fitting, key=lambda i: fills[i])] += length
        else:
            fills.append(length)
    return sorted(fills)


@given(LENGTHS)
def test_every_example_is_packed_once_and_nothing_overflows(lengths: list[int]) -> None:
    """Each example is in exactly one sequence, no sequence holds more than it has room for."""
    packing = pack(lengths, 50)
    assert sorted(n for sequence in packing.sequences for n in sequence) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in sequence) <= 50 for sequence in packing.sequences)
    assert packing.used == sum(lengths)
    assert packing.slots == 50 * len(packing.sequences)


@given(LENGTHS)
def test_packing_is_best_fit_decreasing(lengths: list[int]) -> None:
    """The sequences are as full as the textbook's search over all of them makes them."""
    packing = pack(lengths, 50)
    assert sorted(sum(lengths[n] for n in sequence) for sequence in packing.sequences) == slow_best_fit_decreasing(
        lengths, 50
    )


@given(LENGTHS)
def test_packing_is_near_the_fewest_sequences_possible(lengths: list[int]) -> None:
    """Never below what the tokens need, and all sequences but one more than half full."""
    used = len(pack(lengths, 50).sequences)
    fewest = max(-(-sum(lengths) // 50), sum(length > 25 for length in lengths))
    assert fewest <= used <= min(len(lengths), 2 * fewest + 1)


def test_packing_is_the_same_every_time() -> None:
    """Nothing but the lengths decides: equal lengths are taken in their order."""
    lengths = np.random.default_rng(0).integers(1, 100, size=500).tolist()
    assert pack(lengths, 128) == pack(list(lengths), 128)
    assert pack([4, 4, 4, 4], 8).sequences == ((0, 1), (2, 3))


def test_packing_fills_the_sequences() -> None:
    """On lengths as chats have them, less than one slot in a hundred stays empty."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, size=5000).astype(int).clip(8, 4096).tolist()
    assert pack(lengths, 4096).efficiency > 0.99


def test_packing_is_quick() -> None:
    """A hundred thousand examples into sequences of 8,192 tokens in seconds, not minutes."""
    lengths = np.random.default_rng(0).integers(1, 8192, size=100_000).tolist()
    began = time.perf_counter()
    pack(lengths, 8192)
    assert time.perf_counter() - began < 10


def test_without_packing_each_example_has_a_sequence() -> None:
    """The order is kept and the waste is counted."""
    packing = one_each([5, 10], 10)
    assert packing.sequences == ((0,), (1,))
    assert packing.efficiency == 0.75


@pytest.mark.parametrize("length", [0, 11])
def test_length_that_does_not_fit_is_refused(length: int) -> None:
    """An example is never cut here, so it must fit."""
    with pytest.raises(ValueError, match="not between 1 and 10"):
        pack([length], 10)
