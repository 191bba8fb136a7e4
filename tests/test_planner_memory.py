"""The memory model: sums that add up, moments that saturate, an allocator that behaves, and published measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triweave.catalogue import find_model
from triweave.cluster import CATALOGUE
from triweave.layout import Layout, Recompute, Schedule, Shard, even_layers
from triweave.model_spec import ModelSpec
from triweave.parameters import stage_parameters
from triweave.planner.allocator import MIB, CachingAllocator, OutOfMemory
from triweave.planner.assumptions import MEGATRON, OURS, Assumptions
from triweave.planner.memory import StageMemory, predict_memory
from triweave.planner.memory_moments import saturating_micro_batches, worst_moments
from triweave.planner.memory_replay import replay_rank
from triweave.planner.memory_states import stage_units
from triweave.schedule import build_schedule, check_schedule, peak_held
from triweave.schedule.actions import Kind

LLAMA_70B = find_model("llama-3-70b")
H100 = CATALOGUE["h100-80gb"].usable_bytes


def memory(layout: Layout, *, seq_len: int = 4096, m: int = 32, a: Assumptions = OURS) -> tuple[StageMemory, ...]:
    """Llama-3-70B on a layout, its layers spread evenly."""
    layout = replace(layout, layers=even_layers(80, layout.num_stages))
    return predict_memory(LLAMA_70B, layout, seq_len=seq_len, num_micro_batches=m, assumptions=a)


# --- the sums ---------------------------------------------------------------------------------------------------------


LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 3]),
    micro_batch=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    shard=st.sampled_from(get_args(Shard)),
    recompute=st.sampled_from([(), ("norm",), ("swiglu", "attention"), ("mlp",), ("layer",)]),
)


@given(layout=LAYOUTS, megatron=st.booleans(), m=st.sampled_from([4, 12]))
def test_components_add_up(layout: Layout, megatron: bool, m: int) -> None:
    """The parts of every rank's memory are positive, and their sum is what the card shows as used."""
    for stage in memory(layout, m=m, a=MEGATRON if megatron else OURS):
        assert min(stage.components.values()) > 0
        assert sum(stage.components.values()) == stage.used_bytes
        assert stage.peak_allocated_bytes < stage.reserved_bytes < stage.used_bytes


@given(layout=LAYOUTS)
def test_keeping_less_never_costs_memory(layout: Layout) -> None:
    """Recomputing whole layers never peaks higher; a second sequence never lower.

    A weight half keeps all that its layers' backwards ran again: under zero-bubble nothing may be won on the last
    stage, and one activation is held while a layer runs again.
    """
    plain = [stage.peak_allocated_bytes for stage in memory(replace(layout, recompute=()))]
    again = [stage.peak_allocated_bytes for stage in memory(replace(layout, recompute=("layer",)))]
    double = [stage.peak_allocated_bytes for stage in memory(replace(layout, recompute=(), micro_batch=4))]
    held = layout.micro_batch * 4096 * LLAMA_70B.hidden_size * 2 if layout.schedule == "zero-bubble" else 0
    assert all(less <= more + held for less, more in zip(again, plain, strict=True))
    assert all(less <= more for less, more in zip(plain, double, strict=True))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shapes_are_the_trainers(tp: int) -> None:
    """The elements of every unit are those of `parameters.stage_parameters`, for each kind of model."""
    models = ["llama-3.2-1b", "qwen2.5-7b", "mistral-7b-v0.1", "llama-2-7b"]
    for spec in map(find_model, models):
        if spec.num_attention_heads % tp or (spec.num_key_value_heads % tp and tp % spec.num_key_value_heads):
            continue
        layout = Layout(tp=tp, pp=2, layers=even_layers(spec.num_hidden_layers, 2))
        for stage in range(2):
            real: dict[str, list[int]] = {}
            for parameter in stage_parameters(spec, layout, stage, 0):
                real.setdefault(parameter.unit, []).append(parameter.numel)
            planned = stage_units(spec, layout, stage, OURS)
            assert [sorted(unit.shapes) for unit in planned] == [sorted(sizes) for sizes in real.values()]


