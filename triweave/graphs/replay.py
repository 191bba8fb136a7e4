"""Layers as CUDA graphs: the host issues the forward of one in one call, and its backward in another.

A graph repeats the same kernels at the same addresses. What differs from one micro-batch to the next is copied to where
the graphs read it: the activation and its gradient where they come from outside the stage, the rotation, and where
packed documents end, of which there may be as many as there is room for. What forward keeps for backward must not be
overwritten while it is needed, so each micro-batch that a stage has in flight has a slot: a graph of each pass of each
layer, and memory that no other slot uses. Inside a slot the passes run in the order in which they were captured, so
that backward takes the memory of what it has used up, as it does without graphs.

A layer is the unit because what surrounds one stays as it is: weights that are waited for, gradients that are reduced
beside the backward of the layers that follow. Weights, their sums and their fp8 casts have to stay where they are. What
a graph adds to the sums it adds: they are set to zero before the first backward of a step.

Why so: docs/decisions/0016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from triweave.backward_calls import call_in_backward
from triweave.gradients import WeightGradients, main_grad
from triweave.layers.documents import Documents, Packed
from triweave.layers.fp8 import renew_casts
from triweave.layers.rotary import Rotation

Replay = Callable[[], None]


class Layer(Protocol):
    """What is captured: `llama.DecoderLayer`."""

    def compute(self, x: Tensor, rotation: Rotation, documents: Documents | None) -> Tensor:
        """`[seq/tp, batch, hidden]` to the same shape."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerReplay:
    """One layer's passes in one slot. Whoever calls it gets the layer's output, and autograd its backward."""

    parameters: tuple[nn.Parameter, ...]
    weight_gradients: WeightGradients
    x: Tensor
    """`[seq/tp, batch, hidden]`, where forward reads: the output of the layer before it lies there."""
    y: Tensor
    grad_y: Tensor
    """Where backward reads: the layer that comes next writes its input's gradient there."""
    grad_x: Tensor
    run_forward: Replay
    run_backward: Replay
    run_weights: Replay | None
    """The weight half of a backward that is split."""
    is_first: bool
    """Its input's gradient leaves the stage, and may be overwritten before it has arrived where it is needed."""

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output for `x`."""
        result: Tensor = _Replayed.apply(x, self)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Replay it; the result is overwritten when the slot is taken again."""
        for parameter in self.parameters:
            renew_casts(parameter)
        _put(x, self.x)
        self.run_forward()
        return self.y.detach()

    def backward(self, grad_y: Tensor) -> Tensor:
        """Replay it, the weight half when the schedule asks."""
        for parameter in self.parameters:
            main_grad(parameter)  # zeros, where nothing was added in this step
        _put(grad_y, self.grad_y)
        self.run_backward()
        if self.run_weights is not None:
            self.weight_gradients.submit(self.run_weights)
        return self.grad_x.clone() if self.is_first else self.grad_x.detach()


class _Replayed(torch.autograd.Function):
    """A layer whose two passes are graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, replay: LayerReplay) -> Tensor:
        ctx.replay = replay
        return replay.forward(x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        return ctx.replay.backward(grad_y), None


def _put(value: Tensor, place: Tensor) -> None:
    if value.data_ptr() != place.data_ptr():
        place.copy_(value)


@dataclass(slots=True, eq=False)
class Slot:
    """One micro-batch in flight of one stage."""

    places: tuple[Tensor, Tensor]
    """Where the input of the first layer is put, and the gradient of the last one's output: held here alone."""
    rotation: Rotation
    """Where its graphs read it."""
    documents: Documents | None
    """Likewise; None where its sequences are one document each."""
    layers: Sequence[LayerReplay]
    is_free: bool = True

    def fits(self, x: Tensor, rotation: Rotation, documents: Packed | None) -> bool:
        """Whether its graphs are of these shapes."""
        if documents is not None and self.documents is not None:
            packed = isinstance(documents, Documents) and documents.count <= self.documents.count
        else:
            packed = documents is self.documents
        return packed and self.layers[0].x.shape == x.shape and self.rotation.cos.shape == rotation.cos.shape

    def take(self, x: Tensor, rotation: Rotation, documents: Packed | None) -> Tensor:
        """Begin a micro-batch with `x`; gives `x` as the first layer is to take it."""
        self.is_free = False
        if self.documents is not None and isinstance(documents, Documents):
            self.documents.become(documents)
        self.rotation.cos.copy_(rotation.cos)
        self.rotation.sin.copy_(rotation.sin)
        return call_in_backward(x, self._end)

    def _end(self) -> None:
        # A weight half that is put off comes before this, which is put off with it.
        self.layers[0].weight_gradients.submit(self._free)

    def _free(self) -> None:
        self.is_free = True


@dataclass(slots=True, eq=False)
class StageGraphs:
    """The slots of one virtual stage; none until they are captured."""

    layers: Sequence[Layer]
    frequencies: Tensor
    """Of their rotation; see `rotary.make_rotation`."""
    slots: list[Slot] = field(default_factory=list)
    are_paused: bool = False
    """Whether layers run by themselves for now, for who looks inside them."""

    def slot_for(self, x: Tensor, rotation: Rotation, documents: Packed | None) -> Slot | None:
        """The slot of the micro-batch that comes next, None where its layers are to run without graphs.

        So it is before the capture, without gradients, for other shapes, for more documents than there is room for,
        and where more micro-batches are in flight than there are slots.
        """
        if self.are_paused or not torch.is_grad_enabled():
            return None
        return next((slot for slot in self.slots if slot.is_free and slot.fits(x, rotation, documents)), None)
