"""Megatron-LM's own argument parser and validator on the scripts that `triweave launch --to megatron` writes.

    python bench/peers/megatron_cpu.py                                  # fetches Megatron-Core, once
    python bench/peers/launch_megatron.py [--every N] [--markdown FILE]

Exit code 1: a script was refused, or came back changed

Every script is read back by our reader and by Megatron's parser, which validates it as `pretrain_gpt.py` would on a
machine of that many ranks: `parse_args`, `validate_args`, `core_transformer_config_from_args`, `OptimizerConfig`. Then
`--from-megatron` makes a run file of the script, whose layout must be the one it came from. Broken scripts, one fault
each, show that the validator is not asleep. Replaced is what asks for a GPU (its compute capability), one module that
needs Triton, and Transformer Engine: its fused rotary embedding, and the options of its Adam.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import io
import itertools
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_cpu import NEEDS_TRITON, SOURCES, VERSION

from triweave.config.load import load_run, load_words
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun, validate
from triweave.errors import InputError
from triweave.launch import megatron
from triweave.launch.job import Settings
from triweave.launch.megatron_import import run_file_from
from triweave.launch.megatron_script import Script, read_script
from triweave.layout import Layout

MODELS = {
    "meta-llama/Llama-3-70B": ("4x8xh100-80gb", "8x8xh200-141gb"),
    "meta-llama/Llama-3.1-8B": ("1x8xh100-80gb", "2x8xa100-80gb", "2x4xgb200-186gb"),
    "mistralai/Mistral-7B-v0.3": ("1x8xh200-141gb",),
    "Qwen/Qwen2.5-7B": ("2x8xb200-180gb",),
}
GRIDS = (
    (8, 4, 1),
    (4, 4, 1),
    (4, 4, 5),
    (2, 4, 2),
    (2, 2, 4),
    (4, 2, 1),
    (8, 1, 1),
    (1, 1, 1),
    (2, 1, 1),
    (1, 8, 1),
    (4, 1, 1),
)
"""Tensor, pipeline and virtual-stage sizes."""
FOLDER = "/shared/llama"
VARIANTS = (
    {},
    {"layout.recompute": "[layer]", "layout.shard": "none"},
    {"layout.recompute": "[norm,swiglu]", "layout.layers": "balanced"},
    {"layout.shard": "gradients"},
    {"optimizer.moments": "bfloat16"},
    {"layout.shard": "full", "optimizer.moments": "bfloat16"},
    {"layout.shard": "full", "layout.micro_batch": "2", "model.fp8": "true"},
    {"layout.recompute": "[mlp]", "layout.sequence_parallel": "false", "model.dtype": "float32"},
)
FAULTS = {
    "grid that does not divide the ranks": ("--tensor-model-parallel-size", "3"),
    "attention heads that tp does not divide": ("--num-attention-heads", "63"),
    "layers that do not make the stages": ("--pipeline-model-parallel-layout", "Et*21|t*20|t*20|t*20L"),
    "option of another name": ("--batch-size", "1"),
    "option that is none": ("--pipeline-schedule", "1f1b"),
    "word that is no choice": ("--recompute-granularity", "some"),
    "minimum above the learning rate": ("--min-lr", "1"),
    "moments of a type without the optimizer for it": ("--exp-avg-dtype", "bf16"),
    "that optimizer, and states that are not shared out": ("--use-precision-aware-optimizer",),
}


class _Blank(types.ModuleType):
    """A module whose every name is a function that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *values, **named: None


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name in NEEDS_TRITON else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Blank(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One layout and what became of it."""

    model: str
    cluster: str
    layout: str
    accepted: str
    """`yes`, or why not."""
    returned: str
    """Whether the layout came back: `yes`, or what differs."""


def cases() -> Iterator[dict[str, str]]:
    """Keys of run files, legal or not."""
    for (model, clusters), grid, variant in itertools.product(MODELS.items(), GRIDS, VARIANTS):
        for cluster in clusters:
            tp, pp, vpp = grid
            keys = {"model.path": model, "cluster": cluster, "layout.tp": str(tp), "layout.pp": str(pp)}
            if vpp > 1:
                keys |= {"layout.vpp": str(vpp), "layout.schedule": "interleaved"}
            yield keys | {"data.train": "[train.jsonl]", "train.steps": "500", "data.seq_len": "4096"} | variant


def resolve(keys: dict[str, str]) -> ResolvedRun | None:
    """The run, None where the layout is illegal for the model."""
    run = load_words(Run, [f"{key}={value}" for key, value in keys.items()], "run")
    try:
        return validate(run, dry=True)
    except InputError:
        return None


def prepare() -> None:
    """Make Megatron's parser importable on a machine without a GPU."""
    if not (SOURCES / "megatron" / "training").is_dir():
        raise SystemExit(f"Megatron-Core {VERSION} is not fetched: run `python bench/peers/megatron_cpu.py` first")
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(SOURCES))
    sys.meta_path.insert(0, _StandIn())
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def judged(script: Script, world_size: int, gpu: str) -> str:
    """`yes` if Megatron accepts the arguments of a script, else the reason."""
    import torch

    major = 10 if gpu.startswith(("b200", "gb200")) else 8 if gpu.startswith("a100") else 9
    card = types.SimpleNamespace(major=major, minor=0, name="stand-in", total_memory=80 << 30)
    torch.cuda.get_device_properties = lambda device=None: card
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {**script.environment, "WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0"}
    sys.argv = ["pretrain_gpt.py", *script.words, "--no-rope-fusion"]
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            arguments = parse_args()
            validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})
            core_transformer_config_from_args(arguments)
            check_optimizer(arguments)
    except (Exception, SystemExit) as error:
        # argparse says why on standard error, and a bare assertion says nothing.
        own = "" if isinstance(error, SystemExit) else str(error).strip()
        lines = (own or said.getvalue().strip() or "without a word").splitlines()
        return f"{type(error).__name__}: {lines[0 if own else -1]}"
    return "yes"


