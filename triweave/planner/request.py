"""What is asked of the planner, and one answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triweave.cluster import Cluster
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import OURS, Assumptions
from triweave.planner.memory import StageMemory, each_rank_memory, predict_memory
from triweave.planner.time_step import StepTime, least_step_s, predict_step, step_timeline
from triweave.schedule import Timeline

MAX_OOM_PROBABILITY = 0.05
"""A layout fits when no stage is likelier than this to need more than its card has."""


@dataclass(frozen=True, slots=True)
class Request:
    """A model on a cluster, and the batch of a step."""

    model: str
    """As the user named it."""
    spec: ModelSpec
    cluster: Cluster
    seq_len: int
    global_batch: int
    """Sequences of an optimizer step."""
    dtype: str = "bfloat16"
    tp_across_nodes: bool = False
    assumptions: Assumptions = OURS

    @property
    def capacity_bytes(self) -> int:
        """What the driver gives to programs on one card."""
        return self.cluster.gpu.usable_bytes

    def with_cluster(self, num_nodes: int) -> Request:
        """The same question for another number of nodes."""
        return replace(self, cluster=replace(self.cluster, num_nodes=num_nodes))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout, priced."""

    layout: Layout
    memory: tuple[StageMemory, ...]
    """One a pipeline rank."""
    time: StepTime
    fits: bool
    oom_probability: float
    """Of the likeliest stage."""

    @property
    def peak_bytes(self) -> int:
        """Bytes used on the fullest card."""
        return max(stage.used_bytes for stage in self.memory)


def price(request: Request, layout: Layout) -> Candidate:
    """Memory and time of one layout, whether it fits or not."""
    memory = memory_of(request, layout)
    probability = oom_probability(request, memory)
    time = time_of(request, layout)
    return Candidate(layout, memory, time, probability <= MAX_OOM_PROBABILITY, probability)


def memory_of(request: Request, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank."""
    return predict_memory(
        request.spec,
        layout,
        seq_len=request.seq_len,
        num_micro_batches=layout.micro_batches(request.global_batch),
        dtype=request.dtype,
        assumptions=request.assumptions,
    )


def memory_if_fits(request: Request, layout: Layout) -> tuple[StageMemory, ...] | None:
    """Memory of every pipeline rank, None as soon as one does not fit: the first and the last are asked first."""
    ranks = sorted(range(layout.pp), key=lambda rank: (rank not in (0, layout.pp - 1), rank))
    found: dict[int, StageMemory] = {}
    for stage in each_rank_memory(
        request.spec,
        layout,
        ranks,
        seq_len=request.seq_len,
        num_micro_batches=layout.micro_batches(request.global_batch),
        dtype=request.dtype,
        assumptions=request.assumptions,
    ):
        if stage.out_of_memory_probability(request.capacity_bytes) > MAX_OOM_PROBABILITY:
            return None
        found[stage.pp_rank] = stage
    return tuple(found[rank] for rank in range(layout.pp))


def time_of(request: Request, layout: Layout) -> StepTime:
    """Seconds of a step."""
    return predict_step(
        request.spec, layout, request.cluster, seq_len=request.seq_len, global_batch=request.global_batch
    )


def timeline_of(request: Request, layout: Layout) -> Timeline:
    """Every forward and backward of a step, in time."""
    return step_timeline(
        request.spec, layout, request.cluster, seq_len=request.seq_len, global_batch=request.global_batch
    )


def least_time_of(request: Request, layout: Layout) -> float:
    """Seconds that the step cannot undercut, found faster than the step itself; a hair less, for rounding."""
    least = least_step_s(
        request.spec, layout, request.cluster, seq_len=request.seq_len, global_batch=request.global_batch
    )
    return least * (1 - 1e-9)


def oom_probability(request: Request, memory: tuple[StageMemory, ...]) -> float:
    """Probability that the fullest stage needs more than its card has."""
    return max(stage.out_of_memory_probability(request.capacity_bytes) for stage in memory)
