"""Every axis that two GPUs allow, and grids of four and eight: `verify` in float32 and bfloat16, then some training.

    python bench/smoke.py            # GPUs (NCCL), or CPU processes (gloo); writes runs/smoke.json
    python bench/smoke.py --share    # all ranks on one GPU: results alone, for speeds mean nothing there
    python bench/smoke.py --graphs   # the same with layers as CUDA graphs, where the rules allow it

What needs more GPUs than there are is skipped, and that is said.

The model is a small random Llama; its documents are packed, so that variable-length attention runs too. For each
layout: does it equal transformers, does its loss fall, how fast, how much memory. Last, the command line: the same
run under torchrun and under `--nproc`, which must print the same losses.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from one_gpu import share_gpu
from result_file import result_file

from triweave.config.schema import (
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    Run,
    RuntimeConfig,
    TrainConfig,
)
from triweave.config.validate import ResolvedRun, validate
from triweave.data.cache import PreparedData, prepare
from triweave.data.sampler import sequence_ids
from triweave.training.batches import batch_of, training_batch
from triweave.training.engine import build_engine
from triweave.training.metrics import peak_memory
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.start_ranks import run_ranks
from triweave.training.step import train_step
from triweave.verify.compare import Tolerance, compare_with_reference
from triweave.verify.reference import Reference
from triweave.verify.run import write_references

LAYOUTS = {
    "tp2": LayoutConfig(tp=2),
    "tp2 no sequence parallel": LayoutConfig(tp=2, sequence_parallel=False),
    "tp2 keep gathered": LayoutConfig(tp=2, keep_gathered=True),
    "tp2 recompute layer": LayoutConfig(tp=2, recompute=("layer",)),
    "tp2 recompute norm swiglu": LayoutConfig(tp=2, recompute=("norm", "swiglu")),
    "pp2 gpipe": LayoutConfig(pp=2, schedule="gpipe"),
    "pp2 1f1b": LayoutConfig(pp=2),
    "pp2 interleaved": LayoutConfig(pp=2, vpp=2, schedule="interleaved"),
    "pp2 zero-bubble": LayoutConfig(pp=2, schedule="zero-bubble"),
    "dp2 none": LayoutConfig(shard="none"),
    "dp2 optimizer": LayoutConfig(shard="optimizer"),
    "dp2 gradients": LayoutConfig(shard="gradients"),
    "dp2 full": LayoutConfig(shard="full"),
    "dp2 full recompute layer": LayoutConfig(shard="full", recompute=("layer",)),
    "cp2": LayoutConfig(cp=2),
    "cp2 full recompute attention": LayoutConfig(cp=2, shard="full", recompute=("attention",)),
    "cp2 whole": LayoutConfig(cp=2),
}
LAYOUTS_OF_FOUR = {
    "dp4 optimizer groups of 2": LayoutConfig(shard="optimizer", shard_group=2),
    "dp4 gradients groups of 2": LayoutConfig(shard="gradients", shard_group=2),
    "dp4 full groups of 2": LayoutConfig(shard="full", shard_group=2),
}
LAYOUTS_OF_EIGHT = {
    "tp2 pp2 dp2": LayoutConfig(tp=2, pp=2, shard="optimizer"),
    "tp2 pp2 dp2 interleaved gradients": LayoutConfig(tp=2, pp=2, vpp=2, schedule="interleaved", shard="gradients"),
    "tp4 pp2 zero-bubble": LayoutConfig(tp=4, pp=2, schedule="zero-bubble"),
    "tp8 keep gathered": LayoutConfig(tp=8, keep_gathered=True),
    "tp2 pp2 cp2": LayoutConfig(tp=2, pp=2, cp=2),
    "tp2 dp4 full groups of 2": LayoutConfig(tp=2, shard="full", shard_group=2),
}
WHOLE = " whole"
"""Ends the names of layouts whose sequences are one document each: other kernels compute their attention."""


class Size(NamedTuple):
    """A random Llama, and documents for it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    seq_len: int
    documents: int
    longest: int
    """Tokens of a document, at most."""


LARGE = Size(2048, 5632, 8, 16, 8, seq_len=2048, documents=2000, longest=900)
SHARED = Size(1024, 2816, 4, 16, 8, seq_len=1024, documents=800, longest=500)
SMALL = Size(128, 256, 4, 4, 2, seq_len=128, documents=400, longest=120)


