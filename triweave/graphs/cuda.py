"""Capture by CUDA. torch's allocator gives each slot a pool of its own, which stays as long as its graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triweave.graphs.replay import Replay


@dataclass(slots=True)
class CudaCapture:
    """Captures on a stream of its own."""

    device: torch.device
    settle: Callable[[], None]
    """Ends what is under way on other streams: a graph begins and ends with nothing under way."""
    stream: torch.cuda.Stream = field(init=False)
    pools: list[Any] = field(init=False, default_factory=list)
    """torch's words for them."""
    num_bytes: int = field(init=False, default=0)
    """See `Capture`."""

    def __post_init__(self) -> None:
        """Make the stream."""
        self.stream = torch.cuda.Stream(self.device)

    def pool(self) -> CudaPool:
        """See `Capture`."""
        self.pools.append(torch.cuda.graph_pool_handle())
        return CudaPool(self.pools[-1], self.stream, self.settle)

    def warm_up(self, work: Callable[[], object]) -> None:
        """See `Capture`. cuBLAS has a workspace for each stream and thread, which is not to lie in a pool."""
        self.settle()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()
            self.settle()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        # What the first step took of the driver and does not need now makes room for the pools.
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def finish(self) -> None:
        """See `Capture`."""
        torch.cuda.synchronize(self.device)
        self.num_bytes = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) in self.pools
        )
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True, slots=True)
class CudaPool:
    """Memory of one slot; it stays while there are graphs that use it."""

    handle: Any
    """torch's word for it."""
    stream: torch.cuda.Stream
    """Where captures are made."""
    settle: Callable[[], None]
    """See `CudaCapture`."""

    def capture(self, work: Callable[[], Tensor | None]) -> tuple[Tensor | None, Replay]:
        """See `Pool`. Other threads go on meanwhile: they may ask the driver what a capture forbids."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self.settle()
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                made = work()
                self.settle()
            except BaseException:
                # A capture that was broken off does not end well: what broke it, as want of memory, is to be told.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> None:
            self.settle()
            graph.replay()

        return made, replay

    def address(self, tensor: Tensor) -> Tensor:
        """See `Pool`."""
        there: Tensor = torch.as_tensor(_Bytes(tensor), device=tensor.device)
        return there.view(tensor.dtype).view(tensor.shape)


class _Bytes:
    """Bytes of a tensor by their address, as `torch.as_tensor` takes them. It holds nothing."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
