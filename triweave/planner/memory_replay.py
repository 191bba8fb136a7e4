"""A rank's requests, one after the other, put to the caching allocator: what it reserves and whether it gives up.

The tapes say what is made and freed; the schedule says in which order. Two steps are replayed, because the
optimizer's moments are made at the end of the first one, out of whatever that step has left free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.allocator import CachingAllocator, MemoryBlock, OutOfMemory
from triweave.planner.assumptions import OURS, Assumptions
from triweave.planner.memory import predict_memory, standing_bytes
from triweave.planner.memory_moments import saturating_micro_batches
from triweave.planner.memory_stage import StageTapes, stage_tapes
from triweave.planner.memory_states import ParameterUnit, stage_units, states_of
from triweave.planner.sizes import sizes_of
from triweave.planner.tape import Block, Step
from triweave.schedule.actions import Action, Kind
from triweave.schedule.build import build_schedule


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the allocator did. Bytes."""

    fits: bool
    peak_allocated: int
    peak_reserved: int
    at: str
    """Where it gave up; empty if it did not."""


def fits(
    spec: ModelSpec,
    layout: Layout,
    *,
    seq_len: int,
    num_micro_batches: int,
    capacity_bytes: int,
    dtype: str = "bfloat16",
    assumptions: Assumptions = OURS,
    deviations: float = 1.0,
) -> bool:
    """Whether every rank fits, with `deviations` standard deviations of the prediction to spare.

    With expandable segments the sums decide. Without them a rank whose tensors take more than half of its room is
    replayed: free memory in pieces of the wrong sizes is what such a run dies of.

    Args:
        spec: The model.
        layout: The grid.
        seq_len: Tokens of a sequence.
        num_micro_batches: Micro-batches of a step on one data-parallel rank.
        capacity_bytes: What the driver gives to programs (`Gpu.usable_bytes`).
        dtype: Of weights and activations.
        assumptions: Whose bookkeeping, and what lies beside the tensors.
        deviations: 0 asks whether it fits more likely than not.
    """
    arguments: dict[str, Any] = {
        "seq_len": seq_len,
        "num_micro_batches": num_micro_batches,
        "dtype": dtype,
        "assumptions": assumptions,
    }
    stages = predict_memory(spec, layout, **arguments)
    spare = int(deviations * assumptions.uncertainty * capacity_bytes)
    rooms = [capacity_bytes - spare - (stage.used_bytes - stage.reserved_bytes) for stage in stages]
    if any(stage.peak_allocated_bytes > room for stage, room in zip(stages, rooms, strict=True)):
        return False
    # A split backward is not replayed: its weight halves free tensors in pieces. Graphs have allocators of their own.
    if assumptions.expandable_segments or layout.schedule == "zero-bubble" or layout.cuda_graphs:
        return all(stage.reserved_bytes <= room for stage, room in zip(stages, rooms, strict=True))
    return all(
        replay_rank(spec, layout, stage.pp_rank, capacity=room, **arguments).fits
        for stage, room in zip(stages, rooms, strict=True)
        if 2 * stage.peak_allocated_bytes > room
    )


_Visit = tuple[int, int]
"""A virtual stage and a micro-batch."""
_Key = tuple[_Visit, int, str]


_OF_COLLECTIVES = (
    "attended",
    "down",
    "flat slices",
    "gathered gradient",
    "input's gradient",
    "input's other gradient",
    "normed gradient",
    "normed slice",
    "partial sum",
    "slice ",
)
"""Tensors that tensor parallelism's collectives read or write, as the tapes name them."""


class _Rank:
    """Tensors of one rank by micro-batch of a virtual stage, block and name."""

    def __init__(self, allocator: CachingAllocator, collectives_hold: bool) -> None:
        self.allocator = allocator
        self.collectives_hold = collectives_hold
        self.blocks: dict[_Key, MemoryBlock] = {}

    def make(self, key: _Key, size: int) -> None:
        self.blocks[key] = self.allocator.allocate(size)

    def free(self, key: _Key) -> None:
        block = self.blocks.pop(key, None)
        if block is None:
            return
        if self.collectives_hold and key[2].startswith(_OF_COLLECTIVES):
            self.allocator.hold_back(block)
        else:
            self.allocator.release(block)

    def move(self, key: _Key, to: _Key) -> None:
        block = self.blocks.pop(key, None)
        if block is not None:
            self.blocks[to] = block

    def clear(self) -> None:
        """Free what the buffers of a finished step still hold."""
        for key in tuple(self.blocks):
            self.free(key)

    def run(self, steps: Sequence[Step], visit: _Visit, block: int, spared: frozenset[str]) -> None:
        for name, size in steps:
            if size > 0:
                self.make((visit, block, name), size)
            elif size < 0:
                if name not in spared:
                    self.free((visit, block, name))
            else:
                old, _, new = name.partition(">")
                self.move((visit, block, old), (visit, block, new))


