"""What `triweave check` says against one GPU, for what `bench/campaign.py` does not draw.

float32, packed documents, fp8, context parallel, offload, moments in bfloat16, other attention.

    python bench/check_kinds.py            # one GPU with more than 80 GB; about a minute; writes runs/check_kinds.json
    python bench/check_kinds.py --small    # a CPU, a rehearsal: nothing is measured there

Each rank is told before it runs, in the same process, and runs alone, its collectives local copies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from result_file import result_file

from triweave.catalogue import find_model
from triweave.cluster import GIB, parse_cluster
from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run, RuntimeConfig, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.memory import rank_memory
from triweave.dryrun.on_gpu import Measured, OutOfMemory, measure_rank
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec

TINY = ModelSpec(512, 128, 256, 8, 8, 8, 16, max_position_embeddings=8192)
BAR = 0.01


class Kind(NamedTuple):
    """One run, and the rank of it that is played."""

    name: str
    layout: Layout
    model: str = "llama-3.2-3b"
    layers: int = 8
    """Of the whole model."""
    seq: int = 4096
    rank: int = 0
    of_model: ModelConfig = ModelConfig(path="", weights="random")
    packing: bool = False
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    runtime: RuntimeConfig = RuntimeConfig()


BF16 = ModelConfig(path="", weights="random")
FLOAT32, FP8 = replace(BF16, dtype="float32"), replace(BF16, fp8=True)
SMALLER = OptimizerConfig(learning_rate=1e-6, moments="bfloat16")
KINDS = (
    Kind("float32", Layout(micro_batch=2), of_model=FLOAT32),
    Kind("float32, TP 4", Layout(tp=4, micro_batch=2), of_model=FLOAT32, rank=1),
    Kind(
        "float32, full shards of 4, layers recomputed",
        Layout(dp=4, shard="full", recompute=("layer",)),
        of_model=FLOAT32,
    ),
    Kind("float32, packed", Layout(), of_model=FLOAT32, packing=True, seq=2048),
    Kind("float32 in fp8", Layout(micro_batch=2), of_model=replace(FP8, dtype="float32")),
    Kind("packed", Layout(micro_batch=2), packing=True),
    Kind("packed, 8B, TP 8 x PP 2, last stage", Layout(tp=8, pp=2), "llama-3.1-8b", 32, 8192, 15, packing=True),
    Kind("packed, norm and SwiGLU recomputed", Layout(recompute=("norm", "swiglu")), packing=True),
    Kind("packed, math attention", Layout(), seq=2048, packing=True, of_model=replace(BF16, attention="math")),
    Kind("packed, CP 4", Layout(cp=4), "llama-3.1-8b", 16, 32768, 1, packing=True),
    Kind("CP 2 x TP 2", Layout(cp=2, tp=2), "llama-3.1-8b", 16, 16384, 2),
    Kind("fp8, packed, TP 2", Layout(tp=2, micro_batch=2), of_model=FP8, packing=True, rank=1),
    Kind("fp8, full shards of 8", Layout(dp=8, shard="full"), "llama-3.1-8b", 16, 8192, of_model=FP8),
    Kind("fp8, zero-bubble PP 4, stage 1", Layout(pp=4, schedule="zero-bubble"), "llama-3.1-8b", 16, 8192, 1, FP8),
    Kind("moments in bfloat16", Layout(micro_batch=2), optimizer=SMALLER),
    Kind("moments in bfloat16, gradient shards of 4", Layout(dp=4, shard="gradients"), optimizer=SMALLER, packing=True),
    Kind("offload of MLP", Layout(micro_batch=2, offload=("mlp",)), packing=True),
    Kind("offload of layers, fp8", Layout(offload=("layer",)), "llama-3.1-8b", 8, 8192, of_model=FP8),
    Kind("efficient attention, packed", Layout(), packing=True, of_model=replace(BF16, attention="efficient")),
    Kind("efficient attention", Layout(), of_model=replace(BF16, attention="efficient")),
    Kind("float32, packed, longer", Layout(), packing=True, seq=8192, of_model=FLOAT32),
    Kind("deterministic", Layout(micro_batch=2), runtime=RuntimeConfig(deterministic=True)),
)


def resolve(kind: Kind, small: bool) -> ResolvedRun:
    """The run, with as many micro-batches as fill its pipeline twice."""
    layout, count = kind.layout, max(2, 2 * kind.layout.pp)
    spec = replace(TINY if small else find_model(kind.model), num_hidden_layers=kind.layers)
    layout = replace(layout, layers=even_layers(kind.layers, layout.num_stages))
    batch = count * layout.dp * layout.micro_batch
    run = Run(
        model=kind.of_model,
        data=DataConfig(train=("",), seq_len=kind.seq // 32 if small else kind.seq, packing=kind.packing),
        optimizer=kind.optimizer,
        train=TrainConfig(global_batch=batch, steps=1),
        runtime=kind.runtime,
    )
    per_node = min(8, layout.world_size)
    cluster = parse_cluster(f"{-(-layout.world_size // 8)}x{per_node}x{'h200-141gb'}")
    return ResolvedRun(run, spec, layout, cluster, count, per_node)


def measured(kinds: tuple[Kind, ...], device: torch.device, small: bool) -> Iterator[dict[str, object]]:
    """A row for each: what was told, then what was measured."""
    for kind in kinds:
        resolved = resolve(kind, small)
        told = rank_memory(resolved, kind.rank, one_gpu=True)
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
        found = measure_rank(resolved, kind.rank, device, steps=1)
        row: dict[str, object] = {"name": kind.name, "told_gib": told.peak_bytes / GIB, "at": told.at}
        if isinstance(found, OutOfMemory):
            yield {**row, "failed": found.message}
        else:
            yield {**row, **against(told.peak_bytes, told.reserved_bytes, found)}


def against(told: int, reserved: int, found: Measured) -> dict[str, object]:
    """Measured bytes, and how far what was told is off; nothing of a CPU."""
    if not found.peak_allocated:
        return {}
    return {
        "gib": found.peak_allocated / GIB,
        "off": told / found.peak_allocated - 1,
        "reserved_off": reserved / found.peak_reserved - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--out", type=result_file, default="runs/check_kinds.json")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.small else torch.device("cpu")
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    rows, offs = [], []
    print("kind | GiB | check | off | reserved off | at")
    for row in measured(tuple(kind for kind in KINDS if options.only in kind.name), device, options.small):
        rows.append(row)
        Path(options.out).write_text(json.dumps(rows, indent=1))
        if isinstance(off := row.get("off"), float):
            offs.append(off)
            print(
                f"{row['name']} | {row['gib']:.3f} | {row['told_gib']:.3f} | {off:+.2%} | {row['reserved_off']:+.2%}"
                f" | {row['at']}",
                flush=True,
            )
        else:
            print(f"{row['name']} | {row.get('failed', '-')} | {row['told_gib']:.3f} | | | {row['at']}", flush=True)
    if offs:
        print(f"mean {statistics.mean(map(abs, offs)):.2%}, worst {max(offs, key=abs):+.2%}, {len(offs)} of them")
    return 1 if any(abs(off) > BAR for off in offs) else 0


if __name__ == "__main__":
    sys.exit(main())
