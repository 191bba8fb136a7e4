"""One rank of a grid without the others, for systems that look up their groups by name and call functional collectives.

What a collective would bring is a copy of this rank's own (`triweave.dryrun.lone_rank`), so that products have numbers
of their usual size to work on: an H200 at its power limit is faster on zeros and on what is no number.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from triweave.dryrun.lone_rank import Done, LoneGroup


class NamedGroup(LoneGroup):
    """A lone group with a name, and with the collectives that functional ones and those of torch's meshes call."""

    backend = "alone"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = self._words = ""

    def setGroupName(self, name: str) -> None:  # torch's name
        """Be found by `name`."""
        self._name = name

    def getGroupName(self) -> str:  # torch's name
        """The name that torch has given."""
        return self._name

    def setGroupDesc(self, words: str) -> None:  # torch's name
        """Keep what the group is for."""
        self._words = words

    def getGroupDesc(self) -> str:  # torch's name
        """What the group is for."""
        return self._words

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Leave this rank's own summands."""
        return Done()

    def all_gather_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> dist.Work:
        """Put this rank's parts in every rank's places."""
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_single(out, x)
        return Done()

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> dist.Work:
        """Take this rank's slices of its own summands."""
        for out, x in zip(outs, xs, strict=True):
            self.reduce_scatter_single(out, x)
        return Done()

    # What the operations above were called before torch 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
