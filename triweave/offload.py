"""Offload: what a layer keeps for backward waits in host memory, and is back when its backward comes.

Each tensor is copied out as soon as it is kept, beside what is computed. Its memory is given back at one place: where
the pass of the layer that comes next ends, once the computing stream was made to wait for the copies. It is taken
again, and filled, one layer ahead of the backward. So what a GPU holds does not depend on how fast copies are, and
memory is made, freed and made again by the computing stream alone: the caching allocator needs no word about others.

Tensors stay the same objects. Their storages are emptied and filled again, so whoever else holds one (a norm that is
computed again from it, the pipeline) need not know. Why so: docs/decisions/0014.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from triweave.backward_calls import call_in_backward
from triweave.layout import Offload
from triweave.pinned import give_back, host_memory

CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A place in host memory for one tensor."""

    memory: Tensor
    """uint8."""
    free: torch.cuda.Event | None = None
    """The copy that used it last; None where copies are done when they return."""


class HostPool:
    """Buffers by their size, made when there is none to take, and kept."""

    def __init__(self, device: torch.device) -> None:
        """`device` copies from and to them."""
        self._device = device
        self._made: list[Tensor] = []
        self._there: dict[int, list[HostBuffer]] = {}
        # At the end of the process the driver does it, whatever has become of the GPU.
        weakref.finalize(self, _give_all_back, self._made, device).atexit = False

    @property
    def num_bytes(self) -> int:
        """All that were made."""
        return sum(memory.nbytes for memory in self._made)

    def take(self, num_bytes: int) -> HostBuffer:
        """One that nobody uses; a copy into it must wait for its `free`."""
        there = self._there.setdefault(num_bytes, [])
        return there.pop() if there else HostBuffer(self._make(num_bytes))

    def put(self, buffer: HostBuffer) -> None:
        """Whoever takes it next may overwrite it after its `free`."""
        self._there[buffer.memory.numel()].append(buffer)

    def _make(self, num_bytes: int) -> Tensor:
        if self._device.type == "meta":
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        else:
            memory = host_memory(num_bytes, self._device)
        self._made.append(memory)
        return memory


def _give_all_back(made: Iterable[Tensor], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for memory in made:
        give_back(memory, device)


class Copies:
    """Copies in one direction of the bus, one after the other, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        """`device` is at one end. Where it is no GPU, copies are done when they return; on meta there is nothing to."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, to: Tensor, source: Tensor, after: torch.cuda.Event | None = None) -> None:
        """Copy behind all that the computing stream was given so far, and behind `after`."""
        if self._device.type == "meta":
            return
        if self._stream is None:
            to.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            self._copy(to, source)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """What to wait for to have all copies so far; `Event.wait` makes the computing stream do so."""
        return None if self._stream is None else self._stream.record_event()


@dataclass(slots=True, eq=False)
class LayerKept:
    """What one layer keeps of one micro-batch, and where it is."""

    before: LayerKept | None
    """Of the layer whose backward comes next; None where that is not of this stage."""
    copies: dict[int, tuple[Tensor, HostBuffer]] = field(default_factory=dict)
    """By storage, one tensor that lies in it: on its way out, or out; empty once all are back."""
    left: torch.cuda.Event | None = None
    """The last copy out."""
    arrived: torch.cuda.Event | None = None
    """The last copy back."""


class Offloader:
    """Moves what the layers of one rank keep. Layers call it in the order of their passes."""

    def __init__(self, kinds: tuple[Offload, ...] = (), device: torch.device = CPU) -> None:
        """Move `kinds` between `device`, which computes, and this host; by default nothing moves."""
        self.kinds = frozenset(kinds)
        self.pool = HostPool(device)
        self.last: LayerKept | None = None
        """Of the layer whose forward ran last, or runs, in this stage."""
        self._leaving: LayerKept | None = None
        """Of the pass that came before, where that was a forward: its memory is still there."""
        self._device = device
        self._out, self._back = Copies(device), Copies(device)

    # --- forward --------------------------------------------------------------------------------------------------

    def begin_stage(self) -> None:
        """The forward of a stage's first layer comes next."""
        self.last = None

    def layer(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`forward(x)` of one layer; what it keeps inside `of` leaves, and comes back for its backward."""
        if not self.kinds or not torch.is_grad_enabled():
            return forward(x)
        kept = self.last = LayerKept(self.last)
        y = forward(call_in_backward(x, partial(self._end_pass, None)))
        kept.left = self._out.mark()
        self._end_pass(kept)
        return call_in_backward(y, partial(self._begin_backward, kept))

    def of(self, kind: Offload) -> AbstractContextManager[object]:
        """Inside, what autograd keeps is `kind`'s."""
        if kind not in self.kinds or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._copy_out, _as_it_is)

    def _copy_out(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor that autograd keeps, with all of its storage and once."""
        storage = tensor.untyped_storage()
        # Masks and seeds of attention kernels are no activations.
        moves = tensor.device.type == self._device.type and tensor.is_floating_point() and storage.resizable()
        if moves and self.last is not None and storage._cdata not in self.last.copies:
            buffer = self.pool.take(storage.nbytes())
            self._out.start(buffer.memory, _bytes_of(tensor), after=buffer.free)
            self.last.copies[storage._cdata] = tensor, buffer
        return tensor

    def _end_pass(self, kept: LayerKept | None) -> None:
        """A layer's pass is over, a forward that `kept` something: free what the pass before it kept."""
        leaving, self._leaving = self._leaving, kept
        if leaving is not None:
            _wait_for(leaving.left)
            for tensor, _ in leaving.copies.values():
                tensor.untyped_storage().resize_(0)

    # --- backward -------------------------------------------------------------------------------------------------

    def _begin_backward(self, kept: LayerKept) -> None:
        self.bring_back(kept)
        _wait_for(kept.arrived)
        if kept.before is not None:
            self.bring_back(kept.before)

    def bring_back(self, kept: LayerKept) -> None:
        """Start to fill again what a layer kept; does nothing where it is on its way or has never left."""
        if not kept.copies:
            return
        copies = list(kept.copies.values())
        kept.copies.clear()
        if kept is self._leaving:
            self._leaving = None
            _wait_for(kept.left)
            done = kept.left
        else:
            for tensor, buffer in copies:
                tensor.untyped_storage().resize_(buffer.memory.numel())
                self._back.start(_bytes_of(tensor), buffer.memory)
            done = kept.arrived = self._back.mark()
        for _, buffer in copies:
            buffer.free = done
            self.pool.put(buffer)


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.wait()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of all of a tensor's storage, as a tensor whose writes autograd does not count."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
