"""Seconds of one training step of a layout, and where they go."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from triweave.cluster import Cluster
from triweave.errors import InputError, Problem, nearest_number
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.machine import Machine, machine
from triweave.planner.time_collectives import (
    GroupShape,
    all_reduce_s,
    overlapped_s,
    reduce_scatter_s,
    send_s,
)
from triweave.planner.time_ends import embedding_work, head_work
from triweave.planner.time_layer import layer_work
from triweave.planner.time_matmul import Precision
from triweave.planner.time_parts import Place, Work, add, chain, place_of
from triweave.planner.time_pipeline import StageCost, pipeline_s
from triweave.planner.time_shapes import Decoder, decoder_of
from triweave.planner.time_stack import TRIWEAVE, Stack


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a step's seconds go on the rank that works longest; the parts sum to the step."""

    matmul: float
    attention: float
    memory_bound: float
    tensor_parallel: float
    context_parallel: float
    host: float
    """The GPU waits for kernels to be launched."""
    pipeline: float
    """Bubble, imbalance and messages that the rank waits for."""
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return (
            self.matmul
            + self.attention
            + self.memory_bound
            + self.tensor_parallel
            + self.context_parallel
            + self.host
            + self.pipeline
            + self.data_parallel
            + self.optimizer
        )


@dataclass(frozen=True, slots=True)
class Mfu:
    """Model FLOPs utilisation, attention counted causal and in full, and the peak that both divide by."""

    causal: float
    full: float
    peak_flops: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The prediction for one step."""

    step_s: float
    range_s: tuple[float, float]
    """90 % of measurements are expected inside."""
    tokens_per_s_per_gpu: float
    mfu: Mfu
    bubble: float
    """Idle share of the pipeline ranks' time."""
    breakdown: Breakdown


UNCERTAINTY = Breakdown(
    matmul=0.14,
    attention=0.20,
    memory_bound=0.25,
    tensor_parallel=0.35,
    context_parallel=0.50,
    host=0.35,
    pipeline=0.70,
    data_parallel=0.60,
    optimizer=0.30,
)
"""Half width of the 90 % range of each part, as a share of it; the parts' errors are taken as independent. Chosen so
that about nine tenths of the held-out predictions of `bench/predict_time.py` fall inside."""


def predict_step(
    spec: ModelSpec | Decoder,
    layout: Layout,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    precision: Precision = "bf16",
    stack: Stack = TRIWEAVE,
    on: Machine | None = None,
) -> StepTime:
    """Seconds of one step of `layout`.

    Args:
        spec: the model.
        layout: how it is spread; `layout.layers` must be filled and `layout.recompute` is what is recomputed.
        cluster: nodes and GPU.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        precision: of the layers' matrix products.
        stack: the software that computes it.
        on: speeds of the GPU and its links; by default what is known of the cluster's GPU.

    Raises:
        InputError: a batch or a layer map that does not fit the layout, or a GPU without measured speeds.
    """
    _check(layout, global_batch)
    gpu = on if on is not None else machine(cluster.gpu.name)
    decoder = decoder_of(spec)
    per_node = cluster.gpus_per_node
    place = place_of(decoder, layout, gpu, stack, seq_len=seq_len, gpus_per_node=per_node, precision=precision)
    micro_batches = layout.micro_batches(global_batch)
    works = [_stage_work(place, layout, stage) for stage in range(layout.num_stages)]
    transfer = _transfer_s(place, layout, per_node)
    waits = 0.0 if stack.overlap_pp or layout.num_stages == 1 else transfer
    sharded = _sharding_s(place, layout, works, per_node) if layout.shard == "full" else [(0.0, 0.0)] * len(works)
    costs = [
        StageCost(
            work.forward.total + gathered[0] + waits,
            work.recompute.total + work.backward_input.total + gathered[1] + waits,
            work.backward_weight.total,
        )
        for work, gathered in zip(works, sharded, strict=True)
    ]
    length = pipeline_s(layout.schedule, layout.pp, layout.vpp, micro_batches, costs, transfer - waits)
    busy = [micro_batches * sum(costs[stage].total for stage in layout.stages_of(rank)) for rank in range(layout.pp)]
    longest = max(range(layout.pp), key=lambda rank: busy[rank])
    stages = layout.stages_of(longest)
    parts = add(*(part for stage in stages for part in works[stage])).times(micro_batches)
    gathering = micro_batches * sum(sum(sharded[stage]) for stage in stages)
    data_parallel, optimizer = _after_backward(place, layout, longest, busy[longest], micro_batches, per_node)
    breakdown = Breakdown(
        parts.matmul,
        parts.attention,
        parts.memory,
        parts.tensor_parallel,
        parts.context_parallel,
        parts.host,
        length - parts.total - gathering,
        gathering + data_parallel,
        optimizer,
    )
    step = length + data_parallel + optimizer
    tokens = global_batch * seq_len / layout.world_size
    peak = cluster.gpu.peak_flops or gpu.peak_bf16
    if precision == "fp8" and gpu.peak_fp8:
        peak = gpu.peak_fp8
    flops = [decoder.flops_per_token(seq_len, causal=causal) * tokens / step / peak for causal in (True, False)]
    return StepTime(
        step,
        _range(step, breakdown),
        tokens / step,
        Mfu(flops[0], flops[1], peak),
        1.0 - sum(busy) / (length * layout.pp),
        breakdown,
    )


