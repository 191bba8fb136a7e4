"""The planner's answer in the documented JSON, and for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from triweave.layout import Layout
from triweave.planner.assumptions import GIB
from triweave.planner.explain import what_it_loses, why
from triweave.planner.profile import Profile
from triweave.planner.profile_machine import is_foreign
from triweave.planner.request import Candidate, Request, timeline_of
from triweave.planner.search import Plan
from triweave.schedule.draw import draw_timeline

MAX_OTHERS = 12
"""Grids without an answer that are told to people; scripts get all."""


def to_json(request: Request, plan: Plan) -> dict[str, Any]:
    """The contract of `triweave plan --json`."""
    return {
        "assumptions": assumptions(request),
        "candidates": [
            candidate_json(request, candidate, plan.candidates[0] if number else None)
            for number, candidate in enumerate(plan.candidates)
        ],
        "rejected": [
            *({"layout": layout_json(one.layout), "reason": f"{one.name}: {one.verdict}"} for one in plan.familiar),
            *({"layout": layout_json(one.layout), "reason": one.reason} for one in plan.rejected),
        ],
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
        "profile": None if request.profile is None else profile_json(request, request.profile),
    }


def profile_json(request: Request, profile: Profile) -> dict[str, Any]:
    """Where the speeds come from."""
    return {
        "gpu": profile.gpu,
        "torch": profile.torch,
        "date": profile.date,
        "source": profile.source,
        "of_this_gpu": not is_foreign(profile, request.cluster),
    }


def candidate_json(request: Request, candidate: Candidate, first: Candidate | None) -> dict[str, Any]:
    """One layout with its prices and reasons; a runner-up also says what it loses to the `first`."""
    time = candidate.time
    return {
        "layout": layout_json(candidate.layout),
        "fits": candidate.fits,
        "oom_probability": candidate.oom_probability,
        "peak_gib": [stage.used_bytes / GIB for stage in candidate.memory],
        "host_gib": [stage.host_bytes / GIB for stage in candidate.memory],
        "peak_allocated_gib": [stage.peak_allocated_bytes / GIB for stage in candidate.memory],
        "capacity_gib": request.capacity_bytes / GIB,
        "step_s": time.step_s,
        "step_s_range": list(time.range_s),
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": {"causal": time.mfu.causal, "full": time.mfu.full, "peak_flops": time.mfu.peak_flops},
        "bubble": time.bubble,
        "why": reasons(request, candidate, first),
    }


def reasons(request: Request, candidate: Candidate, first: Candidate | None) -> list[str]:
    """Everything that is said of one answer."""
    runner_up = [] if first is None else [what_it_loses(first, candidate)]
    return [*why(request, candidate), *runner_up]


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
        "shard_group": layout.shard_ranks if layout.shard != "none" else None,
        "schedule": layout.schedule,
        "recompute": list(layout.recompute),
        "offload": list(layout.offload),
        "sequence_parallel": layout.sequence_parallel,
        "keep_gathered": layout.keep_gathered,
        "cuda_graphs": layout.cuda_graphs,
        "layers": list(layout.layers),
    }


def spell_layout(layout: Layout) -> str:
    """`tp4 pp4 vpp5 dp2, micro-batch 1, interleaved, shard optimizer, recompute norm swiglu`."""
    parts = [str(layout), f"micro-batch {layout.micro_batch}", layout.schedule, f"shard {layout.sharing}"]
    if layout.keeps_gathered:
        parts.append("keep gathered")
    if layout.recompute:
        parts.append("recompute " + " ".join(layout.recompute))
    if layout.offload:
        parts.append("offload " + " ".join(layout.offload))
    if layout.cuda_graphs:
        parts.append("CUDA graphs")
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
    if request.profile is not None and is_foreign(request.profile, cluster):
        yield (
            f"the profile is of {request.profile.gpu}, not of {cluster.gpu.name}: its shares of the datasheet are"
            " carried over, and each range is twice as wide"
        )
    for number, candidate in enumerate(plan.candidates, 1):
        yield ""
        yield f"{number}. {spell_layout(candidate.layout)}"
        yield from ("   " + line for line in _figures(candidate))
        yield from ("   " + line for line in memory_bars(request, candidate, width - 3))
        first = plan.candidates[0] if number > 1 else None
        for line in reasons(request, candidate, first):
            yield from wrap(line, width, initial_indent="   ", subsequent_indent="     ")
        if number == 1 and candidate.layout.pp > 1:
            yield ""
            timeline = draw_timeline(timeline_of(request, candidate.layout), width - 3)
            yield from ("   " + line for line in timeline.splitlines())
    if plan.familiar:
        yield ""
        yield "familiar layouts, for comparison:"
        for one in plan.familiar:
            yield from wrap(f"{one.name}: {one.verdict}", width, initial_indent="   ", subsequent_indent="     ")
    if plan.rejected:
        yield ""
        yield "other grids:"
        for other in plan.rejected[:MAX_OTHERS]:
            line = f"{spell_layout(other.layout)}: {other.reason}"
            yield from wrap(line, width, initial_indent="   ", subsequent_indent="     ")
        if len(plan.rejected) > MAX_OTHERS:
            yield f"   and {len(plan.rejected) - MAX_OTHERS} more, which --json lists"


def _figures(candidate: Candidate) -> Iterator[str]:
    time = candidate.time
    low, high = time.range_s
    yield (
        f"step {time.step_s:.2f} s ({low:.2f} to {high:.2f}), {time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU,"
        f" MFU {100 * time.mfu.causal:.1f} % causal, {100 * time.mfu.full:.1f} % full"
        f" (of {time.mfu.peak_flops / 1e12:.0f} TFLOP/s), bubble {100 * time.bubble:.1f} %"
    )
    if not candidate.fits:
        yield f"OUT OF MEMORY with a probability of {100 * candidate.oom_probability:.0f} %"


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
