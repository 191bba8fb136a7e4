"""Layers as CUDA graphs beside layers issued kernel by kernel: the same bits, the host's time, the step, the memory.

    python bench/graphs.py            # one GPU; writes runs/graphs.json
    python bench/graphs.py --small    # a CPU, which captures nothing: a rehearsal

Parts. `bits`: some steps of a small Llama both ways, by kernels whose result does not depend on timing: losses, norms,
gradients and weights are compared bit for bit; grids of several ranks share the GPU (`one_gpu.py`). `host`: steps with
tensors so small that the GPU waits for the host, a rank of TP 8 alone. `steps`: real shapes, the same rank of
Llama-3-70B and whole small models, each both ways one after the other. `train`: the command line on packed documents of
unequal length, both ways: its losses, what it says, its memory beside what it foretold.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from one_gpu import device_here, share_gpu
from result_file import result_file
from smoke import SHARED, run_for, write_inputs
from smoke import SMALL as SMALLEST

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.config.document import to_yaml
from triweave.config.schema import (
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    Run,
    RuntimeConfig,
    TrainConfig,
)
from triweave.config.validate import ResolvedRun
from triweave.dryrun.batch import make_batch
from triweave.dryrun.on_gpu import Measured, fill_on_device, measure_rank
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.training.determinism import deterministic
from triweave.training.engine import build_engine
from triweave.training.process import Process
from triweave.training.processes import process_group
from triweave.training.start_ranks import run_ranks
from triweave.training.step import train_step

SMALL = ModelSpec(1024, 256, 512, 4, 8, 8, 32, max_position_embeddings=131072)
TINY_LAYERS = ModelSpec(512, 512, 1024, 80, 8, 8, 64, max_position_embeddings=131072)
"""Of 70B's depth, with nothing to compute."""
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A run, all but whether its layers are graphs."""

    model: str | ModelSpec
    layout: Layout
    seq: int
    micro_batches: int
    """Of one data-parallel rank."""
    fp8: bool = False
    dtype: str = "bfloat16"
    rank: int = 0
    packed: bool = False

    def resolved(self, *, graphs: bool, exact: bool = False, shrink: int = 1) -> ResolvedRun:
        """As the engine takes it."""
        spec = self.model if isinstance(self.model, ModelSpec) else find_model(self.model)
        if shrink > 1:
            spec = replace(SMALL, num_hidden_layers=2 * self.layout.num_stages)
        layout = replace(
            self.layout, cuda_graphs=graphs, layers=even_layers(spec.num_hidden_layers, self.layout.num_stages)
        )
        batch = self.micro_batches * layout.micro_batch * layout.dp
        run = Run(
            model=ModelConfig(path="", weights="random", fp8=self.fp8, dtype=self.dtype),
            data=DataConfig(train=("",), seq_len=self.seq // shrink, packing=self.packed),
            optimizer=OptimizerConfig(learning_rate=1e-4),
            train=TrainConfig(global_batch=batch, steps=1),
            runtime=RuntimeConfig(deterministic=exact),
        )
        return ResolvedRun(run, spec, layout, parse_cluster("4x8xh200-141gb"), self.micro_batches, 8)


BITS = {
    "one": Case(SMALL, Layout(), 512, 4),
    "one float32": Case(SMALL, Layout(micro_batch=2), 512, 4, dtype="float32"),
    "one fp8": Case(SMALL, Layout(), 512, 4, fp8=True),
    "one recompute layer": Case(SMALL, Layout(recompute=("layer",)), 512, 4),
    "one recompute parts fp8": Case(SMALL, Layout(recompute=("norm", "swiglu", "attention")), 512, 4, fp8=True),
    "one packed": Case(SMALL, Layout(micro_batch=2), 512, 4, packed=True),
    "one packed float32": Case(SMALL, Layout(), 512, 4, dtype="float32", packed=True),
    "pp2": Case(SMALL, Layout(pp=2), 512, 4),
    "pp2 zero-bubble": Case(SMALL, Layout(pp=2, schedule="zero-bubble"), 512, 4),
    "pp2 interleaved fp8": Case(SMALL, Layout(pp=2, vpp=2, schedule="interleaved"), 512, 4, fp8=True),
    "dp2 optimizer": Case(SMALL, Layout(dp=2, shard="optimizer"), 512, 4),
    "tp2": Case(SMALL, Layout(tp=2), 512, 4),
    "tp2 keep gathered fp8": Case(SMALL, Layout(tp=2, keep_gathered=True), 512, 4, fp8=True),
    "tp2 pp2 dp2 zero-bubble": Case(SMALL, Layout(tp=2, pp=2, dp=2, schedule="zero-bubble"), 512, 4),
}
RANK = Layout(tp=8, pp=4)
MIDDLE = 16
"""A rank of the third of four stages of TP 8."""
SPLIT = replace(RANK, schedule="zero-bubble")
AGAIN = replace(RANK, recompute=("layer",))
HOST = {
    "tp8 pp4": Case(TINY_LAYERS, RANK, 128, 8, rank=MIDDLE),
    "tp8 pp4 fp8": Case(TINY_LAYERS, RANK, 128, 8, fp8=True, rank=MIDDLE),
    "tp8 pp4 zero-bubble": Case(TINY_LAYERS, SPLIT, 128, 8, rank=MIDDLE),
    "tp8 pp4 zero-bubble fp8": Case(TINY_LAYERS, SPLIT, 128, 8, fp8=True, rank=MIDDLE),
}
REAL = {
    "70B rank 4096": Case("meta-llama/Llama-3.1-70B", RANK, 4096, 8, rank=MIDDLE),
    "70B rank 4096 fp8": Case("meta-llama/Llama-3.1-70B", RANK, 4096, 8, fp8=True, rank=MIDDLE),
    "70B rank 2048": Case("meta-llama/Llama-3.1-70B", RANK, 2048, 8, rank=MIDDLE),
    "70B rank 2048 fp8": Case("meta-llama/Llama-3.1-70B", RANK, 2048, 8, fp8=True, rank=MIDDLE),
    "1B 4096": Case("meta-llama/Llama-3.2-1B", Layout(), 4096, 8),
    "1B 4096 fp8": Case("meta-llama/Llama-3.2-1B", Layout(), 4096, 8, fp8=True),
    "3B 2048": Case("meta-llama/Llama-3.2-3B", Layout(), 2048, 8),
    "70B rank 4096 packed": Case("meta-llama/Llama-3.1-70B", RANK, 4096, 8, rank=MIDDLE, packed=True),
    "70B rank 4096 zero-bubble fp8": Case("meta-llama/Llama-3.1-70B", SPLIT, 4096, 8, fp8=True, rank=MIDDLE),
    "70B rank 8192": Case("meta-llama/Llama-3.1-70B", RANK, 8192, 8, rank=MIDDLE),
    "70B rank 8192 recompute": Case("meta-llama/Llama-3.1-70B", AGAIN, 8192, 8, rank=MIDDLE),
}


def after_steps(resolved: ResolvedRun, device: torch.device) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """Losses and norms of some steps, and what they leave."""
    with deterministic(resolved.run.runtime):
        torch.manual_seed(resolved.run.seed)
        engine = build_engine(resolved, device, lambda units: fill_on_device(units, resolved.spec))
        batch = make_batch(resolved, device, engine.tp.rank, engine.groups.cp.rank)
        told = [train_step(engine, batch, 1e-4, 1.0) for _ in range(STEPS)]
    units = engine.sharding.units
    return told, [*(unit.gradient.clone() for unit in units), *(unit.master.clone() for unit in units)]


def compare_bits(case: Case, shrink: int, process: Process, device: torch.device) -> list[str]:
    """What differs between both ways."""
    told, tensors = after_steps(case.resolved(graphs=False, exact=True, shrink=shrink), device)
    again, ours = after_steps(case.resolved(graphs=True, exact=True, shrink=shrink), device)
    print(f"  rank {process.rank}: {[f'{loss:.6f}' for loss, _ in told]}", flush=True)
    if told != again:
        return [f"{told} and {again}"]
    pairs = enumerate(zip(tensors, ours, strict=True))
    return [f"tensor {number}" for number, (one, other) in pairs if not torch.equal(one, other)]


def compare_on_ranks(case: Case, shrink: int, out: Path, process: Process) -> int:
    """The same on one of several ranks that share a GPU; what differs is written by each."""
    device = share_gpu(process) if process.world_size > 1 else device_here()
    with process_group(process, device, 120):
        differing = compare_bits(case, shrink, process, device)
    out.with_name(f"{out.stem}-{process.rank}.json").write_text(json.dumps(differing))
    return 0


def bits(case: Case, shrink: int, out: Path) -> dict[str, Any]:
    """One row of `bits`."""
    ranks = case.layout.world_size
    code = run_ranks(ranks, functools.partial(compare_on_ranks, case, shrink, out))
    if code:
        return {"failed": code}
    files = [out.with_name(f"{out.stem}-{rank}.json") for rank in range(ranks)]
    differing = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return {"ranks": ranks, "differing": [one for one in differing if one]}


def measured(case: Case, device: torch.device, shrink: int) -> dict[str, Any]:
    """One row of `host` or `steps`: kernel by kernel, and as graphs."""
    row: dict[str, Any] = {}
    for name, graphs in (("eager", False), ("graphs", True)):
        found = measure_rank(case.resolved(graphs=graphs, shrink=shrink), case.rank, device)
        if isinstance(found, Measured):
            actions = {f"{kind.value}{stage}": seconds for (kind, stage), seconds in found.actions.items()}
            row[name] = {**asdict(found), "actions": actions}
        else:
            row[name] = {"out_of_memory": found.message}
    return row


def trained(small: bool) -> dict[str, Any]:
    """What `triweave train` says of packed documents without graphs and with them."""
    size, row = SMALLEST if small else SHARED, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, documents = write_inputs(folder, size)
        for way, graphs in (("eager", False), ("graphs", True)):
            layout = LayoutConfig(cuda_graphs=graphs)
            run = run_for(model, documents, folder, layout, "bfloat16", seq_len=size.seq_len, steps=4 if small else 12)
            run = replace(run, output_dir=str(folder / way), runtime=RuntimeConfig(deterministic=True))
            run_file = folder / f"{way}.yaml"
            run_file.write_text(to_yaml(run))
            words = [sys.executable, "-m", "triweave", "train", str(run_file)]
            said = subprocess.run(words, check=True, timeout=240, capture_output=True, text=True).stdout
            steps = [json.loads(line) for line in (folder / way / "metrics.jsonl").read_text().splitlines()]
            row[way] = {
                "losses": [step["loss"] for step in steps],
                "step_s": [step["step_s"] for step in steps],
                "peak_gib": steps[-1]["peak_allocated_gib"],
                "said": [each for each in said.splitlines() if each.startswith(("layers ", "memory", "peak"))],
            }
    return row


def line(part: str, name: str, row: dict[str, Any]) -> str:
    """A row for people."""
    if part == "train":
        return "\n".join(
            f"{way:7} losses {one['losses'][1]:.5f} to {one['losses'][-1]:.5f}, steps {1e3 * min(one['step_s']):.1f} ms"
            f" and more, {one['peak_gib']:.2f} GiB; it says {one['said']}"
            for way, one in row.items()
        )
    if part == "bits":
        said = row.get("failed") or row["differing"]
        return f"{name:32} {row.get('ranks', '?')} ranks: " + (f"DIFFERENT {said}"[:300] if said else "the same bits")
    shown = []
    for way in ("eager", "graphs"):
        one = row[way]
        if "out_of_memory" in one:
            shown.append(f"{way} out of memory")
            continue
        actions = " ".join(f"{action} {1e3 * seconds:.2f}" for action, seconds in one["actions"].items())
        gib = one["peak_allocated"] / 2**30, one["peak_reserved"] / 2**30
        shown.append(f"{way} step {1e3 * one['step_s']:.1f} ms, {actions} ms, {gib[0]:.2f} / {gib[1]:.2f} GiB")
    return f"{name:22} " + "; ".join(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=result_file, default="runs/graphs.json")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="bits,host,steps,train", help="parts")
    parser.add_argument("--cases", default="", help="cases with these names, between commas")
    options = parser.parse_args()
    device = device_here()
    rows: dict[str, dict[str, Any]] = {}
    failed = False
    for part, cases in (("bits", BITS), ("host", HOST), ("steps", REAL), ("train", {"train": None})):
        if part not in options.only.split(","):
            continue
        for name, case in cases.items():
            if options.cases and name not in options.cases.split(","):
                continue
            shrink = 16 if options.small else 1
            if case is None:
                row = trained(options.small)
            elif part == "bits":
                row = bits(case, shrink, options.out)
                failed = failed or bool(row.get("failed") or row["differing"])
            else:
                row = measured(case, device, shrink)
            rows.setdefault(part, {})[name] = row
            options.out.write_text(json.dumps({"torch": torch.__version__, **rows}, indent=1, default=str))
            print(line(part, name, row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