def check_optimizer(arguments: argparse.Namespace) -> None:
    """What Megatron-Core itself asks of the optimizer's arguments, where Transformer Engine's Adam is installed."""
    from megatron.core.optimizer import OptimizerConfig

    def adam(master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any) -> None:
        """Its options that Megatron looks for."""

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    engine = types.ModuleType("transformer_engine")
    engine.__dict__.update(__version__="2.11.0")
    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.__dict__.update(FusedAdam=adam)
    pytorch = types.ModuleType("transformer_engine.pytorch")
    with patch.dict(sys.modules, {module.__name__: module for module in (engine, pytorch, optimizers)}):
        OptimizerConfig(**{name: value for name, value in vars(arguments).items() if name in names})


def comparable(layout: Layout) -> dict[str, Any]:
    """What of a layout Megatron can hold: no schedule but its two, no recompute of SwiGLU, nothing to shard at DP 1."""
    kept = dataclasses.asdict(layout)
    kept["schedule"] = "interleaved" if layout.vpp > 1 else "1f1b"
    kept["recompute"] = (
        ("layer",)
        if "layer" in layout.recompute
        else tuple(part for part in ("norm", "mlp") if part in layout.recompute)
    )
    kept["sequence_parallel"] = layout.uses_sequence_parallel
    kept["keep_gathered"] = False
    if layout.replicas == 1:
        kept["shard"] = "none"
    return kept


def returned(script: Script, resolved: ResolvedRun, folder: Path) -> str:
    """`yes` if the run file of the script has the layout that the script came from, else what differs."""
    path = folder / "run.yaml"
    path.write_text(run_file_from(script), encoding="utf-8")
    again = validate(load_run(path, ["--cluster", resolved.run.cluster or ""]), dry=True)
    mine, theirs = comparable(resolved.layout), comparable(again.layout)
    differing = [f"{key} {mine[key]} -> {theirs[key]}" for key in mine if mine[key] != theirs[key]]
    same = ("global_batch", resolved.run.train.global_batch, again.run.train.global_batch)
    differing += [f"{same[0]} {same[1]} -> {same[2]}"] if same[1] != same[2] else []
    moments = resolved.run.optimizer.moments, again.run.optimizer.moments
    differing += [f"moments {moments[0]} -> {moments[1]}"] if moments[0] != moments[1] else []
    return "; ".join(differing) or "yes"


