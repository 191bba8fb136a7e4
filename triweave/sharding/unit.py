"""A unit: parameters that are gathered and reduced together, in one flat buffer, of which every rank owns a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triweave.gradients import begin_sum, main_grad
from triweave.groups import Groups
from triweave.layers.fp8 import forget_casts
from triweave.layout import Shard
from triweave.parameters import LocalParameter, Piece
from triweave.sharing import shares_sums, shares_weights
from triweave.transport.buffers import Buffer, Memory, PlainBuffer, PlainMemory, Work

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
        """Lay the parameters out; `allocate` makes the buffers."""
        self.name = name
        self.replicas = groups.replicas
        self.device = groups.device
        self.dtype = dtype
        self.shard: Shard = shard if self.replicas.size > 1 else "none"
        # Decayed parameters first, so that decay is one slice of the buffer.
        self.parameters = sorted(parameters, key=lambda parameter: not parameter.decay)
        self.offsets: dict[str, int] = {}
        end = decayed = 0
        for parameter in self.parameters:
            self.offsets[parameter.name] = end
            end = _round_up(end + parameter.numel, ALIGNMENT)
            decayed = end if parameter.decay else decayed
        self.numel = _round_up(end, ALIGNMENT * self.replicas.size)
        self.num_decayed = decayed
        whole = self.shard == "none"
        self.shard_start = 0 if whole else self.replicas.rank * (self.numel // self.replicas.size)
        self.shard_stop = self.numel if whole else self.shard_start + self.numel // self.replicas.size
        self.tied_copies = groups.tied.size if name == "embed" else 1

        self.master = torch.empty(0)
        self._gathering: Work | None = None
        self._is_written = False
        self._holders: dict[str, nn.Parameter] = {}

    def allocate(self, memory: Memory) -> None:
        """Make the buffers, of zeros: in `memory` those that stand all through a run and are whole.

        Where whole weights are freed between uses (`full`) they are not there now either: see `filling`.
        """
        plain = PlainMemory(self.replicas, self.device)
        self._weights = (memory if shares_weights(self.shard) else plain).buffer(self.numel, self.dtype)
        self._sums: Buffer | None = memory.buffer(self.numel, torch.float32) if shares_sums(self.shard) else None
        self.gradient = (
            self._zeros(self.shard_stop - self.shard_start, self.device)
            if self._sums is None
            else self._owned(self._sums.whole)
        )
        self.release()

    @property
    def weight(self) -> Tensor:
        """The flat buffer of whole weights, `[numel]`."""
        return self._weights.whole

    @property
    def whole_gradient(self) -> Tensor | None:
        """The flat buffer of whole gradient sums, float32 `[numel]`, if there is one now."""
        return None if self._sums is None else self._sums.whole

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
        freed = self._is_freed
        if freed:
            self._take_back()  # a view can only be made of what is there
        # Through .data, so that refilling the buffer is no in-place change to what autograd has kept.
        holder = nn.Parameter(self.view(self.weight.data, parameter))
        self._holders[parameter.name] = holder
        if freed:
            self.release()
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

    def make_room(self) -> None:
        """Have whole weights, all zeros where they were freed, for someone to write."""
        if self._is_freed:
            self._take_back()
            self.weight.zero_()

    def adopt_weights(self) -> None:
        """Take the float32 master shard from the weights that were just written into the parameters."""
        shard = self._owned(self.weight)
        self.master = shard if self._is_own_master else shard.to(torch.float32, copy=True)
        self._forget_casts(changed=True)
        self.release()

    def publish(self) -> None:
        """Start to give every rank the weights that the optimizer has just changed in the master shards."""
        self._forget_casts(changed=True)
        if self.shard != "full":
            self.finish_gather()
            self._start_gather()

    def prefetch(self) -> None:
        """Start to make the whole weights present (`full`: they are freed between uses)."""
        if self._is_freed:
            self._take_back()
            self._start_gather()

    def gather(self) -> None:
        """Have the whole weights present, and up to date."""
        self.prefetch()
        self.finish_gather()

    def own(self) -> None:
        """Before the optimizer writes the masters: in float32 they are the weights, which peers may still be taking."""
        self.finish_gather()
        if self._is_own_master:
            self._weights.reclaim()

    def own_weights(self) -> Tensor | None:
        """This rank's shard of the whole weights, for the optimizer to write when it writes the masters.

        None where the masters are the weights, or where whole weights are freed between uses.
        """
        if self._is_own_master or self.shard == "full":
            return None
        self._weights.reclaim()
        self._is_written = True
        return self._owned(self.weight)

    def finish_gather(self) -> None:
        """Wait for a gather that was started (on a GPU: make the current stream wait)."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Free the whole weights (`full`)."""
        if self.shard == "full":
            self.finish_gather()
            self.weight.untyped_storage().resize_(0)
            self._forget_casts(changed=False)

    @property
    def _is_freed(self) -> bool:
        return self.shard == "full" and self.weight.untyped_storage().size() == 0

    def _take_back(self) -> None:
        self.weight.untyped_storage().resize_(self.numel * self.weight.element_size())

    def _forget_casts(self, *, changed: bool) -> None:
        for parameter in self._holders.values():
            forget_casts(parameter, changed=changed)

    def _start_gather(self) -> None:
        if not (self._is_own_master or self._is_written):
            self._weights.reclaim()
            self._owned(self.weight).copy_(self.master)
        self._is_written = False
        if self.shard != "none":
            self._gathering = self._weights.gather()

    @property
    def _is_own_master(self) -> bool:
        """In float32 the weights are their own master, unless they are freed between uses."""
        return self.dtype is torch.float32 and self.shard != "full"

    # --- gradients --------------------------------------------------------------------------------------------

    @property
    def shards_gradients(self) -> bool:
        """Whether only this rank's shard of the gradient sums stays after a backward (`gradients` and `full`)."""
        return self.shard in ("gradients", "full")

    def zero_gradients(self) -> None:
        """Begin the gradient sums of a new step."""
        if self._sums is None:
            self.gradient.zero_()
        else:
            self._sums.reclaim()
            for holder in self._holders.values():
                begin_sum(holder)

    def begin_gradients(self) -> None:
        """Make room for whole gradients before the unit's backward, where only shards are kept."""
        if self._sums is None:
            self._sums = PlainBuffer(self._zeros(self.numel, self.device), self.replicas)
            self._place_main_grads()

    def start_reduction(self) -> Reduction:
        """Start to sum the whole gradients over the data-parallel ranks; nothing may be added to them any more.

        Raises:
            RuntimeError: there are no whole gradients, which is a bug.
        """
        sums = self._sums
        if sums is None:
            raise RuntimeError(f"{self.name} has no whole gradients to reduce")
        for holder in self._holders.values():
            main_grad(holder)  # zeros, where nothing was added
        work = sums.all_reduce() if self.shard == "none" else sums.reduce_scatter()
        if self.shards_gradients:
            self._sums = None
            self._place_main_grads()
        return Reduction(self, sums.whole, work)

    def add_reduced(self, whole: Tensor) -> None:
        """Take what a reduction gave: where only shards are kept, add it to this rank's sums."""
        if self.shards_gradients:
            self.gradient.add_(self._owned(whole))

    def _owned(self, flat: Tensor) -> Tensor:
        return flat[self.shard_start : self.shard_stop]

    def _place_main_grads(self) -> None:
        whole = self.whole_gradient
        for parameter in self.parameters:
            if parameter.name in self._holders:
                gradient = None if whole is None else self.view(whole, parameter)
                self._holders[parameter.name].main_grad = gradient  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A unit's gradients on their way over the data-parallel ranks."""

    unit: Unit
    whole: Tensor
    """Held here until the collective is done with it."""
    work: Work | None

    def finish(self) -> None:
        """Wait for it (on a GPU: make the current stream wait) and hand its result to the unit."""
        if self.work is not None:
            self.work.wait()
        self.unit.add_reduced(self.whole)


def filling(units: Iterable[Unit]) -> Iterator[Unit]:
    """Each unit in turn, with its whole weights there to be written; they are adopted when the next is asked for.

    So a model that is too large for one GPU is filled on many, a unit at a time.
    """
    for unit in units:
        unit.make_room()
        yield unit
        unit.adopt_weights()


def make_units(parameters: Iterable[LocalParameter], groups: Groups, shard: Shard, dtype: torch.dtype) -> list[Unit]:
    """Group a stage's parameters into units, in model order; they have no buffers yet."""
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


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
