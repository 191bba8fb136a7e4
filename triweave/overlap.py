"""How a sequence is cut so that products hide tensor-parallel communication, and the memory that this takes.

With sequence parallelism each rank has one slice of the sequence. A product of the whole sequence is done in pieces,
each the slices of some neighbouring ranks, while the other pieces travel (`triweave.transport`).
"""

from __future__ import annotations

MIN_PIECE_TOKENS = 2048
"""A product of fewer rows leaves much of a GPU idle: what is won by overlapping is lost there."""

FLAG_BYTES = 4096
"""Room for the flags that ranks raise for each other, ahead of the slices so that those stay aligned."""


def pieces(tp: int, rank: int, slice_tokens: int) -> tuple[range, ...]:
    """Which ranks' slices are multiplied together, in the order in which rank `rank` has them soonest.

    Its own slice comes first: it needs no transfer. The others follow from the next rank on, so that no rank is
    asked by all at once. Neighbours are taken together until a piece has `MIN_PIECE_TOKENS`; a piece ends at the
    last rank all the same, because its rows must lie together.

    Args:
        tp: ranks of the tensor-parallel group.
        rank: this rank's place among them.
        slice_tokens: sequence / tp x micro-batch.
    """
    together = -(-MIN_PIECE_TOKENS // slice_tokens)
    others = (range(rank + 1, tp), range(rank))
    return (
        range(rank, rank + 1),
        *(
            range(start, min(start + together, run.stop))
            for run in others
            for start in range(run.start, run.stop, together)
        ),
    )


def exchange_bytes(tp: int, slice_bytes: int) -> int:
    """Memory of a rank that its peers read and write: a slice to take from it, and one from each peer to it.

    Allocated once for all layers and micro-batches; as much as one activation of the whole sequence. An allocator
    rounds it up to its granularity (2 MiB).

    Args:
        tp: ranks of the tensor-parallel group.
        slice_bytes: an activation `[seq/tp, micro_batch, hidden]`.
    """
    return FLAG_BYTES + tp * slice_bytes
