"""The check without a GPU against the planner's closed form, and against peaks that were measured.

    python bench/check_planner.py                 # 60 drawn configurations; writes runs/check_planner.md
    python bench/check_planner.py --draws 6       # a rehearsal
    python bench/check_planner.py --smoke         # the check against the peaks of bench/smoke.py, printed

Drawn: model, TP, PP, DP, virtual stages, schedule, shard level, micro-batch, sequence, recompute, sequence parallel,
and the rank. Models are cut to four layers a virtual stage: a layer more adds the same to both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import smoke
import torch
from result_file import result_file
from speed import LAYOUTS, cases

from triweave.catalogue import find_model
from triweave.config.schema import DataConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun, layout_of
from triweave.dryrun.memory import rank_memory
from triweave.errors import InputError
from triweave.layout import Coordinates, Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import OURS
from triweave.planner.memory import predict_memory
from triweave.rules import layout_problems

RESULTS = Path(__file__).parent / "results"
SMOKE = RESULTS / "2026-11-30-smoke-2xh200.json"
MEASURED = RESULTS / "2026-11-30-speed-kernels-2xh200.json"
"""Runs of the trainer as it is now; `2026-11-30-speed-2xh200.json` is of the one before fused kernels and overlap."""
GIB = 2**30


def run_of(spec: ModelSpec, layout: Layout, seq: int, micro_batches: int) -> ResolvedRun:
    """A run with plain causal sequences."""
    batch = micro_batches * layout.dp * layout.micro_batch
    run = Run(
        model=ModelConfig(path="", weights="random"),
        data=DataConfig(train=("",), seq_len=seq, packing=False),
        train=TrainConfig(global_batch=batch),
    )
    return ResolvedRun(run, spec, layout, None, micro_batches, 8)


def draw(rng: random.Random) -> tuple[str, ResolvedRun, int] | None:
    """A configuration and a rank of it; None if it is not legal."""
    name = rng.choice(["llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b", "llama-3.1-405b"])
    pp = rng.choice([1, 1, 2, 4])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]) if pp > 1 else "1f1b"
    vpp = 2 if schedule == "interleaved" else 1
    again = rng.choice([(), (), ("norm",), ("swiglu",), ("norm", "swiglu"), ("attention",), ("mlp",), ("layer",)])
    layout = Layout(
        tp=rng.choice([1, 2, 4, 8]),
        pp=pp,
        vpp=vpp,
        dp=rng.choice([1, 2, 4, 8]),
        micro_batch=rng.choice([1, 1, 2]),
        sequence_parallel=rng.random() < 0.8,
        schedule=schedule,
        shard=rng.choice(["none", "optimizer", "gradients", "full"]),
        recompute=again,
    )
    layers = even_layers(4 * layout.num_stages, layout.num_stages)
    layout = replace(layout, layers=layers)
    spec = replace(find_model(name), num_hidden_layers=sum(layers), max_position_embeddings=8192)
    seq, micro_batches = rng.choice([2048, 4096, 8192]), rng.choice([4, 8, 16])
    batch = micro_batches * layout.dp * layout.micro_batch
    try:
        problems = layout_problems(
            spec, layout, world_size=layout.world_size, seq_len=seq, global_batch=batch, gpus_per_node=8,
            tp_across_nodes=True,
        )  # fmt: skip
    except InputError:
        return None
    if problems:
        return None
    rank = layout.rank(Coordinates(0, 0, 0, rng.randrange(pp)))
    return name, run_of(spec, layout, seq, micro_batches), rank


def against_planner(count: int, seed: int) -> list[dict[str, Any]]:
    """Signed errors of the closed form against the check."""
    rng, rows = random.Random(seed), []  # noqa: S311 - configurations, no secret
    while len(rows) < count:
        drawn = draw(rng)
        if drawn is None:
            continue
        name, run, rank = drawn
        layout = run.layout
        pp = layout.coordinates(rank).pp
        planned = predict_memory(
            run.spec,
            layout,
            seq_len=run.run.data.seq_len,
            num_micro_batches=run.num_micro_batches,
            assumptions=replace(OURS, gpus_per_node=run.gpus_per_node),
        )[pp]
        found = rank_memory(run, rank)
        words = [
            str(layout),
            layout.schedule,
            layout.shard,
            "+".join(layout.recompute) or "-",
            f"b{layout.micro_batch}",
        ]
        words += [f"seq {run.run.data.seq_len}", f"{run.num_micro_batches} micro-batches", f"stage {pp}"]
        words += [] if layout.sequence_parallel or layout.tp == 1 else ["no sp"]
        rows.append(
            {
                "case": f"{name} {', '.join(words)}",
                "check_gib": (found.peak_bytes + found.peer_bytes) / GIB,
                "planner_gib": planned.peak_allocated_bytes / GIB,
                "off": planned.peak_allocated_bytes / (found.peak_bytes + found.peer_bytes) - 1,
                "at": found.at,
                "planner_at": planned.at,
            }
        )
        print(f"{rows[-1]['off']:+.2%} {rows[-1]['case']}", file=sys.stderr, flush=True)
    return rows


def against_measured() -> list[dict[str, Any]]:
    """Signed errors of the check against peaks of real runs on two H200 (bench/speed.py)."""
    measured = {(row["model"], row["layout"]): row for row in json.loads(MEASURED.read_text())}
    rows = []
    for model, (spec, seq, batch) in cases(small=False).items():
        for name, plain in LAYOUTS.items():
            real = measured.get((model, name), {})
            if "allocated_gib" not in real:
                continue
            layout = replace(plain, layers=even_layers(spec.num_hidden_layers, plain.num_stages))
            found = rank_memory(run_of(spec, layout, seq, layout.micro_batches(batch)), 0)
            rows.append(
                {
                    "case": f"{model} {name}",
                    "measured_gib": real["allocated_gib"],
                    "check_gib": found.peak_bytes / GIB,
                    "off": found.peak_bytes / GIB / real["allocated_gib"] - 1,
                    "reserved_off": found.reserved_bytes / GIB / real["reserved_gib"] - 1,
                    "at": found.at,
                }
            )
    return rows


def print_smoke() -> None:
    """The check against rank 0's peaks of bench/smoke.py on two H200: packed documents, float32 and bf16."""
    spec = ModelSpec(1001, 2048, 5632, 8, 16, 8, 128, max_position_embeddings=4096)
    for row in json.loads(SMOKE.read_text())["rows"]:
        run = smoke.run_for(Path(), Path(), Path(), smoke.LAYOUTS[row["layout"]], row["dtype"], small=False)
        layout = layout_of(run.layout, 2)
        layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
        resolved = ResolvedRun(run, spec, layout, None, layout.micro_batches(run.train.global_batch), 2)
        peak = rank_memory(resolved, 0).peak_bytes / GIB
        print(f"{row['dtype']} {row['layout']}: {row['peak_gib']:.3f} {peak:.3f} {peak / row['peak_gib'] - 1:+.2%}")


