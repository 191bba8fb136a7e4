"""Flat buffers that data-parallel ranks fill for each other: what `sharding` needs of whatever carries them.

Every rank of a group has a buffer of the same length, cut into as many equal shards as there are ranks; each rank owns
one. All ranks make the same calls on the same buffers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.collectives import gather_into, reduce_scatter_into, start_all_reduce
from triweave.groups import Group


class Work(Protocol):
    """Something that runs beside what computes."""

    def wait(self) -> Any:
        """Wait for it (on a GPU: make the current stream wait)."""
        ...


class Buffer(Protocol):
    """This rank's buffer, and the way to its peers'."""

    @property
    def whole(self) -> Tensor:
        """All of it, `[numel]`."""
        ...

    def gather(self) -> Work | None:
        """Start to take every shard from the rank that owns it: shard -> replicate."""
        ...

    def reduce_scatter(self) -> Work | None:
        """Start to sum this rank's shard over the ranks, in place; the other shards are lost: partial -> shard."""
        ...

    def all_reduce(self) -> Work | None:
        """Start to sum the buffers over the ranks, in place: partial -> replicate."""
        ...

    def reclaim(self) -> None:
        """Wait until peers have taken what the last call offered to them: before what they take is written again.

        After a gather they take this rank's shard, after a reduce-scatter the others; after an all-reduce nothing.
        """
        ...


class Memory(Protocol):
    """Where buffers lie."""

    @property
    def name(self) -> str:
        """How they travel, as the log says it."""
        ...

    @property
    def unseen_bytes(self) -> int:
        """What this memory takes and the caching allocator does not count."""
        ...

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """The next buffer, of zeros. All ranks ask for the same ones in the same order."""
        ...


@dataclass(frozen=True, slots=True)
class PlainBuffer:
    """A tensor like any other, and collectives: what every backend can do. Collectives end on all ranks together."""

    whole: Tensor
    group: Group

    def gather(self) -> dist.Work | None:
        """See `Buffer`."""
        return gather_into(self.whole, self._mine, self.group, async_op=True)

    def reduce_scatter(self) -> dist.Work | None:
        """See `Buffer`. NCCL sums in place where the output is this rank's slice of the input: no copy is made."""
        return reduce_scatter_into(self._mine, self.whole, self.group, async_op=True)

    def all_reduce(self) -> dist.Work | None:
        """See `Buffer`."""
        return start_all_reduce(self.whole, self.group)[1]

    def reclaim(self) -> None:
        """See `Buffer`."""

    @property
    def _mine(self) -> Tensor:
        return self.whole.chunk(self.group.size)[self.group.rank]


@dataclass(frozen=True, slots=True)
class PlainMemory:
    """The caching allocator's."""

    group: Group
    device: torch.device
    why: str = ""
    """Why nothing better is used."""
    unseen_bytes: int = 0

    @property
    def name(self) -> str:
        """See `Memory`."""
        return "collectives beside what computes" + (f" ({self.why})" if self.why else "")

    def buffer(self, numel: int, dtype: torch.dtype) -> PlainBuffer:
        """See `Memory`."""
        return PlainBuffer(torch.zeros(numel, dtype=dtype, device=self.device), self.group)
