"""One virtual stage as a row of blocks: what a micro-batch keeps on it, and what its passes hold at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.parameters import holds_embedding, holds_head
from triweave.planner import memory_graphs, memory_megatron, memory_ours
from triweave.planner.assumptions import Assumptions
from triweave.planner.memory_ours import Unit
from triweave.planner.memory_states import shared_units, stage_units, weights_ahead
from triweave.planner.sizes import Sizes
from triweave.planner.tape import Block, Pass, total
from triweave.schedule.actions import Kind


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that an action of one micro-batch holds on its stage, its own kept tensors included."""

    bytes: int
    before: tuple[tuple[Mapping[str, int], int], ...]
    """What other blocks of the stage keep for this micro-batch: maps of bytes, and how often each."""
    during: Mapping[str, int]
    """What the block that peaks holds."""
    where: str


@dataclass(frozen=True, slots=True)
class StageTapes:
    """The blocks of a stage: some of one kind of layer, perhaps an embedding before and a head after them."""

    embedding: Block | None
    layer: Block
    num_layers: int
    head: Block | None
    shared: Mapping[str, int]
    """What a micro-batch keeps beside its blocks: the rotary tables that all layers share, perhaps the output."""
    weight_half: int = 0
    """The most that the weight half of a split backward takes: whole gradients, its own and those being reduced, and
    weights that are gathered for what follows."""
    layers_before: tuple[Block, ...] = ()
    """The layer again, as those run that come before the last one: what data-parallel ranks share differs there."""

    @property
    def blocks(self) -> list[tuple[Block, int, str]]:
        """Blocks in model order, how often each, and their names."""
        parts = [
            (self.embedding, 1, "the embedding"),
            (self.layer, self.num_layers, "a layer"),
            (self.head, 1, "the loss"),
        ]
        return [(block, times, name) for block, times, name in parts if block is not None and times]

    def one_by_one(self) -> list[Block]:
        """Every block in model order, layers before the last one as they are in backward."""
        ends = [[] if block is None else [block] for block in (self.embedding, self.head)]
        variants = (self.layer, *self.layers_before)
        layers = [variants[min(behind, len(variants) - 1)] for behind in reversed(range(self.num_layers))]
        return [*ends[0], *layers, *ends[1]]

    def kept(self) -> list[tuple[Mapping[str, int], int]]:
        """What one micro-batch keeps from forward to backward."""
        return [(self.shared, 1), *((block.kept, times) for block, times, _ in self.blocks)]

    @property
    def kept_bytes(self) -> int:
        """The same, in bytes."""
        return sum(self.shared.values()) + sum(block.kept_bytes * times for block, times, _ in self.blocks)

    def put_off(self) -> list[tuple[Mapping[str, int], int]]:
        """What one micro-batch keeps from the input half of its backward to the weight half."""
        return [(block.put_off, times) for block, times, _ in self.blocks]

    @property
    def put_off_bytes(self) -> int:
        """The same, in bytes."""
        return sum(block.put_off_bytes * times for block, times, _ in self.blocks)

    def peak(self, kind: Kind, leaving: int = 0, coming: int = 0) -> Peak:
        """The most that one action holds for its micro-batch.

        Args:
            kind: of the action.
            leaving: layers of another micro-batch that are still here and on their way to host memory, until the
                action's first layer is done (`Moment.leaving`).
            coming: layers of another micro-batch that are on their way back (`Moment.coming`).
        """
        peaks = []
        blocks = self.blocks
        for index, (block, times, name) in enumerate(blocks):
            earlier = [(self.shared, 1), *((other.kept, count) for other, count, _ in blocks[:index])]
            later = [(other.put_off, count) for other, count, _ in blocks[index + 1 :]]
            is_layer = block is self.layer
            variants = (block, *self.layers_before) if is_layer else (block,)
            # A layer's neighbour, whose turn was before in forward and is next in backward, is on its way as well; the
            # head finds the last layer still there, or back.
            near = [int(block is self.head)] if not is_layer else [int(times - 1 > n) for n in range(len(variants))]
            if kind is Kind.FORWARD:
                for behind, one in enumerate(variants):
                    # Below the last layer an earlier backward's gradients may still be in flight.
                    if behind == 0 or one is not block:
                        moving = (near[behind] or leaving) + coming
                        held = [*earlier, (block.kept, times - 1 - behind), *self._moving(moving)]
                        peaks.append(_peak(one.forward, held, f"forward of {name}"))
            elif kind is Kind.BACKWARD:
                for behind, one in enumerate(variants):
                    moving = near[behind] + coming + (leaving if behind == 0 and block is not self.embedding else 0)
                    held = [*earlier, (block.kept, times - 1 - behind), *self._moving(moving)]
                    peaks.append(_peak(one.backward, held, f"backward of {name}"))
            elif kind is Kind.BACKWARD_INPUT:
                # At the first layer to run backward all others are whole; at the last one they are put off.
                until_first = leaving if block is not self.embedding else 0
                first = [*earlier, (block.kept, times - 1), *later, *self._moving(near[0] + coming + until_first)]
                last = [*earlier, *later, (block.put_off, times - 1), *self._moving(coming)]
                peaks.append(_peak(block.backward, first, f"input backward of {name}"))
                peaks.append(_peak(block.backward, last, f"input backward of {name}"))
        if kind is Kind.BACKWARD_WEIGHT:
            working = {"sharding of the weight half": self.weight_half}
            held = [*self.put_off(), *self._moving(leaving + coming)]
            size = self.put_off_bytes + self.weight_half + self.layer.offloaded_bytes * (leaving + coming)
            return Peak(size, tuple(held), working, "weight backward")
        return max(peaks, key=lambda peak: peak.bytes)

    def _moving(self, layers: int) -> list[tuple[Mapping[str, int], int]]:
        """What layers keep that are on their way to host memory or back; layers are alike."""
        return [(self.layer.offloaded, layers)] if layers and self.layer.offloaded else []


