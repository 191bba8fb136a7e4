"""How much of a card's memory each pipeline rank takes, by bookkeeping: nothing here is fitted.

    for stage in predict_memory(spec, layout, seq_len=4096, num_micro_batches=32):
        print(stage.pp_rank, stage.peak_allocated_bytes, stage.at)

The states of a rank stand all through a step. On top lies what the schedule holds at its worst moment: the kept
tensors of the micro-batches in flight, and the working set of the block that runs. Beside the tensors lie what the
allocator reserves and does not use, the CUDA context and NCCL's buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import erf, sqrt
from operator import mul

from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.overlap import exchange_bytes
from triweave.parameters import has_tied_copy, holds_embedding, holds_head
from triweave.planner.assumptions import OURS, Assumptions
from triweave.planner.memory_graphs import graphs_bytes
from triweave.planner.memory_messages import message_buffers
from triweave.planner.memory_moments import Moment, worst_moments
from triweave.planner.memory_stage import Peak, StageTapes, components_of, stage_kept_bytes, stage_tapes
from triweave.planner.memory_states import (
    ParameterUnit,
    States,
    data_parallel_size,
    flat_sizes,
    stage_units,
    states_of,
    weight_casts,
    weight_gradient_cache,
)
from triweave.planner.sizes import Sizes, sizes_of
from triweave.schedule.actions import Kind
from triweave.sharing import beside_bytes

_TOKEN_BYTES = 8
_PAGE = 4096
"""Of host memory; what is pinned starts and ends with one."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the ranks of one pipeline stage take of their cards. Bytes."""

    pp_rank: int
    peak_allocated_bytes: int
    """The most that tensors take at once: `torch.cuda.max_memory_allocated()`."""
    reserved_bytes: int
    """What the caching allocator takes from the driver for them: `torch.cuda.max_memory_reserved()`."""
    used_bytes: int
    """What the card reports as used: the reserved bytes, the CUDA context and NCCL's buffers."""
    components: Mapping[str, int]
    """Every part of `used_bytes` by name; they add up to it."""
    at: str
    """The moment of the peak."""
    uncertainty: float
    """Standard deviation of the prediction, as a share of `used_bytes`."""
    host_bytes: int = 0
    """What the rank pins of its host's memory for what it offloads, at most."""

    def out_of_memory_probability(self, capacity_bytes: int) -> float:
        """Probability that a run needs more than the card has (`Gpu.usable_bytes`), between 0 and 1."""
        return out_of_memory_probability(self.used_bytes, self.uncertainty, capacity_bytes)


def out_of_memory_probability(used_bytes: int, uncertainty: float, capacity_bytes: int) -> float:
    """Probability that a rank predicted to use `used_bytes` needs more than `capacity_bytes`, between 0 and 1."""
    if capacity_bytes <= 0:
        return 0.0
    spread = uncertainty * used_bytes * sqrt(2.0)
    return 0.5 * (1.0 + erf((used_bytes - capacity_bytes) / spread))


