"""Seconds of one training step of a layout, and where they go."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from triweave.cluster import Cluster
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.machine import Machine, Precision
from triweave.planner.time_actions import ActionCosts, action_costs
from triweave.planner.time_after import after_backward_s, batch_copy_s
from triweave.planner.time_parts import add
from triweave.planner.time_pipeline import is_waited_for, least_pipeline_s, pipeline_s
from triweave.planner.time_shapes import Decoder
from triweave.planner.time_stack import Stack
from triweave.planner.time_trainer import TRIWEAVE
from triweave.schedule import Timeline, simulate
from triweave.schedule.build import build_schedule


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
    offload: float = 0.0
    """Copies to and from host memory: what does not hide, and what they take from the work beside them."""

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
            + self.offload
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
    offload=0.50,
)
"""Half width of the 90 % range of each part, as a share of it; the parts' errors are taken as independent. Chosen so
that about nine tenths of the held-out predictions of `bench/predict_time.py` fall inside."""

HOST_SLOWER = 1.5
"""A host may be so much slower than it was measured or is known: hosts of H200 differ by half in what they need to
issue a layer, and so does one from minute to minute (docs/probe.md). A range ends no earlier than with such a host."""


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
    costs = action_costs(
        spec, layout, cluster, seq_len=seq_len, global_batch=global_batch, precision=precision, stack=stack, on=on
    )
    micro_batches, place = costs.micro_batches, costs.place
    decoder, gpu = place.decoder, place.machine
    shape = (layout.schedule, layout.pp, layout.vpp, micro_batches, costs.stages, costs.transfer_s)
    length = pipeline_s(*shape)
    slower = tuple(host.times(HOST_SLOWER) for host in costs.hosts)
    waiting, waiting_longer = (
        pipeline_s(*shape, hosts) - length if is_waited_for(hosts, costs.stages) else 0.0
        for hosts in (costs.hosts, slower)
    )
    busy = costs.busy_s(layout)
    longest = max(range(layout.pp), key=lambda rank: busy[rank])
    stages = layout.stages_of(longest)
    parts = add(*(part for stage in stages for part in costs.blocks[stage].work)).times(micro_batches)
    gathering = micro_batches * sum(costs.blocks[stage].gathering_s for stage in stages)
    offload = micro_batches * sum(sum(costs.blocks[stage].offload_s) for stage in stages)
    data_parallel, optimizer = after_backward_s(costs, layout, longest, busy[longest], cluster.gpus_per_node)
    arriving = batch_copy_s(costs)
    breakdown = Breakdown(
        parts.matmul,
        parts.attention,
        parts.memory,
        parts.tensor_parallel,
        parts.context_parallel,
        parts.host + waiting + arriving,
        length - parts.total - gathering - offload,
        gathering + data_parallel,
        optimizer,
        offload,
    )
    step = length + waiting + data_parallel + optimizer + arriving
    tokens = global_batch * seq_len / layout.world_size
    peak = gpu.peak_fp8 if precision == "fp8" and gpu.peak_fp8 else gpu.peak_bf16
    flops = [decoder.flops_per_token(seq_len, causal=causal) * tokens / step / peak for causal in (True, False)]
    return StepTime(
        step,
        _range(step, breakdown, waiting_longer - waiting),
        tokens / step,
        Mfu(flops[0], flops[1], peak),
        1.0 - sum(busy) / (length * layout.pp),
        breakdown,
    )


def least_step_s(
    spec: ModelSpec | Decoder,
    layout: Layout,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    stack: Stack = TRIWEAVE,
    on: Machine | None = None,
) -> float:
    """Seconds that the step of `layout` cannot undercut, without laying out its schedule: exact for equal stages.

    Raises:
        InputError: as `predict_step`.
    """
    # Below `full` the stages cost the same however optimizer states and gradients are shared.
    alike = layout if layout.shard == "full" else replace(layout, shard="none", shard_group=None)
    known = _least_pipeline(spec, alike, cluster, seq_len, global_batch, stack, on)
    return known.seconds + sum(after_backward_s(known.costs, layout, known.rank, known.busy_s, cluster.gpus_per_node))


class _LeastPipeline(NamedTuple):
    """What a pipeline cannot undercut, and the rank that works longest."""

    costs: ActionCosts
    seconds: float
    rank: int
    busy_s: float
    mean_busy_s: float


@lru_cache(maxsize=4096)
def _least_pipeline(
    spec: ModelSpec | Decoder,
    layout: Layout,
    cluster: Cluster,
    seq_len: int,
    global_batch: int,
    stack: Stack,
    on: Machine | None,
) -> _LeastPipeline:
    costs = action_costs(spec, layout, cluster, seq_len=seq_len, global_batch=global_batch, stack=stack, on=on)
    busy = costs.busy_s(layout)
    longest = max(range(layout.pp), key=lambda rank: busy[rank])
    least = least_pipeline_s(
        layout.schedule, layout.pp, costs.micro_batches, costs.stages, costs.transfer_s, costs.hosts
    )
    return _LeastPipeline(costs, least, longest, busy[longest], sum(busy) / layout.pp)


def least_compute_s(
    spec: ModelSpec | Decoder,
    layout: Layout,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    even: bool,
    stack: Stack = TRIWEAVE,
    on: Machine | None = None,
) -> float:
    """Seconds that no way to shard, to recompute and to offload makes shorter: the pipeline alone.

    Args:
        spec: the model.
        layout: its schedule and its layer map.
        cluster: nodes and GPU.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        even: for any schedule and any layer map: all work, spread over the pipeline ranks without a bubble.
        stack: as for `predict_step`.
        on: speeds of the GPU and its links, as for `predict_step`.

    Raises:
        InputError: as `predict_step`.
    """
    plain = replace(layout, shard="none", shard_group=None, recompute=(), offload=())
    known = _least_pipeline(spec, plain, cluster, seq_len, global_batch, stack, on)
    return known.mean_busy_s if even else known.seconds


def step_timeline(
    spec: ModelSpec | Decoder,
    layout: Layout,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    stack: Stack = TRIWEAVE,
    on: Machine | None = None,
) -> Timeline:
    """Every forward and backward of a step in time, from the costs that `predict_step` adds up.

    What follows the last backward (gradient reduction where it is exposed, the optimizer) is not part of it.

    Raises:
        InputError: as `predict_step`.
    """
    costs = action_costs(spec, layout, cluster, seq_len=seq_len, global_batch=global_batch, stack=stack, on=on)
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, costs.micro_batches)
    return simulate(schedule, lambda action: costs.stages[action.stage].of(action.kind), costs.transfer_s)


def _range(step: float, breakdown: Breakdown, longer: float) -> tuple[float, float]:
    variance = sum((part * share) ** 2 for part, share in zip(_parts(breakdown), _parts(UNCERTAINTY), strict=True))
    spread = math.sqrt(variance) / step
    return step / (1 + spread), max(step * (1 + spread), step + longer)


_parts = attrgetter(*(part.name for part in fields(Breakdown)))
