"""A rank of triweave: its own engine and optimizer step, on random weights and tokens.

Weights, activations and their gradients in bf16, gradient sums, master weights and moments in float32. Options:
`shard`, `schedule`, `recompute` (a comma list), each as in a run file; `keep_gathered` and `fp8` are `on` or not given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import stopwatch
import torch
from session import measure_all
from workload import Case, shapes

from triweave.config.schema import DataConfig, ModelConfig, Run
from triweave.config.validate import ResolvedRun
from triweave.dryrun.on_gpu import fill_on_device
from triweave.layout import Layout, balanced_layers
from triweave.llama import StageInput
from triweave.training.engine import build_engine
from triweave.training.process import started_by_launcher
from triweave.training.processes import process_group
from triweave.training.step import Batch, train_step


def layout_of(case: Case) -> Layout:
    """The case's layout in triweave's own words."""
    shape = shapes()[case.shape]
    schedule = case.option("schedule", "1f1b")
    layout = Layout(
        tp=case.tp,
        pp=case.pp,
        dp=case.dp,
        vpp=2 if schedule == "interleaved" else 1,
        micro_batch=case.micro_batch,
        schedule=schedule,  # type: ignore[arg-type]
        shard=case.option("shard", "optimizer"),  # type: ignore[arg-type]
        keep_gathered=case.option("keep_gathered", "off") == "on",
        recompute=tuple(filter(None, case.option("recompute", "").split(","))),  # type: ignore[arg-type]
    )
    return replace(layout, layers=balanced_layers(shape.spec, layout.num_stages, shape.seq_len))


def measure(case: Case) -> dict[str, Any]:
    """Build the engine and time its steps."""
    shape, layout, device = shapes()[case.shape], layout_of(case), stopwatch.device()
    fp8 = case.option("fp8", "off") == "on"
    model = ModelConfig(path="", weights="random", fp8=fp8)
    run = Run(model=model, data=DataConfig(train=("",), seq_len=shape.seq_len))
    resolved = ResolvedRun(run, shape.spec, layout, None, case.num_micro_batches, layout.world_size)
    engine = build_engine(resolved, device, lambda units: fill_on_device(units, shape.spec))
    work = random_batch(case, device)
    seconds = stopwatch.time_steps(lambda: train_step(engine, work, 1e-5, 1.0))
    products = "bf16 compute, products of the layers in fp8" if fp8 else "bf16 compute"
    carried = f"replicas: {engine.sharding.memory.name}" if case.dp > 1 else f"slices: {engine.tp.transport.name}"
    notes = f"{products}, float32 masters, moments and gradient sums; {carried}"
    peak = torch.cuda.max_memory_allocated() + engine.unseen_bytes if device.type == "cuda" else 0
    stopwatch.end_subgroups()
    return stopwatch.result(seconds, notes, peak_bytes=peak)


def random_batch(case: Case, device: torch.device) -> Batch:
    """One step's tokens, made once; targets are the tokens moved by one."""
    shape = shapes()[case.shape]
    size = (shape.seq_len, case.micro_batch)
    positions = torch.arange(shape.seq_len, device=device).unsqueeze(1).expand(size)
    tokens = [torch.randint(0, shape.spec.vocab_size, size, device=device) for _ in range(case.num_micro_batches)]
    inputs = [StageInput(each, positions) for each in tokens]
    return Batch(inputs, [torch.roll(each, -1, 0) for each in tokens], case.tokens)


def main() -> None:
    process = started_by_launcher()
    if process is None:
        raise SystemExit("bench/throughput.py starts this")
    with process_group(process, stopwatch.device(), 300):
        measure_all(measure)


if __name__ == "__main__":
    main()