def predict_memory(
    spec: ModelSpec,
    layout: Layout,
    *,
    seq_len: int,
    num_micro_batches: int,
    dtype: str = "bfloat16",
    assumptions: Assumptions = OURS,
) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank, first to last; the ranks of a stage are alike.

    Args:
        spec: The model.
        layout: The grid, its layers map included (`layout.layers`).
        seq_len: Tokens of a sequence.
        num_micro_batches: Micro-batches of a step on one data-parallel rank.
        dtype: Of weights and activations: bfloat16, float16 or float32.
        assumptions: Whose bookkeeping, and what lies beside the tensors.

    Raises:
        InputError: the schedule cannot be built with these numbers.
    """
    peaks = _each_rank_peak(spec, layout, range(layout.pp), seq_len, num_micro_batches, dtype, assumptions)
    return tuple(_rank_memory(peak, spec, layout, assumptions) for peak in peaks)


def each_rank_kept_bytes(
    spec: ModelSpec,
    layout: Layout,
    ranks: Iterable[int],
    *,
    seq_len: int,
    num_micro_batches: int,
    dtype: str = "bfloat16",
    assumptions: Assumptions = OURS,
) -> Iterator[int]:
    """What is used without any working set: a rank's states, and what its micro-batches keep for backward.

    The peak with whole layers recomputed may exceed that of another choice, for a layer's forward runs again beside
    its backward. What is kept never does, so this is a bound for every choice of what is recomputed.
    """
    s = sizes_of(spec, layout, seq_len, dtype, assumptions)
    for one in _ranks(spec, layout, ranks, s, num_micro_batches, dtype, assumptions):
        kept = sum(one.standing.values()) + _most_kept(layout, one, s, assumptions)
        yield kept + sum(_beside(one.rank, kept, spec, layout, assumptions).values())


def each_rank_used_bytes(
    spec: ModelSpec,
    layout: Layout,
    ranks: Iterable[int],
    *,
    seq_len: int,
    num_micro_batches: int,
    dtype: str = "bfloat16",
    assumptions: Assumptions = OURS,
) -> Iterator[int]:
    """`StageMemory.used_bytes` of some pipeline ranks, each computed when it is asked for, without its components."""
    for peak in _each_rank_peak(spec, layout, ranks, seq_len, num_micro_batches, dtype, assumptions):
        yield peak.allocated + sum(_beside(peak.rank, peak.allocated, spec, layout, assumptions).values())


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank before its actions are looked at."""

    rank: int
    standing: Mapping[str, int]
    """Bytes that are there at every moment."""
    step_bytes: int
    """What the optimizer's step takes."""
    moments: tuple[Moment, ...]


def _ranks(
    spec: ModelSpec,
    layout: Layout,
    ranks: Iterable[int],
    s: Sizes,
    num_micro_batches: int,
    dtype: str,
    a: Assumptions,
) -> Iterator[_Rank]:
    for rank in ranks:
        units = [unit for stage in layout.stages_of(rank) for unit in stage_units(spec, layout, stage, a)]
        states = states_of(units, layout, dtype, a)
        standing = _standing_bytes(spec, layout, rank, s, num_micro_batches, dtype, a, units, states)
        moments = worst_moments(
            layout.schedule, layout.pp, layout.vpp, num_micro_batches, rank, offload=bool(layout.offload)
        )
        yield _Rank(rank, standing, states.step_working_set, moments)


def _stage_key(layout: Layout, stage: int) -> tuple[int, bool, bool]:
    """Stages with the same blocks have the same tapes, and the same peaks."""
    return layout.layers[stage], holds_embedding(layout, stage), holds_head(layout, stage)


def _most_kept(layout: Layout, one: _Rank, s: Sizes, a: Assumptions) -> int:
    """The most that micro-batches keep for backward at once."""
    kept = {stage: stage_kept_bytes(s, a, *_stage_key(layout, stage)) for stage in layout.stages_of(one.rank)}
    sizes = list(kept.values())
    # A weight half finds its own micro-batch among those that are put off.
    most: int = max(
        sum(map(mul, sizes, moment.held)) + (0 if moment.kind is Kind.BACKWARD_WEIGHT else kept[moment.stage])
        for moment in one.moments
    )
    return most


@dataclass(frozen=True, slots=True)
class _RankPeak:
    """The fullest moment of a rank. Bytes."""

    rank: int
    tapes: Mapping[int, StageTapes]
    standing: Mapping[str, int]
    """What is there at every moment."""
    moments: tuple[Moment, ...]
    moment: Moment | None
    """The fullest one; None is the optimizer's step."""
    peak: Peak | None
    step_bytes: int
    """What the optimizer's step takes."""
    allocated: int


def _each_rank_peak(
    spec: ModelSpec,
    layout: Layout,
    ranks: Iterable[int],
    seq_len: int,
    num_micro_batches: int,
    dtype: str,
    a: Assumptions,
) -> Iterator[_RankPeak]:
    s = sizes_of(spec, layout, seq_len, dtype, a)
    known: dict[tuple[int, bool, bool], _Stage] = {}
    for one in _ranks(spec, layout, ranks, s, num_micro_batches, dtype, a):
        stages = {}
        for stage in layout.stages_of(one.rank):
            key = _stage_key(layout, stage)
            if key not in known:
                known[key] = _Stage(stage_tapes(spec, layout, stage, s, dtype, a))
            stages[stage] = known[key]
        yield _rank_peak(one, stages)


