"""Checkpoints of a Llama so small that thousands of them can be damaged in a minute."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.manifest import manifest_of
from triweave.checkpoint.places import open_store
from triweave.checkpoint.store import MANIFEST_FILE
from triweave.config.schema import DataConfig, LayoutConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.layout import Layout, Shard
from triweave.model_spec import spec_from_folder
from triweave.training.checkpoints import take_snapshot
from triweave.training.engine import Engine, build_engine
from triweave.training.run_progress import RunProgress
from triweave.training.saver import Saved, Saver

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}

PROGRESS = RunProgress(step=0, seed=1, global_batch=1, data="data", layout="a small one")


def small_engine(folder: Path, *, dp: int = 1, shard: Shard = "optimizer") -> Engine:
    """One rank's engine, on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    spec = spec_from_folder(folder)
    run = Run(
        model=ModelConfig(path=str(folder), weights="random", dtype="float32"),
        data=DataConfig(train=("unused",), seq_len=8),
        layout=LayoutConfig(dp=dp, shard=shard),
        train=TrainConfig(global_batch=dp),
    )
    layout = Layout(dp=dp, shard=shard, layers=(CONFIG["num_hidden_layers"],))  # type: ignore[arg-type]
    return build_engine(ResolvedRun(run, spec, layout, None, 1, dp), torch.device("cpu"))


def set_state(engine: Engine, seed: int) -> None:
    """Give weights and moments values that belong to `seed` and to no other, as steps of training would."""
    generator = torch.Generator().manual_seed(1000 * seed + engine.groups.rank)
    for part, moments in engine.optimizer.states():
        for values in (part.parameter.data, moments["exp_avg"], moments["exp_avg_sq"]):
            values.copy_(torch.randn(values.shape, generator=generator))
        moments["step"].fill_(seed)


def state_hash(engine: Engine) -> str:
    """A hash of all that a checkpoint must bring back of weights, moments and Adam's count."""
    snapshot = take_snapshot(engine, PROGRESS, "")
    digest = hashlib.sha256(str(snapshot.progress.updates).encode())
    for name, slices in sorted(snapshot.tensors.items()):
        digest.update(name.encode())
        for part in slices.parts:
            digest.update(part.values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_small(
    where: Path | str, engine: Engine, step: int, keep: int = 9, asynchronous: Literal["auto", "off"] = "off"
) -> Saved:
    """Save an engine and tell how it went."""
    saver = Saver(open_store(where), engine, keep, asynchronous)
    saver.save(replace(PROGRESS, step=step), "seed: 1\n")
    saver.finish()
    (saved,) = saver.news()
    return saved


def reseal(checkpoint: Path) -> None:
    """Make the manifest fit what is there now, as somebody would who means harm."""
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    manifest = manifest_of(LocalStore(checkpoint.parent), checkpoint.name)
    (checkpoint / MANIFEST_FILE).write_bytes(manifest.to_bytes())


def save_on_two_ranks(folder: Path, where: Path, steps: tuple[int, ...]) -> None:
    """Checkpoints that two data-parallel ranks have written, a file each, of equal size."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, folder, where, steps)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        if rank.exitcode:
            raise RuntimeError(f"a rank ended with {rank.exitcode}")


def _rank(rank: int, folder: Path, where: Path, steps: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=2)
    engine = small_engine(folder / f"model-{rank}", dp=2)
    for step in steps:
        set_state(engine, step)
        save_small(where, engine, step)
    dist.destroy_process_group()
