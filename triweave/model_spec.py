"""A Llama in numbers: shapes, parameters and FLOPs, read from a Hugging Face `config.json`.

Fields carry Hugging Face's own names. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triweave.errors import InputError, Problem
from triweave.json_file import read_json_object

ARCHITECTURES: dict[str, dict[str, int]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
}
"""What this code computes, and what transformers takes for the keys that a config leaves out."""

MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**14,
}
"""A hundred times the largest model there is: beyond, a config.json is a mistake, or made to keep its reader busy."""
MAX_SIZE = 2**40


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
    qk_norm: bool = False
    """RMSNorm of every query and key head (Qwen3): priced, not trained."""
    gated_mlp: bool = True
    """SwiGLU's three matrices; False is the two of GPT's MLP: priced, not trained."""

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
        if self.qk_norm:
            yield TensorSpec(f"{prefix}.self_attn.q_norm.weight", (self.head_dim,))
            yield TensorSpec(f"{prefix}.self_attn.k_norm.weight", (self.head_dim,))
        if self.gated_mlp:
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
        return attention + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

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
        InputError: an architecture or option that this code does not compute, or a value that is missing or no number.
    """
    problems: list[Problem] = []
    architecture = _architecture(config, where, problems)
    read = _Reader(ARCHITECTURES.get(architecture, {}) | dict(config), where, problems)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        read.refuse("hidden_act", "must be silu: the MLP is SwiGLU", "silu")
    if config.get("auto_map"):
        rule = (
            "names code of the model's own, which is never run here: what it computes may differ from the architecture"
        )
        read.refuse("auto_map", rule, "a folder without it")
    for key in ("mlp_bias", "use_sliding_window"):
        if config.get(key):
            read.refuse(key, "is not supported", "false")
    if architecture == "LlamaForCausalLM" and config.get("attention_bias"):
        read.refuse("attention_bias", "puts a bias on o_proj, which is not supported", "false")
    if config.get("attention_dropout"):
        read.refuse("attention_dropout", "must be 0: Llama trains without dropout", "0.0")

    hidden_size, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    # transformers 5 writes rope_theta among rope_parameters; before, it stood beside rope_scaling.
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = read.section(key)
    window = None
    if architecture == "MistralForCausalLM" and read.values["sliding_window"] is not None:
        window = read.whole("sliding_window")
    spec = ModelSpec(
        vocab_size=read.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.whole("intermediate_size"),
        num_hidden_layers=read.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=read.whole("num_key_value_heads", heads),
        head_dim=read.whole("head_dim", max(1, hidden_size // heads)),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=architecture == "Qwen2ForCausalLM",
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=(read if rope.values.get("rope_theta") is None else rope).number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        max_position_embeddings=read.whole("max_position_embeddings", 2048),
        sliding_window=window,
        initializer_range=read.number("initializer_range", 0.02),
        architecture=architecture,
    )
    # Rules between values, once each is right by itself.
    if not problems and heads % spec.num_key_value_heads:
        read.refuse("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    if not problems and config.get("head_dim") is None and hidden_size % heads:
        read.refuse("hidden_size", f"must be a multiple of num_attention_heads = {heads}, or head_dim be given")
    if not problems and spec.head_dim % 2:
        read.refuse("head_dim", f"is {spec.head_dim} and must be even: rotary embedding turns pairs")
    if problems:
        raise InputError(problems)
    return spec


class _Reader:
    """Values of a config by key, each problem noted. A wrong value reads as 1, so that all are found."""

    def __init__(self, values: Mapping[str, Any], where: str, problems: list[Problem], section: str = "") -> None:
        self.values = values
        self.where = where
        self.problems = problems
        self.prefix = f"{section}." if section else ""

    def refuse(self, key: str, rule: str, nearest: str | None = None) -> None:
        self.problems.append(Problem(self.prefix + key, self.values.get(key), rule, nearest, self.where))

    def whole(self, key: str, default: int | None = None) -> int:
        value = default if self.values.get(key) is None else self.values[key]
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZES.get(key, MAX_SIZE):
            return value
        limit = f" of at most {MAX_SIZES[key]:,}" if key in MAX_SIZES else ""
        self.refuse(key, f"must be a positive whole number{limit}")
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        value = default if self.values.get(key) is None else self.values[key]
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.refuse(key, "must be a positive number")
        return 1.0

    def flag(self, key: str) -> bool:
        value = self.values.get(key) or False
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return bool(value)

    def section(self, key: str) -> _Reader:
        values = self.values.get(key) or {}
        if not isinstance(values, Mapping):
            self.refuse(key, "must be an object")
            values = {}
        return _Reader(values, self.where, self.problems, key)


def _architecture(config: Mapping[str, Any], where: str, problems: list[Problem]) -> str:
    named = config.get("architectures") or ["LlamaForCausalLM"]
    if isinstance(named, list) and isinstance(named[0], str) and named[0] in ARCHITECTURES:
        return named[0]
    shown = named[0] if isinstance(named, list) else named
    problems.append(Problem("architectures", shown, f"is not one of {', '.join(ARCHITECTURES)}", where=where))
    return ""


def _rope_scaling(rope: _Reader) -> RopeScaling | None:
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        key = "rope_type" if "rope_type" in rope.values else "type"
        rope.refuse(key, "must be default or llama3", "llama3")
        return None
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low and not rope.problems:
        rope.refuse("high_freq_factor", f"must be more than low_freq_factor = {low}")
    return RopeScaling(rope.number("factor"), low, high, rope.whole("original_max_position_embeddings"))


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face model folder.

    Raises:
        InputError: no such folder or file, or it is too large or not JSON.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(Problem("model.path", folder, "is not a folder"))
    if not path.is_file():
        raise InputError(Problem("model.path", folder, "has no config.json"))
    return read_json_object(path, "model.path")


def spec_from_folder(folder: Path) -> ModelSpec:
    """The model in a Hugging Face folder, in numbers."""
    return spec_from_hf_config(read_hf_config(folder), where=str(folder / "config.json"))