class _Stage:
    """The tapes of a stage with what is asked of them again and again."""

    def __init__(self, tapes: StageTapes) -> None:
        self.tapes = tapes
        self.kept_bytes = tapes.kept_bytes
        self.put_off_bytes = tapes.put_off_bytes
        self.peaks: dict[tuple[str, int, int], Peak] = {}

    def peak(self, moment: Moment) -> Peak:
        key = moment.kind.value, moment.leaving, moment.coming
        found = self.peaks.get(key)
        if found is None:
            found = self.peaks[key] = self.tapes.peak(moment.kind, moment.leaving, moment.coming)
        return found


def _rank_peak(one: _Rank, stages: Mapping[int, _Stage]) -> _RankPeak:
    base = sum(one.standing.values())
    kept = [stage.kept_bytes for stage in stages.values()]
    put_off = [stage.put_off_bytes for stage in stages.values()]
    best, best_bytes = None, -1
    for moment in one.moments:
        held = sum(map(mul, kept, moment.held)) + sum(map(mul, put_off, moment.put_off))
        here = stages[moment.stage].peak(moment).bytes + held
        if here > best_bytes:
            best, best_bytes = moment, here
    tapes = {stage: found.tapes for stage, found in stages.items()}
    if best is None or one.step_bytes > best_bytes:
        return _RankPeak(one.rank, tapes, one.standing, one.moments, None, None, one.step_bytes, base + one.step_bytes)
    peak = stages[best.stage].peak(best)
    return _RankPeak(one.rank, tapes, one.standing, one.moments, best, peak, one.step_bytes, base + best_bytes)


def _rank_memory(found: _RankPeak, spec: ModelSpec, layout: Layout, a: Assumptions) -> StageMemory:
    """The peak with its components."""
    components = Counter(found.standing)
    if found.moment is None or found.peak is None:
        components["optimizer step"] += found.step_bytes
        at = "optimizer step"
    else:
        moment = found.moment
        components += components_of(found.peak, _held(moment, found.tapes))
        at = f"{found.peak.where} of stage {moment.stage}, {_others(moment)} in flight"
    beside = _beside(found.rank, found.allocated, spec, layout, a)
    return StageMemory(
        pp_rank=found.rank,
        peak_allocated_bytes=found.allocated,
        reserved_bytes=found.allocated + beside["allocator"],
        used_bytes=found.allocated + sum(beside.values()),
        components={name: size for name, size in (components + Counter(beside)).items() if size},
        at=at,
        uncertainty=a.spread,
        host_bytes=_host_bytes(found),
    )


