"""Process groups whose other ranks are not there: one process plays any rank of any grid.

Nothing is sent. What would arrive is filled in with something plausible, because memory that nobody has written may
hold NaN, and because the power and so the speed of a GPU follow the numbers that it multiplies: a gather gives every
rank this rank's own part, a reduction leaves its own summand, a received message is drawn from a normal distribution.
Works on any device; on the meta device it costs nothing. torch's own "fake" backend leaves outputs as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

LAUNCH_QUEUE = 1024
"""Kernels that CUDA lets the host launch ahead of the GPU before a launch blocks."""


@contextmanager
def lone_rank(rank: int, world_size: int, kind: type[LoneGroup] | None = None) -> Iterator[None]:
    """Be rank `rank` of `world_size` inside: every group that is made inside is without its other members.

    Args:
        rank: of this process.
        world_size: ranks of the grid.
        kind: what the groups are; None is `LoneGroup`.
    """
    kind = kind or LoneGroup
    if not hasattr(dist.Backend, kind.backend.upper()):
        dist.Backend.register_backend(kind.backend, partial(_make_group, kind), devices=["cpu", "cuda"])
    dist.init_process_group(kind.backend, store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _make_group(kind: type[LoneGroup], store: Store, rank: int, size: int, timeout: timedelta) -> LoneGroup:
    return kind(rank, size)


class Done(dist.Work):
    """Work that is finished when it is handed out."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Say so."""
        return True


class Sent(Done):
    """A message on its way: over when the GPU, which runs behind the host, has come to it."""

    def __init__(self, launches: Callable[[], int]) -> None:
        super().__init__()
        self._launches, self._sent_at = launches, launches()

    def is_completed(self) -> bool:
        """Whether the host has launched more since than it can be ahead."""
        return self._launches() - self._sent_at > LAUNCH_QUEUE


class LoneGroup(dist.ProcessGroup):
    """A group of which only this rank is there. Tensors are contiguous, as NCCL wants them."""

    backend: ClassVar[str] = "lone"
    """What `torch.distributed` knows groups of this kind by."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a form that the stub lacks
        self._rank, self._size = rank, size
        self.launches: Callable[[], int] | None = None
        """Counts kernels that the host has launched; None where a send is over at once."""

    def getBackendName(self) -> str:  # torch's name
        """The name that `torch.distributed` shows."""
        return self.backend

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Leave this rank's own summand."""
        return Done()

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Leave what is there."""
        return Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for nobody."""
        return Done()

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Put this rank's part in every rank's place."""
        places = out.view(self._size, -1)
        with torch.no_grad():
            if x.untyped_storage()._cdata != out.untyped_storage()._cdata:
                places.copy_(x.reshape(1, -1))
            elif not out.is_meta:
                # The part lies in its place already, and torch refuses to copy a tensor over itself.
                for place in (*places[: self._rank], *places[self._rank + 1 :]):
                    place.copy_(x.reshape(-1))
        return Done()

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Take this rank's slice of its own summand."""
        with torch.no_grad():
            out.view(-1).copy_(x.reshape(self._size, -1)[self._rank])
        return Done()

    def allgather(  # type: ignore[override]
        self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Put this rank's part in every rank's place."""
        with torch.no_grad():
            for parts, x in zip(outs, xs, strict=True):
                for part in parts:
                    part.copy_(x)
        return Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Keep what was to be sent, where the sizes allow it."""
        with torch.no_grad():
            if out.numel() == x.numel():
                out.view(-1).copy_(x.reshape(-1))
            else:
                out.normal_()
        return Done()

    # What the operations above were called before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Drop the message."""
        return Done() if self.launches is None else Sent(self.launches)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Bring a message of normal numbers."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_()
        return Done()