# --- the schedule -----------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(get_args(Schedule)),
    pp=st.integers(1, 5),
    vpp=st.integers(1, 3),
    groups=st.integers(1, 12),
)
@settings(max_examples=60)
def test_moments_are_those_of_the_whole_schedule(name: Schedule, pp: int, vpp: int, groups: int) -> None:
    """The worst moments of the shortened schedule hold as much as the full one does, weighted in any way."""
    if name != "interleaved":
        vpp = 1
    m = groups * pp
    schedule = build_schedule(name, pp, vpp, m)
    assert check_schedule(schedule) == []
    moments = [worst_moments(name, pp, vpp, m, rank) for rank in range(pp)]
    for weight in (lambda stage: 1, lambda stage: 1 + stage, lambda stage: pp * vpp - stage):
        held = peak_held(schedule, activations=weight, put_off=lambda stage: 0)
        for rank in range(pp):
            stages = range(rank, pp * vpp, pp)
            most = max(
                sum(n * weight(stage) for n, stage in zip(moment.held, stages, strict=True)) + weight(moment.stage)
                for moment in moments[rank]
                if moment.kind is not Kind.BACKWARD_WEIGHT
            )
            assert most == held[rank]
    assert saturating_micro_batches(name, pp, vpp, m) <= m


def test_earlier_ranks_hold_more_micro_batches() -> None:
    """Rank i of a 1F1B pipeline holds the activations of pp - i micro-batches; GPipe's all do of every one."""

    def activations(stage: StageMemory) -> int:
        names = ("query-key-value", "attention output")
        return sum(stage.components[f"activations: {name}"] for name in names)

    one = [activations(stage) for stage in memory(Layout(tp=8, pp=4))]
    assert one[0] == 2 * one[2]
    assert 3 * one[0] == 4 * one[1]
    everything = [activations(stage) for stage in memory(Layout(tp=8, pp=4, schedule="gpipe"), m=8)]
    assert everything[0] == 2 * one[0]


def test_the_moment_of_the_peak_is_named() -> None:
    """The answer says when a rank peaks: in a layer's backward with others in flight, or in the loss."""
    stages = memory(Layout(tp=8, pp=4))
    assert stages[0].at == "backward of a layer of stage 0, 3 other micro-batches in flight"
    assert "the loss of stage 3" in stages[3].at


# --- the story --------------------------------------------------------------------------------------------------------


def test_the_problem_this_package_starts_from() -> None:
    """70B on 32 H100: FSDP dies without recompute and runs with it; TP 8 x PP 4 fits with room."""
    (plain,) = memory(Layout(dp=32, shard="full"), m=4)
    (again,) = memory(Layout(dp=32, shard="full", recompute=("layer",)), m=4)
    grid = memory(Layout(tp=8, pp=4))
    assert plain.peak_allocated_bytes > H100
    assert "backward" in plain.at
    assert plain.out_of_memory_probability(H100) > 0.999
    assert again.out_of_memory_probability(H100) < 0.01
    assert max(stage.used_bytes for stage in grid) < 0.75 * H100


def test_probability_is_even_at_the_edge() -> None:
    """A card that is exactly as large as the prediction overflows with probability one half."""
    stage = memory(Layout(tp=8, pp=4))[0]
    assert stage.out_of_memory_probability(stage.used_bytes) == pytest.approx(0.5)
    assert stage.out_of_memory_probability(2 * stage.used_bytes) < 1e-9
    assert stage.out_of_memory_probability(0) == 0.0


# --- the allocator ----------------------------------------------------------------------------------------------------


def test_segments_are_those_of_pytorch() -> None:
    """Small, middle and large requests take 2 MiB, 20 MiB and their own size in whole pages."""
    for size, segment in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ):
        allocator = CachingAllocator(10**12)
        allocator.allocate(size)
        assert allocator.reserved == segment
        assert size <= allocator.allocated <= size + MIB


