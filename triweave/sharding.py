"""The data-parallel axis: what its ranks share out of weights, gradients and optimizer state.

A *unit* (a layer, the embedding, the norm, the head) is one flat buffer; its parameters are views into it. Every
rank owns an equal slice, its *shard*, of each unit's float32 master weights, moments and reduced gradients.

    shard       weights       gradient sums     master weights, moments      (Rajbhandari et al. 1910.02054)
    none        whole         whole             whole
    optimizer   whole         whole             shard                        ZeRO-1
    gradients   whole         shard             shard                        ZeRO-2
    full        shard         shard             shard                        ZeRO-3, FSDP

Gradient sums are float32 and are added to by the layers themselves (`gradients.main_grad`); whole ones are
reduced once a step, sharded ones after each unit's backward. Why this is not FSDP2: docs/decisions/0002.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triweave.collectives import all_reduce, gather_into, reduce_scatter_into
from triweave.gradients import WeightGradients
from triweave.groups import Group, Groups
from triweave.layout import Shard
from triweave.parameters import LocalParameter, Piece

ALIGNMENT = 64
"""Elements between which parameters start in a flat buffer: 128 bytes in bf16, what fast kernels ask for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements `[start, stop)` of a unit's flat buffer that hold one piece of one parameter."""

    parameter: LocalParameter
    piece: Piece
    start: int
    stop: int


