"""Buffers that the GPUs of one host copy out of each other's memory: no product gives up a multiprocessor for it.

NCCL's kernels beside a product hold some multiprocessors, and the product, made for all of them, takes much longer.
Here two streams a rank do what NCCL did. Offering a buffer means to tell all peers that it is STAGED:

    gather          offer; for each peer: wait for STAGED, copy its shard into place, tell it TAKEN
    reduce-scatter  offer; for each piece of this rank's shard, for each peer: wait for STAGED, copy its part into a
                    slot, tell it TAKEN after the last; add the parts on the other stream, which frees the slot
    all-reduce      the same, then offer the sums (ARRIVED); for each peer: wait until it has TAKEN what is to be
                    overwritten, and for ARRIVED, copy its shard into place, tell it FREE
    reclaim         wait for TAKEN, or FREE, of every peer: what it copied from may be written again. After a
                    reduce-scatter that is all but this rank's own shard

Each buffer has flags of its own, so that any number of them may be under way. A rank only writes its own memory.

Why this cannot hang, however far ranks run apart: as in `copy_engine.py`. All make the same calls in the same order,
and whatever is waited for was told earlier in that order; this holds even if all streams of a rank were one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from triweave.groups import Group
from triweave.overlap import FLAG_BYTES
from triweave.sharing import SLOTS
from triweave.transport.stream_flags import Flag, StreamFlags, cuda_driver


@dataclass(slots=True)
class Slot:
    """Room for one piece: a part from each peer."""

    parts: Tensor
    """float32 `[dp - 1, part]`."""
    free: torch.cuda.Event | None = None
    """When the piece that lies there has been added; None before the first."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Copies, and sums, under way."""

    done: torch.cuda.Event
    also: Callable[[], None] = lambda: None
    """What else to wait for, on the current stream."""

    def wait(self) -> None:
        """Make the current stream wait for them."""
        torch.cuda.current_stream().wait_event(self.done)
        self.also()


