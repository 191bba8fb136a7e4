"""What to say when memory has run out: what the planner knows of the layout, and what would change it.

The planner is imported here only when it is needed: the ordinary path never pays for it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from triweave.config.validate import ResolvedRun
from triweave.moments import LEAST_SHARES

GIB = 2**30

_WORDS = (
    *("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc"),
    # Of a GPU, beside torch's allocator: what the driver, a library or NCCL asked for itself.
    *("CUDA error: out of memory", "CUDA driver error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, on the GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def explain_out_of_memory(error: BaseException, resolved: ResolvedRun, rank: int, where: str) -> str:
    """The message of a rank whose memory has run out; on a GPU a snapshot of it is written beside.

    Args:
        error: what was raised.
        resolved: the run.
        rank: whose memory.
        where: it was, in words.
    """
    lines = [f"rank {rank} is out of memory in {where}: {str(error).strip().splitlines()[0] if str(error) else 'host'}"]
    if isinstance(error, torch.OutOfMemoryError):
        lines.append(f"  what its memory holds is in {write_snapshot(Path(resolved.run.output_dir), rank)}")
    return "\n".join(lines + [f"  {line}" for line in what_would_fit(resolved)])


def write_snapshot(folder: Path, rank: int) -> Path:
    """Every segment and block of the GPU's caching allocator, as JSON."""
    path = folder / f"out-of-memory-rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    segments = torch.cuda.memory_snapshot()
    path.write_text(json.dumps({"segments": segments, "summary": torch.cuda.memory_stats()}, default=str))
    return path


def what_would_fit(resolved: ResolvedRun) -> list[str]:
    """What the planner predicts of the layout, by component, and the nearest layouts that it says would fit."""
    from triweave.planner.answer import spell_layout
    from triweave.planner.explain import why
    from triweave.planner.forecast import assumptions_of
    from triweave.planner.request import SMALLER_MOMENTS, Request, price
    from triweave.planner.search import search

    run, cluster = resolved.run, resolved.cluster
    if cluster is None or cluster.gpu.usable_bytes == 0:
        return ["triweave plan says which layouts fit; give the run file a cluster and this message says it too"]
    request = Request(
        run.model.path,
        run.cluster or "",
        resolved.spec,
        cluster,
        run.data.seq_len,
        run.train.global_batch,
        dtype=run.model.dtype,
        tp_across_nodes=run.layout.tp_across_nodes,
        assumptions=assumptions_of(resolved),
    )
    candidate = price(request, resolved.layout)
    fullest = max(candidate.memory, key=lambda stage: stage.used_bytes)
    largest = sorted(fullest.components.items(), key=lambda item: -item[1])[:5]
    spelled = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    # It did not fit, whatever was predicted.
    changes = [line for line in why(request, replace(candidate, fits=False)) if line.startswith("fits with")]
    if any(1 - beta < LEAST_SHARES["bfloat16"] for beta in run.optimizer.betas):
        changes = [line for line in changes if not line.startswith(f"fits with {SMALLER_MOMENTS}")]
    if not changes:
        best = search(request, 1).candidates
        changes = [f"no single change makes it fit; plan's first answer is {spell_layout(one.layout)}" for one in best]
    return [
        f"predicted {fullest.used_bytes / GIB:.1f} of {request.capacity_bytes / GIB:.1f} GiB on pipeline rank"
        f" {fullest.pp_rank} (GiB: {spelled})",
        *changes[:3],
    ]
