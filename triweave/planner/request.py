"""What is asked of the planner, and one answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from triweave.cluster import Cluster
from triweave.errors import Problem
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import OURS, Assumptions
from triweave.planner.machine import Machine
from triweave.planner.memory import (
    StageMemory,
    each_rank_kept_bytes,
    each_rank_used_bytes,
    out_of_memory_probability,
    predict_memory,
)
from triweave.planner.profile import Profile
from triweave.planner.profile_machine import is_foreign
from triweave.planner.time_step import StepTime, least_compute_s, least_step_s, predict_step, step_timeline
from triweave.planner.time_trainer import trainer_with
from triweave.rules import layout_problems
from triweave.schedule import Timeline

MAX_OOM_PROBABILITY = 0.05
"""A layout fits when no stage is likelier than this to need more than its card has."""

SMALLER_MOMENTS = "moments bfloat16"
"""How that change is told: `--moments` of `plan`, `optimizer.moments` of a run file."""


@dataclass(frozen=True, slots=True)
class Request:
    """A model on a cluster, and the batch of a step."""

    model: str
    """As the user named it."""
    cluster_name: str
    """The same."""
    spec: ModelSpec
    cluster: Cluster
    seq_len: int
    global_batch: int
    """Sequences of an optimizer step."""
    dtype: str = "bfloat16"
    tp_across_nodes: bool = False
    assumptions: Assumptions = OURS
    profile: Profile | None = None
    on: Machine | None = None
    """The machine of the profile; None is what is known of the cluster's GPU."""

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


def with_smaller_moments(request: Request) -> Request | None:
    """The same question with both moments in bfloat16; None where they are."""
    if request.assumptions.moments == "bfloat16":
        return None
    return replace(request, assumptions=replace(request.assumptions, moments="bfloat16"))


def memory_of(request: Request, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank."""
    return predict_memory(request.spec, layout, **_memory_question(request, layout))


def fits_in_memory(request: Request, layout: Layout) -> bool:
    """Whether every pipeline rank fits; known as soon as one does not."""
    ranks = _telling_ranks(layout)
    # Most layouts that do not fit are told by what they keep, which is found several times faster than the peak.
    return may_fit(request, layout) and all(has_room_for(request, used) for used in _used_bytes(request, layout, ranks))


def has_room_for(request: Request, used_bytes: int) -> bool:
    """Whether a rank predicted to use that much fits: it is unlikely enough to need more than the card has."""
    return (
        out_of_memory_probability(used_bytes, request.assumptions.spread, request.capacity_bytes) <= MAX_OOM_PROBABILITY
    )


def _telling_ranks(layout: Layout) -> Iterable[int]:
    """Ranks of which one uses most, the likeliest first.

    Of ranks between the ends that hold as many layers, an earlier one has no fewer micro-batches in flight, and where
    backward is split a later one no fewer weight halves put off.
    """
    last = layout.pp - 1
    between = {layout.layers[rank :: layout.pp]: rank for rank in range(last - 1, 0, -1)}
    latest = {layout.layers[rank :: layout.pp]: rank for rank in range(1, last)}
    put_off = latest.values() if layout.schedule == "zero-bubble" else ()
    return dict.fromkeys((0, last, *between.values(), *put_off))


def most_that_fits(request: Request) -> int:
    """The most bytes that a rank may be predicted to use: what `has_room_for` accepts."""
    low, high = 0, request.capacity_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room_for(request, middle) else (low, middle)
    return low


def most_used_bytes(request: Request, layout: Layout) -> int:
    """Bytes used on the fullest card."""
    return max(_used_bytes(request, layout, _telling_ranks(layout)))


def least_bytes(request: Request, layout: Layout) -> int:
    """What the cards of the first pipeline rank use at least, whatever is recomputed."""
    return next(_kept_bytes(request, replace(layout, recompute=("layer",)), (0,)))


def may_fit(request: Request, layout: Layout) -> bool:
    """Whether what every pipeline rank holds for backward fits; known as soon as one does not.

    With whole layers recomputed nothing keeps less, so what may not fit then fits in no way.
    """
    return all(has_room_for(request, least) for least in _kept_bytes(request, layout, _telling_ranks(layout)))


def _used_bytes(request: Request, layout: Layout, ranks: Iterable[int]) -> Iterator[int]:
    return each_rank_used_bytes(request.spec, layout, ranks, **_memory_question(request, layout))


def _kept_bytes(request: Request, layout: Layout, ranks: Iterable[int]) -> Iterator[int]:
    return each_rank_kept_bytes(request.spec, layout, ranks, **_memory_question(request, layout))


def _memory_question(request: Request, layout: Layout) -> dict[str, Any]:
    return {
        "seq_len": request.seq_len,
        "num_micro_batches": layout.micro_batches(request.global_batch),
        "dtype": request.dtype,
        "assumptions": request.assumptions,
    }


def legal_problems(request: Request, layout: Layout) -> list[Problem]:
    """The rules that a layout breaks for this question."""
    return layout_problems(
        request.spec,
        layout,
        world_size=request.cluster.world_size,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        gpus_per_node=request.cluster.gpus_per_node,
        tp_across_nodes=request.tp_across_nodes,
    )


def time_of(request: Request, layout: Layout) -> StepTime:
    """Seconds of a step; of a profile of another GPU the range is twice as wide."""
    time = predict_step(request.spec, layout, request.cluster, **_question(request))
    if request.profile is None or not is_foreign(request.profile, request.cluster):
        return time
    low, high = time.range_s
    return replace(time, range_s=(low * low / time.step_s, high * high / time.step_s))


def timeline_of(request: Request, layout: Layout) -> Timeline:
    """Every forward and backward of a step, in time."""
    return step_timeline(request.spec, layout, request.cluster, **_question(request))


def least_time_of(request: Request, layout: Layout) -> float:
    """Seconds that the step cannot undercut, found faster than the step itself; a hair less, for rounding."""
    return least_step_s(request.spec, layout, request.cluster, **_question(request)) * (1 - 1e-9)


def least_compute_of(request: Request, layout: Layout, *, even: bool) -> float:
    """Seconds that no shard level and no recomputation undercut (`even`: no schedule and no layer map either)."""
    return least_compute_s(request.spec, layout, request.cluster, even=even, **_question(request)) * (1 - 1e-9)


def _question(request: Request) -> dict[str, Any]:
    stack = trainer_with(request.assumptions.moments)
    return {"seq_len": request.seq_len, "global_batch": request.global_batch, "stack": stack, "on": request.on}


def oom_probability(request: Request, memory: tuple[StageMemory, ...]) -> float:
    """Probability that the fullest stage needs more than its card has."""
    return max(stage.out_of_memory_probability(request.capacity_bytes) for stage in memory)
