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
from triweave.overlap import FLAG_BYTES, exchange_bytes
from triweave.parameters import has_tied_copy, holds_head
from triweave.planner.assumptions import OURS, Assumptions
from triweave.planner.memory_moments import Moment, worst_moments
from triweave.planner.memory_stage import Peak, StageTapes, components_of, stage_tapes
from triweave.planner.memory_states import (
    ParameterUnit,
    data_parallel_size,
    numel_of,
    stage_units,
    states_of,
    weight_gradient_cache,
)
from triweave.planner.sizes import DTYPE_BYTES, Sizes, sizes_of
from triweave.sharing import MOST_RANKS, buffer_sizes, part_numel, staging_bytes

_TOKEN_BYTES = 8


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

    def out_of_memory_probability(self, capacity_bytes: int) -> float:
        """Probability that a run needs more than the card has (`Gpu.usable_bytes`), between 0 and 1."""
        if capacity_bytes <= 0:
            return 0.0
        spread = self.uncertainty * self.used_bytes * sqrt(2.0)
        return 0.5 * (1.0 + erf((self.used_bytes - capacity_bytes) / spread))


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
    return tuple(
        each_rank_memory(
            spec,
            layout,
            range(layout.pp),
            seq_len=seq_len,
            num_micro_batches=num_micro_batches,
            dtype=dtype,
            assumptions=assumptions,
        )
    )


def each_rank_memory(
    spec: ModelSpec,
    layout: Layout,
    ranks: Iterable[int],
    *,
    seq_len: int,
    num_micro_batches: int,
    dtype: str = "bfloat16",
    assumptions: Assumptions = OURS,
) -> Iterator[StageMemory]:
    """`predict_memory` of some pipeline ranks, each computed when it is asked for."""
    s = sizes_of(spec, layout, seq_len, dtype, assumptions)
    for rank in ranks:
        moments = worst_moments(layout.schedule, layout.pp, layout.vpp, num_micro_batches, rank)
        yield _rank_memory(spec, layout, rank, moments, s, num_micro_batches, dtype, assumptions)


def _rank_memory(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    moments: tuple[Moment, ...],
    s: Sizes,
    num_micro_batches: int,
    dtype: str,
    a: Assumptions,
) -> StageMemory:
    stages = layout.stages_of(rank)
    tapes = {stage: stage_tapes(spec, layout, stage, s, dtype, a) for stage in stages}
    standing = standing_bytes(spec, layout, rank, s, num_micro_batches, dtype, a)
    base = sum(standing.values())

    kept = [tapes[stage].kept_bytes for stage in stages]
    put_off = [tapes[stage].put_off_bytes for stage in stages]
    best, best_bytes = None, -1
    peaks: dict[tuple[object, int], Peak] = {}
    for moment in moments:
        key = (moment.kind, moment.stage)
        if key not in peaks:
            peaks[key] = tapes[moment.stage].peak(moment.kind)
        here = peaks[key].bytes + sum(map(mul, kept, moment.held)) + sum(map(mul, put_off, moment.put_off))
        if here > best_bytes:
            best, best_bytes = moment, here
    units = [unit for stage in stages for unit in stage_units(spec, layout, stage, a)]
    step = states_of(units, layout, dtype, a).step_working_set

    components = Counter(standing)
    if best is None or step > best_bytes:
        components["optimizer step"] += step
        at = "optimizer step"
        allocated = base + step
    else:
        peak = peaks[best.kind, best.stage]
        components += components_of(peak, _held(best, stages, tapes))
        at = f"{peak.where} of stage {best.stage}, {_others(best)} in flight"
        allocated = base + best_bytes
    return _with_surroundings(rank, allocated, components, at, spec, layout, a)