def replay_rank(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    *,
    seq_len: int,
    num_micro_batches: int,
    capacity: int,
    dtype: str = "bfloat16",
    assumptions: Assumptions = OURS,
) -> Replayed:
    """Two steps of pipeline rank `rank` on a card whose allocator may take `capacity` bytes."""
    a = assumptions
    s = sizes_of(spec, layout, seq_len, dtype, a)
    count = saturating_micro_batches(layout.schedule, layout.pp, layout.vpp, num_micro_batches)
    actions = build_schedule(layout.schedule, layout.pp, layout.vpp, count).ranks[rank]
    tapes = {stage: stage_tapes(spec, layout, stage, s, dtype, a) for stage in layout.stages_of(rank)}
    units = [unit for stage in tapes for unit in stage_units(spec, layout, stage, a)]
    states = states_of(units, layout, dtype, a)
    allocator = CachingAllocator(capacity)
    here = _Rank(allocator, a.collectives_hold and layout.tp > 1)
    at = "the weights"
    try:
        standing = standing_bytes(spec, layout, rank, s, num_micro_batches, dtype, a)
        # What comes later: moments with the first step's end, other micro-batches' logits with their forward.
        later = {"moments", "logits and loss: held over"} | ({"gradients"} if a.gradients_of_autograd else set())
        for name, size in standing.items():
            if name not in later:
                allocator.allocate(size)
        for step in range(2):
            for action in actions:
                at = f"step {step + 1}, {action}"
                own = units if a.gradients_of_autograd and action.micro_batch == 0 else []
                last = action.stage == layout.num_stages - 1
                _act(here, tapes[action.stage], action, a, last=last, gradients=own, again="layer" in s.recompute)
            here.clear()
            if step == 0:
                at = "the optimizer's first step"
                owned = states.moments // 2
                gradient = allocator.allocate(owned) if a.gradients_of_autograd else None
                for _ in range(2):
                    allocator.allocate(owned)
                if gradient is not None:
                    allocator.release(gradient)
    except OutOfMemory:
        return Replayed(False, allocator.peak_allocated, allocator.peak_reserved, at)
    return Replayed(True, allocator.peak_allocated, allocator.peak_reserved, "")


def _act(
    here: _Rank,
    tapes: StageTapes,
    action: Action,
    a: Assumptions,
    *,
    last: bool,
    gradients: Sequence[ParameterUnit],
    again: bool,
) -> None:
    visit = (action.stage, action.micro_batch)
    blocks = tapes.one_by_one()
    held_over = frozenset({"logits"}) if a.logits_held_over else frozenset()
    if action.kind is Kind.FORWARD:
        for number, block in enumerate(blocks):
            if number == 0:
                if tapes.embedding is None:
                    here.make((visit, 0, "input"), _size(block, "input"))
                for name, size in tapes.shared.items():
                    here.make((visit, -1, name), size)
            else:
                here.move((visit, number - 1, "output"), (visit, number, "input"))
            # Attention looks up the longest sequence, for which the host waits.
            here.allocator.wait()
            here.run(block.forward.steps, visit, number, frozenset())
        if last and held_over:
            earlier = (action.stage, action.micro_batch - 1 - a.logits_held_over)
            here.free((earlier, len(blocks) - 1, "logits"))
        if not last:
            here.free((visit, len(blocks) - 1, "output"))
        return
    for number in reversed(range(len(blocks))):
        block = blocks[number]
        if number == len(blocks) - 1 and not last:
            here.make((visit, number, "gradient"), _size(block, "gradient"))
        if again:
            here.allocator.wait()
        here.run(block.backward.steps[:-1] if number else block.backward.steps, visit, number, held_over)
        for unit in gradients[number:] if number == len(blocks) - 1 else gradients[number : number + 1]:
            for index, size in enumerate(unit.shapes):
                here.make(((action.stage, -1), number, f"{unit.name} {index}"), size * a.gradient_bytes)
        if number:
            here.move((visit, number, "gradient"), (visit, number - 1, "gradient"))
    here.free((visit, 0, "gradient"))
    for name in tapes.shared:
        here.free((visit, -1, name))


def _size(block: Block, name: str) -> int:
    return block.kept.get(name) or block.backward.at_peak.get(name) or max(block.kept.values())
