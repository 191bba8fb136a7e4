"""Slices copied between the GPUs of one node by their copy engines: no product gives up a multiprocessor for it.

Each rank has a buffer that its peers see (torch's symmetric memory): flags, one slice that peers take from it, and a
place for one slice from each peer. One stream a rank does all the moving:

    gather     wait until the last slice was TAKEN by all, stage x, tell all it is STAGED;
               for each peer: wait for STAGED, copy its slice here, tell it TAKEN
    scatter    for each peer: wait for the part's product and until the peer's place is FREE, copy it there, tell it
               ARRIVED; for each peer: wait for ARRIVED; sum, on the stream of the products; tell all FREE

Why this cannot hang, however far ranks run apart: all make the same calls in the same order, and whatever is waited
for was told earlier in that order. Of all waits that hang, the earliest would wait for something told before it, and
nothing before it hangs. This holds too where the host blocks in between, as loading a kernel or freeing memory does.

Why one buffer is enough: it is used again only after the flags say that it may be, and they have said so long before.
A gather and a scatter follow each other by turns, or with a product between them, and no rank gets past one of
them before its peers have come to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.collectives import sum_parts
from triweave.groups import Group
from triweave.overlap import FLAG_BYTES, exchange_bytes, pieces
from triweave.transport.stream_flags import Flag, StreamFlags, driver_flags, first_values


@dataclass(frozen=True, slots=True)
class CopyEngines:
    """The transport of GPUs that can read and write each other's memory."""

    group: Group
    stream: torch.cuda.Stream
    flags: StreamFlags
    staged: tuple[Tensor, ...]
    """Bytes of the slice that each rank, this one too, gives to its peers."""
    received: tuple[Tensor, ...]
    """Bytes here of the slice from each rank."""
    places: tuple[Tensor, ...]
    """Bytes, at each rank, of the slice from this one."""
    owners: tuple[object, ...] = ()
    """What keeps that memory mapped: the tensors above only point into it."""
    cuda: Any = torch.cuda
    """What knows the stream that computes, and makes another one current."""
    name: str = "overlapped with products, by copy engines"

    @property
    def peers(self) -> list[int]:
        """The other ranks, from the next one on."""
        size, rank = self.group.size, self.group.rank
        return [(rank + step) % size for step in range(1, size)]

    def gather(self, x: Tensor, *, whole: bool) -> CopyGathering:
        """Types: shard(0) -> replicate. See `Transport`."""
        group, stream, flags = self.group, self.stream, self.flags
        x = x.contiguous()
        order = pieces(group.size, group.rank, x.shape[0] * x.shape[1])
        # Made on the stream of the products, and before the other one waits for it: its memory may be in use there.
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        slices = out.chunk(group.size)
        stream.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(stream):
            for peer in self.peers:
                flags.await_from(peer, Flag.TAKEN, stream)
            _as(x, self.staged[group.rank]).copy_(x)
            for peer in self.peers:
                flags.raise_at(peer, Flag.STAGED, stream)
            arrivals = {}
            for piece in order[1:]:
                for peer in piece:
                    flags.await_from(peer, Flag.STAGED, stream)
                    slices[peer].copy_(_as(x, self.staged[peer]))
                    flags.raise_at(peer, Flag.TAKEN, stream)
                arrivals[piece] = stream.record_event()
            if whole:
                slices[group.rank].copy_(x)
            return CopyGathering(order, x, out, arrivals, stream.record_event(), self.cuda)

    def scatter(self, tokens: tuple[int, int]) -> CopyScattering:
        """Types: partial -> shard(0). See `Transport`."""
        group = self.group
        own, *others = pieces(group.size, group.rank, tokens[0] // group.size * tokens[1])
        return CopyScattering((*others, own), self)


@dataclass(frozen=True, slots=True)
class CopyGathering:
    """Copies from every peer, and the events that tell of them."""

    pieces: tuple[range, ...]
    x: Tensor
    """Held until `finish`: it is read on another stream than the one that owns its memory."""
    out: Tensor
    arrivals: dict[range, torch.cuda.Event]
    done: torch.cuda.Event
    cuda: Any

    @property
    def tokens(self) -> tuple[int, int]:
        """See `Gathering`."""
        return self.out.shape[0], self.out.shape[1]

    def rows(self, piece: range) -> Tensor:
        """See `Gathering`."""
        if piece == self.pieces[0]:
            return self.x
        self.cuda.current_stream().wait_event(self.arrivals[piece])
        size = self.x.shape[0]
        return self.out[piece.start * size : piece.stop * size]

    def finish(self) -> Tensor:
        """See `Gathering`."""
        self.cuda.current_stream().wait_event(self.done)
        return self.out


@dataclass(frozen=True, slots=True)
class CopyScattering:
    """Copies to every peer, and one from each."""

    pieces: tuple[range, ...]
    transport: CopyEngines
    parts: dict[int, Tensor] = field(default_factory=dict)
    """By rank. Held until `finish`: they are read on another stream than the one that owns their memory."""

    def send(self, piece: range, part: Tensor) -> None:
        """See `Scattering`."""
        stream, flags = self.transport.stream, self.transport.flags
        self.parts.update(zip(piece, part.chunk(len(piece)), strict=True))
        if piece == self.pieces[-1]:
            return
        stream.wait_stream(self.transport.cuda.current_stream())
        with self.transport.cuda.stream(stream):
            for peer in piece:
                flags.await_from(peer, Flag.FREE, stream)
                _as(self.parts[peer], self.transport.places[peer]).copy_(self.parts[peer])
                flags.raise_at(peer, Flag.ARRIVED, stream)

    def finish(self) -> Tensor:
        """See `Scattering`."""
        transport, stream = self.transport, self.transport.stream
        rank = transport.group.rank
        own = self.parts[rank]
        for peer in transport.peers:
            transport.flags.await_from(peer, Flag.ARRIVED, stream)
        # This rank's own copies are before it on that stream: after this nobody reads `parts`.
        transport.cuda.current_stream().wait_stream(stream)
        total = sum_parts(
            [own if peer == rank else _as(own, transport.received[peer]) for peer in range(transport.group.size)]
        )
        stream.wait_stream(transport.cuda.current_stream())
        for peer in transport.peers:
            transport.flags.raise_at(peer, Flag.FREE, stream)
        return total


def _as(like: Tensor, room: Tensor) -> Tensor:
    """The first bytes of `room` as a tensor of the shape and type of `like`."""
    if like.nbytes > room.numel():
        raise ValueError(f"a slice of {like.nbytes} bytes is larger than its room of {room.numel()}")
    return room[: like.nbytes].view(like.dtype).view(like.shape)


def copy_engines(group: Group, device: torch.device, slice_bytes: int) -> CopyEngines:
    """Allocate the buffers and show them to each other. All ranks of the group call it together.

    Args:
        group: ranks of one node, each with a GPU of its own.
        device: this rank's.
        slice_bytes: the largest slice, `[seq/tp, micro_batch, hidden]`.

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
        OSError: there is no CUDA driver here.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    if group.handle is None:
        raise ValueError("a group of one has nobody to exchange with")
    slice_bytes = -(-slice_bytes // 256) * 256  # every slice begins on a boundary that copies like
    mine = symmetric_memory.empty(exchange_bytes(group.size, slice_bytes), dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(mine, group.handle)
    flags = torch.tensor(first_values(group.size), dtype=torch.int32, device=device)
    mine[: flags.nbytes].view(torch.int32).copy_(flags)
    torch.cuda.synchronize(device)
    dist.barrier(group.handle, device_ids=[device.index])  # no flag is raised before all have their first value

    def room(holder: int, sender: int) -> Tensor:
        offset = FLAG_BYTES + room_number(holder, sender) * slice_bytes
        return handle.get_buffer(holder, (slice_bytes,), torch.uint8, offset)

    ranks = range(group.size)
    addresses = tuple(handle.get_buffer(rank, (FLAG_BYTES,), torch.uint8, 0).data_ptr() for rank in ranks)
    return CopyEngines(
        group,
        torch.cuda.Stream(device, priority=-1),
        driver_flags(addresses, group.rank),
        staged=tuple(room(rank, rank) for rank in ranks),
        received=tuple(room(group.rank, rank) for rank in ranks),
        places=tuple(room(rank, group.rank) for rank in ranks),
        owners=(mine, handle),
    )


def room_number(holder: int, sender: int) -> int:
    """Which of the rooms in the holder's buffer is the sender's: the first is the holder's own, for all to take."""
    if sender == holder:
        return 0
    return 1 + sender if sender < holder else sender