def _host_bytes(found: _RankPeak) -> int:
    """Whole pages for everything that waits at once, of which the last forward finds most."""
    sizes = []
    for tapes in found.tapes.values():
        pages = sum(-(-size // _PAGE) for size in tapes.layer.offloaded.values())
        sizes.append(_PAGE * pages * tapes.num_layers)
    if not any(sizes):
        return 0
    stages = list(found.tapes)
    most: int = max(
        sum(map(mul, sizes, moment.held)) + sizes[stages.index(moment.stage)]
        for moment in found.moments
        if moment.kind is Kind.FORWARD
    )
    return most


def standing_bytes(
    spec: ModelSpec, layout: Layout, rank: int, s: Sizes, num_micro_batches: int, dtype: str, a: Assumptions
) -> dict[str, int]:
    """What a rank holds at every moment of a step."""
    units = [unit for stage in layout.stages_of(rank) for unit in stage_units(spec, layout, stage, a)]
    return _standing_bytes(
        spec, layout, rank, s, num_micro_batches, dtype, a, units, states_of(units, layout, dtype, a)
    )


def _standing_bytes(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    s: Sizes,
    num_micro_batches: int,
    dtype: str,
    a: Assumptions,
    units: list[ParameterUnit],
    states: States,
) -> dict[str, int]:
    head = any(holds_head(layout, stage) for stage in layout.stages_of(rank))
    standing = {
        "weights": states.weights,
        "gradients": states.gradients,
        "master weights": states.master_weights,
        "moments": states.moments,
        # Graphs are captured on a stream of their own, which has its own.
        "workspace": a.workspace_bytes * (2 if s.graphs else 1),
        # Tokens, targets, positions and documents; ours loads a step's micro-batches together.
        "batch": 4 * _TOKEN_BYTES * s.tokens * (num_micro_batches if a.bookkeeping == "ours" else 1),
    }
    if a.fp8 and not (data_parallel_size(layout) > 1 and layout.shard == "full"):
        # By rows from the first forward on, by columns from the first backward, when of one micro-batch little is left.
        standing["weights in fp8"] = (2 if s.graphs else min(2, num_micro_batches)) * sum(
            weight_casts(unit, a) for unit in units
        )
    if s.graphs:
        expandable = a.expandable_segments
        standing["CUDA graphs"] = graphs_bytes(layout, rank, num_micro_batches, s, expandable=expandable)
    if layout.pp > 1:
        ours = a.bookkeeping == "ours"
        count = message_buffers(layout, rank, num_micro_batches, runs_ahead=ours, graphs=s.graphs)
        standing["p2p buffers"] = count * s.slice
    if a.bookkeeping == "ours":
        standing["copies between ranks"] = _shared_beside(layout, units, s, a.gpus_per_node)
    if a.weight_gradient_cache:
        standing["weight gradient cache"] = weight_gradient_cache(spec, layout, units, dtype)
    if a.bookkeeping == "megatron" and head and s.sequence_parallel and a.loss != "gathered":
        standing["head gather buffer"] = s.hidden
    if head and a.logits_held_over:
        whole = s.logits * (layout.tp if a.loss == "gathered" else 1)
        standing["logits and loss: held over"] = whole * min(a.logits_held_over, num_micro_batches - 1)
    if layout.cp > 1 and a.bookkeeping == "megatron":
        # Ring attention receives the next keys and values while it computes with the present ones.
        standing["context parallel buffers"] = 4 * s.key_value
    return {name: size for name, size in standing.items() if size}


def _shared_beside(layout: Layout, units: list[ParameterUnit], s: Sizes, gpus_per_node: int | None) -> int:
    """What copies by the GPUs of one host take beside the tensors: flags, and slices and parts under way.

    Runs that switch the copies off do without: for them this is too much by as much.
    """
    dp, host = data_parallel_size(layout), gpus_per_node or layout.world_size
    total = exchange_bytes(layout.tp, s.slice) if layout.uses_sequence_parallel and layout.tp <= host else 0
    return total + (beside_bytes(layout.shard, flat_sizes(units, dp), dp) if layout.tp * dp <= host else 0)


def _held(moment: Moment, tapes: Mapping[int, StageTapes]) -> list[tuple[Mapping[str, int], int]]:
    """What other micro-batches hold at a moment, by tensor."""
    parts = []
    for stage, held, put_off in zip(tapes.values(), moment.held, moment.put_off, strict=True):
        parts += [(sizes, times * held) for sizes, times in stage.kept()]
        parts += [(sizes, times * put_off) for sizes, times in stage.put_off()]
    return parts


def _others(moment: Moment) -> str:
    count = sum(moment.held) + sum(moment.put_off)
    return f"{count} other micro-batch{'' if count == 1 else 'es'}"


def _beside(rank: int, allocated: int, spec: ModelSpec, layout: Layout, a: Assumptions) -> dict[str, int]:
    """What the allocator, the driver and NCCL take beside the tensors."""
    groups = sum(layout.size(axis) > 1 for axis in ("tp", "cp", "dp")) + (layout.world_size > 1)
    # Ours sums gradients over dp x cp in a group of its own also where that has the ranks of cp.
    groups += a.bookkeeping == "ours" and layout.cp > 1 and layout.dp == 1
    # Shard groups sum their parts among each other on a communicator of its own.
    groups += layout.uses_shard_groups and layout.shard_ranks > 1
    channels = 2 * (layout.pp > 1) * (1 if rank in (0, layout.pp - 1) else 2) + has_tied_copy(spec, layout)
    return {
        "allocator": int(allocated * a.fragmentation_share),
        "CUDA context": a.context_bytes,
        "NCCL": groups * a.nccl_bytes_per_group + channels * a.nccl_bytes_per_channel,
    }
