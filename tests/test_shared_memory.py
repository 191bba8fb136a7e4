"""Shared memory under every order of events: what collectives give, no flag lost, nobody hangs, no early overwrite.

Buffers and their transport are those that run on GPUs; only streams and flags are pretended (`pretend_gpus`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretend_gpus import Gpu, Stream, run, without_wait
from torch import Tensor

from triweave.groups import Group, alone
from triweave.layout import Shard
from triweave.overlap import FLAG_BYTES
from triweave.sharing import MOST_RANKS, SLOT_BYTES, SLOTS, buffer_sizes, part_numel, shared_bytes, staging_bytes
from triweave.transport.buffers import PlainMemory
from triweave.transport.choose import choose_memory
from triweave.transport.shared_memory import SharedBuffer, SharedMemory, Slot, add_in_rank_order
from triweave.transport.stream_flags import Driver, Flag, MemoryOperation, StreamFlags

SHARDS = (6, 12)
"""Elements of a rank's shard of two units; that of the second comes in more pieces than there are slots."""
PART = 3
STEPS = 3


def node(dp: int) -> list[tuple[Gpu, SharedMemory]]:
    """GPUs that see each other's memory."""
    sizes = [size for shard in SHARDS for size in (8 * dp * shard, 4 * dp * shard)]
    total = shared_bytes(sizes)
    lowered = {rank * total + offset: 0 for rank in range(dp) for offset in range(0, total, 4)}
    bytes_of = torch.zeros(dp, total, dtype=torch.uint8)
    made = []
    for rank in range(dp):
        gpu = Gpu(lowered)
        gpu.streams.append(Stream(gpu, 2))
        addresses = tuple(peer * total for peer in range(dp))
        memory = SharedMemory(
            Group(tuple(range(dp)), rank),
            gpu.streams[1],
            gpu.streams[2],
            StreamFlags(Driver(gpu.batch, gpu.copy), addresses, rank),
            tuple(bytes_of),
            deque(Slot(torch.full((dp - 1, PART), torch.nan)) for _ in range(SLOTS)),
        )
        made.append((gpu, memory))
    return made


def drawn(dp: int, kind: int, unit: int, step: int) -> Tensor:
    """A buffer of every rank; numbers whose float32 sums are rounded, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * kind + 10 * step + unit)
    return torch.randn(dp, dp * SHARDS[unit], generator=generator) * 10.0 ** torch.arange(dp).unsqueeze(1)


def in_rank_order(parts: Tensor) -> Tensor:
    """Sum over the ranks, one after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Rank:
    """One rank's buffers, as units have them, through some steps."""

    def __init__(self, memory: SharedMemory, shard: Shard) -> None:
        self.dp, self.rank, self.shard = memory.group.size, memory.group.rank, shard
        self.weights = [memory.buffer(self.dp * shard, torch.float64) for shard in SHARDS]
        self.sums = [memory.buffer(self.dp * shard, torch.float32) for shard in SHARDS]
        # Made before the GPU begins: by kind (weights, sums), step and unit.
        self.drawn = [
            [[drawn(self.dp, kind, unit, step)[self.rank] for unit in range(len(SHARDS))] for step in range(STEPS)]
            for kind in range(2)
        ]
        self.given: list[tuple[list[Tensor], list[Tensor]]] = []

    def steps(self) -> None:
        """Publish weights, use them, make sums, reduce them, use what came out and write over it."""
        for step in range(STEPS):
            arrivals = []
            for weights, values in zip(self.weights, self.drawn[0][step], strict=True):
                weights.reclaim()
                self.own(weights).copy_(self.own_of(values))
                arrivals.append(weights.gather())
            used = []
            for weights, arrival in zip(self.weights, arrivals, strict=True):
                arrival.wait()
                used.append(weights.whole.clone())
            reductions = []
            for sums, values in zip(self.sums, self.drawn[1][step], strict=True):
                sums.reclaim()
                sums.whole.copy_(values)
                reductions.append(sums.all_reduce() if self.shard == "none" else sums.reduce_scatter())
            for reduction in reductions:
                reduction.wait()
            reduced = []
            for sums in self.sums:
                mine = sums.whole if self.shard == "none" else self.own(sums)
                reduced.append(mine.clone())
                mine.mul_(torch.inf)  # as clipping scales it: peers must not see that
            self.given.append((used, reduced))

    def own(self, buffer: SharedBuffer) -> Tensor:
        """This rank's shard."""
        return self.own_of(buffer.whole)

    def own_of(self, flat: Tensor) -> Tensor:
        """Its place."""
        return flat.chunk(self.dp)[self.rank]


