"""What a product needs of whatever carries its rows: `Transport`, a gather under way, a scatter under way.

The algorithm is in `layers/products.py` and knows no more than this. All ranks of a group make the same calls in
the same order; every gather and scatter that is started is finished.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Gathering(Protocol):
    """Slices of all ranks on their way to this one."""

    @property
    def tokens(self) -> tuple[int, int]:
        """`(seq, batch)` of the whole sequence."""
        ...

    @property
    def pieces(self) -> tuple[range, ...]:
        """Ranks whose slices arrive together, in the order of arrival; each rank is in one piece."""
        ...

    def rows(self, piece: range) -> Tensor:
        """Wait for a piece: `[len(piece) * seq/tp, batch, features]`."""
        ...

    def finish(self) -> Tensor:
        """Wait for everything: `[seq, batch, features]`, whole only if it was asked for so."""
        ...


class Scattering(Protocol):
    """Parts of a sum on their way to the ranks that keep it."""

    @property
    def pieces(self) -> tuple[range, ...]:
        """Ranks whose slices are computed together, in the order that leaves most time to travel."""
        ...

    def send(self, piece: range, part: Tensor) -> None:
        """Give this rank's part of a piece, `[len(piece) * seq/tp, batch, features]`. It is the transport's now."""
        ...

    def finish(self) -> Tensor:
        """Wait for every rank's part of this rank's slice and sum them: `[seq/tp, batch, features]`."""
        ...


class Transport(Protocol):
    """Carries slices among the ranks of one tensor-parallel group."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    def gather(self, x: Tensor, *, whole: bool, other: int) -> Gathering:
        """Start to gather: shard(0) -> replicate.

        Args:
            x: this rank's slice, `[seq/tp, batch, features]`.
            whole: whether `finish` must give all rows, this rank's own among them, in one tensor.
            other: features on the other side of the product that reads `rows`; 0 where only `finish` is asked.
        """
        ...

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> Scattering:
        """Start to sum and scatter: partial -> shard(0).

        Args:
            tokens: `(seq, batch)` of the whole sequence.
            moved: features of what is summed.
            other: features on the other side of the product that makes it.
        """
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether all that it asks of the GPU may be part of a CUDA graph."""
        ...

    def settle(self) -> None:
        """Have the current stream wait for all that is still under way on others, when no gather or scatter is."""
        ...
