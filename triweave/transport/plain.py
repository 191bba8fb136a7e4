"""One collective before or after the whole product: what every backend can do, and what one rank needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triweave.collectives import (
    Pending,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from triweave.groups import Group


@dataclass(frozen=True, slots=True)
class Collectives:
    """All rows are one piece. Without sequence parallelism a gather is nothing and a scatter an all-reduce."""

    group: Group
    sequence_parallel: bool
    why: str = ""
    """Why nothing better is used."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        return "collectives before and after products" + (f" ({self.why})" if self.why else "")

    def gather(self, x: Tensor, *, whole: bool, other: int) -> WholeGathering:
        """Types: shard(0) -> replicate with sequence parallelism, else replicate -> replicate. See `Transport`."""
        pending = start_all_gather(x, self.group) if self.sequence_parallel else (x, None)
        return WholeGathering(self._pieces, pending)

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> WholeScattering:
        """Types: partial -> shard(0) with sequence parallelism, else partial -> replicate. See `Transport`."""
        return WholeScattering(self._pieces, self)

    @property
    def is_capturable(self) -> bool:
        """See `Transport`. Collectives in graphs were not tried on several GPUs."""
        return self.group.size == 1

    def settle(self) -> None:
        """See `Transport`: what was finished leaves nothing under way."""

    @property
    def _pieces(self) -> tuple[range, ...]:
        return (range(self.group.size if self.sequence_parallel else 1),)


@dataclass(slots=True)
class WholeGathering:
    """One all-gather under way."""

    pieces: tuple[range, ...]
    pending: Pending

    @property
    def tokens(self) -> tuple[int, int]:
        """See `Gathering`."""
        return self.pending[0].shape[0], self.pending[0].shape[1]

    def rows(self, piece: range) -> Tensor:
        """See `Gathering`."""
        return self.finish()

    def finish(self) -> Tensor:
        """See `Gathering`."""
        self.pending = (finish(self.pending), None)
        return self.pending[0]


@dataclass(slots=True)
class WholeScattering:
    """One reduce-scatter, or all-reduce, under way."""

    pieces: tuple[range, ...]
    transport: Collectives
    pending: list[Pending] | None = None

    def send(self, piece: range, part: Tensor) -> None:
        """See `Scattering`."""
        start = start_reduce_scatter if self.transport.sequence_parallel else start_all_reduce
        self.pending = [start(part, self.transport.group)]

    def finish(self) -> Tensor:
        """See `Scattering`."""
        if self.pending is None:
            raise ValueError("nothing was sent")
        return finish(self.pending.pop())
