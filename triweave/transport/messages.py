"""Slices as messages between pairs of ranks: any backend that can send and receive, gloo on the CPU above all.

The pieces, their order and their sums are those of the copy engines (`copy_engine.py`), so that what decides about
right and wrong there is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from triweave.collectives import sum_parts
from triweave.groups import Group
from triweave.overlap import pieces


@dataclass(frozen=True, slots=True)
class Messages:
    """Every slice is one message."""

    group: Group
    name: str = "overlapped with products, by messages"

    def gather(self, x: Tensor, *, whole: bool, other: int) -> MessageGathering:
        """Types: shard(0) -> replicate. See `Transport`."""
        group, x = self.group, x.contiguous()
        order = pieces(group.size, group.rank, x.shape[0] * x.shape[1])
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        if whole:
            out.chunk(group.size)[group.rank].copy_(x)
        peers = [peer for piece in order[1:] for peer in piece]
        sends = [_send(x, peer, group) for peer in peers]
        arrivals = {peer: _receive(out.chunk(group.size)[peer], peer, group) for peer in peers}
        return MessageGathering(order, x, out, sends, arrivals)

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> MessageScattering:
        """Types: partial -> shard(0). See `Transport`."""
        group = self.group
        own, *others = pieces(group.size, group.rank, tokens[0] // group.size * tokens[1])
        return MessageScattering((*others, own), group)

    @property
    def is_capturable(self) -> bool:
        """See `Transport`. Collectives in graphs were not tried on several GPUs."""
        return self.group.size == 1

    def settle(self) -> None:
        """See `Transport`: what was finished leaves nothing under way."""


def _send(x: Tensor, peer: int, group: Group) -> dist.Work:
    return _started(dist.isend(x, group.ranks[peer], group=group.handle))


def _receive(x: Tensor, peer: int, group: Group) -> dist.Work:
    return _started(dist.irecv(x, group.ranks[peer], group=group.handle))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ValueError("this process is not in the group")
    return work


@dataclass(slots=True)
class MessageGathering:
    """Messages from and to every peer."""

    pieces: tuple[range, ...]
    x: Tensor
    out: Tensor
    sends: list[dist.Work]
    arrivals: dict[int, dist.Work]

    @property
    def tokens(self) -> tuple[int, int]:
        """See `Gathering`."""
        return self.out.shape[0], self.out.shape[1]

    def rows(self, piece: range) -> Tensor:
        """See `Gathering`."""
        if piece == self.pieces[0]:
            return self.x
        for peer in piece:
            self.arrivals.pop(peer).wait()
        size = self.x.shape[0]
        return self.out[piece.start * size : piece.stop * size]

    def finish(self) -> Tensor:
        """See `Gathering`."""
        for work in (*self.arrivals.values(), *self.sends):
            work.wait()
        return self.out


@dataclass(slots=True)
class MessageScattering:
    """A part to every peer, and one from each."""

    pieces: tuple[range, ...]
    group: Group
    sent: list[tuple[Tensor, dist.Work]] = field(default_factory=list)
    parts: dict[int, Tensor] = field(default_factory=dict)

    def send(self, piece: range, part: Tensor) -> None:
        """See `Scattering`."""
        if piece == self.pieces[-1]:
            self.parts[self.group.rank] = part
            return
        for peer, slice_of_peer in zip(piece, part.chunk(len(piece)), strict=True):
            self.sent.append((slice_of_peer, _send(slice_of_peer, peer, self.group)))

    def finish(self) -> Tensor:
        """See `Scattering`."""
        own = self.parts[self.group.rank]
        arrivals = []
        for piece in self.pieces[:-1]:
            for peer in piece:
                self.parts[peer] = own.new_empty(own.shape)
                arrivals.append(_receive(self.parts[peer], peer, self.group))
        for work in (*arrivals, *(work for _, work in self.sent)):
            work.wait()
        return sum_parts([self.parts[rank] for rank in range(self.group.size)])
