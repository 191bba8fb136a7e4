"""Follows every byte of a card that is not there: what is made, resized and freed, for what, and the most at once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triweave.dryrun.components import CAPTURE, GRAPHS
from triweave.dryrun.scratch import scratch_bytes
from triweave.planner.allocator import CachingAllocator, MemoryBlock

ROUNDING = 512
"""Bytes that PyTorch's allocator rounds a request up to."""

_NO_KERNEL = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten._unsafe_view}


@dataclass(slots=True)
class Alive:
    """A storage on the card."""

    size: int
    """Rounded bytes."""
    component: str
    block: MemoryBlock | None
    allocator: CachingAllocator
    """What served it."""
    ref: weakref.ref[UntypedStorage]


@dataclass(slots=True)
class Peak:
    """The moment at which most was allocated."""

    size: int = 0
    components: Mapping[str, int] = field(default_factory=dict)
    at: str = ""


class Allocations(TorchDispatchMode):
    """Counts the storages of meta tensors that operations make inside. In-place operations and views make none."""

    def __init__(self, place: Callable[[], tuple[str, str] | None], allocator: CachingAllocator) -> None:
        """Start with nothing allocated.

        Args:
            place: component of what is made now, and where that is; None if it is not made on the card.
            allocator: what serves the requests.
        """
        super().__init__()
        self.place = place
        self.allocator = allocator
        self.pools: list[CachingAllocator] = []
        """What serves requests for good in places of their own; see `inside`."""
        self.pool: CachingAllocator | None = None
        """The one of them that serves now."""
        self.is_counting = True
        self.peak_reserved = 0
        self.alive: dict[int, Alive] = {}
        self.watched: dict[int, weakref.ref[UntypedStorage]] = {}
        self.launches = 0
        """Kernels so far, about: operations that are neither views nor empty allocations."""
        self.now = 0
        self.by_component: Counter[str] = Counter()
        self.peak = Peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and see what it has made."""
        if func.is_view:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if self.watched:
                self._look_at_watched()
            # Nothing is made where a result has its place; torch 2.11 cannot run addmm into float32 on meta.
            out = (kwargs or {}).get("out")
            filled = isinstance(out, Tensor) and out.is_meta and out.numel() > 0
            result = out if filled else func(*args, **(kwargs or {}))
            self.launches += func.overloadpacket not in _NO_KERNEL
            for value in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(value, Tensor) and value.is_meta:
                    self._see(value.untyped_storage())
            if scratch := scratch_bytes(func, args):
                self._use_scratch(scratch)
        return result

    def handed_out(self, storage: UntypedStorage) -> None:
        """Look at the size of a storage from now on: who has it can resize it."""
        one = self.alive.get(storage._cdata)
        if one is not None and one.allocator is self.allocator:
            self.watched[storage._cdata] = one.ref

    def name(self, tensor: Tensor, component: str) -> None:
        """Say what a tensor is for that was made elsewhere than that would be told from."""
        with torch._C.DisableTorchFunction():
            one = self.alive.get(tensor.untyped_storage()._cdata)
        if one is not None:
            self.by_component[one.component] -= one.size
            self.by_component[component] += one.size
            one.component = component

    def new_pool(self) -> CachingAllocator:
        """Memory of its own, for who goes `inside`."""
        self.pools.append(CachingAllocator(self.allocator.capacity, self.allocator.expandable))
        return self.pools[-1]

    @contextmanager
    def inside(self, pool: CachingAllocator) -> Iterator[None]:
        """Inside, `pool` serves the requests. What it reserves for them stays, and is what counts of them."""
        self.pool = pool
        try:
            yield
        finally:
            self.pool = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, what is made takes nothing of the card."""
        self.is_counting = False
        try:
            yield
        finally:
            self.is_counting = True

    def set_apart(self, tensor: Tensor) -> None:
        """Count a tensor no longer: another allocator has made it."""
        with torch._C.DisableTorchFunction():
            one = self.alive[tensor.untyped_storage()._cdata]
        if one.block is not None:
            one.allocator.release(one.block)
        self._count(-one.size, one.component, "")
        one.size, one.block = 0, None

    def add(self, size: int, component: str) -> None:
        """Take memory that no tensor holds, for good."""
        self._allocate(size)
        self._count(size, component, component)

    def _see(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self.alive:
            return
        place = self.place()
        size = _rounded(storage.nbytes())
        if place is None or not size:
            return
        component, at = place
        block = self._allocate(size) if self.is_counting else None
        if block is None or self.pool is not None:
            size = 0  # of a pool, all of it is counted
        self.alive[key] = Alive(
            size, component, block, self.pool or self.allocator, weakref.ref(storage, lambda _: self._free(key))
        )
        self._count(size, component, at)

    def _free(self, key: int) -> None:
        one = self.alive.pop(key)
        self.watched.pop(key, None)
        if one.block is not None:
            one.allocator.release(one.block)
        self.now -= one.size
        self.by_component[one.component] -= one.size

    def _look_at_watched(self) -> None:
        for key, ref in self.watched.items():
            storage = ref()
            one = self.alive[key]
            if storage is None or (size := _rounded(storage.nbytes())) == one.size:
                continue
            if one.block is not None:
                one.allocator.release(one.block)
            one.block = self._allocate(size) if size else None
            change, one.size = size - one.size, size
            place = self.place()
            self._count(change, one.component, place[1] if place else "")

    def _use_scratch(self, size: int) -> None:
        place = self.place()
        size = _rounded(size)
        component, at = place or ("", "")
        block = self._allocate(size)
        counted = size if self.pool is None else 0
        self._count(counted, component, at)
        (self.pool or self.allocator).release(block)
        self._count(-counted, component, at)

    def _allocate(self, size: int) -> MemoryBlock:
        serving = self.pool or self.allocator
        before = serving.reserved
        block = serving.allocate(size)
        if self.pool is not None:
            self._count(serving.reserved - before, GRAPHS, CAPTURE)
        reserved = self.allocator.reserved + sum(pool.reserved for pool in self.pools)
        self.peak_reserved = max(self.peak_reserved, reserved)
        return block

    def _count(self, change: int, component: str, at: str) -> None:
        self.now += change
        self.by_component[component] += change
        if self.now > self.peak.size:
            self.peak = Peak(self.now, dict(self.by_component), at)


def _rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING
