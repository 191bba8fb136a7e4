"""The dry run of layers as CUDA graphs: what their slots take for good, and what stays outside of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_dryrun import SPEC, resolved

from triweave.config.validate import ResolvedRun
from triweave.dryrun.allocations import Allocations
from triweave.dryrun.card import META, Card
from triweave.dryrun.components import CAPTURE, GRAPHS, MESSAGES, WORKSPACE
from triweave.dryrun.graphs import PoolOnPaper
from triweave.dryrun.lone_rank import LAUNCH_QUEUE, lone_rank
from triweave.dryrun.memory import adopt_weights, enough_micro_batches, rank_memory
from triweave.dryrun.transport import transport_on_paper
from triweave.layers.rotary import make_rotation
from triweave.layout import Layout
from triweave.llama import DecoderLayer
from triweave.planner.allocator import MIB, CachingAllocator
from triweave.planner.forecast import stages_of
from triweave.schedule.build import build_schedule
from triweave.schedule.slots import most_in_flight
from triweave.training.engine import Engine, build_engine

SEQ, MICRO_BATCHES = 1024, 8
ACTIVATION = SEQ * SPEC.hidden_size * 2
ROTATION = 2 * SEQ * SPEC.head_dim * 2

LAYOUTS: dict[str, tuple[Layout, tuple[list[int], ...], dict[str, Any]]] = {
    "one": (Layout(), ([1],), {}),
    "two-sequences": (Layout(micro_batch=2), ([1],), {}),
    "tp2": (Layout(tp=2), ([1],), {}),
    "tp2-keep-gathered": (Layout(tp=2, keep_gathered=True), ([1],), {}),
    "pp2": (Layout(pp=2), ([2], [1]), {}),
    "tp2-pp4": (Layout(tp=2, pp=4), ([4], [3], [2], [1]), {}),
    "gpipe": (Layout(pp=2, schedule="gpipe"), ([8], [8]), {}),
    "interleaved": (Layout(pp=2, vpp=2, schedule="interleaved"), ([4, 2], [3, 1]), {}),
    "zero-bubble": (Layout(pp=2, schedule="zero-bubble"), ([2], [2]), {}),
    "layer": (Layout(tp=2, recompute=("layer",)), ([1],), {}),
    "norm-swiglu": (Layout(recompute=("norm", "swiglu")), ([1],), {}),
    "attention": (Layout(tp=2, recompute=("attention",)), ([1],), {}),
    "mlp": (Layout(recompute=("mlp",)), ([1],), {}),
    "replicas": (Layout(dp=2, shard="none"), ([1],), {}),
    "optimizer": (Layout(tp=2, dp=2), ([1],), {}),
    "float32": (Layout(), ([1],), {"dtype": "float32"}),
    "fp8": (Layout(), ([1],), {"fp8": True}),
    "fp8-tp2-pp2": (Layout(tp=2, pp=2, recompute=("swiglu",)), ([2], [1]), {"fp8": True}),
    "fp8-zero-bubble": (Layout(pp=2, schedule="zero-bubble"), ([2], [2]), {"fp8": True}),
}
"""With the micro-batches that each pipeline rank has in flight at most, by virtual stage: in 1F1B one for each
rank from its own on, in GPipe all."""


def both(layout: Layout, **model: Any) -> tuple[ResolvedRun, ResolvedRun]:
    """A run whose layers are issued kernel by kernel, and as graphs."""
    eager = resolved(layout, MICRO_BATCHES, **model)
    return eager, replace(eager, layout=replace(eager.layout, cuda_graphs=True))


@contextmanager
def engine_on_paper(run: ResolvedRun, rank: int) -> Iterator[tuple[Engine, Allocations]]:
    """The engine of a rank, and what follows its allocations inside."""
    memory = Allocations(lambda: ("", ""), CachingAllocator(2**60, expandable=True))
    transport = transport_on_paper(run.gpus_per_node, memory.set_apart)
    with lone_rank(rank, run.layout.world_size), memory, Card("auto", memory.handed_out):
        yield build_engine(run, META, adopt_weights, transport), memory


def slot_bytes(run: ResolvedRun, rank: int, *, split: bool) -> list[int]:
    """What one micro-batch of each stage's layers takes of an allocator of its own, forward, backward, weight halves.

    The last output stands to the end, for a head that comes to its weight half later.
    """
    found = []
    with engine_on_paper(run, rank) as (engine, memory):
        shape, dtype = engine.pipeline.activation_shape, engine.pipeline.dtype
        positions = torch.empty(SEQ, run.layout.micro_batch, dtype=torch.int64, device=META)
        for stage in engine.stages.values():
            layers = [layer for layer in stage.modules() if isinstance(layer, DecoderLayer)]
            rotation = make_rotation(stage.frequencies, positions, dtype)
            x, gradient = (torch.zeros(shape, dtype=dtype, device=META) for _ in range(2))
            # Once before, so that casts of weights are there.
            first = x.detach().requires_grad_()
            for layer in layers:
                torch.autograd.grad(layer.compute(first, rotation, None), first, gradient)
            main, memory.allocator = memory.allocator, CachingAllocator(2**60, expandable=True)
            held, work = [], []
            for layer in layers:
                x = x.detach().requires_grad_()
                held.append((x, layer.compute(x, rotation, None)))
                x = held[-1][1]
            last = held[-1][1].detach()
            while held:
                x, y = held.pop()
                if split:
                    with engine.tp.weight_gradients.deferring() as later:
                        (gradient,) = torch.autograd.grad(y, x, gradient)
                    work.append(later)
                else:
                    (gradient,) = torch.autograd.grad(y, x, gradient)
                del x, y
            with torch.no_grad():
                for each in [one for later in work for one in later]:
                    each()
            found.append(memory.allocator.peak_reserved)
            memory.allocator = main
            del last, work
    return found


@pytest.mark.parametrize(("layout", "slots", "model"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_slots_are_counted(layout: Layout, slots: tuple[list[int], ...], model: dict[str, Any]) -> None:
    """Graphs take what their slots' passes take in allocators of their own, and the places that are copied to.

    Everything else of the peak is what it is without graphs, but for the workspace of the stream that captures, the
    casts of weights, which stay, and activations: of a layer nothing but gradients that leave the stage is outside.
    """
    eager, graphs = both(layout, **model)
    split = layout.schedule == "zero-bubble"
    element = 2 if model.get("dtype") == "float32" else 1
    activation = ACTIVATION * layout.micro_batch // layout.tp * element
    for pp in {0, layout.pp - 1}:
        rank = layout.world_size // layout.pp * pp
        plain, found = rank_memory(eager, rank), rank_memory(graphs, rank)
        pools = slot_bytes(eager, rank, split=split)
        counts = slots[pp]
        places = sum(counts) * (activation * (2 if split else 1) + ROTATION * layout.micro_batch * element)
        places += 0 if split else activation
        assert found.components[GRAPHS] == sum(map(int.__mul__, counts, pools)) + places
        for name in ("weights", "gradients", "master weights", "optimizer moments", "batch"):
            assert found.components.get(name) == plain.components.get(name)
        assert found.components[WORKSPACE] == 2 * plain.components[WORKSPACE]
        assert sum(found.components.values()) == found.peak_bytes <= found.reserved_bytes
        assert found.peak_bytes > plain.peak_bytes
        assert found.at != CAPTURE
        assert ".layers." not in found.at


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_fewer_micro_batches_have_the_same_slots(schedule: Any, rank: int) -> None:
    """As many slots are made for the micro-batches that are played as for all of the step."""
    layout = Layout(pp=4, vpp=2 if schedule == "interleaved" else 1, schedule=schedule)
    for total in (4, 8, 16, 64):
        every = build_schedule(schedule, 4, layout.vpp, total).ranks[rank]
        few = enough_micro_batches(layout, rank, total, LAUNCH_QUEUE)
        assert most_in_flight(build_schedule(schedule, 4, layout.vpp, few).ranks[rank]) == most_in_flight(every)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=2, schedule="zero-bubble")], ids=str)
def test_what_slots_take_too_much_is_seen(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot more, a tensor that a pass leaves in its pool, and a place that is held twice are each in the peak."""
    _, graphs = both(layout)
    clean = rank_memory(graphs, 0)
    pool = slot_bytes(graphs, 0, split=layout.schedule == "zero-bubble")[0]
    slots = sum(most_in_flight(build_schedule(layout.schedule, layout.pp, 1, MICRO_BATCHES).ranks[0]).values())

    with monkeypatch.context() as patched:
        patched.setattr(
            "triweave.graphs.rank.most_in_flight", lambda actions: {stage: n + 1 for stage, n in find(actions).items()}
        )
        find = most_in_flight
        places = ACTIVATION * (2 if layout.schedule == "zero-bubble" else 1) + ROTATION
        assert rank_memory(graphs, 0).peak_bytes == clean.peak_bytes + pool + places

    with monkeypatch.context() as patched:
        kept: list[torch.Tensor] = []
        capture = PoolOnPaper.capture

        def leaving(self: PoolOnPaper, work: Any) -> Any:
            def leaves() -> Any:
                kept.append(torch.empty(20 * MIB, dtype=torch.uint8, device=META))
                return work()

            return capture(self, leaves)

        patched.setattr(PoolOnPaper, "capture", leaving)
        passes = len(graphs.layout.layers_of(0)) * (3 if layout.schedule == "zero-bubble" else 2)
        more = rank_memory(graphs, 0).peak_bytes - clean.peak_bytes
        # At the pool's fullest moment, in its first backward, all forwards have left one.
        assert more >= slots * 20 * MIB * (len(graphs.layout.layers_of(0)) + 1)
        assert more <= slots * 20 * MIB * passes

    with monkeypatch.context() as patched:
        patched.setattr(PoolOnPaper, "address", lambda self, tensor: tensor.clone())
        assert rank_memory(graphs, 0).peak_bytes > clean.peak_bytes


