"""Captures the passes of layers, slot by slot. What captures is given: CUDA, or a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from triweave.gradients import WeightGradients, Work
from triweave.graphs.replay import Layer, LayerReplay, Replay, Slot
from triweave.layers.documents import Documents
from triweave.layers.rotary import Rotation


class Pool(Protocol):
    """Memory of one slot, and who captures into it."""

    def capture(self, work: Callable[[], Tensor | None]) -> tuple[Tensor | None, Replay]:
        """Note all that `work` asks of the GPU; what it gives, and what does it."""
        ...

    def address(self, tensor: Tensor) -> Tensor:
        """`tensor` without a hold on its memory, which graphs write and nobody else may take."""
        ...


class Capture(Protocol):
    """Where and how graphs are captured."""

    def pool(self) -> Pool:
        """A new pool."""
        ...

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do once, where it will be captured, what will be: workspaces are made, and stay."""
        ...

    def finish(self) -> None:
        """All is captured. Peaks count from here on: while captures are made a pool counts as allocated, later not."""
        ...

    @property
    def num_bytes(self) -> int:
        """What all pools take of the GPU beside what the caching allocator counts as allocated."""
        ...


def capture_slot(
    layers: Sequence[Layer],
    pool: Pool,
    x: Tensor,
    grad_y: Tensor,
    rotation: Rotation,
    documents: Documents | None,
    weight_gradients: WeightGradients,
    *,
    split: bool,
) -> Slot:
    """Capture the passes of a stage's layers, in the order in which they will run.

    Args:
        layers: of one virtual stage.
        pool: nobody else's.
        x: `[seq/tp, batch, hidden]`, where the first layer's input will be put.
        grad_y: where the gradient of the last layer's output will be put.
        rotation: where that of each micro-batch will be put.
        documents: where those of each micro-batch will be put; None where its sequences are one document each.
        weight_gradients: where the layers submit weight gradients.
        split: whether the schedule has a weight half.
    """
    places = x, grad_y
    x_at, grad_at = map(pool.address, places)
    passes = [_Passes(layer, pool, weight_gradients) for layer in layers]
    for one in passes:
        x, x_at = one.forward(x, x_at, rotation, documents)
    for one in reversed(passes):
        grad_y, grad_at = one.backward(grad_y, grad_at, split=split)
    if split:
        for one in reversed(passes):
            one.weights()
    # To here the last output is held: the head's weight half may come after the layers' backward, and read it.
    del x
    return Slot(places, rotation, documents, [one.replay(is_first=one is passes[0]) for one in passes])


class _Passes:
    """One layer while it is captured, and what its forward leaves for its backward.

    The graphs know where everything lies. A tensor is held only until what reads it is captured, so that what comes
    later can have its memory.
    """

    def __init__(self, layer: Layer, pool: Pool, weight_gradients: WeightGradients) -> None:
        self.layer = layer
        self.pool = pool
        self.weight_gradients = weight_gradients
        self.ends: tuple[Tensor, Tensor] | None = None
        """What goes in and comes out."""
        self.later: list[Work] = []
        self.run_weights: Replay | None = None

    def forward(
        self, x: Tensor, x_at: Tensor, rotation: Rotation, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Its output, and where that lies."""
        x = x.detach().requires_grad_()

        def work() -> Tensor:
            y = self.layer.compute(x, rotation, documents)
            self.ends = x, y
            return y

        y, self.run_forward = self._captured(work)
        self.x_at, self.y_at = x_at, self.pool.address(y.detach())
        return y.detach(), self.y_at

    def backward(self, grad_y: Tensor, grad_y_at: Tensor, *, split: bool) -> tuple[Tensor, Tensor]:
        """Its input's gradient, and where that lies."""

        def work() -> Tensor:
            if self.ends is None:
                raise RuntimeError("there was no forward")
            (x, y), self.ends = self.ends, None
            half: AbstractContextManager[list[Work]] = nullcontext([])
            with self.weight_gradients.deferring() if split else half as self.later:
                return torch.autograd.grad(y, x, grad_y)[0]

        # As it is: what a kernel has noted of a gradient is found again by the layer that reads it.
        grad_x, self.run_backward = self._captured(work)
        self.grad_y_at, self.grad_x_at = grad_y_at, self.pool.address(grad_x)
        return grad_x, self.grad_x_at

    def weights(self) -> None:
        """Its weight half."""

        def work() -> None:
            with torch.no_grad():
                for each in self.later:
                    each()

        _, self.run_weights = self.pool.capture(work)
        self.later = []

    def replay(self, *, is_first: bool) -> LayerReplay:
        """What is left of it when all is captured."""
        return LayerReplay(
            tuple(self.layer.parameters()),
            self.weight_gradients,
            self.x_at,
            self.y_at,
            self.grad_y_at,
            self.grad_x_at,
            self.run_forward,
            self.run_backward,
            self.run_weights,
            is_first,
        )

    def _captured(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        made, replay = self.pool.capture(work)
        if made is None:
            raise RuntimeError("nothing was made")
        return made, replay