def write_inputs(folder: Path, size: Size) -> tuple[Path, Path]:
    """A random Llama and token documents of unequal length in which each token follows from the last one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = folder / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1001,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=4096,
        initializer_range=0.02,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    draw = random.Random(0)  # noqa: S311 - data, no secret
    documents = folder / "documents.jsonl"
    with documents.open("w") as file:
        for _ in range(size.documents):
            token, ids = draw.randrange(1000), []
            for _ in range(draw.randrange(20, size.longest)):
                ids.append(token)
                token = (token * 7 + draw.randrange(3)) % 1000
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return model, documents


def run_for(
    model: Path,
    documents: Path,
    folder: Path,
    layout: LayoutConfig,
    dtype: str,
    *,
    seq_len: int,
    steps: int = 8,
    packing: bool = True,
) -> Run:
    """The run of one layout."""
    return Run(
        model=ModelConfig(path=str(model), dtype="float32" if dtype == "float32" else "bfloat16"),
        layout=replace(layout, micro_batch=1),
        data=DataConfig(
            train=(str(documents),),
            validation=0.0,
            seq_len=seq_len,
            loss_on="all",
            format="tokens",
            packing=packing,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        train=TrainConfig(global_batch=8, steps=steps),
        output_dir=str(folder / "out"),
        resume="never",
    )


def measure(
    jobs: list[tuple[str, str, ResolvedRun]],
    prepared: dict[bool, PreparedData],
    out: Path,
    share: bool,
    process: Process,
) -> int:
    """All layouts on this rank; the data is packed or not."""
    rows: list[dict[str, Any]] = []
    device = share_gpu(process) if share else choose_device(jobs[0][2].run.runtime, process)
    with process_group(process, device, 300):
        for name, dtype, resolved in jobs:
            rows.append(
                {"layout": name, "dtype": dtype, **measure_one(resolved, prepared[resolved.run.data.packing], device)}
            )
            if process.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    if process.rank == 0:
        out.write_text(json.dumps(rows, indent=1))
    return 0


def measure_one(resolved: ResolvedRun, prepared: PreparedData, device: torch.device) -> dict[str, Any]:
    """Verdict, losses, speed and memory of one layout."""
    run, data = resolved.run, prepared.train()
    record = json.loads((Path(run.output_dir) / "verify" / f"{kept_as(resolved)}.json").read_text())
    reference = Reference(record["loss"], Path(record["file"]))
    engine = build_engine(resolved, device)
    ids = sequence_ids(run.seed, 0, run.train.global_batch, data.num_sequences)
    verdict = compare_with_reference(engine, batch_of(data, engine, ids), reference, Tolerance(**record["tolerance"]))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for step in range(run.train.steps or 1):
        batch = training_batch(data, engine, seed=run.seed, step=step, global_batch=run.train.global_batch)
        begin = time.monotonic()
        loss, _ = train_step(engine, batch, 1e-3, 1.0)
        times.append(time.monotonic() - begin)
        losses.append(loss)
    name, worst = verdict.worst_gradient
    tokens = run.train.global_batch * run.data.seq_len
    return {
        "slices": engine.tp.transport.name,
        "pass": verdict.passed,
        "first_difference": verdict.first_difference,
        "loss_relative": verdict.loss_error / verdict.reference_loss,
        "worst_output": max(verdict.outputs.values()),
        "worst_gradient": worst,
        "worst_gradient_name": name,
        "losses": losses,
        "tokens_per_s": tokens / sorted(times)[len(times) // 2],
        "peak_gib": peak_memory(device, engine.unseen_bytes, engine.graph_bytes)[0] / 2**30,
    }


def command_line(run: Run, folder: Path) -> dict[str, list[float]]:
    """Losses of the same run, started by torchrun and by triweave itself."""
    from triweave.config.document import to_yaml

    found = {}
    for name, words in {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
        "nproc": [sys.executable, "-m"],
    }.items():
        run_file = folder / f"{name}.yaml"
        run_file.write_text(to_yaml(replace(run, output_dir=str(folder / name))))
        own = ["--nproc", "2"] if name == "nproc" else []
        subprocess.run([*words, "triweave", "train", str(run_file), *own], check=True, timeout=240)
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [json.loads(line)["loss"] for line in lines]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=result_file, default="runs/smoke.json")
    parser.add_argument(
        "--only", default="", help="layouts with these names, between commas; without the command line's part"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="layers as CUDA graphs; layouts without them are left out"
    )
    parser.add_argument("--share", action="store_true", help="put all ranks on one GPU")
    options = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    size = (SHARED if options.share else LARGE) if torch.cuda.is_available() else SMALL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, documents = write_inputs(folder, size)
        by_ranks: dict[int, list[tuple[str, str, ResolvedRun]]] = {}
        for num_ranks, layouts in ((2, LAYOUTS), (4, LAYOUTS_OF_FOUR), (8, LAYOUTS_OF_EIGHT)):
            if not options.share and torch.cuda.is_available() and torch.cuda.device_count() < num_ranks:
                print(f"skipped, for want of {num_ranks} GPUs: {', '.join(layouts)}", flush=True)
                continue
            for layout_name, layout in layouts.items():
                if options.graphs and not may_be_graphs(layout):
                    continue
                if not options.only or layout_name in options.only.split(","):
                    for dtype in ("float32", "bfloat16"):
                        packing = not layout_name.endswith(WHOLE)
                        run = run_for(
                            model,
                            documents,
                            folder,
                            replace(layout, cuda_graphs=options.graphs),
                            dtype,
                            seq_len=size.seq_len,
                            steps=2 if options.share else 8,
                            packing=packing,
                        )
                        job = (layout_name, dtype, validate(run, world_size=num_ranks))
                        by_ranks.setdefault(num_ranks, []).append(job)
        if not by_ranks:
            return 2
        jobs = [job for of_ranks in by_ranks.values() for job in of_ranks]
        first = {kept_as(resolved): resolved for _, _, resolved in reversed(jobs)}
        prepared = {one.run.data.packing: prepare(one.run, one.spec.vocab_size) for one in first.values()}
        for one in first.values():
            keep_reference(one, prepared[one.run.data.packing])
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        rows = []
        for num_ranks, of_ranks in by_ranks.items():
            code = run_ranks(num_ranks, functools.partial(measure, of_ranks, prepared, options.out, options.share))
            if code:
                return code
            rows += json.loads(options.out.read_text())
        exact = run_for(model, documents, folder, LAYOUTS["tp2"], "bfloat16", seq_len=size.seq_len)
        exact = replace(exact, runtime=RuntimeConfig(deterministic=True))
        cli = {} if options.only or options.share else command_line(exact, folder)
    options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows, "command_line": cli}, indent=1))
    for row in rows:
        print(
            f"{row['layout']:28} {row['dtype']:9} {'pass' if row['pass'] else 'FAIL'} loss {row['loss_relative']:.1e}"
            f" output {row['worst_output']:.1e} gradient {row['worst_gradient']:.1e}"
            f" | {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f} | {row['tokens_per_s']:9.0f} tokens/s"
            f" | {row['peak_gib']:5.1f} GiB {row['first_difference'] or ''}"
        )
    if cli:
        print("torchrun and --nproc print the same losses:", cli["torchrun"] == cli["nproc"], cli["nproc"][-1])
    return 0 if all(row["pass"] for row in rows) and cli.get("torchrun") == cli.get("nproc") else 1


def may_be_graphs(layout: LayoutConfig) -> bool:
    """Whether the rules allow a layout's layers to be CUDA graphs."""
    return layout.cp == 1 and layout.sequence_parallel and layout.shard in ("none", "optimizer")


def kept_as(resolved: ResolvedRun) -> str:
    """Name of the reference that a run is held against."""
    return f"{resolved.run.model.dtype}-{'packed' if resolved.run.data.packing else 'whole'}"


def keep_reference(resolved: ResolvedRun, prepared: PreparedData) -> None:
    """Write the reference for a precision and a way to pack once; every layout of them is held against it."""
    name = kept_as(resolved)
    write_references(resolved, prepared)
    folder = Path(resolved.run.output_dir) / "verify"
    kept = folder / f"{name}-reference.safetensors"
    (folder / "float32.safetensors").rename(kept)
    record = json.loads((folder / "reference.json").read_text())
    (folder / f"{name}.json").write_text(json.dumps({**record, "file": str(kept)}))


if __name__ == "__main__":
    sys.exit(main())