def run_cases(every: int) -> list[Row]:
    """Judge every `every`th legal case."""
    rows = []
    legal = [(keys, found) for keys in cases() if (found := resolve(keys)) is not None]
    with tempfile.TemporaryDirectory() as folder:
        for keys, found in legal[::every]:
            settings = Settings("run.yaml", FOLDER, name="run")
            (text,) = megatron.files(found, settings).values()
            script = read_script(text)
            cluster = found.cluster
            gpu = cluster.gpu.name if cluster else ""
            extra = " ".join(f"{key.partition('.')[2]}={value}" for key, value in keys.items() if key not in BASIC)
            rows.append(
                Row(
                    keys["model.path"].rpartition("/")[2],
                    keys["cluster"],
                    f"{found.layout} {extra}".strip(),
                    judged(script, found.layout.world_size, gpu),
                    returned(script, found, Path(folder)),
                )
            )
            print(rows[-1], flush=True)
    return rows


BASIC = (
    "model.path",
    "cluster",
    "layout.tp",
    "layout.pp",
    "layout.vpp",
    "layout.schedule",
    "data.train",
    "train.steps",
)
BASIC += ("data.seq_len",)
"""Keys that the other columns show."""


def run_faults() -> list[tuple[str, str]]:
    """What Megatron says to the 70B script with one argument changed or added."""
    keys = {"model.path": "meta-llama/Llama-3-70B", "cluster": "4x8xh100-80gb", "layout.tp": "8", "layout.pp": "4"}
    found = resolve(keys | {"data.train": "[train.jsonl]", "train.steps": "500", "data.seq_len": "4096"})
    if found is None:
        raise SystemExit("the 70B layout is not legal")
    (text,) = megatron.files(found, Settings("run.yaml", FOLDER, name="run")).values()
    script = read_script(text)
    said = []
    for fault, words in FAULTS.items():
        broken = dataclasses.replace(script, words=(*script.words, *words))
        said.append((fault, judged(broken, 32, "h100-80gb")))
    unset = dataclasses.replace(script, environment={})
    said.append(("CUDA_DEVICE_MAX_CONNECTIONS unset", judged(unset, 32, "h100-80gb")))
    return said


def markdown(rows: list[Row], faults: list[tuple[str, str]], every: int) -> str:
    """The table."""
    good = sum(row.accepted == "yes" for row in rows)
    back = sum(row.returned == "yes" for row in rows)
    lines = [
        f"# Scripts for Megatron-LM before Megatron-Core {VERSION}'s own parser and validator",
        "",
        f"Made by `python bench/peers/launch_megatron.py --every {every} --markdown FILE` on a CPU.",
        "",
        f"{len(rows)} layouts: {good} accepted by Megatron; {back} with the layout and global batch that they came from"
        " after `--from-megatron`.",
        "",
        "| model | cluster | layout | accepted | came back |",
        "|---|---|---|---|---|",
        *(f"| {row.model} | {row.cluster} | {row.layout} | {row.accepted} | {row.returned} |" for row in rows),
        "",
        "## Planted faults",
        "",
        "One argument of the Llama-3-70B script changed or added.",
        "",
        "| fault | what Megatron says |",
        "|---|---|",
        *(f"| {fault} | {said.replace('|', chr(92) + '|')} |" for fault, said in faults),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="judge one case in N (5 takes some minutes)")
    parser.add_argument("--markdown", type=Path)
    chosen = parser.parse_args()
    prepare()
    rows, faults = run_cases(chosen.every), run_faults()
    for fault, said in faults:
        print(f"{fault}: {said}")
    if chosen.markdown is not None:
        chosen.markdown.write_text(markdown(rows, faults, chosen.every), encoding="utf-8")
    wrong = [row for row in rows if (row.accepted, row.returned) != ("yes", "yes")]
    asleep = [fault for fault, said in faults if said == "yes"]
    print(f"{len(rows)} layouts, {len(wrong)} wrong; {len(faults)} faults, {len(asleep)} not seen")
    return 1 if wrong or asleep else 0


if __name__ == "__main__":
    raise SystemExit(main())
