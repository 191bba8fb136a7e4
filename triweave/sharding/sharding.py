"""All units of one rank, through a step: weights there when they are used, gradients reduced when they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from triweave.collectives import all_reduce
from triweave.gradients import WeightGradients
from triweave.groups import Group, Groups
from triweave.schedule.actions import Action, Kind
from triweave.sharding.hooks import Passes, surround
from triweave.sharding.overlap import Gradients, Weights
from triweave.sharding.unit import ALIGNMENT, Unit
from triweave.transport.buffers import Memory


class Use(NamedTuple):
    """A module of a stage, and the unit that holds its parameters."""

    module: nn.Module
    unit: Unit
    reads_weights_again: bool = True
    """Whether its backward needs the weights, as a product's does and a lookup's does not."""


class Sharding:
    """All units of one rank."""

    def __init__(self, units: list[Unit], groups: Groups, memory: Memory) -> None:
        """Take units that were allocated in `memory`."""
        self.units = units
        self.memory = memory
        self.groups = groups
        self._uses: dict[int, list[Use]] = {}
        self._weights = Weights()
        self._gradients = Gradients()

    def follow(self, stage: int, uses: Iterable[Use], weight_gradients: WeightGradients) -> None:
        """Take care of a virtual stage's weights and gradients from now on.

        Args:
            stage: its number.
            uses: its modules, in the order of their forwards.
            weight_gradients: where the modules submit weight gradients, at once or to be run later.
        """
        self._uses[stage] = list(uses)
        for module, unit, reads_weights_again in self._uses[stage]:
            surround(module, self._passes(unit, weight_gradients, reads_weights_again))
        # The last module's forward and backward come when most is kept; the others' forwards have hidden what is left.
        gradients = self._gradients
        self._uses[stage][-1].module.register_forward_pre_hook(lambda *_: gradients.let_go())

    def _passes(self, unit: Unit, weight_gradients: WeightGradients, reads_weights_again: bool) -> Passes:
        # Modules hold what is made here, and this object holds modules: were it held in turn, nobody would free them
        # and their buffers when a run is over, before Python's cycle collector happens to pass.
        weights, gradients = self._weights, self._gradients

        def before_backward() -> None:
            if reads_weights_again:
                weights.use(unit)
            weight_gradients.submit(partial(gradients.open, unit))

        def after_backward() -> None:
            weights.leave(unit)
            weight_gradients.submit(partial(gradients.close, unit))

        return Passes(partial(weights.use, unit), partial(weights.leave, unit), before_backward, after_backward)

    # --- one run of the schedule ------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action]) -> None:
        """Prepare for what this rank does next: the order of use of the weights and the last gradients follow."""
        weights: list[Unit] = []
        backwards: Counter[Unit] = Counter()
        for action in actions:
            uses = self._uses.get(action.stage, [])
            if action.kind is Kind.FORWARD:
                weights += [use.unit for use in uses]
            elif action.kind is not Kind.BACKWARD_WEIGHT:
                weights += [use.unit for use in reversed(uses) if use.reads_weights_again]
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                backwards.update(use.unit for use in uses)
        self._weights.begin(weights)
        self._gradients.begin(backwards)

    def zero_gradients(self) -> None:
        """Set every gradient sum to zero."""
        for unit in self.units:
            unit.zero_gradients()

    def end_backward(self) -> None:
        """A stage's backward has left all its weight gradients."""
        self._gradients.close_all()

    def reduce_gradients(self) -> None:
        """Complete the step's gradients: over data-parallel ranks, then replicas, then the tied copies."""
        self._gradients.finish(self.units)
        self._sum_replicas(self.groups.tp, lambda piece: piece.partial and piece.replicas == self.groups.tp.size)
        if self.groups.kv.ranks != self.groups.tp.ranks:
            self._sum_replicas(self.groups.kv, lambda piece: piece.partial and piece.replicas == self.groups.kv.size)
        if self.groups.tied.size > 1:
            for unit in self.units:
                if unit.name == "embed":
                    all_reduce(unit.gradient, self.groups.tied)

    def _sum_replicas(self, group: Group, chosen: Any) -> None:
        """Sum the partial gradients of slices that several tensor-parallel ranks hold, in one all-reduce."""
        if group.size == 1:
            return
        parts = [
            unit.gradient[inside]
            for unit in self.units
            for segment in unit.segments()
            if chosen(segment.piece) and (inside := unit.in_shard(segment.start, segment.stop)) is not None
        ]
        if not parts:
            return
        together = torch.cat(parts)
        all_reduce(together, group)
        for part, summed in zip(parts, together.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed)

    def squared_gradient_norm(self) -> Tensor:
        """This rank's share of the squared norm of all gradients: every element counts once over the whole grid."""
        total = torch.zeros((), dtype=torch.float32, device=self.groups.device)
        for unit in self.units:
            # Row by row: nothing of the gradients' size is made, and no float32 sum is so long that it stands still.
            square = vector_norm(unit.gradient.view(-1, ALIGNMENT), dim=1).square().sum()
            for segment in unit.segments():
                inside = unit.in_shard(segment.start, segment.stop)
                if segment.piece.replicas > 1 and inside is not None:
                    square -= (1 - 1 / segment.piece.replicas) * unit.gradient[inside].square().sum()
            whole = unit.replicas.size if unit.shard == "none" else 1
            total += square / (whole * unit.tied_copies)
        return total

    def publish(self) -> None:
        """Start to bring the weights up to date with the master shards; each unit's next use waits for its own."""
        for unit in self.units:
            unit.publish()
