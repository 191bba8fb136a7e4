"""Where exposed tensor-parallel communication comes from: a layer with less and less of it, and products beside copies.

Two sections of `bench/overlap.py`. `beside`: what a product loses while one GPU reads a peer's memory, or writes it,
all the time. `parts`: the layer by turns with nothing communicated, its products in pieces, the copies inside the GPU
and the sums added, the copies between GPUs added, and at last the flags, which is the layer as it is trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from measuring import Bench
from stand_ins import Alone, Dropped
from torch import Tensor

from triweave.layers.products import slices
from triweave.overlap import order
from triweave.transport.copy_engine import CopyEngines
from triweave.transport.interface import Transport
from triweave.transport.plain import WholeGathering
from triweave.transport.stream_flags import Signal, StreamFlags

COPIES, PRODUCTS = 240, 8
"""Enough copies to outlast the products that run beside them."""
MIB = 2**20


@dataclass(frozen=True)
class FewerSteps(StreamFlags):
    """Without the flags, and if asked without what is copied on `copies_on` (a stream's handle) too: timing alone."""

    copies_on: int = 0

    def run(self, signal: Signal, stream: int) -> None:
        """Neither raise nor wait."""

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy where that is not left out."""
        if stream != self.copies_on:
            super().copy(to, source, num_bytes, stream)


@dataclass
class InPieces(Alone):
    """Nothing is communicated, and products are cut as if it were."""

    name: str = "in pieces"

    def gather(self, x: Tensor, *, whole: bool, other: int) -> AllThere:
        there = super().gather(x, whole=whole, other=other).pending
        cut = order(self.group.size, self.group.rank, x.shape[0] * x.shape[1], x.shape[2], other)
        return AllThere(cut, there)

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> Dropped:
        slice_tokens = tokens[0] // self.group.size * tokens[1]
        own, *others = order(self.group.size, self.group.rank, slice_tokens, moved, other)
        return OwnPart((*others, own), self.group)


class AllThere(WholeGathering):
    def rows(self, piece: range) -> Tensor:
        return slices(self.finish(), piece, self.pieces)


@dataclass
class OwnPart(Dropped):
    def finish(self) -> Tensor:
        assert self.part is not None
        return self.part if len(self.pieces) > 1 else super().finish()


def with_less(bench: Bench, overlapped: Transport) -> dict[str, Transport]:
    """Transports by name, each with something more than the one before it; without copy engines the first two."""
    found: dict[str, Transport] = {"alone": Alone(bench.group), "in pieces": InPieces(bench.group)}
    if isinstance(overlapped, CopyEngines):
        flags = (overlapped.flags.driver, overlapped.flags.addresses, overlapped.flags.rank)
        found |= {
            "copies inside": replace(overlapped, flags=FewerSteps(*flags, copies_on=overlapped.stream.cuda_stream)),
            "copies between": replace(overlapped, flags=FewerSteps(*flags)),
            "all": overlapped,
        }
    return found


def parts(bench: Bench, overlapped: Transport, layer: Callable[[Transport], Callable[[], None]], **row: object) -> None:
    """Milliseconds of a layer with each of `with_less`, by turns."""
    steps = {name: layer(transport) for name, transport in with_less(bench, overlapped).items()}
    bench.add(section="parts", **row, **bench.by_turns(steps))
    bench.sync()


def beside(bench: Bench, overlapped: Transport) -> None:
    """A product while copies pass all the time, by how they pass; of both ranks, and of each alone."""
    if not isinstance(overlapped, CopyEngines):
        bench.add(section="beside", skipped=overlapped.name)
        return
    flags, stream, peer = overlapped.flags, overlapped.stream, overlapped.peers[0]
    features, seq = 14336, 8192
    x, weight = bench.random(seq, 4096), bench.random(features, 4096, seed=1)
    y = torch.empty(seq, features, device=bench.device, dtype=x.dtype)
    here = torch.empty(32 * MIB, dtype=torch.uint8, device=bench.device)
    other = torch.empty(32 * MIB, dtype=torch.uint8, device=bench.device)
    addresses = {
        "read from the peer": (here.data_ptr(), overlapped.staged[peer]),
        "written to the peer": (overlapped.places[peer], here.data_ptr()),
        "inside the GPU": (here.data_ptr(), other.data_ptr()),
    }

    def product() -> None:
        torch.mm(x, weight.t(), out=y)

    def nothing() -> None:
        pass

    alone_ms = bench.milliseconds(product)
    for mib in (32, 2):
        for name, (to, source) in addresses.items():
            for ranks in ((0, 1), (0,)):
                copy = functools.partial(flags.copy, to, source, mib * MIB, stream.cuda_stream)
                many = COPIES * 32 // mib if bench.group.rank in ranks else 0
                product_ms, copy_ms = _together(bench, stream, product, copy if many else nothing, many)
                times = [bench.worst(product_ms if bench.group.rank == rank else 0.0) for rank in range(2)]
                rate = mib * MIB / copy_ms / 1e6 if copy_ms else 0.0
                bench.add(
                    section="beside",
                    copies=name,
                    mib=mib,
                    ranks=len(ranks),
                    alone_ms=alone_ms,
                    beside_ms=times,
                    gb_s=bench.worst(rate),
                )


def _together(
    bench: Bench, stream: torch.cuda.Stream, product: Callable[[], None], copy: Callable[[], None], many: int
) -> tuple[float, float]:
    """Milliseconds of a product while copies pass, and of a copy while products run."""
    products = torch.cuda.current_stream()
    bench.sync()
    begun = torch.cuda.Event(enable_timing=True)
    ends = []
    for number in range(many):
        copy()
        if number % 8 == 0:
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record(stream)
    if ends:
        products.wait_event(ends[0])
    begun.record(products)
    for _ in range(PRODUCTS):
        product()
    ended = torch.cuda.Event(enable_timing=True)
    ended.record(products)
    torch.cuda.synchronize()
    took = begun.elapsed_time(ended)
    inside = [end for end in ends if begun.elapsed_time(end) >= 0 and end.elapsed_time(ended) >= 0]
    copy_ms = inside[0].elapsed_time(inside[-1]) / (8 * (len(inside) - 1)) if len(inside) > 1 else 0.0
    return took / PRODUCTS, copy_ms
