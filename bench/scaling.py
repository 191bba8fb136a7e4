"""Does cost grow as it should: tokens a second against micro-batches, sequence, layers, TP and PP.

    python bench/scaling.py --out runs/scaling                   # two GPUs, one pair of processes, under three minutes
    python bench/scaling.py --small --out runs/scaling           # two CPU processes, a rehearsal
    python bench/scaling.py --out runs/scaling --table           # the table and the picture of rows that are there

Layers as wide as Llama-3-8B's with a vocabulary of 32,000; random weights and tokens, bf16. Beside each point stands
what the planner says of it with the machine profile of `--profile`, written before the first step is run. A row that is
there is not run again, and keeps what was said of it then. Rows of one GPU leave the other idle.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scaling_picture import draw
from speed import measure_one

from triweave.cluster import parse_cluster
from triweave.config.schema import RuntimeConfig
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.machine import Machine
from triweave.planner.memory import predict_memory
from triweave.planner.profile_machine import machine_from_profile, profile_of
from triweave.planner.time_step import predict_step
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.start_ranks import run_ranks

GIB = 2**30
CLUSTER = parse_cluster("1x2xh200-141gb")


@dataclass(frozen=True)
class Row:
    """One point of a curve."""

    curve: str
    x: int
    """What grows along the curve."""
    layout: Layout
    layers: int
    seq: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.curve}, {self.x}"


def rows(small: bool) -> list[Row]:
    """All points, the short ones of each curve first."""
    seq, long, layers, deep = (
        (64, (64, 128), 4, (2, 4)) if small else (4096, (4096 << i for i in range(6)), 8, (2, 4, 8, 16))
    )
    counts = (2, 4) if small else (1, 2, 4, 8, 16)
    one_f_one_b = Layout(pp=2)
    return [
        *(Row("micro-batches, TP 2", n, Layout(tp=2), layers, seq, n) for n in counts),
        *(Row("micro-batches, PP 2 1F1B", n, one_f_one_b, layers, seq, n) for n in counts if n >= 2),
        *(
            Row("micro-batches, PP 2 zero-bubble", n, replace(one_f_one_b, schedule="zero-bubble"), layers, seq, n)
            for n in counts
            if n >= 2
        ),
        *(Row("layers, TP 2", n, Layout(tp=2), n, 2 * seq, 2) for n in deep),
        *(Row("ranks, TP", n, Layout(tp=n), layers // 2, 2 * seq, 4) for n in (1, 2)),
        *(Row("ranks, PP 1F1B", n, Layout(pp=n), layers // 2, 2 * seq, 8) for n in (1, 2)),
        *(Row("sequence, TP 2", n, Layout(tp=2), layers // 2, n, 1) for n in long),
    ]


def planned(row: Row, small: bool, on: Machine) -> dict[str, Any]:
    """What is measured, and what the planner says of it; a layer is computed again where all activations do not fit."""
    spec = (
        ModelSpec(512, 64, 128, row.layers, 4, 2, 16)
        if small
        else ModelSpec(32000, 4096, 14336, row.layers, 32, 8, 128)
    )
    spec = replace(spec, max_position_embeddings=max(row.seq, 8192))
    for recompute in ((), ("layer",)):
        layout = replace(row.layout, recompute=recompute)
        layout = replace(layout, layers=even_layers(row.layers, layout.num_stages))
        stages = predict_memory(spec, layout, seq_len=row.seq, num_micro_batches=layout.micro_batches(row.batch))
        if max(stage.used_bytes for stage in stages) <= CLUSTER.gpu.usable_bytes:
            break
    step_s = predict_step(spec, layout, CLUSTER, seq_len=row.seq, global_batch=row.batch, on=on).step_s
    told = {
        "curve": row.curve,
        "x": row.x,
        "gpus": layout.world_size,
        "tokens": row.seq * row.batch,
        "recompute": bool(layout.recompute),
        "predicted_step_s": step_s,
        "predicted_gib": stages[0].peak_allocated_bytes / GIB,
    }
    return {
        "told": told,
        "spec": spec,
        "layout": layout,
        "seq": row.seq,
        "batch": row.batch,
        "trace": None,
        "overlap_dp": "auto",
    }


def measure(jobs: list[dict[str, Any]], folder: Path, process: Process) -> int:
    """All jobs on this rank; the rows of one rank are rank 0's."""
    device = choose_device(RuntimeConfig(), process)
    with process_group(process, device, 120):
        for job in jobs:
            if process.rank >= job["layout"].world_size:
                continue
            row = {**job["told"], **measure_one(job, device)}
            if process.rank == 0:
                print(json.dumps(row), flush=True)
                path_of(folder, job["told"]).write_text(json.dumps(row))
    return 0


def path_of(folder: Path, told: dict[str, Any]) -> Path:
    """Where a row is kept."""
    return folder / f"{''.join(c if c.isalnum() else '-' for c in told['curve'])}-{told['x']}.json"


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a line for each point."""
    yield "| curve | x | tokens/s/GPU | predicted | step s | predicted / measured | GiB (predicted) |"
    yield "|---|---|---|---|---|---|---|"
    for row in found:
        place = f"| {row['curve']} | {row['x']:,}{' (recompute layer)' if row['recompute'] else ''} |"
        if "step_s" not in row:
            yield f"{place} out of memory | | | | ({row['predicted_gib']:.1f}) |"
            continue
        measured, predicted = (row["tokens"] / row[key] / row["gpus"] for key in ("step_s", "predicted_step_s"))
        ratio = row["predicted_step_s"] / row["step_s"]
        memory = f"{row['allocated_gib']:.1f} ({row['predicted_gib']:.1f})"
        yield f"{place} {measured:,.0f} | {predicted:,.0f} | {row['step_s']:.4f} | {ratio:.3f} | {memory} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="curves whose name holds this")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--profile", default="h200-x2", help="machine profile: a file, or one of the package's")
    options = parser.parse_args()
    on = machine_from_profile(profile_of(options.profile), CLUSTER)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [planned(row, options.small, on) for row in rows(options.small) if options.only in row.curve]
    (options.out / "predicted.json").write_text(json.dumps([job["told"] for job in jobs], indent=1))
    waiting = [job for job in jobs if not path_of(options.out, job["told"]).exists()]
    code = 0
    if waiting and not options.table:
        code = run_ranks(2, functools.partial(measure, waiting, options.out))
    paths = [path_of(options.out, job["told"]) for job in jobs]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    print("\n".join([f"torch {torch.__version__}", "", *table(found)]))
    (options.out / "scaling.svg").write_text(draw(found))
    return code


if __name__ == "__main__":
    sys.exit(main())
