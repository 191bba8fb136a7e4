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
    passes = [_Passes(layer, pool, weight_gradients) for layer in layers]
    for one in passes:
        x = one.forward(x, rotation, documents)
    for one in reversed(passes):
        grad_y = one.backward(grad_y, split=split)
    if split:
        for one in reversed(passes):
            one.weights()
    return Slot(places, rotation, documents, [one.replay(is_first=one is passes[0]) for one in passes])


class _Passes:
    """One layer while it is captured, and what its forward leaves for its backward."""

    def __init__(self, layer: Layer, pool: Pool, weight_gradients: WeightGradients) -> None:
        self.layer = layer
        self.pool = pool
        self.weight_gradients = weight_gradients
        self.made: Tensor | None = None
        self.later: list[Work] = []
        self.run_weights: Replay | None = None

    def forward(self, x: Tensor, rotation: Rotation, documents: Documents | None) -> Tensor:
        self.x = x.detach().requires_grad_()

        def work() -> Tensor:
            self.made = self.layer.compute(self.x, rotation, documents)
            return self.made

        made, self.run_forward = self._captured(work)
        self.y = made.detach()
        return self.y

    def backward(self, grad_y: Tensor, *, split: bool) -> Tensor:
        self.grad_y = grad_y

        def work() -> Tensor:
            made, self.made = self.made, None
            if made is None:
                raise RuntimeError("there was no forward")
            half: AbstractContextManager[list[Work]] = nullcontext([])
            with self.weight_gradients.deferring() if split else half as self.later:
                return torch.autograd.grad(made, self.x, grad_y)[0]

        # As it is: what a kernel has noted of a gradient is found again by the layer that reads it.
        self.grad_x, self.run_backward = self._captured(work)
        return self.grad_x

    def weights(self) -> None:
        def work() -> None:
            with torch.no_grad():
                for each in self.later:
                    each()

        _, self.run_weights = self.pool.capture(work)
        self.later = []

    def replay(self, *, is_first: bool) -> LayerReplay:
        """What is left of it when all is captured. The graphs know where everything lies, and need it held no more."""
        x, y, grad_y, grad_x = map(self.pool.address, (self.x.detach(), self.y, self.grad_y, self.grad_x))
        return LayerReplay(
            tuple(self.layer.parameters()),
            self.weight_gradients,
            x,
            y,
            grad_y,
            grad_x,
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