def test_freed_memory_is_used_again() -> None:
    """A freed block serves the next request; neighbours join; a piece in use keeps its segment from being returned."""
    allocator = CachingAllocator(100 * MIB)
    first = allocator.allocate(60 * MIB)
    allocator.release(first)
    halves = [allocator.allocate(30 * MIB) for _ in range(2)]
    assert allocator.reserved == 60 * MIB
    for half in halves:
        allocator.release(half)
    pinned = allocator.allocate(20 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(61 * MIB)
    allocator.release(pinned)
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 100 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), max_size=60))
def test_allocator_never_loses_memory(requests: list[tuple[int, bool]]) -> None:
    """Reserved memory is at least what is handed out, and everything freed leaves nothing handed out."""
    allocator = CachingAllocator(10**12)
    held = []
    for size, release in requests:
        held.append(allocator.allocate(size))
        if release:
            allocator.release(held.pop(len(held) // 2))
        assert allocator.allocated == sum(block.size for block in held)
        assert allocator.allocated <= allocator.reserved <= allocator.peak_reserved
    for block in held:
        allocator.release(block)
    assert allocator.allocated == 0


@pytest.mark.parametrize("a", [OURS, MEGATRON], ids=["ours", "megatron"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8, pp=4),
        Layout(tp=4, pp=2, dp=2, micro_batch=2, recompute=("layer",)),
        Layout(tp=8, pp=2, vpp=2, schedule="interleaved"),
        Layout(dp=8, shard="full", recompute=("layer",)),
        Layout(tp=8, pp=2, sequence_parallel=False, schedule="gpipe"),
    ],
    ids=str,
)
def test_replay_peaks_where_the_sums_say(layout: Layout, a: Assumptions) -> None:
    """Tensor by tensor through the schedule, the allocator hands out the predicted peak."""
    spec = replace(LLAMA_70B, num_hidden_layers=8)
    layout = replace(layout, layers=even_layers(8, layout.num_stages))
    arguments: dict[str, Any] = {"seq_len": 2048, "num_micro_batches": 8, "assumptions": a}
    for stage in predict_memory(spec, layout, **arguments):
        replayed = replay_rank(spec, layout, stage.pp_rank, capacity=10**13, **arguments)
        assert replayed.fits
        if stage.at == "optimizer step":
            continue
        assert replayed.peak_allocated == pytest.approx(stage.peak_allocated_bytes, rel=0.005)
        if replayed.peak_reserved > stage.peak_allocated_bytes:
            tight = replay_rank(spec, layout, stage.pp_rank, capacity=stage.peak_allocated_bytes * 9 // 10, **arguments)
            assert not tight.fits
            assert tight.at


def test_other_models_are_priced() -> None:
    """Qwen3's head norms and an MLP without a gate change what is counted."""
    qwen = find_model("qwen3-8b")
    layout = Layout(tp=2, layers=(36,))
    plain = predict_memory(replace(qwen, qk_norm=False), layout, seq_len=1024, num_micro_batches=1)[0]
    normed = predict_memory(qwen, layout, seq_len=1024, num_micro_batches=1)[0]
    assert 0 < normed.components["weights"] - plain.components["weights"] <= 36 * 2 * 128 * 2
    gpt: ModelSpec = replace(qwen, gated_mlp=False)
    assert predict_memory(gpt, layout, seq_len=1024, num_micro_batches=1)[0].used_bytes < plain.used_bytes


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"fp8_inputs": True}, {}),
        ({"attention": "recomputed-softmax"}, {"attention": "softmax"}),
        ({}, {"keeps_stage_output": True}),
    ],
    ids=["fp8", "recomputed scores", "stage output"],
)
def test_what_is_kept_between_the_passes(less: dict[str, Any], more: dict[str, Any]) -> None:
    """Inputs in one byte, scores made again and outputs freed when sent each hold less on a rank with micro-batches."""
    few, many = (memory(Layout(tp=8, pp=4), a=replace(MEGATRON, **changes))[0] for changes in (less, more))
    assert few.peak_allocated_bytes < many.peak_allocated_bytes


def test_what_another_stream_uses_is_not_given_out() -> None:
    """A block held back stays taken until the host waits, or until the card is full and the allocator waits itself."""
    allocator = CachingAllocator(capacity=60 * MIB)
    allocator.hold_back(allocator.allocate(20 * MIB))
    assert allocator.allocated == 0
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.wait()
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 40 * MIB
    full = CachingAllocator(capacity=30 * MIB)
    full.hold_back(full.allocate(20 * MIB))
    full.allocate(30 * MIB)
    assert full.reserved == 30 * MIB


def test_recompute_names_are_all_priced() -> None:
    """Every kind of recompute saves memory in both bookkeepings."""
    for a in (OURS, MEGATRON):
        plain = memory(Layout(tp=2, pp=4), a=a)[0].peak_allocated_bytes
        for kind in get_args(Recompute):
            assert memory(Layout(tp=2, pp=4, recompute=(kind,)), a=a)[0].peak_allocated_bytes < plain
