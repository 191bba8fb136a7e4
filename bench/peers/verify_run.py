"""A rank of triweave that proves a layout: a small model against transformers, in bf16, then a few steps of training.

    python bench/peers/verify_run.py FOLDER      # before the ranks: the model, its documents and transformers' answer

`BENCH_VERIFY` names that folder to the ranks. Outputs of every module, the loss and every gradient are compared, as
`verify` does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import stopwatch
import torch
from session import measure_all
from smoke import Size, keep_reference, measure_one, run_for, write_inputs
from triweave_case import layout_of
from workload import REFERENCE_IS_THERE, VERIFY_FOLDER, Case

from triweave.config.schema import LayoutConfig, Run
from triweave.config.validate import validate
from triweave.data.cache import prepare
from triweave.training.process import started_by_launcher
from triweave.training.processes import process_group

LARGE = Size(1024, 2816, 16, 16, 8, seq_len=1024, documents=1000, longest=900)
SMALL = Size(64, 128, 16, 8, 8, seq_len=32, documents=300, longest=30)
"""Enough heads for eight tensor-parallel ranks, and enough layers for two virtual stages on each of eight."""


def run_of(folder: Path, layout: LayoutConfig) -> Run:
    """The run of a layout on what lies in `folder`."""
    size, steps = (LARGE, 4) if torch.cuda.is_available() else (SMALL, 1)
    inputs = folder / "model", folder / "documents.jsonl"
    return run_for(*inputs, folder, layout, "bfloat16", seq_len=size.seq_len, steps=steps)


def write_reference(folder: Path) -> None:
    """Write the model, its documents and transformers' answer."""
    write_inputs(folder, LARGE if torch.cuda.is_available() else SMALL)
    resolved = validate(run_of(folder, LayoutConfig()), world_size=1)
    keep_reference(resolved, prepare(resolved.run, resolved.spec.vocab_size))
    (folder / REFERENCE_IS_THERE).touch()


def measure(case: Case) -> dict[str, Any]:
    """Verdict and losses of the case's layout."""
    layout = layout_of(case)
    names = ("tp", "pp", "vpp", "cp", "dp", "schedule", "shard", "keep_gathered", "recompute")
    config = LayoutConfig(**{name: getattr(layout, name) for name in names})
    run = run_of(Path(os.environ[VERIFY_FOLDER]), config)
    resolved = validate(run, world_size=case.world_size)
    found = measure_one(resolved, prepare(run, resolved.spec.vocab_size), stopwatch.device())
    stopwatch.end_subgroups()
    return stopwatch.result([0.0], "bf16 against transformers in float32") | found


def main() -> None:
    if len(sys.argv) > 1:
        write_reference(Path(sys.argv[1]))
        return
    process = started_by_launcher()
    if process is None:
        raise SystemExit("bench/eight.py starts this")
    with process_group(process, stopwatch.device(), 300):
        measure_all(measure)


if __name__ == "__main__":
    main()
