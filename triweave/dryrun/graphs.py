"""CUDA graphs of a GPU that is not there: each pass is played once in memory of its slot, and a replay does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triweave.dryrun.allocations import Allocations
from triweave.dryrun.components import WORKSPACE
from triweave.graphs.capture import Capture
from triweave.graphs.replay import Replay
from triweave.planner.allocator import CachingAllocator
from triweave.planner.assumptions import OURS
from triweave.transport.interface import Transport


@dataclass(slots=True)
class PoolOnPaper:
    """Memory of one slot: what the passes take of it at once, in an allocator of its own, stands from then on."""

    memory: Allocations
    allocator: CachingAllocator

    def capture(self, work: Callable[[], Tensor | None]) -> tuple[Tensor | None, Replay]:
        """See `Pool`."""
        with self.memory.inside(self.allocator):
            made = work()
        return made, self._replay

    def address(self, tensor: Tensor) -> Tensor:
        """See `Pool`."""
        with self.memory.uncounted():
            return torch.empty_like(tensor)

    def _replay(self) -> None:
        self.memory.launches += 1


@dataclass(slots=True)
class GraphsOnPaper:
    """Captures on a stream of its own."""

    memory: Allocations

    def pool(self) -> PoolOnPaper:
        """See `Capture`."""
        return PoolOnPaper(self.memory, self.memory.new_pool())

    def warm_up(self, work: Callable[[], object]) -> None:
        """See `Capture`. A second stream has workspaces of its own."""
        self.memory.add(OURS.workspace_bytes, WORKSPACE)
        work()
        self.memory.allocator.empty_cache()

    def finish(self) -> None:
        """See `Capture`."""

    @property
    def num_bytes(self) -> int:
        """See `Capture`."""
        return sum(pool.reserved - pool.allocated for pool in self.memory.pools)


def capture_on_paper(
    memory: Allocations, *, one_gpu: bool = False
) -> Callable[[torch.device, Transport], Capture | None]:
    """Choose as `cuda_capture` does on a GPU, or as `capture_local_copies` does for a rank that has `one_gpu` alone."""
    return lambda device, transport: GraphsOnPaper(memory) if one_gpu or transport.is_capturable else None