def _peak(part: Pass, before: list[tuple[Mapping[str, int], int]], where: str) -> Peak:
    held = sum(sum(sizes.values()) * times for sizes, times in before)
    return Peak(held + part.peak, tuple(before), part.at_peak, where)


def stage_tapes(spec: ModelSpec, layout: Layout, stage: int, s: Sizes, dtype: str, a: Assumptions) -> StageTapes:
    """The blocks of virtual stage `stage`."""
    units = stage_units(spec, layout, stage, a)
    shared = shared_units(units, layout, stage, dtype, a)
    weight_half = 0
    if layout.schedule == "zero-bubble" and a.bookkeeping == "ours":
        # Whole gradients are made where the weight half begins with a unit, not in the input half.
        weight_half = max(unit.whole_gradients + unit.reducing for unit in shared.values())
        weight_half += weights_ahead(units, layout, dtype)
        shared = {name: replace(unit, whole_gradients=0, reducing=0) for name, unit in shared.items()}
    ends = holds_embedding(layout, stage), holds_head(layout, stage)
    return _tapes(s, a, layout.layers[stage], *ends, shared, weight_half)


def layer_offloaded(s: Sizes, a: Assumptions) -> Mapping[str, int]:
    """What one layer keeps in host memory from forward to backward, by tensor."""
    return _layer(s, a, Unit()).offloaded


@lru_cache(maxsize=4096)
def stage_kept_bytes(s: Sizes, a: Assumptions, num_layers: int, embedding: bool, head: bool) -> int:
    """What one micro-batch keeps on a stage from forward to backward, however its weights are shared."""
    return _tapes(s, a, num_layers, embedding, head, {}, 0).kept_bytes


def _tapes(
    s: Sizes,
    a: Assumptions,
    num_layers: int,
    embedding: bool,
    head: bool,
    shared: Mapping[str, Unit],
    weight_half: int,
) -> StageTapes:
    alone = Unit()
    if s.graphs:
        # Of layers nothing is kept but what came in, unless it was looked up here. Whole sums of gradients stand.
        after = memory_graphs.without_input(_head(s, a, alone)) if head else None
        before = _embedding(s, a, alone) if embedding else None
        kept = {} if embedding else {"stage input": s.slice}
        return StageTapes(before, memory_graphs.layers_block(s), num_layers, after, kept)
    per_micro_batch = {"rotary tables": 2 * s.rotary} if a.bookkeeping == "ours" else {}
    if a.keeps_stage_output and not head:
        per_micro_batch["stage output"] = s.slice
    return StageTapes(
        _embedding(s, a, shared.get("embed", alone)) if embedding else None,
        _layer(s, a, shared.get("layer", alone)),
        num_layers,
        _head(s, a, shared.get("head", alone)) if head else None,
        per_micro_batch,
        weight_half,
        tuple(_layer(s, a, unit) for name, unit in shared.items() if name.startswith("layer -")),
    )


@lru_cache(maxsize=4096)
def _embedding(s: Sizes, a: Assumptions, unit: Unit) -> Block:
    if a.bookkeeping == "ours":
        return memory_ours.embedding_block(s, unit)
    return memory_megatron.embedding_block(s, a, unit)


@lru_cache(maxsize=4096)
def _layer(s: Sizes, a: Assumptions, unit: Unit) -> Block:
    if a.bookkeeping == "ours":
        return memory_ours.layer_block(s, unit)
    return memory_megatron.layer_block(s, a, unit)


@lru_cache(maxsize=4096)
def _head(s: Sizes, a: Assumptions, unit: Unit) -> Block:
    if a.bookkeeping == "ours":
        return memory_ours.head_block(s, unit)
    return memory_megatron.head_block(s, a, unit)


def components_of(peak: Peak, others: list[tuple[Mapping[str, int], int]]) -> Counter[str]:
    """A peak's bytes by component: activations by tensor, the loss, and what only the moment itself needs."""
    kept_names = {name for sizes, _ in [*peak.before, *others] for name in sizes}
    result: Counter[str] = Counter()
    for name, size in total([*peak.before, *others]).items():
        result[_component(name, kept=True)] += size
    for name, size in peak.during.items():
        result[_component(name, kept=name in kept_names)] += size
    return result


_LOSS = ("logits", "logits' gradient", "probabilities", "float32 logits", "loss gradient", "float32 gradient", "slices")
_LOSS_ALSO = ("gathered logits", "loss mask", "row statistics", "head input", "normalised head input")


def _component(name: str, *, kept: bool) -> str:
    if name in _LOSS or name in _LOSS_ALSO:
        return f"logits and loss: {name}"
    if name in ("gathered weights", "whole gradients", "reduced gradients", "gradients in flight"):
        return f"sharding: {name}"
    return f"activations: {name}" if kept else f"working set: {name}"
