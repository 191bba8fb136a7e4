"""Megatron-Core itself loads what `triweave convert` writes, and `convert` reads what Megatron-Core saves.

    python bench/peers/megatron_cpu.py            # once: fetches Megatron-Core (needs psutil beside it, for its saver)
    python bench/peers/convert_megatron.py

For each model and grid, on CPU processes over gloo: Megatron's own `dist_checkpointing.load` fills a model, built with
random weights, from a checkpoint that `convert` made of a Hugging Face folder; every parameter is compared bit for bit
with the slice that the oracle's own mapping cuts (`megatron_weights.py`, written apart from triweave's). Then
`dist_checkpointing.save` writes that model, `convert` makes a Hugging Face folder of it, and every tensor is compared
with the first folder's. Exit status 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from contract import Batch, Layout
from megatron_oracle import read_llama
from megatron_rank import Job, _build, _global_names
from megatron_weights import Folder, shard, source
from safetensors.torch import load_file

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 384},
    "tied, vocabulary 301": {"model_type": "llama", "vocab_size": 301, "tie_word_embeddings": True},
    "qwen2 (biases), vocabulary 301": {"model_type": "qwen2", "vocab_size": 301},
    "2 key/value heads": {"model_type": "llama", "vocab_size": 384, "num_key_value_heads": 2},
}
GRIDS = (Layout(), Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=4), Layout(pp=2, vpp=2), Layout(tp=2, dp=2))
STYLES: dict[str, dict[str, Any]] = {
    "stacked": {},
    "by layer": {"non_homogeneous_layers": True},
    "by layer, gate and up apart": {"singleton_local_shards": True},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One grid that loads a checkpoint and saves it again."""

    job: Job
    written: Path
    """Megatron checkpoint that `convert` wrote."""
    saved: Path
    """Where Megatron saves."""
    style: dict[str, Any]
    """Megatron's metadata of how it saves."""


def run_rank(rank: int, case: Case) -> None:
    """One rank: load, compare, save."""
    import megatron_cpu

    torch.set_num_threads(1)
    megatron_cpu.activate()
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    layout = case.job.layout
    dist.init_process_group(
        "gloo",
        init_method=f"file://{case.job.folder}/rendezvous",
        rank=rank,
        world_size=layout.world_size,
        timeout=datetime.timedelta(seconds=case.job.timeout),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    chunks = [chunk.module for chunk in _build(case.job)]
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    state = {name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
    loaded = dist_checkpointing.load(state, str(case.written))
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=True)
    different = [name for chunk in chunks for name in _different(chunk, case)]
    state = {
        name: chunk.sharded_state_dict(metadata=case.style or None) for name, chunk in zip(names, chunks, strict=True)
    }
    if rank == 0:
        case.saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(state | {"iteration": 7}, str(case.saved), async_strategy="mcore")
    (case.job.folder / f"rank-{rank}.json").write_text(json.dumps(different))
    dist.barrier()
    dist.destroy_process_group()


def _different(model: Any, case: Case) -> list[str]:
    """Parameters whose bits are not those of the Hugging Face folder."""
    from megatron.core import parallel_state

    folder, llama = Folder(case.job.model_dir), case.job.llama
    shape, tp = llama.shape(case.job.layout), case.job.layout.tp
    rank = parallel_state.get_tensor_model_parallel_rank()
    found = []
    for name, parameter in _global_names(model):
        origin = source(name, tied=llama.tie_word_embeddings)
        expected = shard(origin.cut, [folder[hf] for hf in origin.names], shape, rank=rank, tp=tp)
        rows = len(expected)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            # Padding is in no checkpoint; what stands there is Megatron's business.
            rows = max(0, min(rows, llama.vocab_size - rank * rows))
        if not torch.equal(parameter.detach()[:rows], expected[:rows]):
            found.append(name)
    return found


def _convert(*words: object) -> None:
    from triweave.cli import main

    try:
        main(["convert", *map(str, words)])
    except SystemExit as ended:
        if ended.code:
            raise


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def run_case(model: Path, grid: Layout, style: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Parameters that Megatron loaded wrongly, and tensors that came back other than they went."""
    (folder / "batch.json").write_text(json.dumps({"micro_batches": [{"tokens": [[1] * 8], "targets": [[1] * 8]}] * 4}))
    batch = Batch.read(folder / "batch.json")
    _convert(model, folder / "written", "--to", "megatron")
    job = Job(model, read_llama(model), grid, batch, folder, 120.0)
    case = Case(job, folder / "written" / "release", folder / "saved", style)
    torch.multiprocessing.spawn(run_rank, (case,), nprocs=grid.world_size)
    wrong = sum(len(json.loads(file.read_text())) for file in folder.glob("rank-*.json"))
    _convert(folder / "saved", folder / "back", "--model", model)
    before, after = _weights(model), _weights(folder / "back")
    changed = [n for n in before.keys() | after.keys() if n not in before or n not in after]
    changed += [n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n])]
    return wrong, len(changed)


def make_model(folder: Path, overrides: dict[str, Any]) -> Path:
    """A random model that transformers writes, in float32 as the oracle computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SMALL | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return folder


def main() -> int:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--out", type=Path, help="where the table goes too")
    arguments = parser.parse_args()
    lines = [
        "| model | Megatron's grid | it saves layers | parameters loaded wrongly | tensors changed on the way back |",
        "|---|---|---|---|---|",
    ]
    failed = 0
    for name, overrides in MODELS.items():
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            model = make_model(Path(temporary) / "model", overrides)
            for grid in GRIDS:
                for style, metadata in STYLES.items() if grid.tp == grid.pp == 2 else [("stacked", {})]:
                    folder = Path(tempfile.mkdtemp(dir=temporary))
                    wrong, changed = run_case(model, replace(grid), metadata, folder)
                    failed += wrong + changed
                    lines.append(f"| {name} | {grid} | {style} | {wrong} | {changed} |")
                    print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
