"""`triweave verify`: the reference in one process, then the layout on its own ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from triweave.config.validate import ResolvedRun
from triweave.data.batch import make_micro_batch
from triweave.data.cache import PreparedData
from triweave.data.sampler import sequence_ids
from triweave.training.batches import batch_of, stage_input
from triweave.training.determinism import deterministic
from triweave.training.engine import DTYPES, build_engine
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.verify.compare import Tolerance, Verdict, compare_with_reference, in_fp8, tolerance_for
from triweave.verify.reference import Reference, Sample, compute_reference

REFERENCE_FILE = "reference.json"


def reference_samples(resolved: ResolvedRun, prepared: PreparedData) -> list[Sample]:
    """The micro-batches of the first step, of all data-parallel ranks."""
    run, dataset = resolved.run, prepared.train()
    ids = sequence_ids(run.seed, 0, run.train.global_batch, dataset.num_sequences)
    size = resolved.layout.micro_batch
    parts = [make_micro_batch(dataset, ids[first : first + size]) for first in range(0, len(ids), size)]
    return [Sample(stage_input(part), part.targets) for part in parts]


def write_references(resolved: ResolvedRun, prepared: PreparedData) -> None:
    """Write `transformers`' answer in float32, and how far from it counts as equal in the run's own precision.

    In bfloat16 the yardstick is measured: `transformers` in bfloat16 against itself in float32.
    """
    folder = _folder(resolved)
    folder.mkdir(parents=True, exist_ok=True)
    samples = reference_samples(resolved, prepared)
    model = Path(resolved.run.model.path)
    device = torch.device("cuda") if resolved.run.runtime.device != "cpu" and torch.cuda.is_available() else None
    tolerance = Tolerance()
    dtype = DTYPES[resolved.run.model.dtype]
    with deterministic(resolved.run.runtime):
        reference = compute_reference(model, samples, folder / "float32.safetensors", torch.float32, device)
        if dtype is not torch.float32:
            rounded = compute_reference(model, samples, folder / "rounded.safetensors", dtype, device)
            tolerance = tolerance_for(reference, rounded)
    if resolved.run.model.fp8:
        tolerance = in_fp8(tolerance)
    record = {"loss": reference.loss, "tolerance": asdict(tolerance)}
    (folder / REFERENCE_FILE).write_text(json.dumps(record), encoding="utf-8")


def verify_rank(as_json: bool, resolved: ResolvedRun, prepared: PreparedData, process: Process) -> int:
    """Run the layout on the reference's batch and compare; rank 0 tells. Returns its exit code, 0 on other ranks."""
    run = resolved.run
    device = choose_device(run.runtime, process)
    with deterministic(run.runtime), process_group(process, device, run.runtime.timeout_s):
        # Read only now: the ranks meet after the reference was written.
        record = json.loads((_folder(resolved) / REFERENCE_FILE).read_text(encoding="utf-8"))
        reference = Reference(record["loss"], _folder(resolved) / "float32.safetensors")
        engine = build_engine(resolved, device)
        dataset = prepared.train()
        ids = sequence_ids(run.seed, 0, run.train.global_batch, dataset.num_sequences)
        batch = batch_of(dataset, engine, ids)
        verdict = compare_with_reference(engine, batch, reference, Tolerance(**record["tolerance"]))
    if process.rank:
        # A rank that ends with 1 ends the run, which would not wait for rank 0 to tell.
        return 0
    print(json.dumps(verdict.to_json()) if as_json else describe(verdict, resolved), flush=True)
    return 0 if verdict.passed else 1


def describe(verdict: Verdict, resolved: ResolvedRun) -> str:
    """The verdict for people."""
    name, relative = verdict.worst_gradient
    worst_output = max(verdict.outputs.items(), key=lambda item: (item[1] != item[1], item[1]))
    lines = [
        f"layout          {resolved.layout}, {_precision(resolved)}, against transformers in float32",
        f"loss            {verdict.layout_loss:.8f}, reference {verdict.reference_loss:.8f},"
        f" relative difference {verdict.loss_error / abs(verdict.reference_loss):.1e}",
        f"worst output    {worst_output[0]}: relative error {worst_output[1]:.1e}",
        f"worst gradient  {name}: relative error {relative:.1e}",
    ]
    if verdict.first_difference is None:
        lines.append(f"equal: {len(verdict.outputs)} outputs, the loss and {len(verdict.gradients)} gradients agree")
    else:
        lines.append(f"DIFFERENT: the first to differ is {verdict.first_difference}")
    return "\n".join(lines)


def _precision(resolved: ResolvedRun) -> str:
    model = resolved.run.model
    return f"{model.dtype}, products in fp8 (tolerances are wide)" if model.fp8 else model.dtype


def _folder(resolved: ResolvedRun) -> Path:
    return Path(resolved.run.output_dir) / "verify"