def check(dp: int, shard: Shard, seed: int) -> None:
    """All ranks' steps, queued one after another and then run in one of the possible orders."""
    gpus = node(dp)
    ranks = [Rank(memory, shard) for _, memory in gpus]
    for (gpu, _), rank in zip(gpus, ranks, strict=True):
        gpu.program(rank.steps)
    run([gpu for gpu, _ in gpus], seed)
    for rank in ranks:
        for step, (used, reduced) in enumerate(rank.given):
            for unit in range(len(SHARDS)):
                shards = [whole.chunk(dp)[owner] for owner, whole in enumerate(drawn(dp, 0, unit, step))]
                assert torch.equal(used[unit], torch.cat(shards).double())
                total = in_rank_order(drawn(dp, 1, unit, step))
                assert torch.equal(reduced[unit], total if shard == "none" else rank.own_of(total))


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("dp", [2, 3, 4, MOST_RANKS])
def test_any_order_gives_the_same(dp: int, shard: Shard) -> None:
    """However far ranks and streams run apart, gathers are exact, sums in rank order, and nothing hangs."""
    for seed in range(10 if dp < MOST_RANKS else 3):
        check(dp, shard, seed)


def fails(shard: Shard, seeds: int = 60) -> bool:
    """Whether some order shows a fault."""
    for seed in range(seeds):
        try:
            check(2, shard, seed)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_faultless_is_not_taken_for_faulty(shard: Shard) -> None:
    """What the tests below look for is not there unless it is planted."""
    assert not fails(shard)


@pytest.mark.parametrize(
    ("shard", "flag"),
    [("optimizer", Flag.STAGED), ("optimizer", Flag.TAKEN), *(("none", flag) for flag in Flag)],
)
def test_missing_wait_is_seen(shard: Shard, flag: Flag) -> None:
    """Without waiting for any one kind of flag, some order gives a wrong result or loses a flag."""
    awaiting = StreamFlags.awaiting

    def careless(self: StreamFlags, which: Flag, peers: list[int]) -> list[MemoryOperation]:
        return [] if which is flag else awaiting(self, which, peers)

    with patch.object(StreamFlags, "awaiting", careless):
        assert fails(shard)


@pytest.mark.parametrize(("waits", "waited_for"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_missing_wait_between_streams_is_seen(waits: int, waited_for: int) -> None:
    """So with each wait of a rank's own streams: computing (0), copies (1), sums (2)."""
    with without_wait(waits, waited_for):
        assert fails("none" if waits == 0 else "optimizer")


def test_offering_twice_is_refused() -> None:
    """A buffer that peers may still be reading is not offered again: it was written too early."""
    gpu, memory = node(2)[0]
    weights = memory.buffer(12, torch.float64)

    def twice() -> None:
        weights.gather()
        weights.gather()

    with pytest.raises(RuntimeError, match="not reclaimed"):
        gpu.program(twice)


def test_more_buffers_than_reckoned_with_are_refused() -> None:
    """Buffers never lie outside of what the peers see."""
    _, memory = node(2)[0]
    with pytest.raises(ValueError, match="that are shared"):
        memory.buffer(10_000, torch.float64)


@pytest.mark.parametrize("dp", [2, 5])
def test_sums_are_in_rank_order(dp: int) -> None:
    """Whichever rank adds, the bits are those of adding one rank's part after another."""
    parts = drawn(dp, 2, 1, 0)
    for rank in range(dp):
        own, *others = (part.clone() for part in (parts[rank], *parts[:rank], *parts[rank + 1 :]))
        add_in_rank_order(own, others, rank)
        assert torch.equal(own, in_rank_order(parts))


@given(dp=st.integers(2, MOST_RANKS), numels=st.lists(st.integers(1, 2**24), min_size=1))
def test_staging_is_bounded(dp: int, numels: list[int]) -> None:
    """A slot holds no more than a shard of the largest unit from each peer, and never more than its bound."""
    numels = [64 * dp * numel for numel in numels]
    part = part_numel("optimizer", numels, dp)
    assert 0 < part <= max(numels) // dp
    assert staging_bytes(part, dp) <= SLOTS * SLOT_BYTES
    assert part_numel("gradients", numels, dp) == part_numel("full", numels, dp) == 0


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "full"])
def test_buffers_fit_what_was_asked_for(shard: Shard) -> None:
    """The allocation is used up to the byte, and every buffer begins where copies like it."""
    numels = [128 * 3, 128 * 5]
    sizes = [size for numel in numels for size in buffer_sizes(shard, numel, 2)]
    kinds = {"none": 1, "optimizer": 2, "gradients": 1, "full": 0}
    assert len(sizes) == 2 * kinds[shard]
    assert shared_bytes(sizes) == sum(sizes) + FLAG_BYTES * len(sizes)
    assert all(size % 256 == 0 for size in sizes)


def test_log_tells_why_collectives_are_used() -> None:
    """Where nothing is shared, the name says why."""
    group, cuda = Group((0, 1), 0), torch.device("cuda", 0)
    choose: Callable[..., Any] = partial(choose_memory, sizes=[256], part=0)
    assert "no copy engines on cpu" in choose("auto", group, torch.device("cpu")).name
    assert "overlap_dp is off" in choose("off", group, cuda).name
    assert "buffers come and go" in choose_memory("auto", group, cuda, [], 0).name
    assert "do not reach" in choose("auto", Group(tuple(range(MOST_RANKS + 1)), 0), cuda).name
    assert isinstance(choose("auto", alone(), cuda), PlainMemory)
