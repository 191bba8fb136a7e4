"""Layers as CUDA graphs (`triweave/graphs`): what their slots take for good, and what of a layer stays outside of them.

A slot is one micro-batch in flight: memory of its own, in which the passes of a stage's layers are captured one after
the other. What it takes is what the caching allocator reserves for them, so their tapes are put to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from triweave.layout import Layout, Schedule
from triweave.planner.allocator import CachingAllocator, MemoryBlock
from triweave.planner.memory_moments import saturating_micro_batches
from triweave.planner.memory_ours import Unit, layer_block
from triweave.planner.sizes import Sizes
from triweave.planner.tape import Block, Pass, Step, Tape
from triweave.schedule.build import rank_order
from triweave.schedule.slots import most_in_flight

_BOUNDLESS = 2**62
_CASTS = "by rows", "by columns"


def graphs_bytes(layout: Layout, rank: int, num_micro_batches: int, s: Sizes, *, expandable: bool) -> int:
    """What all slots of a rank take, and the places that are copied to: inputs, rotations, gradients of outputs."""
    split = layout.schedule == "zero-bubble"
    total = 0 if split else s.slice
    for stage, count in slots_of(layout, rank, num_micro_batches):
        places = s.slice * (2 if split else 1) + 2 * s.rotary
        total += count * (places + slot_bytes(s, layout.layers[stage], split, expandable))
    return total


@lru_cache(maxsize=4096)
def _slots(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int, rank: int) -> tuple[tuple[int, int], ...]:
    return tuple(most_in_flight(rank_order(schedule, rank, pp, vpp, num_micro_batches)).items())


def slots_of(layout: Layout, rank: int, num_micro_batches: int) -> Sequence[tuple[int, int]]:
    """Virtual stages of a rank and their slots."""
    schedule, pp, vpp = layout.schedule, layout.pp, layout.vpp
    return _slots(schedule, pp, vpp, saturating_micro_batches(schedule, pp, vpp, num_micro_batches), rank)


@lru_cache(maxsize=4096)
def slot_bytes(s: Sizes, num_layers: int, split: bool, expandable: bool) -> int:
    """What an allocator of its own reserves for one micro-batch of `num_layers` layers, all their passes in order.

    Of what leaves a layer the output is held until its own backward is over, the last layer's to the end, and the
    gradient of its input until what reads that is over (`graphs/capture.py`).
    """
    block = layer_block(s, Unit())
    slot = _Slot(CachingAllocator(_BOUNDLESS, expandable))
    for layer in range(num_layers):
        slot.run(block.forward.steps, layer)
    later = _made_later(s) if split else {}
    # The last step frees what the layer before reads.
    backward = [step for step in block.backward.steps[:-1] if step[0] not in later]
    put_off = _put_off(backward, s) if split else frozenset()
    for layer in reversed(range(num_layers)):
        slot.run(backward, layer, put_off)
        if layer < num_layers - 1:
            slot.free(layer, "output")
            if not (split and _reads_gradients_as_they_are(s)):
                slot.free(layer + 1, "gradient")
    # As the first weight half begins, all that waits for the others is there.
    slot.run([(name, size) for name, size in later.items() if size], num_layers)
    return slot.allocator.peak_reserved


def _put_off(steps: Sequence[Step], s: Sizes) -> frozenset[int]:
    """Which steps of a backward, by their places, free nothing where its weight half comes later.

    It reads inputs of products, which may have been computed again and given up before, and output gradients.
    """
    if s.keeps_columns:
        inputs = [f"{name} by columns" for name in ("attention input", "attention output", "mlp input", "product")]
        gradients = ["gradient by columns"]
    else:
        gathered = "gathered " if s.keeps_gathered and s.sequence_parallel else ""
        cast = " by columns" if s.fp8 else ""
        inputs = [f"{gathered}attention input", f"{gathered}mlp input", f"attention output{cast}", f"product{cast}"]
        gradients = ["gathered gradient" if s.sequence_parallel else "gradient"]
        gradients += [] if s.fp8 else ["projected gradient"]
    freed: dict[str, list[int]] = {}
    for place, (name, size) in enumerate(steps):
        if size < 0:
            freed.setdefault(name, []).append(place)
    places = [place for name in inputs for place in freed.get(name, [])[-1:]]
    places += [place for name in gradients for place in freed.get(name, [])]
    if s.fp8 and not s.keeps_columns:
        # Of a sum's gradient, which was gathered, the cast by columns is made in the weight half: of every other one.
        places += freed.get("gradient by columns", [])[1::2]
    return frozenset(places)


def _made_later(s: Sizes) -> dict[str, int]:
    """What a column-parallel product's weight half makes for itself: its gathered input, and that cast."""
    gathered = {} if s.keeps_gathered else {f"gathered {name} input": s.gathered for name in ("mlp", "attention")}
    return gathered if s.keeps_columns else gathered | {"input by columns": s.in_fp8(s.hidden)}


def _reads_gradients_as_they_are(s: Sizes) -> bool:
    """Whether a weight half reads the gradient of a layer's output itself: not gathered, nor cast before."""
    return not s.sequence_parallel and not s.keeps_columns


class _Slot:
    """Tensors by layer and name."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.blocks: dict[tuple[int, str], MemoryBlock] = {}

    def free(self, layer: int, name: str) -> None:
        self.allocator.release(self.blocks.pop((layer, name)))

    def run(self, steps: Sequence[Step], layer: int, put_off: frozenset[int] = frozenset()) -> None:
        for place, (name, size) in enumerate(steps):
            later = f", put off at {place}" if place in put_off else ""
            self._run(name, size, layer, later)
            if name.endswith(_CASTS):
                # Each cast has a scale, which takes a block of its own.
                self._run(f"{name}, scale", (size > 0) - (size < 0), layer, later)

    def _run(self, name: str, size: int, layer: int, put_off: str) -> None:
        if size > 0:
            self.blocks[layer, name] = self.allocator.allocate(size)
            return
        old, _, new = (name, "", name + put_off) if size < 0 else name.partition(">")
        block = self.blocks.pop((layer, old), None)
        if block is None:
            return
        if size < 0 and not put_off:
            self.allocator.release(block)
        else:
            self.blocks[layer, new] = block


def layers_block(s: Sizes) -> Block:
    """What of a stage's layers lies outside of their slots: what comes in, and the gradient that goes out."""
    f = Tape({"input": s.slice})
    f.make("rotary tables", 2 * s.rotary)
    b = Tape({"gradient": s.slice})
    b.make("input's gradient", s.slice)
    return Block({}, Pass.of(f), Pass.of(b))


def without_input(block: Block) -> Block:
    """The head after layers in a slot: its input lies there."""
    size = block.kept["input"]
    kept = {name: bytes_ for name, bytes_ in block.kept.items() if name != "input"}
    return Block(kept, _without(block.forward, size), _without(block.backward, size), block.put_off)


def _without(one: Pass, size: int) -> Pass:
    at_peak = dict(one.at_peak)
    # Where it is freed before the peak it was no part of it.
    found = size if at_peak.pop("input", 0) else 0
    return Pass(one.steps, one.peak - found, at_peak)
