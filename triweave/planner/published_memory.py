"""Rows of published measurements as questions to the memory model: which program it was and how it keeps its tensors.

Only the columns that describe a run are read, never those that were measured. Which tensors another program keeps
was read from its code; each preset says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from triweave.errors import InputError, Problem
from triweave.layout import Layout, Recompute, Shard, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import GIB, MEGATRON, MIB, Assumptions

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
    metric: str
    """What the source measured: allocated, reserved or used."""


ALEPH_ALPHA = replace(
    MEGATRON,
    gradient_bytes=2,
    fused_norm=False,
    fused_swiglu=False,
    whole_qkv=True,
    rotary_tables_per_layer=True,
    keeps_gathered_input=True,
    loss="gathered",
    logits_held_over=1,
    weight_gradient_cache=False,
    vocab_multiple=1,
    workspace_bytes=8 * MIB,
)
"""The sweeps of 2311.05610, run with Aleph Alpha's trainer. Read from its published successor, Aleph-Alpha/scaling:

- the head gathers its logits (`parallel_output=False`), so every tensor-parallel rank holds the whole vocabulary,
  and the loss is PyTorch's `cross_entropy` on float32 copies;
- the last pipeline rank's output buffers are overwritten, never emptied: two micro-batches' logits are held;
- gradients are bf16 `.grad`; each rank keeps a float32 copy and moments of its data-parallel slice;
- `silu(x) * gate`, RMSNorm and rotary embedding are PyTorch operations (RMSNorm a kernel where the source says so),
  and values stay a view of the query-key-value product;