def test_what_is_not_captured_takes_no_slots() -> None:
    """Where tensor parallelism goes by collectives, layers are issued kernel by kernel, and the check says so."""
    eager, graphs = (replace(run, gpus_per_node=1) for run in both(Layout(tp=2)))
    plain, found = rank_memory(eager, 0), rank_memory(graphs, 0)
    assert GRAPHS not in found.components
    assert found.peak_bytes == plain.peak_bytes


def test_messages_wait_longer() -> None:
    """A graph is one launch: the host is further ahead than the kernels of layers allow, and more messages wait."""
    eager, graphs = both(Layout(pp=2))
    plain, found = rank_memory(eager, 0), rank_memory(graphs, 0)
    assert found.micro_batches == MICRO_BATCHES >= plain.micro_batches
    assert found.components[MESSAGES] >= plain.components[MESSAGES]


def test_what_the_first_step_leaves_is_given_back() -> None:
    """What layers took in the first step makes room for the pools: it is not reserved beside them."""
    _, graphs = both(Layout(micro_batch=8))
    found = rank_memory(graphs, 0)
    assert found.reserved_bytes < found.peak_bytes + 120 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.sampled_from(["keep", "free", "empty"])), max_size=60))
def test_an_emptied_segment_keeps_account(requests: list[tuple[int, str]]) -> None:
    """What is reserved is every page that holds something, whatever was freed and given back in between."""
    allocator, held = CachingAllocator(2**50, expandable=True), []
    for size, what in requests:
        if what == "empty":
            before = allocator.reserved
            allocator.empty_cache()
            assert allocator.allocated <= allocator.reserved <= before
        elif what == "free" and held:
            allocator.release(held.pop(len(held) // 2))
        held.append(allocator.allocate(size))
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
        free = [block for pool in allocator._free.values() for _, _, block in pool]
        assert all(block.unmapped <= block.size for block in free)
        whole = allocator.allocated + sum(block.size - block.unmapped for block in free)
        assert allocator.reserved == whole
    for block in held:
        allocator.release(block)
    allocator.empty_cache()
    assert allocator.allocated == allocator.reserved == 0


CLOSED_FORM = {name: case for name, case in LAYOUTS.items() if name != "float32"} | {
    "tp2-zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble"), (), {}),
    "keep-gathered-zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble", keep_gathered=True), (), {}),
    "norm-attention-zero-bubble": (Layout(pp=2, schedule="zero-bubble", recompute=("norm", "attention")), (), {}),
    "fp8-tp2-zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble"), (), {"fp8": True}),
    "fp8-layer": (Layout(tp=2, recompute=("layer",)), (), {"fp8": True}),
    "tp4-pp2-dp2": (Layout(tp=4, pp=2, dp=2), (), {}),
}
"""Attention in float32 keeps its scores, which no tape has."""


