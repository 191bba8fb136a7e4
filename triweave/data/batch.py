"""The tensors of a micro-batch. The only file of this folder that imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triweave.data.dataset import Dataset, count_trained_tokens
from triweave.data.sampler import rank_slice
from triweave.layers.cross_entropy import IGNORE
from triweave.layout import Coordinates, Layout

PADDING_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that a rank computes at once. Columns are sequences, as everywhere in the model."""

    tokens: Tensor
    """int64 [seq, batch]; padding holds token 0."""
    targets: Tensor
    """int64 [seq, batch]: the next token of the same document where it is trained, else -100."""
    positions: Tensor
    """int64 [seq, batch]: from 0 in each document."""
    documents: Tensor
    """int64 [seq, batch]: number of the document within its sequence; padding is a document of its own, -1."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: where each document begins when the sequences lie one after the other, and the end.

    What variable-length attention kernels read. Counts over [batch x seq], a sequence being contiguous; a sequence's
    padding is its last document.
    """
    max_seqlen: int
    """Tokens of the longest document."""
    ids: tuple[int, ...]
    """The sequences, by number; -1 is an empty one."""
    num_trained: int
    """Targets that are not -100."""


def load_micro_batches(dataset: Dataset, ids: Sequence[int], layout: Layout, at: Coordinates) -> list[MicroBatch]:
    """What the rank at `at` computes of a global batch of the sequences `ids`, in order.

    Ranks that differ only along tp, cp or pp get the same; context-parallel ranks share each sequence out.

    Raises:
        InputError: there are not `micro_batch x dp` times some number of them.
    """
    return [make_micro_batch(dataset, part) for part in rank_slice(ids, at.dp, layout.dp, layout.micro_batch)]


def make_micro_batch(dataset: Dataset, ids: Sequence[int]) -> MicroBatch:
    """Load the sequences `ids`; a negative one is empty."""
    seq_len = dataset.seq_len
    shape = (len(ids), seq_len)
    tokens, targets, positions, documents = (
        np.full(shape, value, dtype=np.int64) for value in (0, IGNORE, 0, PADDING_DOCUMENT)
    )
    starts = [0]
    for row, number in enumerate(ids):
        edges = dataset.boundaries(number) if number >= 0 else np.zeros(1, dtype=np.int64)
        used = int(edges[-1] - edges[0])
        ends = edges[1:] - edges[0]
        lengths = np.diff(edges)
        source = slice(int(edges[0]), int(edges[-1]))
        tokens[row, :used] = dataset.tokens[source]
        # A document's first token is never trained, so a shift by one cannot reach into the next document.
        shifted = slice(source.start + 1, source.stop)
        if used:
            targets[row, : used - 1] = np.where(dataset.trained[shifted], dataset.tokens[shifted], IGNORE)
        positions[row, :used] = np.arange(used) - np.repeat(edges[:-1] - edges[0], lengths)
        positions[row, used:] = np.arange(seq_len - used)
        documents[row, :used] = np.repeat(np.arange(len(lengths)), lengths)
        starts += [row * seq_len + int(end) for end in ends]
        if used < seq_len:
            starts.append((row + 1) * seq_len)
    return MicroBatch(
        tokens=_columns(tokens),
        targets=_columns(targets),
        positions=_columns(positions),
        documents=_columns(documents),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=int(np.diff(starts).max()),
        ids=tuple(ids),
        num_trained=count_trained_tokens(dataset, ids),
    )


def _columns(rows: npt.NDArray[np.int64]) -> Tensor:
    """[batch, seq] to a contiguous tensor [seq, batch]."""
    return torch.from_numpy(np.ascontiguousarray(rows.T))