def standing_bytes(
    spec: ModelSpec, layout: Layout, rank: int, s: Sizes, num_micro_batches: int, dtype: str, a: Assumptions
) -> dict[str, int]:
    """What a rank holds at every moment of a step."""
    stages = layout.stages_of(rank)
    units = [unit for stage in stages for unit in stage_units(spec, layout, stage, a)]
    states = states_of(units, layout, dtype, a)
    head = any(holds_head(layout, stage) for stage in stages)
    standing = {
        "weights": states.weights,
        "gradients": states.gradients,
        "master weights": states.master_weights,
        "moments": states.moments,
        "workspace": a.workspace_bytes,
        # Tokens, targets, positions and documents; ours loads a step's micro-batches together.
        "batch": 4 * _TOKEN_BYTES * s.tokens * (num_micro_batches if a.bookkeeping == "ours" else 1),
    }
    if layout.pp > 1:
        # The next message is received and the last ones are sent while an action computes.
        neighbours = 1 if rank in (0, layout.pp - 1) and layout.vpp == 1 else 2
        standing["p2p buffers"] = (1 + neighbours) * s.slice
    if a.bookkeeping == "ours":
        standing["copies between ranks"] = _shared_beside(layout, units, s, dtype)
    if a.weight_gradient_cache:
        standing["weight gradient cache"] = weight_gradient_cache(spec, layout, units, dtype)
    if a.bookkeeping == "megatron" and head and s.sequence_parallel and a.loss != "gathered":
        standing["head gather buffer"] = s.hidden
    if head and a.logits_held_over:
        whole = s.logits * (layout.tp if a.loss == "gathered" else 1)
        standing["logits and loss: held over"] = whole * min(a.logits_held_over, num_micro_batches - 1)
    if layout.cp > 1:
        # Ring attention receives the next keys and values while it computes with the present ones.
        standing["context parallel buffers"] = 4 * s.key_value
    return {name: size for name, size in standing.items() if size}


def _shared_beside(layout: Layout, units: list[ParameterUnit], s: Sizes, dtype: str) -> int:
    """What copies by the GPUs of one host take beside the tensors: flags, and slices and parts under way.

    Groups that span hosts, or runs that switch the copies off, do without: for them this is too much by as much.
    """
    total = exchange_bytes(layout.tp, s.slice) if layout.uses_sequence_parallel else 0
    dp = data_parallel_size(layout)
    if 1 < dp <= MOST_RANKS:
        numels = [numel_of(unit, dp) for unit in units]
        sizes = [buffer_sizes(layout.shard, numel, DTYPE_BYTES[dtype]) for numel in numels]
        total += FLAG_BYTES * sum(map(len, sizes)) + staging_bytes(part_numel(layout.shard, numels, dp), dp)
    return total


def _held(
    moment: Moment, stages: tuple[int, ...], tapes: Mapping[int, StageTapes]
) -> list[tuple[Mapping[str, int], int]]:
    """What other micro-batches hold at a moment, by tensor."""
    parts = []
    for stage, held, put_off in zip(stages, moment.held, moment.put_off, strict=True):
        parts += [(sizes, times * held) for sizes, times in tapes[stage].kept()]
        parts += [(sizes, times * put_off) for sizes, times in tapes[stage].put_off()]
    return parts


def _others(moment: Moment) -> str:
    count = sum(moment.held) + sum(moment.put_off)
    return f"{count} other micro-batch{'' if count == 1 else 'es'}"


def _with_surroundings(
    rank: int,
    allocated: int,
    components: Counter[str],
    at: str,
    spec: ModelSpec,
    layout: Layout,
    a: Assumptions,
) -> StageMemory:
    """Add what the allocator, the driver and NCCL take."""
    slack = int(allocated * a.fragmentation_share)
    groups = sum(layout.size(axis) > 1 for axis in ("tp", "cp", "dp")) + (layout.world_size > 1)
    channels = 2 * (layout.pp > 1) * (1 if rank in (0, layout.pp - 1) else 2) + has_tied_copy(spec, layout)
    beside = {
        "allocator": slack,
        "CUDA context": a.context_bytes,
        "NCCL": groups * a.nccl_bytes_per_group + channels * a.nccl_bytes_per_channel,
    }
    parts = {name: size for name, size in (components + Counter(beside)).items() if size}
    return StageMemory(
        pp_rank=rank,
        peak_allocated_bytes=allocated,
        reserved_bytes=allocated + slack,
        used_bytes=allocated + sum(beside.values()),
        components=parts,
        at=at,
        uncertainty=a.uncertainty,
    )