@dataclass(slots=True)
class SharedMemory:
    """One allocation on each rank, in which the same buffers lie at the same places."""

    group: Group
    copies: torch.cuda.Stream
    """Where all copies and flags go."""
    sums: torch.cuda.Stream
    """Where parts are added, so that the next piece need not wait for a multiprocessor to be free."""
    flags: StreamFlags
    """Those of a buffer at the very beginning."""
    at: tuple[Tensor, ...]
    """Each rank's bytes, zeros at first, as this process sees them."""
    slots: deque[Slot]
    owners: tuple[object, ...] = ()
    """What keeps the memory mapped: `at` only points into it."""
    name: str = "copy engines beside what computes"
    used_bytes: int = 0

    @property
    def unseen_bytes(self) -> int:
        """See `Memory`: the slots are the caching allocator's."""
        return self.at[self.group.rank].numel()

    @property
    def peers(self) -> list[int]:
        """The other ranks, from the next one on: none is asked by all at once."""
        size, rank = self.group.size, self.group.rank
        return [(rank + step) % size for step in range(1, size)]

    def buffer(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        """See `Memory`.

        Raises:
            ValueError: more is asked for than was reckoned with.
        """
        start, stop = self.used_bytes + FLAG_BYTES, self.used_bytes + FLAG_BYTES + numel * dtype.itemsize
        if stop > self.unseen_bytes:
            raise ValueError(f"{stop} bytes of {self.unseen_bytes} that are shared")
        flags = replace(self.flags, addresses=tuple(address + self.used_bytes for address in self.flags.addresses))
        self.used_bytes = stop
        return SharedBuffer(self, flags, tuple(memory[start:stop].view(dtype) for memory in self.at))


@dataclass(slots=True)
class SharedBuffer:
    """A buffer, and those of the other ranks at the same place."""

    memory: SharedMemory
    flags: StreamFlags
    at: tuple[Tensor, ...]
    """Each rank's."""
    shards: list[tuple[Tensor, ...]] = field(init=False)
    """By rank that holds them, then by rank that owns them."""
    taken: Flag | None = None
    """What peers will tell when they have taken what was offered to them; None when nothing is."""

    def __post_init__(self) -> None:
        self.shards = [whole.chunk(len(self.at)) for whole in self.at]

    @property
    def whole(self) -> Tensor:
        """See `Buffer`."""
        return self.at[self.memory.group.rank]

    def gather(self) -> Arrival:
        """See `Buffer`."""
        copies, mine = self.memory.copies, self.shards[self.memory.group.rank]
        self._offer()
        with torch.cuda.stream(copies):
            for peer in self.memory.peers:
                self._await(Flag.STAGED, peer, copies)
                mine[peer].copy_(self.shards[peer][peer])
                self._tell(Flag.TAKEN, peer, copies)
            return Arrival(copies.record_event())

    def reduce_scatter(self) -> Arrival:
        """See `Buffer`. Parts are added in the order of the ranks: the same bits on every run."""
        self._offer()
        self._sum_own_shard()
        return Arrival(self.memory.sums.record_event())

    def all_reduce(self) -> Arrival:
        """See `Buffer`."""
        copies, mine = self.memory.copies, self.shards[self.memory.group.rank]
        self._offer()
        self._sum_own_shard()
        copies.wait_stream(self.memory.sums)
        with torch.cuda.stream(copies):
            for peer in self.memory.peers:
                self._tell(Flag.ARRIVED, peer, copies)
            for peer in self.memory.peers:
                self._await(Flag.TAKEN, peer, copies)
                self._await(Flag.ARRIVED, peer, copies)
                mine[peer].copy_(self.shards[peer][peer])
                self._tell(Flag.FREE, peer, copies)
            self.taken = Flag.FREE
            # Peers copy from the very elements that this rank has summed: it may write there only when they have.
            return Arrival(copies.record_event(), self.reclaim)

    def reclaim(self) -> None:
        """See `Buffer`."""
        if self.taken is not None:
            for peer in self.memory.peers:
                self._await(self.taken, peer, torch.cuda.current_stream())
            self.taken = None

    def _tell(self, flag: Flag, peer: int, stream: torch.cuda.Stream) -> None:
        self.flags.run(self.flags.signal(self.flags.raising(flag, [peer])), stream.cuda_stream)

    def _await(self, flag: Flag, peer: int, stream: torch.cuda.Stream) -> None:
        self.flags.run(self.flags.signal(self.flags.awaiting(flag, [peer])), stream.cuda_stream)

    def _offer(self) -> None:
        if self.taken is not None:
            raise RuntimeError("a buffer is offered again, and was not reclaimed before it was written")
        copies = self.memory.copies
        copies.wait_stream(torch.cuda.current_stream())
        for peer in self.memory.peers:
            self._tell(Flag.STAGED, peer, copies)
        self.taken = Flag.TAKEN

    def _sum_own_shard(self) -> None:
        memory = self.memory
        group, copies, sums = memory.group, memory.copies, memory.sums
        own = self.shards[group.rank][group.rank]
        for start in range(0, own.numel(), memory.slots[0].parts.shape[1]):
            slot = memory.slots[0]
            memory.slots.rotate(-1)
            piece = own[start : start + slot.parts.shape[1]]
            stop = start + piece.numel()
            # By rank, this one left out.
            parts = {peer: slot.parts[peer - (peer > group.rank)][: piece.numel()] for peer in sorted(memory.peers)}
            if slot.free is not None:
                copies.wait_event(slot.free)
            with torch.cuda.stream(copies):
                for peer in memory.peers:
                    if start == 0:
                        self._await(Flag.STAGED, peer, copies)
                    parts[peer].copy_(self.shards[peer][group.rank][start:stop])
                    if stop == own.numel():
                        self._tell(Flag.TAKEN, peer, copies)
            sums.wait_stream(copies)
            with torch.cuda.stream(sums):
                add_in_rank_order(piece, list(parts.values()), group.rank)
                slot.free = sums.record_event()


def add_in_rank_order(own: Tensor, others: list[Tensor], rank: int) -> None:
    """Add to `own` the parts of the other ranks, as if all were added one after the other from rank 0 on.

    Args:
        own: part of rank `rank`, overwritten by the sum.
        others: parts of the others in the order of the ranks; those of lower ranks are overwritten.
        rank: whose part is `own`.
    """
    before = others[:rank]
    for part in before[1:]:
        before[0].add_(part)
    # A sum of two does not depend on their order, so that what comes before may be added to what is here.
    for part in (*before[:1], *others[rank:]):
        own.add_(part)


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory that can be shown to other processes.

    Raises:
        RuntimeError: there is not as much, or the GPU has none of the kind.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    # It comes from the driver, which does not know what the caching allocator could give back.
    torch.cuda.empty_cache()
    mine = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    mine.zero_()
    return mine


def share(mine: Tensor, group: Group, part: int) -> SharedMemory:
    """Show allocations of one size to each other. All ranks of the group call it together.

    Args:
        mine: from `allocate`.
        group: ranks of one host, each with a GPU of its own.
        part: elements of one peer's part of a piece (`sharing.part_numel`).

    Raises:
        RuntimeError: the GPUs cannot reach each other's memory.
        OSError: there is no CUDA driver here.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    if group.handle is None:
        raise ValueError("a group of one has nobody to share with")
    device = mine.device
    handle = symmetric_memory.rendezvous(mine, group.handle)
    torch.cuda.synchronize(device)
    dist.barrier(group.handle, device_ids=[device.index])  # no flag is raised before all have lowered theirs
    at = tuple(handle.get_buffer(rank, (mine.numel(),), torch.uint8, 0) for rank in range(group.size))
    addresses = tuple(memory.data_ptr() for memory in at)
    return SharedMemory(
        group,
        torch.cuda.Stream(device, priority=-1),
        torch.cuda.Stream(device, priority=-1),
        StreamFlags(cuda_driver(), addresses, group.rank),
        at,
        deque(Slot(torch.empty(group.size - 1, part, device=device)) for _ in range(SLOTS)),
        owners=(mine, handle),
    )
