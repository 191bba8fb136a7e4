"""Where each row of a Hugging Face tensor lies in a checkpoint of Megatron-Core (torch_dist, GPT model).

Megatron fuses query, key and value by key/value head (its query heads, its key, its value), and gate and up one after
the other. Tensors of equal layers are stacked along a first dimension, or, with `non_homogeneous_layers`, stand by
themselves under the layer's number; with `singleton_local_shards` gate and up have names of their own too. The norms
before a product carry Transformer Engine's names, also where its layers are not used. Read off checkpoints that
Megatron-Core 0.19.2 wrote, and off its sources (transformer_block.py, mlp.py, gpt_layer_specs.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from triweave.model_spec import ModelSpec, TensorSpec

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
LAYERS = "decoder.layers"

_QKV = "self_attention.linear_qkv"
_FC1 = "mlp.linear_fc1"
_PLAIN = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "input_layernorm.weight": f"{_QKV}.layer_norm_weight",
    "post_attention_layernorm.weight": f"{_FC1}.layer_norm_weight",
}
_WHOLE_MODEL = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": FINAL_NORM,
    "lm_head.weight": HEAD,
}
EXTRA_STATES = (
    "self_attention.core_attention",
    "self_attention.linear_proj",
    _QKV,
    _FC1,
    "mlp.linear_fc2",
)
"""Modules of a layer whose empty `_extra_state` Megatron asks for: there fp8 scales would be."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, stop)` of a Hugging Face tensor, which are rows `at` and on of Megatron's."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Hugging Face tensor lies."""

    key: str
    layer: int | None
    """Its index along the first dimension of a stacked tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor `key`, the stacked dimension included."""
    blocks: tuple[Block, ...]

    def offsets(self, row: int) -> tuple[int, ...]:
        """Position of the first element of a row."""
        leading = () if self.layer is None else (self.layer,)
        return (*leading, row, *(0 for _ in self.shape[len(leading) + 1 :]))


def place_of(spec: ModelSpec, tensor: TensorSpec, stored: Container[str] | None = None) -> Place:
    """Where `tensor` lies.

    Args:
        spec: the model.
        tensor: one of its tensors.
        stored: the keys of the checkpoint that is read, which tell its style; None is the stacked one, which is
            written.
    """
    rows = tensor.shape[0]
    whole = (Block(0, rows, 0),)
    if tensor.name in _WHOLE_MODEL:
        return Place(_WHOLE_MODEL[tensor.name], None, tensor.shape, whole)
    layer, _, rest = tensor.name.removeprefix("model.layers.").partition(".")
    columns = tensor.shape[1:]
    name, total, blocks = _inside_layer(spec, rest, rows)
    number = int(layer)
    stacked = Place(f"{LAYERS}.{name}", number, (spec.num_hidden_layers, total, *columns), blocks)
    if stored is None or stacked.key in stored:
        return stacked
    half = {"mlp.gate_proj.weight": "_w", "mlp.up_proj.weight": "_v"}.get(rest)
    if half is not None and f"{LAYERS}.{layer}.{name}{half}" in stored:
        return Place(f"{LAYERS}.{layer}.{name}{half}", None, tensor.shape, whole)
    return Place(f"{LAYERS}.{layer}.{name}", None, (total, *columns), blocks)


def extra_state_names(spec: ModelSpec) -> Iterator[str]:
    """Every empty state that Megatron's model asks for beside its weights."""
    layers = spec.num_hidden_layers
    for module in EXTRA_STATES:
        for layer in range(layers):
            yield f"{LAYERS}.{module}._extra_state/shard_{layer}_{layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _inside_layer(spec: ModelSpec, rest: str, rows: int) -> tuple[str, int, tuple[Block, ...]]:
    """Name inside the layer, rows of the fused tensor, and which of them these are."""
    if rest in _PLAIN:
        return _PLAIN[rest], rows, (Block(0, rows, 0),)
    if rest.startswith("mlp."):
        first = 0 if rest == "mlp.gate_proj.weight" else rows
        return f"{_FC1}.weight", 2 * rows, (Block(0, rows, first),)
    projection, _, kind = rest.removeprefix("self_attn.").partition(".")
    groups, head = spec.num_key_value_heads, spec.head_dim
    query = spec.query_size // groups
    mine, first = {"q_proj": (query, 0), "k_proj": (head, query), "v_proj": (head, query + head)}[projection]
    stride = query + 2 * head
    blocks = tuple(Block(g * mine, (g + 1) * mine, g * stride + first) for g in range(groups))
    return f"{_QKV}.{kind}", groups * stride, blocks
