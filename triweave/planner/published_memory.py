"""Rows of published measurements as questions to the memory model.

Only the columns that describe a run are read, never those that were measured. Which tensors a row's program keeps is
in `memory_programs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from triweave.cluster import CATALOGUE
from triweave.errors import InputError, Problem
from triweave.layout import Layout, Recompute, Shard, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import GIB, Assumptions
from triweave.planner.memory_programs import (
    MEGATRON_2021,
    NEMO,
    SCALING,
    SIMUMAX,
    TORCHTITAN,
    Metric,
    Program,
    program_of,
)
from triweave.planner.time_rows import GPU_NAMES

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One published run, ready to be predicted."""

    spec: ModelSpec
    layout: Layout
    seq_len: int
    num_micro_batches: int
    dtype: str
    assumptions: Assumptions
    unit: int
    """Bytes of the unit that the source prints memory in: GiB or GB."""
    metric: Metric
    """What the source measured."""


def case_of(row: Row) -> Case:
    """The question that a row asks.

    Raises:
        InputError: the row leaves out what a prediction needs, or its program is not known; the message says which.
    """
    source = row["source"]
    if missing := [key for key in _NEEDED if not row[key]]:
        raise InputError(Problem("row", source, f"leaves {', '.join(missing)} empty"))
    program = program_of(source)
    if program is None:
        raise InputError(Problem("row", source, "was run with a program whose bookkeeping is not known"))
    spec = _spec(row)
    if program is SCALING:
        # Tied is that trainer's default; with one pipeline rank the embedding is then held once.
        spec = replace(spec, tie_word_embeddings=True)
    elif program is SIMUMAX and row["model"].startswith("llama3.1-405b"):
        # Their launch script and model file give 16 key/value heads; the row's 8 are those of the released model.
        spec = replace(spec, num_key_value_heads=16)
    return Case(
        spec,
        _layout(row, program),
        int(row["seq"]),
        _micro_batches(row),
        program.dtype,
        _assumptions(row, program),
        program.unit,
        program.metric,
    )


_NEEDED = ("layers", "hidden", "ffn", "heads", "vocab", "seq", "mbs")


def capacity_of(gpu_type: str) -> int | None:
    """Bytes that the driver gives to programs on a row's GPU; None where the catalogue does not know it.

    A size in the name (`H100-96GB`) that is not the catalogue's scales what is usable with it.
    """
    name = next((name for start, name in GPU_NAMES if gpu_type.lower().startswith(start)), None)
    if name is None:
        return None
    gpu = CATALOGUE[name]
    stated = re.search(r"(\d+)Gi?B", gpu_type)
    return gpu.usable_bytes * int(stated[1]) * GIB // gpu.memory_bytes if stated else gpu.usable_bytes


def _number(row: Row, key: str, default: int = 1) -> int:
    return int(row[key] or default)


def _spec(row: Row) -> ModelSpec:
    heads, hidden = int(row["heads"]), int(row["hidden"])
    name = row["model"].lower()
    return ModelSpec(
        vocab_size=int(row["vocab"]),
        hidden_size=hidden,
        intermediate_size=int(row["ffn"]),
        num_hidden_layers=int(row["layers"]),
        num_attention_heads=heads,
        num_key_value_heads=_number(row, "kv_heads", heads),
        head_dim=128 if name.startswith("qwen3") else hidden // heads,
        qk_norm=name.startswith("qwen3"),
        gated_mlp=not name.startswith(("gpt", "opt", "mpt")),
    )


def _layout(row: Row, program: Program) -> Layout:
    pp, vpp = _number(row, "pp"), _number(row, "vpp")
    layers = even_layers(int(row["layers"]), pp * vpp)
    if program is SCALING:
        # Embedding, layers, final norm and head, spread evenly, the first ranks taking one more if it does not divide.
        first, *others = even_layers(int(row["layers"]) + 3, pp)
        layers = (first - 1, *others)
        layers = (*layers[:-1], layers[-1] - 2)
    return Layout(
        tp=_number(row, "tp"),
        pp=pp,
        vpp=vpp,
        cp=_number(row, "cp"),
        dp=_number(row, "dp"),
        micro_batch=_number(row, "mbs"),
        sequence_parallel=row["sp"] == "1" if row["sp"] else program.sequence_parallel,
        schedule="interleaved" if vpp > 1 else "1f1b",
        shard=_shard(row, program.shard),
        recompute=_recompute(row),
        layers=layers,
    )


def _recompute(row: Row) -> tuple[Recompute, ...]:
    """What the row names. A block of whole layers (`full_block5`) is some of them: counted as none."""
    named = row["recompute"].lower()
    if "block" in named:
        return ()
    if "full" in named or "every_layer" in named:
        return ("layer",)
    kinds: dict[str, Recompute] = {"mlp": "mlp", "layernorm": "norm"}
    return tuple(kind for word, kind in kinds.items() if word in named)


def _shard(row: Row, default: Shard) -> Shard:
    """A ZeRO level by its number or by a name such as zero1 or fsdp_zero3; `default` where the row leaves it out."""
    levels: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")
    named = row["zero"].lower()
    level = named.removeprefix("fsdp_").removeprefix("zero")
    if level in ("0", "1", "2", "3"):
        return levels[int(level)]
    return "full" if "fsdp" in named else "none" if named == "none" else default


def _micro_batches(row: Row) -> int:
    """InternEvo's table states 4 beside the batch that it leaves out. Never fewer than fill our schedules."""
    pp = _number(row, "pp")
    if not row["gbs"]:
        return max(4, pp)
    return max(pp, int(row["gbs"]) // (_number(row, "mbs") * _number(row, "dp")))


def _assumptions(row: Row, program: Program) -> Assumptions:
    """The program's, with what the row's own columns say of its kernels."""
    usual, source, recompute = program.assumptions, row["source"], row["recompute"].lower()
    if program is SCALING:
        kernel = source.partition("kernel=")[2]
        attention: dict[str, Literal["softmax", "masked-softmax"]] = {"torch": "masked-softmax", "fused": "softmax"}
        if kernel in attention:
            return replace(usual, attention=attention[kernel])
        return replace(usual, fused_norm=kernel.endswith("RMSkernel"))
    if program is SIMUMAX:
        # cef in a run's name is cross-entropy fusion.
        return usual if "cef" in source else replace(usual, loss="vocab-parallel")
    if program is TORCHTITAN:
        # The loss was compiled from 2025 on; before, PyTorch's cross_entropy worked on float32 copies of the logits.
        eager_loss = "202412" in source or source.startswith("torchao")
        per_operation = "op" in recompute or not recompute
        return replace(usual, loss="gathered" if eager_loss else "compiled", selective_ops=per_operation)
    if program is MEGATRON_2021 and "selective" in recompute:
        # Once attention is a flash kernel, recomputing its core saves nothing.
        return replace(usual, attention="recomputed-softmax")
    if program is NEMO and "fp8" in row["precision"]:
        return replace(usual, fp8_inputs=True)
    return usual
