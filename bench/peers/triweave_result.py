"""triweave as one of the compared systems: its engine on gloo ranks, loss and gradients by Hugging Face name."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
from contract import Batch, Layout, Result
from safetensors.torch import load_file, save_file

from triweave import layout as ours
from triweave.config.schema import DataConfig, ModelConfig, Run
from triweave.config.validate import ResolvedRun
from triweave.llama import StageInput
from triweave.model_spec import spec_from_folder
from triweave.training import step as steps
from triweave.training.engine import build_engine
from triweave.training.process import Process
from triweave.training.processes import process_group
from triweave.training.start_ranks import run_ranks

CPU = torch.device("cpu")


def triweave_result(layout: Layout, model_dir: Path, batch: Batch) -> Result:
    """One forward and backward on `layout.world_size` gloo ranks of this machine, in float32."""
    spec = spec_from_folder(model_dir)
    grid = ours.Layout(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        dp=layout.dp,
        micro_batch=batch.shape[0],
        sequence_parallel=layout.sequence_parallel,
        schedule="interleaved" if layout.vpp > 1 else "1f1b",
        layers=ours.even_layers(spec.num_hidden_layers, layout.pp * layout.vpp),
    )
    run = Run(
        model=ModelConfig(path=str(model_dir), dtype="float32"),
        data=DataConfig(train=("unused",), seq_len=batch.shape[1]),
    )
    count = len(batch.micro_batches) // layout.dp
    resolved = ResolvedRun(run, spec, grid, None, count, layout.world_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch.write(folder / "batch.json")
        code = run_ranks(layout.world_size, functools.partial(_rank, resolved, folder))
        if code:
            raise RuntimeError(f"the ranks ended with exit code {code}")
        totals = json.loads((folder / "totals.json").read_text())
        gradients = {tensor.name: torch.full(tensor.shape, float("nan")) for tensor in spec.tensors()}
        for rank in range(layout.world_size):
            for key, values in load_file(folder / f"rank-{rank}.safetensors").items():
                # "name|dim|start": the dimension that is cut and where the slice begins.
                tensor, dim, start = key.split("|")
                gradients[tensor].narrow(int(dim), int(start), values.shape[int(dim)]).copy_(values)
    return {**totals, "gradients": gradients}


def _rank(resolved: ResolvedRun, folder: Path, process: Process) -> int:
    batch = Batch.read(folder / "batch.json")
    with process_group(process, CPU, 120):
        engine = build_engine(resolved, CPU)
        count = resolved.num_micro_batches
        mine = batch.micro_batches[engine.groups.at.dp * count : (engine.groups.at.dp + 1) * count]
        seq, size = batch.shape[1], batch.shape[0]
        positions = torch.arange(seq).unsqueeze(1).expand(seq, size)
        local = steps.Batch(
            inputs=[StageInput(part.tokens.t(), positions) for part in mine],
            targets=[part.targets.t() for part in mine],
            trained_tokens=batch.valid_tokens,
        )
        loss = engine.pipeline.train(
            engine.schedule, local.inputs, steps.loss_of(engine, local), loss_scale=1 / batch.valid_tokens
        )
        engine.sharding.reduce_gradients()
        loss, square = steps.sum_over_grid(engine, loss, engine.sharding.squared_gradient_norm())
        if process.rank == 0:
            totals = {"loss": loss.item() / batch.valid_tokens, "grad_norm": square.sqrt().item()}
            (folder / "totals.json").write_text(json.dumps(totals))
        save_file(_whole_slices(engine), folder / f"rank-{process.rank}.safetensors")
    return 0


def _whole_slices(engine: object) -> dict[str, torch.Tensor]:
    """This rank's gradient slices; data-parallel shards are gathered first."""
    from triweave.collectives import all_gather

    kept = {}
    for unit in engine.sharding.units:  # type: ignore[attr-defined]
        flat = unit.gradient if unit.shard == "none" else all_gather(unit.gradient, unit.shards)
        for segment in unit.segments():
            piece = segment.piece
            values = flat[segment.start : segment.stop].view(piece.local_shape).clone()
            kept[f"{piece.name}|{piece.dim}|{piece.start}"] = values
    return kept
