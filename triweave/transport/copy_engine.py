"""Slices copied between the GPUs of one node by their copy engines: no product gives up a multiprocessor for it.

Each rank has a buffer that its peers see (torch's symmetric memory): flags, one slice that peers take from it, and a
place for one slice from each peer. One stream a rank moves what travels:

    gather     stage x, on the stream of the products; tell all it is STAGED;
               for each peer: wait for STAGED, copy its slice here, tell it TAKEN; wait until all have TAKEN
    scatter    for each peer: wait for the part's product, copy it to its place there, tell it ARRIVED;
               wait until all have ARRIVED; sum, on the stream of the products; tell all FREE; wait until all are FREE

What follows the sum is put off until the next exchange, which waits for the products anyway: FREE is told with STAGED,
and waited for when a gather is over. That is one call to the driver less, and two events.

Staging is a copy inside one GPU, which the driver does by a kernel, whichever of its calls asks for it: on the other
stream it would wait for multiprocessors until the product beside it is nearly done, and the peers with it
(`bench/overlap.py` shows it in its trace). Ahead of the product it takes 16 us for 32 MiB. Where the slice also goes
into the gathered rows, both places are filled in one pass (`kernels/copies.py`).

Why this cannot hang, however far ranks run apart: all make the same calls in the same order, and whatever is waited
for was told earlier in that order. Of all waits that hang, the earliest would wait for something told before it, and
nothing before it hangs. This holds too where the host blocks in between, as loading a kernel or freeing memory does.

Why one buffer is enough: a slice is staged when all peers have taken the one before it, and a part is put into its
place there when the one before it is summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.collectives import sum_parts
from triweave.groups import Group
from triweave.kernels.dispatch import uses_kernels
from triweave.overlap import FLAG_BYTES, PIECE_S, exchange_bytes, order
from triweave.transport.stream_flags import Flag, MemoryOperation, Signal, StreamFlags, cuda_driver, flag_bytes


@dataclass(frozen=True, slots=True)
class Signals:
    """What a rank tells and waits for between its copies, each in one call. Peers are in the order of `peers`."""

    took: tuple[Signal, ...]
    """Of a gather: before the first copy, between each two, after the last."""
    took_after_sum: tuple[Signal, ...]
    """The same where a scatter came before it, with `summed` in it."""
    put: tuple[Signal, ...]
    """Of a scatter: after each copy."""
    summed: Signal


def signals_of(flags: StreamFlags, peers: list[int]) -> Signals:
    """Both sequences as the head of this file has them."""
    free, freed = flags.raising(Flag.FREE, peers), flags.awaiting(Flag.FREE, peers)
    first = [*flags.raising(Flag.STAGED, peers), *flags.awaiting(Flag.STAGED, peers[:1])]
    between = [[*flags.raising(Flag.TAKEN, [a]), *flags.awaiting(Flag.STAGED, [b])] for a, b in pairwise(peers)]
    last = [*flags.raising(Flag.TAKEN, peers[-1:]), *flags.awaiting(Flag.TAKEN, peers)]
    put = [flags.raising(Flag.ARRIVED, [peer]) for peer in peers]
    put[-1] += flags.awaiting(Flag.ARRIVED, peers)

    def signals(*steps: list[MemoryOperation]) -> tuple[Signal, ...]:
        return tuple(map(flags.signal, steps))

    return Signals(
        took=signals(first, *between, last),
        took_after_sum=signals(free + first, *between, last + freed),
        put=signals(*put),
        summed=flags.signal(free, freed),
    )


@dataclass(slots=True)
class CopyEngines:
    """The transport of GPUs that can read and write each other's memory."""

    group: Group
    stream: torch.cuda.Stream
    flags: StreamFlags
    staged: tuple[int, ...]
    """Addresses of the slice that each rank, this one too, gives to its peers."""
    places: tuple[int, ...]
    """Addresses, at each rank, of the slice from this one."""
    received: tuple[Tensor, ...]
    """Bytes here of the slice from each rank; from this one, of what it gives to its peers."""
    owners: tuple[object, ...] = ()
    """What keeps that memory mapped: addresses only point into it."""
    cuda: Any = torch.cuda
    """What knows the stream that computes, and makes events."""
    piece_s: float = PIECE_S
    """What one piece more costs: decides which products are cut."""
    name: str = "overlapped with products, by copy engines"
    peers: list[int] = field(init=False)
    """The other ranks, from the next one on."""
    signals: Signals = field(init=False)
    spare: list[torch.cuda.Event] = field(init=False, default_factory=list)
    """Events that nobody waits for any more."""
    num_gathers: int = field(init=False, default=0)
    num_settled: int = field(init=False, default=0)
    """Gathers of which products know that all peers have what was staged, since they waited for something later."""
    owes_free: bool = field(init=False, default=False)
    """Whether peers are still to be told that the last sum is made."""
    views: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = field(init=False, default_factory=dict)
    """`received` as tensors, by what was asked for."""
    cuts: dict[tuple[int, int, int], tuple[range, ...]] = field(init=False, default_factory=dict)
    """Pieces that were asked for."""

    def __post_init__(self) -> None:
        """Put together what is told and waited for."""
        size, rank = self.group.size, self.group.rank
        self.peers = [(rank + step) % size for step in range(1, size)]
        self.signals = signals_of(self.flags, self.peers)

    def gather(self, x: Tensor, *, whole: bool, other: int) -> CopyGathering:
        """Types: shard(0) -> replicate. See `Transport`."""
        group, stream, flags = self.group, self.stream, self.flags
        x = x.contiguous()
        size = self.fitting(x.nbytes)
        order = self.pieces(x.shape[0] * x.shape[1], x.shape[2], other)
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        to = out.data_ptr()
        products = self.cuda.current_stream()
        if self.num_settled < self.num_gathers:
            taken = self.mark(self.stream)
            products.wait_event(taken)
            self.spare.append(taken)
        self.stage(x, out if whole or len(order) == 1 else None, products.cuda_stream)
        # Not before this: the memory of `out` may still be in use there.
        self.follow(products)
        ends = {piece[-1] for piece in order[1:]} or {self.peers[-1]}
        arrivals = []
        handle, took = stream.cuda_stream, self.signals.took_after_sum if self.owes_free else self.signals.took
        self.owes_free = False
        flags.run(took[0], handle)
        for peer, then in zip(self.peers, took[1:], strict=True):
            flags.copy(to + peer * size, self.staged[peer], size, handle)
            if peer in ends:
                arrivals.append(self.mark(stream))
            flags.run(then, handle)
        self.num_gathers += 1
        return CopyGathering(order, x, out, arrivals, self, products)

    def stage(self, x: Tensor, out: Tensor | None, stream: int) -> None:
        """Put a slice where peers take it, and into its place in `out` if given, on the stream that computes."""
        rank, flags = self.group.rank, self.flags
        if out is not None and uses_kernels(x):
            from triweave.kernels.copies import copy_to_both

            size = x.shape[0]
            copy_to_both(x, self.rooms(x)[rank], out[rank * size : (rank + 1) * size])
            return
        flags.copy(self.staged[rank], x.data_ptr(), x.nbytes, stream)
        if out is not None:
            flags.copy(out.data_ptr() + rank * x.nbytes, x.data_ptr(), x.nbytes, stream)

    def rooms(self, like: Tensor) -> list[Tensor]:
        """`received` as tensors of the shape and type of `like`."""
        key = like.dtype, like.shape
        if key not in self.views:
            self.views[key] = [room[: like.nbytes].view(like.dtype).view(like.shape) for room in self.received]
        return self.views[key]

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> CopyScattering:
        """Types: partial -> shard(0). See `Transport`."""
        own, *others = self.pieces(tokens[0] // self.group.size * tokens[1], moved, other)
        return CopyScattering((*others, own), self, self.cuda.current_stream())

    @property
    def is_capturable(self) -> bool:
        """See `Transport`: flags have no state on the host."""
        return True

    def settle(self) -> None:
        """See `Transport`. All flags are down then, and peers have been told what they wait for."""
        if not self.owes_free and self.num_settled == self.num_gathers:
            return
        products = self.cuda.current_stream()
        if self.owes_free:
            self.owes_free = False
            self.follow(products)
            self.flags.run(self.signals.summed, self.stream.cuda_stream)
        last = self.mark(self.stream)
        products.wait_event(last)
        self.spare.append(last)
        self.num_settled = self.num_gathers

    def pieces(self, slice_tokens: int, moved: int, other: int) -> tuple[range, ...]:
        """How a product is cut, if it is worth it; `other` is 0 for rows that no product reads in pieces."""
        key = slice_tokens, moved, other
        if key not in self.cuts:
            self.cuts[key] = order(self.group.size, self.group.rank, *key, self.piece_s)
        return self.cuts[key]

    def fitting(self, slice_bytes: int) -> int:
        """The size of a slice that fits its room."""
        room = self.received[0].numel()
        if slice_bytes > room:
            raise ValueError(f"a slice of {slice_bytes} bytes is larger than its room of {room}")
        return slice_bytes

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event when `stream` has come so far. Made once and used again: whoever waits refers to that record."""
        event = self.spare.pop() if self.spare else self.cuda.Event()
        event.record(stream)
        return event

    def follow(self, products: torch.cuda.Stream) -> None:
        """Let the copies wait for what was computed so far."""
        event = self.mark(products)
        self.stream.wait_event(event)
        self.spare.append(event)


@dataclass(slots=True)
class CopyGathering:
    """Copies from every peer, and the events that tell of them."""

    pieces: tuple[range, ...]
    x: Tensor
    out: Tensor
    """Held until `finish`: it is written on another stream than the one that owns its memory."""
    arrivals: list[torch.cuda.Event]
    """Of each piece but this rank's own."""
    transport: CopyEngines
    products: torch.cuda.Stream
    """The stream that it was started from, which computes."""
    is_waited_for: bool = False
    """Whether that stream waits for the last arrival already."""

    @property
    def tokens(self) -> tuple[int, int]:
        """See `Gathering`."""
        return self.out.shape[0], self.out.shape[1]

    def rows(self, piece: range) -> Tensor:
        """See `Gathering`."""
        number = self.pieces.index(piece)
        if number == 0 and len(self.pieces) > 1:
            return self.x
        self._wait_for(self.arrivals[number - 1])
        if len(self.pieces) == 1:
            return self.out
        size = self.x.shape[0]
        return self.out[piece.start * size : piece.stop * size]

    def finish(self) -> Tensor:
        """See `Gathering`."""
        if not self.is_waited_for:
            self._wait_for(self.arrivals[-1])
        self.transport.spare += self.arrivals
        return self.out

    def _wait_for(self, arrival: torch.cuda.Event) -> None:
        self.products.wait_event(arrival)
        self.is_waited_for = self.is_waited_for or arrival is self.arrivals[-1]


@dataclass(slots=True)
class CopyScattering:
    """Copies to every peer, and one from each."""

    pieces: tuple[range, ...]
    transport: CopyEngines
    products: torch.cuda.Stream
    """The stream that it was started from, which computes."""
    parts: dict[range, Tensor] = field(default_factory=dict)
    """Held until `finish`: they are read on another stream than the one that owns their memory."""
    arrived: torch.cuda.Event | None = None
    num_gathers: int = 0
    """Those before `arrived`."""

    def send(self, piece: range, part: Tensor) -> None:
        """See `Scattering`."""
        transport = self.transport
        part = part.contiguous()
        self.parts[piece] = part
        peers, flags = transport.peers, transport.flags
        leaving = [peer for peer in peers if peer in piece]
        if not leaving:
            return
        transport.follow(self.products)
        if transport.owes_free:
            transport.owes_free = False
            flags.run(transport.signals.summed, transport.stream.cuda_stream)
        size = transport.fitting(part.nbytes // len(piece))
        source, handle = part.data_ptr(), transport.stream.cuda_stream
        for peer in leaving:
            flags.copy(transport.places[peer], source + (peer - piece.start) * size, size, handle)
            flags.run(transport.signals.put[peers.index(peer)], handle)
        if leaving[-1] == peers[-1]:
            # This rank's own copies are before it on that stream: after this nobody reads `parts`.
            self.arrived, self.num_gathers = transport.mark(transport.stream), transport.num_gathers

    def finish(self) -> Tensor:
        """See `Scattering`."""
        transport = self.transport
        if self.arrived is None:
            raise ValueError("not every piece was sent")
        rank = transport.group.rank
        piece = self.pieces[-1]
        last = self.parts[piece]
        rows = last.shape[0] // len(piece)
        own = last if len(piece) == 1 else last[(rank - piece.start) * rows : (rank - piece.start + 1) * rows]
        self.products.wait_event(self.arrived)
        transport.num_settled = max(transport.num_settled, self.num_gathers)
        transport.spare.append(self.arrived)
        parts = list(transport.rooms(own))
        parts[rank] = own
        total = sum_parts(parts)
        transport.owes_free = True
        return total


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
    mine[: flag_bytes(group.size)].zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group.handle, device_ids=[device.index])  # no flag is raised before all are down

    def room(holder: int, sender: int) -> Tensor:
        offset = FLAG_BYTES + room_number(holder, sender) * slice_bytes
        buffer: Tensor = handle.get_buffer(holder, (slice_bytes,), torch.uint8, offset)
        return buffer

    ranks = range(group.size)
    addresses = tuple(handle.get_buffer(rank, (FLAG_BYTES,), torch.uint8, 0).data_ptr() for rank in ranks)
    return CopyEngines(
        group,
        torch.cuda.Stream(device, priority=-1),
        StreamFlags(cuda_driver(), addresses, group.rank),
        staged=tuple(room(rank, rank).data_ptr() for rank in ranks),
        places=tuple(room(rank, group.rank).data_ptr() for rank in ranks),
        received=tuple(room(group.rank, rank) for rank in ranks),
        owners=(mine, handle),
    )


def room_number(holder: int, sender: int) -> int:
    """Which of the rooms in the holder's buffer is the sender's: the first is the holder's own, for all to take."""
    if sender == holder:
        return 0
    return 1 + sender if sender < holder else sender