def summary(rows: list[dict[str, Any]], key: str = "off") -> str:
    """Mean and worst error."""
    errors = [row[key] for row in rows]
    mean, worst, bias = statistics.mean(map(abs, errors)), max(errors, key=abs), statistics.mean(errors)
    return f"mean {mean:.2%}, worst {worst:+.2%}, bias {bias:+.2%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=result_file, default="runs/check_planner.md")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        print_smoke()
        return 0
    begin = time.monotonic()
    drawn, real = against_planner(options.draws, options.seed), against_measured()
    command = f"python bench/check_planner.py --draws {options.draws} --seed {options.seed}"
    table = [
        "# The check without a GPU, against the planner and against measured peaks",
        "",
        f"Command: `{command}`, torch {torch.__version__}.",
        "",
        f"Against two H200 (`{MEASURED.name}`), allocated: {summary(real)}; reserved: {summary(real, 'reserved_off')}.",
        "",
        "| run | measured GiB | check | off | reserved off | peak at |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['case']} | {row['measured_gib']:.2f} | {row['check_gib']:.2f} | {row['off']:+.2%}"
            f" | {row['reserved_off']:+.2%} | {row['at']} |"
            for row in real
        ),
        "",
        f"The planner's closed form against the check, {len(drawn)} drawn configurations: {summary(drawn)}.",
        "",
        "| configuration | check GiB | planner | off | check: peak at | planner: peak at |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['case']} | {row['check_gib']:.2f} | {row['planner_gib']:.2f} | {row['off']:+.2%} | {row['at']}"
            f" | {row['planner_at']} |"
            for row in sorted(drawn, key=lambda row: -abs(row["off"]))
        ),
    ]
    options.out.write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join([line for line in table if ": mean" in line]))
    print(f"wrote {options.out} in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
