"""One rank of a big job for real on one GPU, its other ranks not there; and the out-of-memory error of plain FSDP.

    python bench/one_rank.py --out one_rank.json        # one GPU with more than 80 GB
    python bench/one_rank.py --small                    # a CPU, a rehearsal

Llama-3-70B on 4 x 8 H100-80GB: first, middle and last stage with their real shapes, kernels and optimizer states, in
80 GB. Collectives are local copies, so times are of the rank's computation. What `triweave check` says of every rank is
written to the output file before the first of them is run. The step time of the grid is the schedule with the measured
actions in it: pipeline bubbles and messages between nodes are in, waiting for tensor-parallel collectives is not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.memory import RankMemory, rank_memory
from triweave.dryrun.on_gpu import Measured, OutOfMemory, fewer_micro_batches, flops_of, grid_step, measure_rank, mfu_of
from triweave.layout import Coordinates, Layout, even_layers
from triweave.model_spec import ModelSpec

CAP_BYTES = int(80e9)
GIB = 2**30
GLOBAL_BATCH = 128
TINY = ModelSpec(512, 64, 128, 8, 8, 8, 8, max_position_embeddings=8192)

CASES: dict[str, tuple[Layout, int]] = {
    "fsdp32 seq 4096": (Layout(dp=32, shard="full"), 4096),
    "fsdp32 recompute layer seq 4096": (Layout(dp=32, shard="full", recompute=("layer",)), 4096),
    "tp8 pp4 seq 4096": (Layout(tp=8, pp=4), 4096),
    "tp8 pp4 seq 8192": (Layout(tp=8, pp=4), 8192),
    "tp8 pp4 seq 4096 micro-batch 2": (Layout(tp=8, pp=4, micro_batch=2), 4096),
    "tp8 pp4 seq 8192 micro-batch 2": (Layout(tp=8, pp=4, micro_batch=2), 8192),
    "tp4 pp8 seq 4096": (Layout(tp=4, pp=8), 4096),
    "tp4 pp8 seq 8192": (Layout(tp=4, pp=8), 8192),
    "tp8 pp4 zero-bubble seq 4096": (Layout(tp=8, pp=4, schedule="zero-bubble"), 4096),
}


def resolve(layout: Layout, seq: int, small: bool) -> ResolvedRun:
    """The run of a case, cut to the micro-batches that are run here."""
    spec = TINY if small else find_model("meta-llama/Llama-3.1-70B")
    seq = seq // 64 if small else seq
    layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
    run = Run(
        model=ModelConfig(path="", weights="random"),
        data=DataConfig(train=("",), seq_len=seq, packing=False),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        train=TrainConfig(global_batch=GLOBAL_BATCH, steps=1),
    )
    count = layout.micro_batches(GLOBAL_BATCH)
    return ResolvedRun(run, spec, layout, parse_cluster("4x8xh100-80gb"), count, 8)


def ranks_of(layout: Layout) -> list[int]:
    """One rank of the first, a middle and the last pipeline stage."""
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    return [layout.rank(Coordinates(0, 0, 0, pp)) for pp in stages]


def told(one: RankMemory) -> dict[str, Any]:
    """What the check says of a rank, for the file."""
    return {"peak_gib": one.peak_bytes / GIB, "reserved_gib": one.reserved_bytes / GIB, "at": one.at}


def row_of(
    found: Measured | OutOfMemory, resolved: ResolvedRun, check: dict[str, Any], peak_flops: float
) -> dict[str, Any]:
    """A rank's figures."""
    if isinstance(found, OutOfMemory):
        return {"out_of_memory": found.message, "at": found.at, "allocated_gib": found.allocated / GIB, "check": check}
    actions = {
        f"{kind.value}{stage}": {
            "seconds": seconds,
            "mfu_causal": flops_of(resolved, (kind, stage), causal=True) / seconds / peak_flops,
            "mfu_full": flops_of(resolved, (kind, stage), causal=False) / seconds / peak_flops,
        }
        for (kind, stage), seconds in found.actions.items()
    }
    return {
        "actions": actions,
        "mfu_causal": mfu_of(resolved, found.actions, peak_flops, causal=True),
        "mfu_full": mfu_of(resolved, found.actions, peak_flops, causal=False),
        "rest_s": found.rest_s,
        "loss": found.loss,
        "grad_norm": found.grad_norm,
        "step_s": found.step_s,
        "micro_batches": found.micro_batches,
        "peak_allocated_gib": found.peak_allocated / GIB,
        "peak_reserved_gib": found.peak_reserved / GIB,
        "check": check,
    }


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield "case | rank | actions (ms, causal MFU) | MFU causal | full | allocated GiB | check | off | reserved | check"
    for name, case in results.items():
        for rank, row in case["ranks"].items():
            check = row["check"]
            if "out_of_memory" in row:
                yield (
                    f"{name} | {rank} | OUT OF MEMORY at {row['at']} with {row['allocated_gib']:.1f} GiB allocated"
                    f" | check: needs {check['peak_gib']:.1f} GiB, peak at {check['at']}"
                )
                continue
            if "actions" not in row:
                continue
            actions = ", ".join(
                f"{action} {one['seconds'] * 1e3:.1f} ({one['mfu_causal']:.1%})"
                for action, one in row["actions"].items()
            )
            real = row["peak_allocated_gib"]
            off = f"{check['peak_gib'] / real - 1:+.2%}" if real else "-"
            yield (
                f"{name} | {rank} | {actions} | {row['mfu_causal']:.1%} | {row['mfu_full']:.1%} | {real:.2f}"
                f" | {check['peak_gib']:.2f} | {off} | {row['peak_reserved_gib']:.2f} | {check['reserved_gib']:.2f}"
            )
        if "grid" in case:
            grid = case["grid"]
            yield (
                f"{name} | grid of 32, global batch {GLOBAL_BATCH} | step {grid['step_s']:.2f} s"
                f" | {grid['mfu_causal']:.1%} causal, {grid['mfu_full']:.1%} full"
                f" | bubble {grid['bubble']:.1%} | {grid['tokens_per_s_per_gpu']:.0f} tokens/s/GPU"
            )


