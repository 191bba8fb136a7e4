"""The host's time of a training step: our engine and layers with tensors so small that a GPU waits for the host.

    python bench/host.py --speed runs/speed.json    # two GPUs; beside the steps that bench/speed.py measured
    python bench/host.py --small                    # two CPU processes and few layers, a rehearsal

As many layers and micro-batches as the model has, at hidden size 64 and sequence 16: what is left of a step is Python,
autograd, launches and the host's part of communication. A step of the real model cannot be shorter than that; while it
is several times longer the host runs ahead. On CPUs the time is that of the CPU's own kernels, and says nothing.
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
from unittest.mock import patch

from result_file import result_file
from speed import LAYOUTS, measure_one

from triweave.config.schema import RuntimeConfig
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.start_ranks import run_ranks

HIDDEN, SEQ = 64, 16

MODELS = {
    # Name in bench/speed.py where it has the model: layers, global batch.
    "Llama-3-8B seq 8192": (32, 4),
    "70B-shaped, 4 layers, seq 4096": (4, 8),
    "70B's rank at PP 4, 20 layers": (20, 8),
    "70B, 80 layers": (80, 4),
}


NAMES = ("tp2", "pp2 1f1b", "pp2 zero-bubble", "dp2 optimizer", "dp2 full")


@dataclass(frozen=True)
class Job:
    """A model's layers on a layout."""

    model: str
    layout_name: str
    layers: int
    batch: int
    layout: Layout

    @property
    def work(self) -> dict[str, Any]:
        """As bench/speed.py takes it."""
        spec = ModelSpec(512, HIDDEN, 2 * HIDDEN, self.layers, 2, 2, HIDDEN // 2, max_position_embeddings=SEQ)
        return {
            "spec": spec, "layout": self.layout, "seq": SEQ, "batch": self.batch, "trace": None, "overlap_dp": "auto",
        }  # fmt: skip

    @property
    def layer_passes(self) -> int:
        """Forwards and backwards of a layer on one rank in a step."""
        return self.layers // self.layout.pp * self.layout.micro_batches(self.batch)


def jobs(world: int, only: str, small: bool) -> Iterator[Job]:
    layouts = {"one GPU": Layout()} if world == 1 else {name: LAYOUTS[name] for name in NAMES}
    for model, (of_model, batch) in MODELS.items():
        layers = 4 if small else of_model
        for name, layout in layouts.items():
            if only in f"{model}, {name}":
                yield Job(model, name, layers, batch, replace(layout, layers=even_layers(layers, layout.num_stages)))
        if small:
            return


def measure(todo: list[Job], out: Path, process: Process) -> int:
    """All jobs on this rank."""
    rows = json.loads(out.read_text())
    device = choose_device(RuntimeConfig(), process)
    # Products of this size are never cut: here they are, as those are whose calls are counted.
    with (
        patch("triweave.overlap.pays_to_cut", lambda *_: True),
        process_group(process, device, 300),
    ):
        for job in todo:
            step_s = measure_one(job.work, device)["step_s"]
            row = {"model": job.model, "layout": job.layout_name, "host_step_ms": 1e3 * step_s}
            rows.append({**row, "host_layer_ms": 1e3 * step_s / job.layer_passes})
            if process.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
                out.write_text(json.dumps(rows, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, default="runs/host.json")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="rows whose model and layout, 'model, layout', hold this")
    parser.add_argument("--speed", type=Path, help="what bench/speed.py wrote: steps of the real models")
    options = parser.parse_args()
    options.out.write_text("[]")
    for world in (1, 2):
        todo = list(jobs(world, options.only, options.small))
        if todo and (code := run_ranks(world, functools.partial(measure, todo, options.out))):
            return code
    rows = json.loads(options.speed.read_text()) if options.speed else []
    real_s = {(row["model"], row["layout"]): row.get("step_s") for row in rows}
    print("model | layout | host ms a step | host ms a layer and micro-batch | measured step ms | host's share")
    for row in json.loads(options.out.read_text()):
        step_s = real_s.get((row["model"], row["layout"]))
        beside = f"{1e3 * step_s:.0f} | {row['host_step_ms'] / 1e3 / step_s:.0%}" if step_s else "- | -"
        print(f"{row['model']} | {row['layout']} | {row['host_step_ms']:.1f} | {row['host_layer_ms']:.3f} | {beside}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
