"""A Llama in numbers: shapes, parameters and FLOPs, read from a Hugging Face `config.json`.

Fields carry Hugging Face's own names. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triweave.errors import InputError, Problem

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's rotary frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter of the model: its Hugging Face name and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shapes of one Llama-family decoder (RMSNorm, rotary, grouped-query attention, SwiGLU)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 4096
    sliding_window: int | None = None
    """Mistral's attention window; attention here is full, so a run's sequences must not be longer."""
    initializer_range: float = 0.02
    architecture: str = "LlamaForCausalLM"

    @property
    def query_size(self) -> int:
        """Rows of the query projection: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Rows of the key (or value) projection: key/value heads x head_dim."""
        return self.num_key_value_heads * self.head_dim

    def layer_tensors(self, layer: int) -> Iterator[TensorSpec]:
        """Parameters of decoder layer `layer`, in Hugging Face's order and names."""
        prefix = f"model.layers.{layer}"
        hidden, ffn = self.hidden_size, self.intermediate_size
        for name, rows in (("q", self.query_size), ("k", self.key_value_size), ("v", self.key_value_size)):
            yield TensorSpec(f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden))
            if self.attention_bias:
                yield TensorSpec(f"{prefix}.self_attn.{name}_proj.bias", (rows,))
        yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", (hidden, self.query_size))
        yield TensorSpec(f"{prefix}.mlp.gate_proj.weight", (ffn, hidden))
        yield TensorSpec(f"{prefix}.mlp.up_proj.weight", (ffn, hidden))
        yield TensorSpec(f"{prefix}.mlp.down_proj.weight", (hidden, ffn))
        yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,))
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,))

    def tensors(self) -> Iterator[TensorSpec]:
        """Every parameter of the model. A tied head is not listed: it is the embedding."""
        yield TensorSpec("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        for layer in range(self.num_hidden_layers):
            yield from self.layer_tensors(layer)
        yield TensorSpec("model.norm.weight", (self.hidden_size,))
        if not self.tie_word_embeddings:
            yield TensorSpec("lm_head.weight", (self.vocab_size, self.hidden_size))

    @property
    def num_parameters(self) -> int:
        """Exact parameter count; a tied head is counted once."""
        return sum(tensor.numel for tensor in self.tensors())

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that take part in a matrix product (no norms, no biases)."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_value_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def layer_flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Forward-plus-backward FLOPs of one layer for one token.

        6 FLOPs a weight (2 forward, 4 backward; Kaplan et al. 2001.08361), plus attention's two products:
        12 x heads x head_dim x seq counted in full (PaLM, 2204.02311 appendix B), half of that counted causal.
        """
        attention = (6 if causal else 12) * self.query_size * seq_len
        return float(6 * self.layer_matmul_parameters + attention)

    def head_flops_per_token(self) -> float:
        """Forward-plus-backward FLOPs of the output head for one token: 6 x hidden x vocabulary."""
        return float(6 * self.hidden_size * self.vocab_size)

    def flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Model FLOPs of one token, forward and backward; the embedding lookup counts nothing."""
        return self.num_hidden_layers * self.layer_flops_per_token(seq_len, causal=causal) + self.head_flops_per_token()


def spec_from_hf_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Read a Hugging Face config of the Llama family.

    Raises:
        InputError: an architecture or option that this code does not compute, or a size that is missing.
    """
    problems: list[Problem] = []

    def refuse(key: str, value: object, rule: str, nearest: str | None = None) -> None:
        problems.append(Problem(key, value, rule, nearest, where))

    architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        refuse("architectures", architecture, f"is not one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", config["hidden_act"], "must be silu: the MLP is SwiGLU", "silu")
    for key in ("mlp_bias", "use_sliding_window"):
        if config.get(key):
            refuse(key, config[key], "is not supported", "false")
    if architecture == "LlamaForCausalLM" and config.get("attention_bias"):
        refuse("attention_bias", True, "puts a bias on o_proj, which is not supported", "false")
    if config.get("attention_dropout"):
        refuse("attention_dropout", config["attention_dropout"], "must be 0: Llama trains without dropout", "0.0")

    sizes: dict[str, int] = {}
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in required:
        value = config.get(key)
        if not isinstance(value, int) or value <= 0:
            refuse(key, value, "must be a positive whole number")
        else:
            sizes[key] = value
    if problems:
        raise InputError(problems)

    heads = sizes["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}")
    head_dim = config.get("head_dim") or sizes["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    window = config.get("sliding_window") if architecture == "MistralForCausalLM" else None
    scaling = _rope_scaling(rope, refuse)
    if problems:
        raise InputError(problems)
    return ModelSpec(
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=architecture == "Qwen2ForCausalLM",
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        sliding_window=window,
        initializer_range=float(config.get("initializer_range", 0.02)),
        architecture=architecture,
    )


def _rope_scaling(rope: Mapping[str, Any], refuse: Any) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        refuse("rope_scaling.rope_type", kind, "must be default or llama3", "llama3")
        return None
    missing = [
        key
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if key not in rope
    ]
    if missing:
        refuse("rope_scaling", dict(rope), f"lacks {', '.join(missing)}")
        return None
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face model folder.

    Raises:
        InputError: no such folder or file, or it is not JSON.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(Problem("model.path", folder, "is not a folder"))
    if not path.is_file():
        raise InputError(Problem("model.path", folder, "has no config.json"))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(Problem("model.path", path, f"is not JSON ({error})")) from None
    if not isinstance(config, dict):
        raise InputError(Problem("model.path", path, "must hold a JSON object"))
    return config


def spec_from_folder(folder: Path) -> ModelSpec:
    """The model in a Hugging Face folder, in numbers."""
    return spec_from_hf_config(read_hf_config(folder), where=str(folder / "config.json"))
