"""One rank of a big job for real on one GPU, its other ranks not there; and the out-of-memory error of plain FSDP.

    python bench/one_rank.py            # one GPU with more than 80 GB; about 150 s; writes runs/one_rank.json
    python bench/one_rank.py --small    # a CPU, a rehearsal

Llama-3-70B on 4 x 8 H100-80GB: middle, first and last stage with their real shapes, kernels and optimizer states, in
80 GB; and all 80 layers of it on one node of eight H200, with moments in bfloat16. Collectives are local copies, so
times are of the rank's computation. What `triweave check` says of a rank is written to the output file before it is
run. The step time of the grid is the schedule with the measured actions in it: pipeline bubbles and messages between
nodes are in, waiting for tensor-parallel collectives is not.

Parts: the same rank cut to two and to four layers gives the time of a layer, the last stage cut to two that of the
head. Layers times a layer, and the head, are held against the whole stage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import without_gpu
from result_file import result_file

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.memory import RankMemory, rank_memory
from triweave.dryrun.on_gpu import Measured, OutOfMemory, fewer_micro_batches, flops_of, grid_step, measure_rank, mfu_of
from triweave.layout import Coordinates, Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.moments import MomentsDtype

CAP_BYTES = int(80e9)
GIB = 2**30
GLOBAL_BATCH = 128
FEW, MORE = 2, 4
"""Layers a stage, of the runs that the time of a layer comes from."""
TINY = ModelSpec(512, 128, 256, 8, 8, 8, 16, max_position_embeddings=8192)


class Case(NamedTuple):
    """What a rank is of."""

    layout: Layout
    seq: int
    fp8: bool = False
    moments: MomentsDtype = "float32"
    cluster: str = "4x8xh100-80gb"
    cap_bytes: int | None = CAP_BYTES
    """What it may take of the card; None for all of it."""


ONE_NODE = partial(Case, seq=8192, moments="bfloat16", cluster="1x8xh200-141gb", cap_bytes=None)
"""Of Llama-3-70B on eight H200."""


GRAPHS = Layout(tp=8, pp=4, cuda_graphs=True)


CASES = {
    "tp8 pp4 seq 8192": Case(Layout(tp=8, pp=4), 8192),
    "tp8 pp4 seq 4096": Case(Layout(tp=8, pp=4), 4096),
    "fsdp32 seq 4096": Case(Layout(dp=32, shard="full"), 4096),
    "tp8 pp4 seq 4096 micro-batch 2": Case(Layout(tp=8, pp=4, micro_batch=2), 4096),
    "tp8 pp4 zero-bubble seq 4096": Case(Layout(tp=8, pp=4, schedule="zero-bubble"), 4096),
    "fsdp32 recompute layer seq 4096": Case(Layout(dp=32, shard="full", recompute=("layer",)), 4096),
    "tp4 pp8 seq 8192": Case(Layout(tp=4, pp=8), 8192),
    "tp4 pp8 seq 4096": Case(Layout(tp=4, pp=8), 4096),
    "tp8 pp4 seq 8192 micro-batch 2": Case(Layout(tp=8, pp=4, micro_batch=2), 8192),
    "tp8 pp4 seq 8192 fp8": Case(Layout(tp=8, pp=4), 8192, fp8=True),
    "tp8 pp4 seq 4096 micro-batch 2 fp8": Case(Layout(tp=8, pp=4, micro_batch=2), 4096, fp8=True),
    "tp8 pp4 seq 4096 fp8": Case(Layout(tp=8, pp=4), 4096, fp8=True),
    "tp8 pp4 seq 4096 graphs": Case(GRAPHS, 4096),
    "tp8 pp4 seq 4096 fp8 graphs": Case(GRAPHS, 4096, fp8=True),
    "tp8 pp4 zero-bubble seq 4096 fp8 graphs": Case(replace(GRAPHS, schedule="zero-bubble"), 4096, fp8=True),
    "one node, recompute layer": ONE_NODE(Layout(tp=8, recompute=("layer",))),
    "one node, recompute norm and swiglu": ONE_NODE(Layout(tp=8, recompute=("norm", "swiglu"))),
}
"""Most telling first: what there is no time for is left out."""
WITH_PARTS = ("tp8 pp4 seq 8192", "tp8 pp4 seq 4096")


def resolve(case: Case, small: bool, layers_a_stage: int | None = None) -> ResolvedRun:
    """The run of a case; with fewer layers where `layers_a_stage` says so."""
    spec = TINY if small else find_model("meta-llama/Llama-3.1-70B")
    layout, seq = case.layout, case.seq // 64 if small else case.seq
    if layers_a_stage is not None:
        spec = replace(spec, num_hidden_layers=layers_a_stage * layout.num_stages)
    layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
    run = Run(
        model=ModelConfig(path="", weights="random", fp8=case.fp8),
        data=DataConfig(train=("",), seq_len=seq, packing=False),
        optimizer=OptimizerConfig(learning_rate=1e-6, moments=case.moments),
        train=TrainConfig(global_batch=GLOBAL_BATCH, steps=1),
    )
    count = layout.micro_batches(GLOBAL_BATCH)
    return ResolvedRun(run, spec, layout, parse_cluster(case.cluster), count, 8)


def cut(run: ResolvedRun) -> ResolvedRun:
    """The micro-batches that are run here: with a pipeline as many as fill it, and as many again."""
    return fewer_micro_batches(run, 2 * run.layout.pp if run.layout.pp > 1 else 1)


def ranks_of(layout: Layout) -> list[int]:
    """One rank of a middle, the first and the last pipeline stage, each once."""
    stages = dict.fromkeys((layout.pp // 2, 0, layout.pp - 1))
    return [layout.rank(Coordinates(0, 0, 0, pp)) for pp in stages]


def told(one: RankMemory) -> dict[str, Any]:
    """What the check says of a rank, for the file."""
    return {"peak_gib": one.peak_bytes / GIB, "reserved_gib": one.reserved_bytes / GIB, "at": one.at}


def row_of(
    found: Measured | OutOfMemory | str, resolved: ResolvedRun, check: dict[str, Any], peak_flops: float
) -> dict[str, Any]:
    """A rank's figures; `found` is a text where something went wrong."""
    if isinstance(found, str):
        return {"failed": found, "check": check}
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
    yield "MFU: forward and backward of one micro-batch; the optimizer apart, in rest"
    yield (
        "case | rank | actions (ms, causal MFU) | MFU causal | full | allocated GiB | check | off | reserved | check"
        " | step ms of the micro-batches that were run | rest ms"
    )
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
                yield f"{name} | {rank} | {row.get('failed', 'not run').strip().splitlines()[-1]}"
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
                f" | {row['step_s'] * 1e3:.1f} of {row['micro_batches']} | {row['rest_s'] * 1e3:.1f}"
            )
        for part in case.get("parts", ()):
            yield (
                f"{name} | parts | {part['what']}: {part['parts_ms']:.1f} ms, whole {part['whole_ms']:.1f} ms"
                f" ({part['whole_ms'] / part['parts_ms'] - 1:+.1%})"
            )
        if "grid" in case:
            grid, ranks = case["grid"], CASES[name].layout.world_size
            yield (
                f"{name} | grid of {ranks}, global batch {GLOBAL_BATCH} | step {grid['step_s']:.2f} s"
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


def parts_of(
    run: ResolvedRun, few: Measured, more: Measured, last: Measured, whole: list[Measured]
) -> list[dict[str, Any]]:
    """Whole stages against the sum of their parts.

    Args:
        run: the case.
        few: a middle stage of `FEW` layers.
        more: the same of `MORE`.
        last: the last stage of `FEW`.
        whole: middle, first and last stage of all layers.
    """
    layout = run.layout
    rows = []
    middle, end = layout.pp // 2, layout.num_stages - 1
    layers = layout.layers[middle]

    def stretched(short: float, long: float, number: int) -> float:
        return short + (number - FEW) * (long - short) / (MORE - FEW)

    found = {key: seconds for one in whole for key, seconds in one.actions.items()}
    for kind, stage in few.actions:
        layer = (more.actions[kind, stage] - few.actions[kind, stage]) / (MORE - FEW)
        parts = stretched(few.actions[kind, stage], more.actions[kind, stage], layers)
        what = f"{kind.value}{stage}, {layers} layers of {layer * 1e3:.2f} ms"
        rows.append({"what": what, "parts_ms": parts * 1e3, "whole_ms": found[kind, stage] * 1e3})
        head = last.actions[kind, end] - few.actions[kind, stage]
        what = f"{kind.value}{end}, the same and a head of {head * 1e3:.2f} ms"
        rows.append({"what": what, "parts_ms": (parts + head) * 1e3, "whole_ms": found[kind, end] * 1e3})
    rest = stretched(few.rest_s, more.rest_s, layers)
    what = f"optimizer and the rest of the step, stage {middle}"
    rows.append({"what": what, "parts_ms": rest * 1e3, "whole_ms": whole[0].rest_s * 1e3})
    return rows


class Bench:
    """The results so far, on disk after every rank."""

    def __init__(self, out: Path, device: torch.device, seconds: float) -> None:
        self.out, self.device = out, device
        self.end = time.monotonic() + seconds
        self.results: dict[str, Any] = {}
        self.peak_flops = parse_cluster("1x1xh200-141gb").gpu.peak_flops

    def save(self) -> None:
        """Write the file."""
        self.out.write_text(json.dumps(self.results, indent=1))

    def measure(self, run: ResolvedRun, rank: int, cap_bytes: int | None) -> Measured | OutOfMemory | str:
        """A rank; a text if there is no time left or something unforeseen happens, so that the others are run."""
        if time.monotonic() > self.end:
            return "not run: no time left"
        try:
            found = measure_rank(cut(run), rank, self.device, cap_bytes=cap_bytes, steps=2)
            if isinstance(found, Measured) and not isfinite(found.grad_norm):
                return f"its gradients' norm is {found.grad_norm}: a GPU is faster on what is no number"
            return found
        except Exception:  # whatever it is, it is this row's result
            return traceback.format_exc()

    def case(self, name: str, run: ResolvedRun, checks: dict[int, Future[RankMemory]], small: bool) -> None:
        """All ranks of a case."""
        told_of = {rank: told(found.result()) for rank, found in checks.items()}
        case = self.results[name] = {"ranks": {str(rank): {"check": check} for rank, check in told_of.items()}}
        self.save()
        measured = []
        for rank, check in told_of.items():
            begin = time.monotonic()
            found = self.measure(run, rank, CASES[name].cap_bytes)
            case["ranks"][str(rank)] = row_of(found, run, check, self.peak_flops)
            print(f"{name} rank {rank}: {type(found).__name__} in {time.monotonic() - begin:.1f} s", flush=True)
            if isinstance(found, str):
                print(found, flush=True)
            if isinstance(found, Measured):
                measured.append(found)
            self.save()
        if len(measured) < len(told_of):
            return
        case["grid"] = grid_of(run, measured, self.peak_flops)
        if name in WITH_PARTS:
            short, longer = (resolve(CASES[name], small, layers) for layers in (FEW, MORE))
            middle, _, last = ranks_of(run.layout)
            parts = [
                self.measure(part, rank, CASES[name].cap_bytes)
                for part, rank in ((short, middle), (longer, middle), (short, last))
            ]
            few, more, end = parts
            if isinstance(few, Measured) and isinstance(more, Measured) and isinstance(end, Measured):
                case["parts"] = parts_of(run, few, more, end, measured)
            else:
                print("parts:", *(part for part in parts if not isinstance(part, Measured)), flush=True)
        self.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=result_file, default="runs/one_rank.json")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=140.0, help="no rank is begun later than this")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.small else torch.device("cpu")
    if device.type == "cuda":
        # What PYTORCH_ALLOC_CONF says, which torch may have read by now.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    bench = Bench(options.out, device, options.seconds)
    cases = {name: resolve(case, options.small) for name, case in CASES.items() if options.only in name}
    jobs = [(name, rank) for name, run in cases.items() for rank in ranks_of(run.layout)]
    workers = min(len(jobs), max(1, (os.cpu_count() or 2) // 2))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=without_gpu) as pool:
        # What is told is what is run below: as many micro-batches, and no peers.
        checks = {(name, rank): pool.submit(rank_memory, cut(cases[name]), rank, one_gpu=True) for name, rank in jobs}
        for name, run in cases.items():
            bench.case(name, run, {rank: checks[name, rank] for rank in ranks_of(run.layout)}, options.small)
            print("\n".join(lines({name: bench.results[name]})), flush=True)
    print("\n".join(["", *lines(bench.results)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
