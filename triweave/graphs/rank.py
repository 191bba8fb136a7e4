"""The graphs of one rank: when they are captured, and of how many micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triweave.gradients import WeightGradients, begin_sum, main_grad
from triweave.graphs.capture import Capture, capture_slot
from triweave.graphs.replay import StageGraphs
from triweave.layers.documents import Documents, Packed
from triweave.layers.fp8 import hold_casts
from triweave.layers.rotary import Rotation, make_rotation
from triweave.schedule.actions import Action, Kind
from triweave.schedule.slots import most_in_flight


class Graphs:
    """Captured when the rank's second step begins: the first one loads kernels and fills caches."""

    def __init__(
        self,
        stages: Mapping[int, StageGraphs],
        weight_gradients: WeightGradients,
        capture: Capture | None,
        why_not: str = "",
    ) -> None:
        """Take those of a rank's stages.

        Args:
            stages: by the stage's number.
            weight_gradients: where their layers submit weight gradients.
            capture: None captures nothing.
            why_not: why it is None, for the log.
        """
        self._stages = stages
        self._weight_gradients = weight_gradients
        self._capture = capture
        self._why_not = why_not
        self._is_warm = False

    @property
    def name(self) -> str:
        """How layers are issued, as the log says it."""
        if self._capture is None:
            return f"issued kernel by kernel: {self._why_not}"
        return "issued as CUDA graphs from the second step on"

    @property
    def are_captured(self) -> bool:
        """Whether layers are, or will be when the second step begins."""
        return self._capture is not None

    @property
    def num_bytes(self) -> int:
        """What they take of the GPU beside what the caching allocator counts as allocated."""
        return 0 if self._capture is None else self._capture.num_bytes

    def begin(
        self,
        actions: Sequence[Action],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        positions: Tensor,
        documents: Sequence[Packed | None],
    ) -> None:
        """A step comes next; nothing is in flight.

        Args:
            actions: what this rank will do in it.
            shape: of activations, `(seq/tp, batch, hidden)`.
            dtype: of the same.
            positions: of one of its micro-batches, `[seq, batch]`.
            documents: of each of them.
        """
        if self._capture is None or any(stage.slots or stage.are_paused for stage in self._stages.values()):
            return
        if not self._is_warm:
            self._is_warm = True
            return
        packed = room_for(documents)
        rotations = {
            number: make_rotation(stage.frequencies, positions, dtype) for number, stage in self._stages.items()
        }
        layers = [layer for stage in self._stages.values() for layer in stage.layers]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]

        def place() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=positions.device)

        def once() -> None:
            x, rotation = place().requires_grad_(), next(iter(rotations.values()))
            torch.autograd.grad(layers[0].compute(x, rotation, packed), x, place())

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
                slot = capture_slot(
                    stage.layers,
                    self._capture.pool(),
                    place(),
                    place() if shared is None else shared,
                    Rotation(own.cos.clone(), own.sin.clone()),
                    packed if packed is None else packed.with_room(packed.count),
                    self._weight_gradients,
                    split=split,
                )
                stage.slots.append(slot)
        self._capture.finish()
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


def room_for(documents: Sequence[Packed | None]) -> Documents | None:
    """One of the micro-batches' documents, with room for twice as many as any of them has; None if one has none.

    A micro-batch of a later step may have more, and then runs without graphs. Each document that is not there costs
    attention a few blocks that end at once.
    """
    known = [each for each in documents if isinstance(each, Documents)]
    if len(known) < len(documents):
        return None
    return known[0].with_room(2 * max(each.count for each in known))