def grid_of(resolved: ResolvedRun, measured: list[Measured], peak_flops: float) -> dict[str, float]:
    """Step time and MFU of the whole grid."""
    cluster = resolved.cluster
    timeline = grid_step(resolved, measured, cluster.gpu.nic_bandwidth if cluster else 50e9)
    step = timeline.total_s + max(one.rest_s for one in measured)
    tokens = GLOBAL_BATCH * resolved.run.data.seq_len / step / resolved.layout.world_size
    causal, full = (
        tokens * resolved.spec.flops_per_token(resolved.run.data.seq_len, causal=c) / peak_flops for c in (True, False)
    )
    bubble = timeline.bubble_of_total
    return {"step_s": step, "mfu_causal": causal, "mfu_full": full, "tokens_per_s_per_gpu": tokens, "bubble": bubble}


def without_gpu() -> None:
    """Keep a process that only checks off the card that is measured."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("one_rank.json"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    # Before CUDA starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.small else torch.device("cpu")
    peak_flops = parse_cluster("1x1xh200-141gb").gpu.peak_flops
    cases = {name: resolve(*case, options.small) for name, case in CASES.items() if options.only in name}

    jobs = [(name, rank) for name, run in cases.items() for rank in ranks_of(run.layout)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(len(jobs), max(1, (os.cpu_count() or 2) // 2)), mp_context=context, initializer=without_gpu
    ) as pool:
        here = [cases[name] for name, _ in jobs]
        # The check runs what is run below: eight micro-batches, all of them on the card.
        here = [fewer_micro_batches(run, max(8, run.layout.pp)) for run in here]
        checks = dict(zip(jobs, pool.map(rank_memory, here, [rank for _, rank in jobs]), strict=True))
    results: dict[str, Any] = {
        name: {"ranks": {str(rank): {"check": told(checks[name, rank])} for rank in ranks_of(run.layout)}}
        for name, run in cases.items()
    }
    options.out.write_text(json.dumps(results, indent=1))

    for name, run in cases.items():
        short = fewer_micro_batches(run, max(8, run.layout.pp))
        measured = []
        for rank in ranks_of(run.layout):
            found = measure_rank(short, rank, device, cap_bytes=CAP_BYTES)
            results[name]["ranks"][str(rank)] = row_of(found, run, told(checks[name, rank]), peak_flops)
            if isinstance(found, Measured):
                measured.append(found)
            print(name, rank, "done", flush=True)
            options.out.write_text(json.dumps(results, indent=1))
        if len(measured) == len(ranks_of(run.layout)):
            results[name]["grid"] = grid_of(run, measured, peak_flops)
            options.out.write_text(json.dumps(results, indent=1))
    print("\n".join(lines(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
