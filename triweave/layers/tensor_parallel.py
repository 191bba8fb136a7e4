"""What a layer must know of the grid to split itself over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from triweave.gradients import WeightGradients
from triweave.groups import Group, alone
from triweave.transport.interface import Transport
from triweave.transport.plain import Collectives


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor-parallel group, how activations lie between its products, and where weight gradients go.

    With one rank nothing is split and nothing communicates: the same layers are then plain layers.
    """

    group: Group = field(default_factory=alone)
    sequence_parallel: bool = False
    """Whether activations outside the products are `[seq/tp, batch, hidden]` rather than `[seq, batch, hidden]`."""
    keep_gathered: bool = False
    """Whether a column-parallel product keeps its gathered input for backward, and not its own slice of it."""
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    chosen: Transport | None = None
    """What carries slices from rank to rank; None leaves it to collectives."""

    @property
    def transport(self) -> Transport:
        """What carries slices from rank to rank."""
        return self.chosen or Collectives(self.group, self.sequence_parallel)

    @property
    def gathers(self) -> bool:
        """Whether products need slices of other ranks: activations between them are sliced."""
        return self.sequence_parallel and self.size > 1

    @property
    def size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.group.size

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return self.group.rank
