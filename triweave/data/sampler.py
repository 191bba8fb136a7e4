"""Which sequences a step takes: a function of the seed and the step, and of nothing else.

Epochs lie end to end, each a permutation of all sequences drawn from (seed, epoch); step `s` takes positions
`s * global_batch` to `(s + 1) * global_batch` of that endless list. So nothing is skipped or taken twice in an
epoch, no layout changes the order, and a run that goes on at step `s` needs to remember only `s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from triweave.errors import InputError, Problem, nearest_number

PADDING = -1
"""Number of no sequence: fills the last batch of an evaluation."""


def sequence_ids(seed: int, step: int, global_batch: int, num_sequences: int) -> list[int]:
    """The `global_batch` sequences of step `step` (from 0), in the order of the global batch.

    A step that passes the end of an epoch goes on with the next permutation.

    Raises:
        ValueError: there are no sequences.
    """
    if num_sequences < 1:
        raise ValueError("there are no sequences to take from")
    ids: list[int] = []
    position, end = step * global_batch, (step + 1) * global_batch
    while position < end:
        epoch, offset = divmod(position, num_sequences)
        taken = epoch_order(seed, epoch, num_sequences)[offset : offset + end - position]
        ids.extend(taken.tolist())
        position += len(taken)
    return ids


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_sequences: int) -> npt.NDArray[np.int64]:
    """[num_sequences]: the order of one epoch, a permutation.

    Sorts by raw 64-bit words of PCG64, which numpy promises never to change (NEP 19); it promises no such thing of
    `Generator.permutation`, and a run must find its order again under another numpy.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_sequences)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)  # it is shared between calls
    return order


def rank_slice(ids: Sequence[int], dp_rank: int, dp: int, micro_batch: int) -> list[list[int]]:
    """The micro-batches of one data-parallel rank: its contiguous share of the global batch, cut in order.

    Raises:
        InputError: the global batch is not a multiple of `micro_batch x dp`.
    """
    check_global_batch(len(ids), dp, micro_batch)
    share = len(ids) // dp
    mine = ids[dp_rank * share : (dp_rank + 1) * share]
    return [list(mine[first : first + micro_batch]) for first in range(0, share, micro_batch)]


def check_global_batch(global_batch: int, dp: int, micro_batch: int) -> None:
    """Refuse a global batch that the ranks cannot share out evenly.

    Raises:
        InputError: it is not a positive multiple of `micro_batch x dp`.
    """
    unit = micro_batch * dp
    if global_batch < 1 or global_batch % unit:
        below = global_batch // unit * unit
        nearest = nearest_number(global_batch, (number for number in (below, below + unit) if number > 0))
        rule = f"must be a multiple of layout.micro_batch x dp = {micro_batch} x {dp} = {unit}"
        raise InputError(Problem("train.global_batch", global_batch, rule, nearest))


def steps_for(epochs: float, num_sequences: int, global_batch: int) -> int:
    """Steps that take every sequence at least `epochs` times: the product divided by the global batch, rounded up."""
    return max(1, math.ceil(Fraction(str(epochs)) * num_sequences / global_batch))


def evaluation_ids(batch: int, global_batch: int, num_sequences: int) -> list[int]:
    """The sequences of batch `batch` (from 0) of an evaluation: all once, in order; `PADDING` fills the last batch."""
    first = batch * global_batch
    ids = list(range(first, min(first + global_batch, num_sequences)))
    return ids + [PADDING] * (global_batch - len(ids))


def evaluation_batches(global_batch: int, num_sequences: int) -> int:
    """Batches that an evaluation of all sequences takes."""
    return -(-num_sequences // global_batch)