@pytest.mark.parametrize(("layout", "slots", "model"), CLOSED_FORM.values(), ids=CLOSED_FORM.keys())
def test_the_closed_form_agrees(layout: Layout, slots: object, model: dict[str, Any]) -> None:
    """What is said before a run is within 1 % of the check, and its slots within a page of theirs."""
    _, graphs = both(layout, **model)
    planned = stages_of(graphs)
    for pp in {0, layout.pp - 1}:
        found = rank_memory(graphs, layout.world_size // layout.pp * pp)
        told = planned[pp]
        assert told.peak_allocated_bytes == pytest.approx(found.peak_bytes + found.peer_bytes, rel=0.01)
        assert told.components["CUDA graphs"] == pytest.approx(found.components[GRAPHS], rel=0.03)
        assert sum(told.components.values()) == told.used_bytes


def test_the_closed_form_knows_what_is_not_captured() -> None:
    """Where slices go by collectives the prediction is that of layers without graphs."""
    eager, graphs = (stages_of(replace(run, gpus_per_node=1)) for run in both(Layout(tp=2)))
    assert [one.peak_allocated_bytes for one in graphs] == [one.peak_allocated_bytes for one in eager]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_packed_documents_are_captured(layout: Layout) -> None:
    """With several documents in a sequence layers run in slots too, which take what the closed form says."""
    _, graphs = both(layout)
    packed = replace(graphs, run=replace(graphs.run, data=replace(graphs.run.data, packing=True)))
    found, told = rank_memory(packed, 0), stages_of(packed)[0]
    assert found.components[GRAPHS] > 0
    assert told.peak_allocated_bytes == pytest.approx(found.peak_bytes + found.peer_bytes, rel=0.02)
