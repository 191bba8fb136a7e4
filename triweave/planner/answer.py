"""The planner's answer in the documented JSON, and for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from triweave.layout import Layout
from triweave.planner.assumptions import GIB
from triweave.planner.explain import why
from triweave.planner.request import Candidate, Request, timeline_of
from triweave.planner.search import Plan
from triweave.schedule.draw import draw_timeline


def to_json(request: Request, plan: Plan) -> dict[str, Any]:
    """The contract of `triweave plan --json`."""
    return {
        "assumptions": assumptions(request),
        "candidates": [candidate_json(request, candidate) for candidate in plan.candidates],
        "rejected": [{"layout": layout_json(one.layout), "reason": one.reason} for one in plan.rejected],
    }


def assumptions(request: Request) -> dict[str, Any]:
    """Everything the answer rests on."""
    gpu = request.cluster.gpu
    return {
        "model": request.model,
        "parameters": request.spec.num_parameters,
        "cluster": str(request.cluster),
        "gpus": request.cluster.world_size,
        "capacity_gib": request.capacity_bytes / GIB,
        "peak_flops": gpu.peak_flops,
        "seq_len": request.seq_len,
        "global_batch": request.global_batch,
        "dtype": request.dtype,
        "memory": asdict(request.assumptions),
    }


def candidate_json(request: Request, candidate: Candidate) -> dict[str, Any]:
    """One layout with its prices and reasons."""
    time = candidate.time
    return {
        "layout": layout_json(candidate.layout),
        "fits": candidate.fits,
        "oom_probability": candidate.oom_probability,
        "peak_gib": [stage.used_bytes / GIB for stage in candidate.memory],
        "peak_allocated_gib": [stage.peak_allocated_bytes / GIB for stage in candidate.memory],
        "capacity_gib": request.capacity_bytes / GIB,
        "step_s": time.step_s,
        "step_s_range": list(time.range_s),
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": {"causal": time.mfu.causal, "full": time.mfu.full, "peak_flops": time.mfu.peak_flops},
        "bubble": time.bubble,
        "why": why(request, candidate),
    }


def layout_json(layout: Layout) -> dict[str, Any]:
    """The keys of the run file's `layout` section, so that an answer can be pasted into one."""
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "cp": layout.cp,
        "dp": layout.dp,
        "micro_batch": layout.micro_batch,
        "shard": layout.shard,
        "schedule": layout.schedule,
        "recompute": list(layout.recompute),
        "sequence_parallel": layout.sequence_parallel,
        "layers": list(layout.layers),
    }


def spell_layout(layout: Layout) -> str:
    """`tp4 pp4 vpp5 dp2, micro-batch 1, interleaved, shard optimizer, recompute norm swiglu`."""
    parts = [str(layout), f"micro-batch {layout.micro_batch}", layout.schedule, f"shard {layout.shard}"]
    if layout.recompute:
        parts.append("recompute " + " ".join(layout.recompute))
    if len(set(layout.layers)) > 1:
        parts.append("layers " + _runs(layout.layers))
    return ", ".join(parts)


def _runs(layers: Sequence[int]) -> str:
    """`5+4x19` for one stage of 5 layers and 19 of 4."""
    runs: list[list[int]] = []
    for count in layers:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return "+".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)


def to_text(request: Request, plan: Plan, *, width: int = 100) -> Iterator[str]:
    """The answer for people, line by line."""
    spec, cluster = request.spec, request.cluster
    yield (
        f"{request.model}: {spec.num_parameters / 1e9:.2f} B parameters on {cluster},"
        f" sequence {request.seq_len}, global batch {request.global_batch}"
    )
    for number, candidate in enumerate(plan.candidates, 1):
        yield ""
        yield f"{number}. {spell_layout(candidate.layout)}"
        yield from ("   " + line for line in _figures(candidate))
        yield from ("   " + line for line in memory_bars(request, candidate, width - 3))
        yield from ("   " + line for line in why(request, candidate))
        if number == 1 and candidate.layout.pp > 1:
            yield ""
            timeline = draw_timeline(timeline_of(request, candidate.layout), width - 3)
            yield from ("   " + line for line in timeline.splitlines())
        if number > 1:
            first = plan.candidates[0].time.step_s
            yield f"   {100 * (candidate.time.step_s / first - 1):.1f} % slower than the first"
    if plan.rejected:
        yield ""
        yield "other grids:"
        yield from (f"   {spell_layout(one.layout)}: {one.reason}" for one in plan.rejected)


def _figures(candidate: Candidate) -> Iterator[str]:
    time = candidate.time
    low, high = time.range_s
    yield (
        f"step {time.step_s:.2f} s ({low:.2f} to {high:.2f}), {time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU,"
        f" MFU {100 * time.mfu.causal:.1f} % causal, {100 * time.mfu.full:.1f} % full"
        f" (of {time.mfu.peak_flops / 1e12:.0f} TFLOP/s), bubble {100 * time.bubble:.1f} %"
    )
    if not candidate.fits:
        yield f"OUT OF MEMORY: probability {100 * candidate.oom_probability:.0f} %"


def memory_bars(request: Request, candidate: Candidate, width: int) -> Iterator[str]:
    """One bar a stage in eighths of a block, and the capacity as a line."""
    capacity = request.capacity_bytes
    room = width - 30
    scale = max(capacity, candidate.peak_bytes) / room
    mark = round(capacity / scale)
    for rank, stage in enumerate(candidate.memory):
        eighths = round(8 * stage.used_bytes / scale)
        bar = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])
        row = bar.ljust(room + 1)
        if row[mark] == " ":
            row = row[:mark] + "│" + row[mark + 1 :]
        yield f"stage {rank:<3} {row.rstrip()} {stage.used_bytes / GIB:5.1f}/{capacity / GIB:.0f} GiB"
