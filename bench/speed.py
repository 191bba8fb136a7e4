"""Step time and peak memory of our own trainer on the GPUs at hand, beside what the planner said before the run.

    python bench/speed.py            # two GPUs: Llama-3-8B and 70B-shaped layers; writes runs/speed.json
    python bench/speed.py --small                   # two CPU processes, a rehearsal
    python bench/speed.py --only dp2 --trace DIR    # one step more, profiled: which communication is exposed
    python bench/speed.py --only dp2 --overlap-dp auto,off   # copy engines, and the same by collectives

Random weights and tokens, bf16, nothing but the step itself: two steps to warm up, the median of four. No other
trainer is compared here. Predictions are written to the output file before the first step is run.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from exposed import communication
from result_file import result_file
from torch.profiler import ProfilerActivity, profile

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.config.schema import DataConfig, ModelConfig, Run, RuntimeConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.on_gpu import fill_on_device
from triweave.layout import Layout, even_layers
from triweave.llama import StageInput
from triweave.model_spec import ModelSpec
from triweave.planner.memory import predict_memory
from triweave.planner.time_step import predict_step
from triweave.training.engine import Engine, build_engine
from triweave.training.metrics import peak_memory
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.start_ranks import run_ranks
from triweave.training.step import Batch, train_step

WARM_UP, TIMED = 2, 4

LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2 recompute norm swiglu": Layout(tp=2, recompute=("norm", "swiglu")),
    "pp2 1f1b": Layout(pp=2),
    "pp2 zero-bubble": Layout(pp=2, schedule="zero-bubble"),
    "pp2 interleaved": Layout(pp=2, vpp=2, schedule="interleaved"),
    "dp2 none": Layout(dp=2, shard="none"),
    "dp2 optimizer": Layout(dp=2, shard="optimizer"),
    "dp2 optimizer recompute norm swiglu": Layout(dp=2, shard="optimizer", recompute=("norm", "swiglu")),
    "dp2 gradients": Layout(dp=2, shard="gradients"),
    "dp2 full": Layout(dp=2, shard="full"),
    "dp2 full recompute layer": Layout(dp=2, shard="full", recompute=("layer",)),
}


def cases(small: bool) -> dict[str, tuple[ModelSpec, int, int]]:
    """Name of each model with its shapes, sequence and global batch."""
    if small:
        tiny = ModelSpec(1024, 128, 256, 4, 4, 2, 32, max_position_embeddings=8192)
        return {"tiny": (tiny, 128, 4)}
    eight = replace(find_model("meta-llama/Llama-3.1-8B"), max_position_embeddings=8192)
    seventy = replace(find_model("meta-llama/Llama-3.1-70B"), num_hidden_layers=4, vocab_size=32000)
    return {"Llama-3-8B seq 8192": (eight, 8192, 4), "70B-shaped, 4 layers, seq 4096": (seventy, 4096, 8)}


def measure(jobs: list[dict[str, Any]], out: Path, process: Process) -> int:
    """All jobs on this rank."""
    rows = []
    run = Run(model=ModelConfig(path=""), data=DataConfig(train=("",)))
    device = choose_device(run.runtime, process)
    with process_group(process, device, 300):
        for job in jobs:
            rows.append({**job["told"], **measure_one(job, device)})
            if process.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
                out.write_text(json.dumps(rows, indent=1))
    return 0


def measure_one(job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Median step and peak of one job; an out-of-memory error is an answer too."""
    spec, layout, seq, batch = job["spec"], job["layout"], job["seq"], job["batch"]
    run = Run(
        model=ModelConfig(path="", weights="random"),
        data=DataConfig(train=("",), seq_len=seq),
        runtime=RuntimeConfig(overlap_dp=job["overlap_dp"]),
    )
    resolved = ResolvedRun(run, spec, layout, None, layout.micro_batches(batch), layout.world_size)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        engine = build_engine(resolved, device, lambda units: fill_on_device(units, spec))
        generator = torch.Generator(device).manual_seed(0)
        inputs, targets = [], []
        positions = torch.arange(seq, device=device).unsqueeze(1)
        for _ in range(layout.micro_batches(batch)):
            tokens = torch.randint(0, spec.vocab_size, (seq, 1), device=device, generator=generator)
            inputs.append(StageInput(tokens, positions))
            targets.append(torch.roll(tokens, -1, 0))
        work = Batch(inputs, targets, batch * seq)
        times = []
        for _ in range(WARM_UP + TIMED):
            begin = time.monotonic()
            loss, _ = train_step(engine, work, 1e-5, 1.0)
            times.append(time.monotonic() - begin)
        traced = {} if job["trace"] is None else trace_step(engine, work, job["trace"] / f"{job['file']}.json")
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    allocated, reserved = peak_memory(device, engine.unseen_bytes)
    return {
        "loss": loss,
        "carried_by": (engine.sharding.memory if layout.dp > 1 else engine.tp.transport).name,
        "step_s": sorted(times[WARM_UP:])[TIMED // 2],
        "allocated_gib": allocated / 2**30,
        "reserved_gib": reserved / 2**30,
        **traced,
    }


def trace_step(engine: Engine, work: Batch, file: Path) -> dict[str, float]:
    """One step under the profiler: rank 0's trace to `file`, and the communication that it shows.

    Two steps are run and the second is kept, so that it begins as steps do, with the gathers of the one before.
    """
    on_gpu = engine.groups.device.type == "cuda"
    train_step(engine, work, 1e-5, 1.0)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        train_step(engine, work, 1e-5, 1.0)
        if on_gpu:
            torch.cuda.synchronize()
    if engine.groups.rank != 0:
        return {}
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    return communication(json.loads(file.read_text())["traceEvents"])._asdict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=result_file, default="runs/speed.json")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="layouts whose name holds one of these, between commas")
    parser.add_argument("--model", default="", help="models whose name holds this")
    parser.add_argument("--overlap-dp", default="auto", help="runtime.overlap_dp, or both: auto,off")
    parser.add_argument("--trace", type=Path, help="folder for a trace of each layout, and exposed NCCL time in --out")
    options = parser.parse_args()
    cluster = parse_cluster("1x2xh200-141gb")
    jobs = []
    for model, (spec, seq, batch) in cases(options.small).items():
        for name, layout in LAYOUTS.items():
            if options.model not in model or not any(wanted in name for wanted in options.only.split(",")):
                continue
            full = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
            stages = predict_memory(spec, full, seq_len=seq, num_micro_batches=full.micro_batches(batch))
            needed = max(stage.used_bytes for stage in stages)
            if needed > 1.1 * cluster.gpu.usable_bytes:
                print(f"{model} | {name} | not run: {needed / 2**30:.0f} GiB predicted")
                continue
            told = {
                "model": model,
                "layout": name,
                "tokens": seq * batch,
                "predicted_step_s": predict_step(spec, full, cluster, seq_len=seq, global_batch=batch).step_s,
                "predicted_allocated_gib": stages[0].peak_allocated_bytes / 2**30,
                "flops": seq * batch * spec.flops_per_token(seq, causal=False) / 2 / 989e12,
            }
            for overlap_dp in options.overlap_dp.split(",") if full.dp > 1 else ["auto"]:
                file = "".join(letter if letter.isalnum() else "-" for letter in f"{model} {name} {overlap_dp}")
                jobs.append(
                    {
                        "told": told,
                        "spec": spec,
                        "layout": full,
                        "seq": seq,
                        "batch": batch,
                        "trace": options.trace,
                        "overlap_dp": overlap_dp,
                        "file": file,
                    }
                )
    options.out.write_text(json.dumps([job["told"] for job in jobs], indent=1))
    code = run_ranks(2, functools.partial(measure, jobs, options.out))
    if code:
        return code
    print(
        "model | layout | step s | predicted | tokens/s/GPU | full MFU | allocated GiB (rank 0) | predicted"
        " | moved ms | exposed | loss | carried by"
    )
    for row in json.loads(options.out.read_text()):
        if row.get("out_of_memory"):
            print(
                f"{row['model']} | {row['layout']} | out of memory | predicted {row['predicted_allocated_gib']:.1f} GiB"
            )
            continue
        print(
            f"{row['model']} | {row['layout']} | {row['step_s']:.3f} | {row['predicted_step_s']:.3f}"
            f" | {row['tokens'] / row['step_s'] / 2:,.0f} | {row['flops'] / row['step_s']:.1%}"
            f" | {row['allocated_gib']:.2f} | {row['predicted_allocated_gib']:.2f}"
            f" | {1e3 * row.get('total_s', 0):.1f} | {1e3 * row.get('exposed_s', 0):.1f}"
            f" | {row['loss']:.9f} | {row['carried_by']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