class Unit:
    """Parameters that are gathered and reduced together."""

    def __init__(
        self,
        name: str,
        parameters: list[LocalParameter],
        groups: Groups,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.dp = groups.dp
        self.shard: Shard = shard if self.dp.size > 1 else "none"
        # Decayed parameters first, so that decay is one slice of the buffer.
        self.parameters = sorted(parameters, key=lambda parameter: not parameter.decay)
        self.offsets: dict[str, int] = {}
        end = decayed = 0
        for parameter in self.parameters:
            self.offsets[parameter.name] = end
            end = _round_up(end + parameter.numel, ALIGNMENT)
            decayed = end if parameter.decay else decayed
        self.numel = _round_up(end, ALIGNMENT * self.dp.size)
        self.num_decayed = decayed
        whole = self.shard == "none"
        self.shard_start = 0 if whole else self.dp.rank * (self.numel // self.dp.size)
        self.shard_stop = self.numel if whole else self.shard_start + self.numel // self.dp.size
        self.tied_copies = groups.tied.size if name == "embed" else 1

        device = groups.device
        self.weight = torch.zeros(self.numel, dtype=dtype, device=device)
        self.master = torch.empty(0)
        whole_gradients = self.shard in ("none", "optimizer")
        self.whole_gradient = self._zeros(self.numel, device) if whole_gradients else None
        self.gradient = (
            self.whole_gradient[self.shard_start : self.shard_stop]
            if self.whole_gradient is not None
            else self._zeros(self.shard_stop - self.shard_start, device)
        )
        self._holders: dict[str, nn.Parameter] = {}

    @staticmethod
    def _zeros(numel: int, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=device)

    # --- parameters -------------------------------------------------------------------------------------------

    def view(self, flat: Tensor, parameter: LocalParameter) -> Tensor:
        """The part of a flat buffer of this unit that is `parameter`, in its shape."""
        start = self.offsets[parameter.name]
        return flat[start : start + parameter.numel].view(parameter.shape)

    def make_parameter(self, parameter: LocalParameter) -> nn.Parameter:
        """The module's parameter: a view into the flat buffer."""
        # Through .data, so that refilling the buffer is no in-place change to what autograd has kept.
        holder = nn.Parameter(self.view(self.weight.data, parameter))
        self._holders[parameter.name] = holder
        self._place_main_grads()
        return holder

    def segments(self) -> Iterator[Segment]:
        """Every piece of every parameter, with its place in the flat buffer."""
        for parameter in self.parameters:
            for piece in parameter.pieces:
                row = parameter.numel // parameter.shape[0]
                rows = piece.local_shape[0]
                start = self.offsets[parameter.name] + piece.offset * row
                yield Segment(parameter, piece, start, start + rows * row)

    def in_shard(self, start: int, stop: int) -> slice | None:
        """Elements `[start, stop)` of the flat buffer as a slice of this rank's shard, None if it holds none."""
        first, last = max(start, self.shard_start), min(stop, self.shard_stop)
        return slice(first - self.shard_start, last - self.shard_start) if first < last else None

    # --- weights ----------------------------------------------------------------------------------------------

    def adopt_weights(self) -> None:
        """Take the float32 master shard from the weights that were just written into the parameters."""
        shard = self.weight[self.shard_start : self.shard_stop]
        # In float32 the weights are their own master, unless they are freed between uses.
        same = self.weight.dtype is torch.float32 and self.shard != "full"
        self.master = shard if same else shard.to(torch.float32, copy=True)
        self.release()

    def publish(self) -> None:
        """Give every rank the weights that the optimizer has just changed in the master shards."""
        if self.shard != "full":
            self._gather_weights()

    def gather(self) -> None:
        """Make the whole weights present (`full`: they are freed between uses)."""
        if self.shard == "full" and self.weight.untyped_storage().size() == 0:
            self.weight.untyped_storage().resize_(self.numel * self.weight.element_size())
            self._gather_weights()

    def release(self) -> None:
        """Free the whole weights (`full`)."""
        if self.shard == "full":
            self.weight.untyped_storage().resize_(0)

    def _gather_weights(self) -> None:
        mine = self.weight[self.shard_start : self.shard_stop]
        if mine.data_ptr() != self.master.data_ptr():
            mine.copy_(self.master)
        if self.shard != "none":
            gather_into(self.weight, mine, self.dp)

    # --- gradients --------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Set the gradient sums to zero for a new step."""
        (self.gradient if self.whole_gradient is None else self.whole_gradient).zero_()

    def begin_gradients(self) -> None:
        """Make room for whole gradients before the unit's backward, where only shards are kept."""
        if self.whole_gradient is None:
            self.whole_gradient = self._zeros(self.numel, self.gradient.device)
            self._place_main_grads()

    def end_gradients(self) -> None:
        """Add what the unit's backward gave to this rank's shard, where only shards are kept."""
        if self.shard not in ("gradients", "full") or self.whole_gradient is None:
            return
        mine = torch.empty_like(self.gradient)
        reduce_scatter_into(mine, self.whole_gradient, self.dp)
        self.gradient.add_(mine)
        self.whole_gradient = None
        self._place_main_grads()

    def reduce_gradients(self) -> None:
        """Sum over the data-parallel ranks, once a step, where whole gradients are kept."""
        if self.shard == "none" and self.dp.size > 1:
            all_reduce(self.gradient, self.dp)
        elif self.shard == "optimizer" and self.whole_gradient is not None:
            mine = torch.empty_like(self.gradient)
            reduce_scatter_into(mine, self.whole_gradient, self.dp)
            self.gradient.copy_(mine)

    def _place_main_grads(self) -> None:
        whole = self.whole_gradient
        for parameter in self.parameters:
            if parameter.name in self._holders:
                gradient = None if whole is None else self.view(whole, parameter)
                self._holders[parameter.name].main_grad = gradient  # type: ignore[attr-defined]


class Sharding:
    """All units of one rank."""

    def __init__(self, units: list[Unit], groups: Groups) -> None:
        self.units = units
        self.groups = groups

    def zero_gradients(self) -> None:
        """Set every gradient sum to zero."""
        for unit in self.units:
            unit.zero_gradients()

    def end_backward(self) -> None:
        """Reduce and free what a stage's backward has left: the embedding has no input whose gradient ends it."""
        for unit in self.units:
            unit.end_gradients()
            unit.release()

    def reduce_gradients(self) -> None:
        """Complete the step's gradients: over data-parallel ranks, then replicas, then the tied copies."""
        for unit in self.units:
            unit.reduce_gradients()
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
            square = unit.gradient.square().sum()
            for segment in unit.segments():
                inside = unit.in_shard(segment.start, segment.stop)
                if segment.piece.replicas > 1 and inside is not None:
                    square -= (1 - 1 / segment.piece.replicas) * unit.gradient[inside].square().sum()
            whole = unit.dp.size if unit.shard == "none" else 1
            total += square / (whole * unit.tied_copies)
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by `factor`."""
        torch._foreach_mul_([unit.gradient for unit in self.units], factor)

    def publish(self) -> None:
        """Bring the weights up to date with the master shards."""
        for unit in self.units:
            unit.publish()


def make_units(parameters: Iterable[LocalParameter], groups: Groups, shard: Shard, dtype: torch.dtype) -> list[Unit]:
    """Group a stage's parameters into units, in model order."""
    by_unit: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        by_unit.setdefault(parameter.unit, []).append(parameter)
    return [Unit(name, members, groups, shard, dtype) for name, members in by_unit.items()]


def place_parameters(stage: nn.Module, units: Iterable[Unit]) -> None:
    """Replace the parameters of `stage`, built on the meta device, by views into the units' buffers.

    Raises:
        RuntimeError: the module and the parameter list disagree on a name or a shape, which is a bug.
    """
    expected = {parameter.name: (unit, parameter) for unit in units for parameter in unit.parameters}
    made: dict[int, nn.Parameter] = {}
    for path, module in stage.named_modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) in made:
                setattr(module, name, made[id(old)])
                continue
            if f"{path}.{name}" not in expected:
                raise RuntimeError(f"{path}.{name} is not in the plan")
            unit, parameter = expected.pop(f"{path}.{name}")
            if tuple(old.shape) != parameter.shape:
                raise RuntimeError(f"{path}.{name} has shape {tuple(old.shape)}, its plan says {parameter.shape}")
            made[id(old)] = unit.make_parameter(parameter)
            setattr(module, name, made[id(old)])
    if expected:
        raise RuntimeError(f"parameters without a module: {', '.join(expected)}")


def shard_module(module: nn.Module, unit: Unit, weight_gradients: WeightGradients) -> None:
    """Gather `unit` around each use of `module`, and reduce its gradients after its backward."""

    def before_forward(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        unit.gather()
        return (_AfterBackward.apply(args[0], unit, weight_gradients), *args[1:])

    def after_forward(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        unit.release()
        result: Tensor = _BeforeBackward.apply(output, unit, weight_gradients)
        return result

    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward)


class _AfterBackward(torch.autograd.Function):
    """Identity; its backward comes when the module's backward is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit, weight_gradients: WeightGradients) -> Tensor:
        ctx.unit, ctx.weight_gradients = unit, weight_gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.unit.release()
        ctx.weight_gradients.submit(ctx.unit.end_gradients)
        return grad, None, None


class _BeforeBackward(torch.autograd.Function):
    """Identity; its backward comes when the module's backward is about to start."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit, weight_gradients: WeightGradients) -> Tensor:
        ctx.unit, ctx.weight_gradients = unit, weight_gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.unit.gather()
        ctx.weight_gradients.submit(ctx.unit.begin_gradients)
        return grad, None, None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
