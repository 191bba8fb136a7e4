"""A rank of triweave: its own engine and optimizer step, on random weights and tokens.

Weights, activations and their gradients in bf16, gradient sums, master weights and moments in float32. Options:
`shard`, `schedule`, `recompute` (a comma list), `moments`, each as in a run file; `keep_gathered`, `fp8` and `graphs`
are `on` or not given.
"""

from __future__ import annotations

from typing import Any

import stopwatch
import torch
from session import measure_all, read_cases
from triweave_case import resolved_of
from workload import Case

from triweave.dryrun.batch import make_batch
from triweave.dryrun.on_gpu import fill_on_device
from triweave.training.engine import build_engine
from triweave.training.process import started_by_launcher
from triweave.training.processes import process_group
from triweave.training.step import train_step


def measure(case: Case) -> dict[str, Any]:
    """Build the engine and time its steps."""
    resolved, device = resolved_of(case), stopwatch.device()
    engine = build_engine(resolved, device, lambda units: fill_on_device(units, case.spec))
    # The same tokens on all ranks: those of a tensor-parallel group look up each other's words.
    torch.manual_seed(0)
    # Of each sequence a context-parallel rank has its own slices.
    slices = {"cp_rank": engine.groups.at.cp} if case.cp > 1 else {}
    work = make_batch(resolved, device, **slices)
    seconds, loss = stopwatch.time_steps(lambda: train_step(engine, work, 1e-5, 1.0)[0])
    products = "bf16 compute, products of the layers in fp8" if resolved.run.model.fp8 else "bf16 compute"
    carried = [f"slices: {engine.tp.transport.name}"] if case.tp > 1 or case.dp == 1 else []
    carried += [f"replicas: {engine.sharding.memory.name}"] if case.dp > 1 else []
    small = resolved.run.optimizer.moments == "bfloat16"
    sums = "float32 masters and gradient sums, bf16 moments" if small else "float32 masters, moments and gradient sums"
    notes = f"{products}, {sums}; {', '.join(carried)}"
    peak = torch.cuda.max_memory_allocated() + engine.unseen_bytes + engine.graph_bytes if device.type == "cuda" else 0
    stopwatch.end_subgroups()
    return stopwatch.result(seconds, notes, loss=loss, peak_bytes=peak)


def main() -> None:
    process = started_by_launcher()
    if process is None:
        raise SystemExit("bench/throughput.py starts this")
    case, device = read_cases()[0], stopwatch.device()
    with stopwatch.world(case) if case.is_alone else process_group(process, device, 300):
        measure_all(measure)


if __name__ == "__main__":
    main()
