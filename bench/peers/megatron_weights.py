"""Hugging Face tensors to Megatron's tensor-parallel shards, and gradients back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors import safe_open


class Cut(Enum):
    """How a Megatron parameter is made of Hugging Face tensors and split over the tensor-parallel group."""

    REPLICATED = "whole on every rank"
    COLUMNS = "by input features"
    VOCABULARY = "by rows, after padding the vocabulary to a multiple of the group"
    QUERY_KEY_VALUE = "rows grouped by key/value head: its query heads, its key, its value"
    GATE_UP = "gate rows then up rows, on each rank its own slice of both"


@dataclass(frozen=True, slots=True)
class Source:
    """The Hugging Face tensors behind one Megatron parameter."""

    names: tuple[str, ...]
    cut: Cut


_WHOLE_MODEL = {
    "embedding.word_embeddings.weight": Source(("model.embed_tokens.weight",), Cut.VOCABULARY),
    "decoder.final_layernorm.weight": Source(("model.norm.weight",), Cut.REPLICATED),
    "output_layer.weight": Source(("lm_head.weight",), Cut.VOCABULARY),
}
_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER = {
    "input_layernorm.weight": Source(("input_layernorm.weight",), Cut.REPLICATED),
    "self_attention.linear_qkv.weight": Source(tuple(f"{p}.weight" for p in _QUERY_KEY_VALUE), Cut.QUERY_KEY_VALUE),
    "self_attention.linear_qkv.bias": Source(tuple(f"{p}.bias" for p in _QUERY_KEY_VALUE), Cut.QUERY_KEY_VALUE),
    "self_attention.linear_proj.weight": Source(("self_attn.o_proj.weight",), Cut.COLUMNS),
    "pre_mlp_layernorm.weight": Source(("post_attention_layernorm.weight",), Cut.REPLICATED),
    "mlp.linear_fc1.weight": Source(("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.GATE_UP),
    "mlp.linear_fc2.weight": Source(("mlp.down_proj.weight",), Cut.COLUMNS),
}


def source(name: str, *, tied: bool) -> Source:
    """Where a Megatron parameter comes from; `decoder.layers.N.` counts layers of the whole model from 0."""
    if tied and name == "output_layer.weight":
        return _WHOLE_MODEL["embedding.word_embeddings.weight"]
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name]
    layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
    found = _LAYER[rest]
    return Source(tuple(f"model.layers.{layer}.{hf_name}" for hf_name in found.names), found.cut)


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model that its cuts depend on."""

    num_key_value_heads: int
    query_rows_per_group: int
    """Query heads of one key/value head, times head_dim."""
    head_dim: int
    vocab_size: int
    padded_vocab_size: int


def shard(cut: Cut, tensors: list[torch.Tensor], shape: Shape, *, rank: int, tp: int) -> torch.Tensor:
    """The slice of `tensors` that tensor-parallel rank `rank` of `tp` holds."""
    match cut:
        case Cut.REPLICATED:
            return tensors[0]
        case Cut.COLUMNS:
            return tensors[0].chunk(tp, dim=1)[rank]
        case Cut.VOCABULARY:
            padding = tensors[0].new_zeros(shape.padded_vocab_size - shape.vocab_size, tensors[0].shape[1])
            return torch.cat([tensors[0], padding]).chunk(tp)[rank]
        case Cut.QUERY_KEY_VALUE:
            grouped = [tensor.unflatten(0, (shape.num_key_value_heads, -1)) for tensor in tensors]
            return torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp)[rank]
        case Cut.GATE_UP:
            return torch.cat([tensor.chunk(tp)[rank] for tensor in tensors])


def unshard(cut: Cut, shards: list[torch.Tensor], shape: Shape) -> list[torch.Tensor]:
    """The inverse of `shard`: the Hugging Face tensors, from the shards of all ranks in order."""
    match cut:
        case Cut.REPLICATED:
            return [shards[0]]
        case Cut.COLUMNS:
            return [torch.cat(shards, dim=1)]
        case Cut.VOCABULARY:
            return [torch.cat(shards)[: shape.vocab_size]]
        case Cut.QUERY_KEY_VALUE:
            grouped = torch.cat(shards).unflatten(0, (shape.num_key_value_heads, -1))
            parts = grouped.split([shape.query_rows_per_group, shape.head_dim, shape.head_dim], dim=1)
            return [part.flatten(0, 1) for part in parts]
        case Cut.GATE_UP:
            halves = [piece.chunk(2) for piece in shards]
            return [torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves])]


class Folder:
    """The tensors of a Hugging Face folder's safetensors files, read one at a time as float32."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path}: no .safetensors file")
        self._files = [safe_open(file, framework="pt") for file in files]
        self._index = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._index[name].get_tensor(name)
        return tensor.float()