def _check(layout: Layout, global_batch: int) -> None:
    problems = []
    share = layout.dp * layout.micro_batch
    if global_batch % share or global_batch < share:
        rule = f"must be a multiple of dp {layout.dp} x micro_batch {layout.micro_batch} = {share}"
        below = max(1, global_batch // share) * share
        problems.append(
            Problem("train.global_batch", global_batch, rule, nearest_number(global_batch, (below, below + share)))
        )
    if len(layout.layers) != layout.num_stages:
        rule = f"must name the layers of {layout.num_stages} virtual stages, not of {len(layout.layers)}"
        problems.append(Problem("layout.layers", layout.layers, rule))
    if problems:
        raise InputError(problems)


def _stage_work(place: Place, layout: Layout, stage: int) -> Work:
    """One micro-batch on one virtual stage."""
    works = [layer_work(place).times(len(layout.layers_of(stage)))]
    if stage == 0:
        works.append(embedding_work(place))
    if stage == layout.num_stages - 1:
        works.append(head_work(place))
    return chain(*works)


def _transfer_s(place: Place, layout: Layout, gpus_per_node: int) -> float:
    """One activation, or its gradient, from a stage to the next."""
    if layout.pp == 1:
        return 0.0
    size = 2.0 * place.tokens * place.decoder.hidden
    if place.sequence_parallel or place.stack.sends_slices:
        size /= place.tp.ranks
    crosses = layout.tp * layout.cp * layout.dp >= gpus_per_node
    return send_s(place.machine, size, crosses_nodes=crosses)


def _parameters(place: Place, layout: Layout, stage: int) -> float:
    """Weights of a virtual stage on one tensor-parallel rank."""
    decoder = place.decoder
    ends = (stage == 0) + (stage == layout.num_stages - 1)
    return (len(layout.layers_of(stage)) * decoder.layer_parameters + ends * decoder.head_parameters) / layout.tp


def _replicas(place: Place, layout: Layout, gpus_per_node: int) -> GroupShape:
    """Ranks that share out weights: data-parallel and context-parallel ones, which are neighbours."""
    ranks = layout.dp * layout.cp
    return GroupShape(ranks, max(1, min(ranks, gpus_per_node // layout.tp)))


def _sharding_s(place: Place, layout: Layout, works: list[Work], gpus_per_node: int) -> list[tuple[float, float]]:
    """ZeRO-3: what gathering weights and scattering gradients adds to a stage's forward and backward, per micro-batch.

    A layer's weights are gathered while the layer before computes (backward again), its gradients scattered while
    the next one computes. The first gather and the last scatter of a stage have nothing to hide under.
    """
    stack, group = place.stack, _replicas(place, layout, gpus_per_node)
    result = []
    for stage, work in enumerate(works):
        count = max(1, len(layout.layers_of(stage)))
        layer = _parameters(place, layout, stage) / count
        gather = reduce_scatter_s(place.machine, group, 2.0 * layer)
        scatter = reduce_scatter_s(place.machine, group, stack.gradient_size * layer)
        forward = work.forward.total / count
        backward = (work.recompute.total + work.backward_input.total + work.backward_weight.total) / count
        hidden_forward = overlapped_s(gather, forward, stack.slowdown)
        hidden_backward = overlapped_s(gather + scatter, backward, stack.slowdown)
        copies = stack.shard_copies * layer * count / place.machine.hbm_kernel_bytes_per_s
        share = stack.overlap_dp
        added_forward = count * (share * hidden_forward + (1 - share) * gather)
        added_backward = count * (share * hidden_backward + (1 - share) * (gather + scatter))
        if share:
            added_forward += max(0.0, gather - overlapped_s(gather, forward, 0.0))
            added_backward += max(0.0, scatter - overlapped_s(scatter, backward, 0.0))
        result.append((added_forward + copies / 3, added_backward + copies * 2 / 3))
    return result


def _after_backward(
    place: Place, layout: Layout, rank: int, busy: float, micro_batches: int, gpus_per_node: int
) -> tuple[float, float]:
    """Exposed data-parallel communication of a step, and the optimizer, on one pipeline rank."""
    gpu, stack = place.machine, place.stack
    parameters = sum(_parameters(place, layout, stage) for stage in layout.stages_of(rank))
    group = _replicas(place, layout, gpus_per_node)
    shard = parameters if layout.shard == "none" else parameters / group.ranks
    optimizer = shard * stack.optimizer / gpu.hbm_kernel_bytes_per_s
    if layout.shard in ("none", "optimizer"):
        optimizer += parameters * 4 / gpu.hbm_kernel_bytes_per_s
    if group.ranks == 1 or layout.shard == "full":
        return 0.0, optimizer
    gradients = stack.gradient_size * parameters
    if layout.shard == "none":
        reduce, gather = all_reduce_s(gpu, group, gradients), 0.0
    else:
        reduce = (all_reduce_s if stack.reduces_whole else reduce_scatter_s)(gpu, group, gradients)
        gather = reduce_scatter_s(gpu, group, 2.0 * parameters)
    if layout.shard == "gradients":
        reduce *= micro_batches
    # Reduction hides under the last micro-batch's backward, gathering under the first's forward.
    room = busy / micro_batches
    hidden = overlapped_s(reduce, 2 / 3 * room, stack.slowdown) + overlapped_s(gather, room / 3, stack.slowdown)
    return stack.overlap_dp * hidden + (1 - stack.overlap_dp) * (reduce + gather), optimizer


def _range(step: float, breakdown: Breakdown) -> tuple[float, float]:
    variance = sum((getattr(breakdown, part.name) * getattr(UNCERTAINTY, part.name)) ** 2 for part in fields(Breakdown))
    spread = math.sqrt(variance) / step
    return step / (1 + spread), step * (1 + spread)
