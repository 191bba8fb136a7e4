"""Which sequences a step takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.data.sampler import (
    PADDING,
    epoch_order,
    evaluation_batches,
    evaluation_ids,
    rank_slice,
    sequence_ids,
    steps_for,
)
from triweave.errors import InputError

SEEDS = st.integers(0, 2**40)


@given(SEEDS, st.integers(1, 40), st.integers(1, 60))
def test_every_epoch_takes_every_sequence_once(seed: int, num_sequences: int, global_batch: int) -> None:
    """Steps run on over the epochs: no sequence twice and none skipped, also where the batch does not divide."""
    steps = math.ceil(3 * num_sequences / global_batch)
    taken = [n for step in range(steps) for n in sequence_ids(seed, step, global_batch, num_sequences)]
    for epoch in range(3):
        part = taken[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(part) == list(range(num_sequences))


@given(SEEDS, st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 30))
def test_layout_does_not_change_what_a_step_takes(
    seed: int, step: int, dp: int, micro_batch: int, count: int, num_sequences: int
) -> None:
    """The ranks' micro-batches put end to end are the global batch, whatever the layout."""
    ids = sequence_ids(seed, step, dp * micro_batch * count, num_sequences)
    parts = [rank_slice(ids, rank, dp, micro_batch) for rank in range(dp)]
    assert all(len(part) == count and all(len(batch) == micro_batch for batch in part) for part in parts)
    assert [n for part in parts for batch in part for n in batch] == ids


def test_order_is_pinned() -> None:
    """The order of a seed never changes, for a run that resumes must find it: these were written down once."""
    assert sequence_ids(42, 0, 8, 8) == [4, 1, 3, 6, 0, 7, 2, 5]
    assert sequence_ids(42, 1, 8, 8) != sequence_ids(42, 0, 8, 8) != sequence_ids(43, 0, 8, 8)


def test_global_random_state_is_neither_read_nor_moved() -> None:
    """The generator is private."""
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    epoch_order.cache_clear()
    first = sequence_ids(1, 0, 5, 100)
    assert np.random.rand() == expected
    epoch_order.cache_clear()
    assert sequence_ids(1, 0, 5, 100) == first


def test_order_is_a_fair_shuffle() -> None:
    """Over many epochs every sequence comes first about equally often (chi-squared, 9 degrees of freedom)."""
    counts = np.bincount([sequence_ids(7, epoch, 10, 10)[0] for epoch in range(2000)], minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 30  # passed by chance in 99.96 % of all seeds


def test_global_batch_that_does_not_divide_names_its_neighbour() -> None:
    """10 sequences over 2 ranks in micro-batches of 2: 8 or 12 would do."""
    with pytest.raises(InputError, match=r"train.global_batch = 10: .* 2 x 2 = 4; nearest: 8"):
        rank_slice(list(range(10)), 0, 2, 2)


@pytest.mark.parametrize(
    ("epochs", "num_sequences", "global_batch", "steps"),
    [(1, 100, 10, 10), (1, 101, 10, 11), (2, 101, 10, 21), (0.1, 1000, 1, 100), (0.3, 10, 1, 3), (0.001, 10, 4, 1)],
)
def test_steps_cover_the_epochs(epochs: float, num_sequences: int, global_batch: int, steps: int) -> None:
    """The last sequence of the last epoch is taken, and no step more; 0.3 x 10 is 3, not 4."""
    assert steps_for(epochs, num_sequences, global_batch) == steps


@given(st.integers(1, 50), st.integers(1, 20))
def test_evaluation_takes_everything_once(num_sequences: int, global_batch: int) -> None:
    """All sequences in order, every batch full, the rest of the last one marked as padding."""
    batches = [
        evaluation_ids(i, global_batch, num_sequences) for i in range(evaluation_batches(global_batch, num_sequences))
    ]
    assert all(len(batch) == global_batch for batch in batches)
    flat = [n for batch in batches for n in batch]
    assert flat[:num_sequences] == list(range(num_sequences))
    assert set(flat[num_sequences:]) <= {PADDING}
    assert len(flat) - num_sequences < global_batch


def test_no_sequences_are_refused() -> None:
    """Nothing can be taken from nothing."""
    with pytest.raises(ValueError, match="no sequences"):
        sequence_ids(0, 0, 4, 0)
