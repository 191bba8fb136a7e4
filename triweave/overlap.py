"""How a sequence is cut so that products hide tensor-parallel communication, when that pays, and the memory it takes.

With sequence parallelism each rank has one slice of the sequence. A product of the whole sequence is done in pieces,
each the slices of some neighbouring ranks, while the other pieces travel (`triweave.transport`).
"""

from __future__ import annotations

MIN_PIECE_TOKENS = 2048
"""A product of fewer rows leaves much of a GPU idle: what is won by overlapping is lost there."""

COPY_BYTES_PER_S = 340e9
"""A slice from one H200 to another by copy engine, from 32 MiB on: `bench/overlap.py`, section `copies`."""

PRODUCT_FLOPS_PER_S = 600e12
"""A bf16 product of the size of a piece on an H200: 590 to 650 TFLOP/s in the same bench's trace."""

PIECE_S = 15e-6
"""What one piece more costs its product: a launch and a copy on the host, a wave that is not full on the GPU."""

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
    together = slices_together(slice_tokens)
    others = (range(rank + 1, tp), range(rank))
    return (
        range(rank, rank + 1),
        *(
            range(start, min(start + together, run.stop))
            for run in others
            for start in range(run.start, run.stop, together)
        ),
    )


def slices_together(slice_tokens: int) -> int:
    """How many neighbours' slices make one piece."""
    return -(-MIN_PIECE_TOKENS // slice_tokens)


def exposed_s(tp: int, slice_tokens: int, moved: int, other: int, num_pieces: int, piece_s: float = PIECE_S) -> float:
    """Seconds that a gather or a scatter adds to its product on an H200.

    One piece waits for all copies, or they for it. Of n pieces n - 1 are multiplied while copies are under way.

    Args:
        tp: ranks of the tensor-parallel group.
        slice_tokens: sequence / tp x micro-batch.
        moved: features of the rows that travel, two bytes each.
        other: features on the product's other side.
        num_pieces: into how many it is cut.
        piece_s: what one piece more costs.
    """
    copies = 2 * (tp - 1) * slice_tokens * moved / COPY_BYTES_PER_S
    product = 2 * tp * slice_tokens * moved * other / PRODUCT_FLOPS_PER_S
    hidden = min(copies, (num_pieces - 1) / num_pieces * product)
    return copies - hidden + (num_pieces - 1) * piece_s


def pays_to_cut(tp: int, slice_tokens: int, moved: int, other: int, piece_s: float = PIECE_S) -> bool:
    """Whether a product in pieces adds less than one that waits, by `exposed_s`. All ranks come to the same answer."""
    num_pieces = 1 + -(-(tp - 1) // slices_together(slice_tokens))
    price = (tp, slice_tokens, moved, other)
    return exposed_s(*price, num_pieces, piece_s) < exposed_s(*price, 1, piece_s)


def order(tp: int, rank: int, slice_tokens: int, moved: int, other: int, piece_s: float = PIECE_S) -> tuple[range, ...]:
    """`pieces` where it pays to cut the product, else all ranks' slices as one; the arguments are theirs."""
    if pays_to_cut(tp, slice_tokens, moved, other, piece_s):
        return pieces(tp, rank, slice_tokens)
    return (range(tp),)


def exchange_bytes(tp: int, slice_bytes: int) -> int:
    """Memory of a rank that its peers read and write: a slice to take from it, and one from each peer to it.

    Allocated once for all layers and micro-batches; as much as one activation of the whole sequence. An allocator
    rounds it up to its granularity (2 MiB).

    Args:
        tp: ranks of the tensor-parallel group.
        slice_bytes: an activation `[seq/tp, micro_batch, hidden]`.
    """
    return FLAG_BYTES + tp * slice_bytes
