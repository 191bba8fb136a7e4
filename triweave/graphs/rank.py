"""The graphs of one rank: when they are captured, and of how many micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triweave.gradients import WeightGradients, begin_sum, main_grad
from triweave.graphs.capture import Capture, capture_slot
from triweave.graphs.replay import StageGraphs
from triweave.layers.fp8 import hold_casts
from triweave.layers.rotary import Rotation, make_rotation
from triweave.schedule.actions import Action, Kind


class Graphs:
    """Captured when the rank's second step begins: the first one loads kernels and fills caches."""

    def __init__(
        self, stages: Mapping[int, StageGraphs], weight_gradients: WeightGradients, capture: Capture | None
    ) -> None:
        """Take those of a rank's stages.

        Args:
            stages: by the stage's number.
            weight_gradients: where their layers submit weight gradients.
            capture: None captures nothing.
        """
        self._stages = stages
        self._weight_gradients = weight_gradients
        self._capture = capture
        self._is_warm = False

    @property
    def num_bytes(self) -> int:
        """What they take of the GPU beside what the caching allocator counts as allocated."""
        return 0 if self._capture is None else self._capture.num_bytes

    def begin(
        self, actions: Sequence[Action], shape: tuple[int, int, int], dtype: torch.dtype, positions: Tensor
    ) -> None:
        """A step comes next; nothing is in flight.

        Args:
            actions: what this rank will do in it.
            shape: of activations, `(seq/tp, batch, hidden)`.
            dtype: of the same.
            positions: of one of its micro-batches, `[seq, batch]`.
        """
        if self._capture is None or any(stage.slots for stage in self._stages.values()):
            return
        if not self._is_warm:
            self._is_warm = True
            return
        rotations = {
            number: make_rotation(stage.frequencies, positions, dtype) for number, stage in self._stages.items()
        }
        layers = [layer for stage in self._stages.values() for layer in stage.layers]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]

        def place() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=positions.device)

        def once() -> None:
            x, rotation = place().requires_grad_(), next(iter(rotations.values()))
            torch.autograd.grad(layers[0].compute(x, rotation, None), x, place())

        for parameter in parameters:
            hold_casts(parameter)
        self._capture.warm_up(once)
        for parameter in parameters:
            main_grad(parameter)  # what overwrites a former sum while it is captured would do so always
        split = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        # A weight half reads the gradient too, when another micro-batch may have put its own there.
        shared = None if split else place()
        for number, count in most_in_flight(actions).items():
            stage, own = self._stages[number], rotations[number]
            for _ in range(count):
                rotation = Rotation(own.cos.clone(), own.sin.clone())
                grad_y = place() if shared is None else shared
                stage.slots.append(
                    capture_slot(
                        stage.layers,
                        self._capture.pool(),
                        place(),
                        grad_y,
                        rotation,
                        self._weight_gradients,
                        split=split,
                    )
                )
        for parameter in parameters:
            begin_sum(parameter)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, layers run by themselves, for who looks at the modules within them."""
        for stage in self._stages.values():
            stage.are_paused = True
        try:
            yield
        finally:
            for stage in self._stages.values():
                stage.are_paused = False


def most_in_flight(actions: Sequence[Action]) -> Mapping[int, int]:
    """Of each stage, the most micro-batches at once between their forward and the end of their backward."""
    ends = Kind.BACKWARD_WEIGHT if any(action.kind is Kind.BACKWARD_WEIGHT for action in actions) else Kind.BACKWARD
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in actions:
        now[action.stage] += (action.kind is Kind.FORWARD) - (action.kind is ends)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return most
