"""Copy engines under every order of events: right results, no flag lost, nobody hangs.

The transport and the layers are those that run on GPUs; only streams and flags are pretended (`pretend_gpus`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pretend_gpus import Gpu, Stream, run
from torch import Tensor, nn

from triweave import overlap
from triweave.gradients import main_grad
from triweave.groups import Group
from triweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from triweave.layers.tensor_parallel import TensorParallel
from triweave.transport.copy_engine import CopyEngines, CopyGathering, room_number
from triweave.transport.stream_flags import Driver, Flag, MemoryOperation, StreamFlags, flag_bytes

SLICE, HIDDEN, WIDE, LAYERS = 2, 4, 8, 2
SLICE_BYTES = SLICE * HIDDEN * 8


def node(tp: int, piece_s: float = 0.0) -> list[tuple[Gpu, CopyEngines]]:
    """GPUs that see each other's memory, their buffers full of what was there before; products are cut if that is free.

    Each holds the tensor of the buffers: what copies know of it is addresses.
    """
    size = flag_bytes(tp)
    memory = dict.fromkeys(range(0, tp * size, 4), 0)
    addresses = tuple(rank * size for rank in range(tp))
    rooms = torch.full((tp, tp, SLICE_BYTES), 255, dtype=torch.uint8)  # as float64, not a number
    ranks = range(tp)
    made = []
    for rank in ranks:
        gpu = Gpu(memory)
        transport = CopyEngines(
            Group(tuple(ranks), rank),
            gpu.streams[1],
            StreamFlags(Driver(gpu.batch, gpu.copy), addresses, rank),
            staged=tuple(rooms[holder, 0].data_ptr() for holder in ranks),
            places=tuple(rooms[holder, room_number(holder, rank)].data_ptr() for holder in ranks),
            received=tuple(rooms[rank, room_number(rank, sender)] for sender in ranks),
            owners=(rooms,),
            piece_s=piece_s,
        )
        made.append((gpu, transport))
    return made


def numbers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: their sums and products are exact, so that equal means equal bit for bit."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def whole(tp: int) -> list[Tensor]:
    """Output, input gradient and weight gradients by autograd in one piece."""
    y = x = numbers(tp * SLICE, 1, HIDDEN, seed=1).requires_grad_()
    weights = [
        numbers(*shape, seed=10 + i).requires_grad_()
        for i, shape in enumerate([(WIDE, HIDDEN), (HIDDEN, WIDE)] * LAYERS)
    ]
    for weight in weights:
        y = y @ weight.t()
    y.backward(numbers(*y.shape, seed=2))
    return [y.detach(), *(t.grad for t in (x, *weights) if t.grad is not None)]


@dataclass
class Rank:
    """One rank's part of it, made before its GPU begins."""

    tp: TensorParallel

    def __post_init__(self) -> None:
        rank, size = self.tp.rank, self.tp.size
        self.layers = nn.ModuleList()
        for number in range(LAYERS):
            column = ColumnParallelLinear(HIDDEN, WIDE // size, self.tp).double()
            row = RowParallelLinear(WIDE // size, HIDDEN, self.tp).double()
            column.weight.data = numbers(WIDE, HIDDEN, seed=10 + 2 * number).chunk(size, 0)[rank]
            row.weight.data = numbers(HIDDEN, WIDE, seed=11 + 2 * number).chunk(size, 1)[rank]
            self.layers += [column, row]
        self.x, self.grad_y = (numbers(size * SLICE, 1, HIDDEN, seed=seed).chunk(size)[rank].clone() for seed in (1, 2))

    def step(self, splits: bool) -> list[Tensor]:
        """Output, input gradient and weight gradients, in the order of `whole`; the last are sums over steps.

        `splits`: weight gradients after everything else, as a zero-bubble schedule has them.
        """
        y = x = self.x.detach().requires_grad_()
        for layer in self.layers:
            y = layer(y)
        with self.tp.weight_gradients.deferring() if splits else nullcontext([]) as work:
            y.backward(self.grad_y)
        with torch.no_grad():
            for one in work:
                one()
        assert x.grad is not None
        return [y.detach(), x.grad, *(main_grad(layer.weight) for layer in self.layers)]


def check(tp: int, seed: int, splits: bool, steps: int = 2, piece_s: float = 0.0) -> None:
    """Several steps of all ranks, queued one after another and then run in one of the possible orders."""
    gpus = node(tp, piece_s)
    given: list[list[list[Tensor]]] = []
    ranks = [Rank(TensorParallel(transport.group, True, chosen=transport)) for _, transport in gpus]
    for (gpu, _), rank in zip(gpus, ranks, strict=True):
        given.append([gpu.program(partial(rank.step, splits)) for _ in range(steps)])
    run([gpu for gpu, _ in gpus], seed)
    y, x_grad, *weight_grads = whole(tp)
    for number, of_rank in enumerate(given):
        for ours_y, ours_x_grad, *sums in of_rank:
            assert torch.equal(ours_y, y.chunk(tp)[number])
            assert torch.equal(ours_x_grad, x_grad.chunk(tp)[number])
            for place, (ours, grad) in enumerate(zip(sums, weight_grads, strict=True)):
                assert torch.equal(ours, steps * grad.float().chunk(tp, place % 2)[number])


@pytest.mark.parametrize("splits", [False, True], ids=["at-once", "split"])
@pytest.mark.parametrize(("tp", "piece_tokens"), [(2, 1), (4, 1), (4, 2 * SLICE), (4, 2048), (8, 3 * SLICE)])
def test_any_order_gives_the_same(tp: int, piece_tokens: int, splits: bool) -> None:
    """However far ranks and streams run apart, results are exact, no flag is lost and nothing hangs."""
    with patch.object(overlap, "MIN_PIECE_TOKENS", piece_tokens):
        for seed in range(10 if tp < 8 else 3):
            check(tp, seed, splits)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_products_too_small_to_cut_wait_for_all_rows(tp: int) -> None:
    """Where a piece costs more than it hides, one product reads all rows: as right as in pieces."""
    with patch.object(overlap, "MIN_PIECE_TOKENS", 1):
        for seed in range(5):
            check(tp, seed, splits=seed % 2 == 0, piece_s=1.0)


def replayed(tp: int, seed: int, splits: bool, settles: tuple[bool, bool] = (True, True)) -> None:
    """A step of all ranks, then the same captured and replayed three times, one between that is not; in some order.

    `settles`: whether what is captured begins, and ends, with nothing under way.
    """
    gpus = node(tp)
    ranks = [Rank(TensorParallel(transport.group, True, chosen=transport)) for _, transport in gpus]
    given: list[list[Tensor]] = []
    for (gpu, transport), rank in zip(gpus, ranks, strict=True):
        step, settle = partial(rank.step, splits), transport.settle

        def captured(step: Any = step, settle: Any = settle) -> list[Tensor]:
            made: list[Tensor] = step()
            if settles[1]:
                settle()
            return made

        gpu.program(step)
        if settles[0]:
            gpu.program(settle)
        made, replay = gpu.capture(captured)
        replay()
        replay()
        gpu.program(step)
        gpu.program(settle)
        replay()
        given.append(made)
    run([gpu for gpu, _ in gpus], seed)
    y, x_grad, *weight_grads = whole(tp)
    for number, (ours_y, ours_x_grad, *sums) in enumerate(given):
        assert torch.equal(ours_y, y.chunk(tp)[number])
        assert torch.equal(ours_x_grad, x_grad.chunk(tp)[number])
        for place, (ours, grad) in enumerate(zip(sums, weight_grads, strict=True)):
            assert torch.equal(ours, 5 * grad.float().chunk(tp, place % 2)[number])


@pytest.mark.parametrize("splits", [False, True], ids=["at-once", "split"])
@pytest.mark.parametrize(("tp", "piece_tokens"), [(2, 1), (4, 1), (4, 2048), (8, 3 * SLICE)])
def test_a_step_can_be_captured(tp: int, piece_tokens: int, splits: bool) -> None:
    """A graph of a step that begins and ends settled is right as often as it is repeated, in any order of streams."""
    with patch.object(overlap, "MIN_PIECE_TOKENS", piece_tokens):
        for seed in range(5 if tp < 8 else 2):
            replayed(tp, seed, splits)


@pytest.mark.parametrize("settles", [(False, True), (True, False)], ids=["begins", "ends"])
def test_a_capture_that_is_not_settled_is_refused(settles: tuple[bool, bool]) -> None:
    """Copies under way at a border of a graph are seen, as CUDA sees them."""
    with pytest.raises(AssertionError, match=r"hang|raised twice|graph"):
        replayed(2, 0, splits=True, settles=settles)


@contextmanager
def in_one_pass() -> Iterator[None]:
    """As on a GPU: what goes to peers and into the gathered rows is written to both by one kernel."""

    def copy_to_both(source: Tensor, first: Tensor, second: Tensor) -> None:
        first.copy_(source)
        second.copy_(source)

    with (
        patch("triweave.transport.copy_engine.uses_kernels", lambda _: True),
        patch("triweave.kernels.copies.copy_to_both", copy_to_both),
    ):
        yield


@pytest.mark.parametrize(("tp", "piece_s"), [(2, 0.0), (4, 0.0), (4, 1.0)])
def test_one_pass_to_both_places(tp: int, piece_s: float) -> None:
    """Staged by a kernel, in pieces and whole: as right, and a place written before peers have taken it is seen."""
    with patch.object(overlap, "MIN_PIECE_TOKENS", 1), in_one_pass():
        for seed in range(5):
            check(tp, seed, splits=seed % 2 == 0, piece_s=piece_s)
        with patch.object(CopyEngines, "num_gathers", property(lambda _: 0, lambda *_: None)):
            assert fails()


def fails(seeds: int = 40) -> bool:
    """Whether some order shows a fault."""
    for seed in range(seeds):
        try:
            check(2, seed, splits=False)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("flag", list(Flag))
def test_missing_wait_is_seen(flag: Flag) -> None:
    """Without waiting for any one kind of flag, some order gives a wrong result or loses a flag."""
    awaiting = StreamFlags.awaiting

    def careless(self: StreamFlags, which: Flag, peers: list[int]) -> list[MemoryOperation]:
        return [] if which is flag else awaiting(self, which, peers)

    with patch.object(StreamFlags, "awaiting", careless):
        assert fails()


@pytest.mark.parametrize("name", ["rows", "finish"])
def test_missing_wait_of_products_is_seen(name: str) -> None:
    """A product that does not wait for the rows that it reads is wrong in some order."""
    kept = getattr(CopyGathering, name)

    def careless(self: CopyGathering, *args: Any) -> Any:
        with patch.object(Stream, "wait_event"):
            return kept(self, *args)

    with patch.object(CopyGathering, name, careless):
        assert fails()


@pytest.mark.parametrize("waits", ["num_gathers", "follow"])
def test_missing_wait_of_copies_is_seen(waits: str) -> None:
    """Staging over what a peer has not taken, or sending what is not computed, is wrong in some order."""
    if waits == "follow":
        with patch.object(CopyEngines, "follow", lambda *_: None):
            assert fails()
    else:
        with patch.object(CopyEngines, waits, property(lambda _: 0, lambda *_: None)):
            assert fails()


def test_memory_operations_lie_as_the_driver_reads_them() -> None:
    """Places of the fields are those of CUstreamBatchMemOpParams in cuda.h (12.8): a union of 6 x 64 bits."""
    fields = (MemoryOperation.address, MemoryOperation.value, MemoryOperation.flags, MemoryOperation.alias)
    assert [field.offset for field in fields] == [8, 16, 24, 32]
    assert ctypes.sizeof(MemoryOperation) == 48


def test_slice_larger_than_its_room_is_refused() -> None:
    """Activations that were not reckoned with do not overwrite what lies beside."""
    large = numbers(2 * SLICE, 1, HIDDEN, seed=1)
    gpu, transport = node(2)[0]
    with pytest.raises(ValueError, match="larger than its room"):
        gpu.program(lambda: transport.gather(large, whole=True, other=0))