- embedding, every layer, final norm and head are the items that are spread evenly over the pipeline.
"""


TORCHTITAN = replace(MEGATRON, prefetched_units=2, vocab_multiple=1, weight_gradient_cache=False, selective_ops=True)
"""FSDP2 with float32 sharded weights; per-operation checkpointing; runs print the largest reserved memory."""

SAILOR = replace(
    MEGATRON,
    attention="softmax",
    loss="vocab-parallel",
    weight_gradient_cache=False,
)
"""Megatron-DeepSpeed in float16 with attention in PyTorch operations; the rows state neither."""

NANOTRON = replace(MEGATRON, loss="vocab-parallel", weight_gradient_cache=False, fused_norm=False, vocab_multiple=1)
"""nanotron: float32 gradient sums, ZeRO-1, a vocabulary-parallel loss in float32."""

INTERNEVO = replace(MEGATRON, gradient_bytes=2, loss="vocab-parallel", weight_gradient_cache=False, vocab_multiple=1)
"""InternEvo: bf16 gradients, float32 master weights and moments in data-parallel slices."""


def case_of(row: Row) -> Case:
    """The question that a row asks.

    Raises:
        InputError: the row leaves out what a prediction needs, or its program is not known; the message says which.
    """
    source = row["source"]
    missing = [key for key in _NEEDED if not row[key]]
    if missing:
        raise InputError(Problem("row", source, f"leaves {', '.join(missing)} empty"))
    if "2311.05610" in source:
        return _aleph_alpha(row)
    if "SimuMax" in source:
        return _simumax(row)
    if "torchtitan" in source:
        return _torchtitan(row)
    if "sailor" in source:
        return _sailor(row)
    if "InternEvo" in source:
        return _internevo(row)
    if "nanotron" in source:
        return _plain(row, NANOTRON, "optimizer", 10**9, "reserved")
    if "mosaicml" in source:
        return _plain(row, replace(TORCHTITAN, selective_ops=False, loss="gathered"), "full", GIB, "reserved")
    if any(name in source for name in ("vTrain", "2104.04473", "2205.05198")):
        return _plain(row, SAILOR, "none", GIB, "allocated")
    if any(name in source for name in ("Megatron-Bridge", "NeMo", "nemo", "dgxc", "Primus")):
        return _plain(row, MEGATRON, "optimizer", 10**9, "allocated")
    raise InputError(Problem("row", source, "was run with a program whose bookkeeping is not known"))


_NEEDED = ("layers", "hidden", "ffn", "heads", "vocab", "seq", "mbs")


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


def _layout(row: Row, shard: Shard, recompute: tuple[Recompute, ...], layers: tuple[int, ...] | None = None) -> Layout:
    pp, vpp = _number(row, "pp"), _number(row, "vpp")
    return Layout(
        tp=_number(row, "tp"),
        pp=pp,
        vpp=vpp,
        cp=_number(row, "cp"),
        dp=_number(row, "dp"),
        micro_batch=_number(row, "mbs"),
        sequence_parallel=row["sp"] == "1",
        schedule="interleaved" if vpp > 1 else "1f1b",
        shard=shard,
        recompute=recompute,
        layers=layers or even_layers(int(row["layers"]), pp * vpp),
    )


def _recompute(row: Row) -> tuple[Recompute, ...]:
    """Selective recompute of the attention core saves nothing once attention is a flash kernel."""
    named = row["recompute"].lower()
    if "full" in named or "every_layer" in named:
        return ("layer",)
    kinds: dict[str, Recompute] = {"mlp": "mlp", "layernorm": "norm"}
    return tuple(kind for word, kind in kinds.items() if word in named)


def _shard(row: Row, default: Shard) -> Shard:
    """A ZeRO level by its number or by a name such as fsdp_zero3; `default` where the row leaves it out."""
    levels: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")
    level = row["zero"].lower().removeprefix("fsdp_zero")
    return levels[int(level)] if level in ("0", "1", "2", "3") else "full" if "fsdp" in level else default


def _plain(row: Row, assumptions: Assumptions, default: Shard, unit: int, metric: str) -> Case:
    """A row whose columns say all there is to say beside the program."""
    layout = _layout(row, _shard(row, default), _recompute(row))
    return Case(_spec(row), layout, int(row["seq"]), _micro_batches(row), "bfloat16", assumptions, unit, metric)


def _micro_batches(row: Row) -> int:
    """InternEvo's table states 4 beside the batch that it leaves out. Never fewer than fill our schedules."""
    pp = _number(row, "pp")
    if not row["gbs"]:
        return max(4, pp)
    return max(pp, int(row["gbs"]) // (_number(row, "mbs") * _number(row, "dp")))


def _aleph_alpha(row: Row) -> Case:
    kernel = row["source"].partition("kernel=")[2]
    attention: dict[str, Assumptions] = {
        "torch": replace(ALEPH_ALPHA, attention="masked-softmax"),
        "fused": replace(ALEPH_ALPHA, attention="softmax"),
    }
    assumptions = attention.get(kernel, replace(ALEPH_ALPHA, fused_norm=kernel.endswith("RMSkernel")))
    recompute = _recompute(row)
    pp = _number(row, "pp")
    # Embedding, layers, final norm and head, spread evenly, the first ranks taking one more where it does not divide.
    items = list(even_layers(int(row["layers"]) + 3, pp))
    items[0] -= 1
    items[-1] -= 2
    layout = _layout(row, "optimizer", recompute, tuple(items))
    # Tied is that trainer's default; with one pipeline rank the embedding is then held once.
    spec, seq = replace(_spec(row), tie_word_embeddings=True), int(row["seq"])
    return Case(spec, layout, seq, _micro_batches(row), "bfloat16", assumptions, GIB, "used")


def _simumax(row: Row) -> Case:
    spec = _spec(row)
    if row["model"].startswith("llama3.1-405b"):
        # Their launch script and model file give 16 key/value heads; the row's 8 are those of the released model.
        spec = replace(spec, num_key_value_heads=16)
    # NullTokenizer adds one token before the vocabulary is padded; cef in a run's name is cross-entropy fusion.
    loss: Literal["fused", "vocab-parallel"] = "fused" if "cef" in row["source"] else "vocab-parallel"
    assumptions = replace(MEGATRON, extra_tokens=1, loss=loss)
    layout = _layout(row, "optimizer", _recompute(row))
    return Case(spec, layout, int(row["seq"]), _micro_batches(row), "bfloat16", assumptions, GIB, "allocated")


def _torchtitan(row: Row) -> Case:
    recompute = _recompute(row)
    # The loss was compiled from 2025 on; before, PyTorch's cross_entropy worked on float32 copies of the logits.
    eager_loss = "202412" in row["source"] or row["source"].startswith("torchao")
    assumptions = replace(TORCHTITAN, loss="gathered" if eager_loss else "compiled", selective_ops=not recompute)
    layout = _layout(row, "full", recompute)
    return Case(_spec(row), layout, int(row["seq"]), _micro_batches(row), "bfloat16", assumptions, GIB, "reserved")


def _sailor(row: Row) -> Case:
    layout = _layout(row, "none", ())
    return Case(_spec(row), layout, int(row["seq"]), _micro_batches(row), "float16", SAILOR, GIB, "used")


def _internevo(row: Row) -> Case:
    shard: Shard = "full" if row["zero"] == "3" else "optimizer"
    layout = _layout(row, shard, ("layer",))
    return Case(_spec(row), layout, int(row["seq"]), _micro_batches(row), "bfloat16", INTERNEVO, 10**9, "used")
