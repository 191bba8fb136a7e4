"""Models by name, in numbers: what `plan --model NAME` prices without a download.

Shapes are those of the models' own `config.json`. Qwen3 normalises its query and key heads, which this package
prices but does not train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

from triweave.errors import InputError, Problem, closest
from triweave.model_spec import ModelSpec, RopeScaling

_LLAMA_3_1_ROPE = RopeScaling(8.0, 1.0, 4.0, 8192)
_LLAMA_3_2_ROPE = RopeScaling(32.0, 1.0, 4.0, 8192)

_Shape = tuple[int, int, int, int, int, int]
"""Hidden size, intermediate size, layers, attention heads, key/value heads, head size."""

_LLAMA_2: dict[str, _Shape] = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 128),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 128),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 128),
}
_LLAMA_3: dict[str, _Shape] = {
    "8b": (4096, 14336, 32, 32, 8, 128),
    "70b": (8192, 28672, 80, 64, 8, 128),
    "405b": (16384, 53248, 126, 128, 8, 128),
}
_LLAMA_3_2: dict[str, _Shape] = {
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128),
}
_MISTRAL: dict[str, tuple[int, _Shape, float, int, int | None]] = {
    # vocabulary, shape, rotary base, longest sequence, attention window
    "mistral-7b-v0.1": (32000, (4096, 14336, 32, 32, 8, 128), 1e4, 32768, 4096),
    "mistral-7b-v0.3": (32768, (4096, 14336, 32, 32, 8, 128), 1e6, 32768, None),
    "mistral-nemo-2407": (131072, (5120, 14336, 40, 32, 8, 128), 1e6, 131072, None),
    "mistral-small-2409": (32768, (6144, 16384, 56, 48, 8, 128), 1e6, 32768, None),
    "mistral-small-24b-2501": (131072, (5120, 32768, 40, 32, 8, 128), 1e8, 32768, None),
    "mistral-large-2407": (32768, (12288, 28672, 88, 96, 8, 128), 1e6, 131072, None),
}
_QWEN_2_5: dict[str, tuple[int, _Shape]] = {
    "qwen2.5-0.5b": (151936, (896, 4864, 24, 14, 2, 64)),
    "qwen2.5-1.5b": (151936, (1536, 8960, 28, 12, 2, 128)),
    "qwen2.5-3b": (151936, (2048, 11008, 36, 16, 2, 128)),
    "qwen2.5-7b": (152064, (3584, 18944, 28, 28, 4, 128)),
    "qwen2.5-14b": (152064, (5120, 13824, 48, 40, 8, 128)),
    "qwen2.5-32b": (152064, (5120, 27648, 64, 40, 8, 128)),
    "qwen2.5-72b": (152064, (8192, 29568, 80, 64, 8, 128)),
}
_QWEN_3: dict[str, _Shape] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 128),
}
_SMOLLM: dict[str, _Shape] = {
    "135m": (576, 1536, 30, 9, 3, 64),
    "360m": (960, 2560, 32, 15, 5, 64),
    "1.7b": (2048, 8192, 24, 32, 32, 64),
}
_TIED = {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}

_ALIASES: dict[str, str] = {
    "llama-3.3-70b": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-7b-v0.2": "mistral-7b-v0.1",
    "mistral-nemo": "mistral-nemo-2407",
    "mistral-nemo-12b": "mistral-nemo-2407",
    "mistral-small": "mistral-small-24b-2501",
    "mistral-small-24b": "mistral-small-24b-2501",
    "mistral-small-22b": "mistral-small-2409",
    "mistral-large": "mistral-large-2407",
    "mistral-large-123b": "mistral-large-2407",
}
"""Other names of the same shapes. Mistral 7B v0.2 has v0.1's matrices; only its window and rotary base differ."""

_VARIANT = re.compile(r"(?<![a-z0-9])(?:meta|instruct|base|chat|hf|it|preview)(?![a-z0-9])")
"""Words of a Hugging Face name that leave the shapes alone."""


@cache
def models() -> Mapping[str, ModelSpec]:
    """Every model of the catalogue by its name, smaller ones of a family first."""
    return MappingProxyType(dict(_models()))


def find_model(name: str) -> ModelSpec:
    """The model of a name, in any case, bare (`llama-3.1-70b`) or of Hugging Face (`meta-llama/Llama-3.1-70B`).

    Raises:
        InputError: no model has that name; the message gives the nearest one.
    """
    names = {_key(known): known for known in models()} | {_key(alias): known for alias, known in _ALIASES.items()}
    key = _key(name)
    if key in names:
        return models()[names[key]]
    near = closest(key, list(names))
    rule = f"is neither a folder nor one of the {len(models())} models of the catalogue"
    raise InputError(Problem("model.path", name, rule, names[near] if near else "llama-3.1-8b"))


def _key(name: str) -> str:
    """A name without its owner, variant words and separators: `Meta-Llama-3-8B-Instruct` is `llama38b`."""
    bare = name.strip().lower().rpartition("/")[2]
    return re.sub(r"[^a-z0-9.]", "", _VARIANT.sub("", bare))


def _models() -> Iterator[tuple[str, ModelSpec]]:
    for name, shape in _LLAMA_2.items():
        yield name, _spec(32000, shape)
    for size, shape in _LLAMA_3.items():
        if size != "405b":
            yield f"llama-3-{size}", _spec(128256, shape, rope_theta=5e5, max_position_embeddings=8192)
    for size, shape in _LLAMA_3.items():
        yield (
            f"llama-3.1-{size}",
            _spec(128256, shape, rope_theta=5e5, rope_scaling=_LLAMA_3_1_ROPE, max_position_embeddings=131072),
        )
    for name, shape in _LLAMA_3_2.items():
        yield (
            name,
            _spec(
                128256,
                shape,
                tie_word_embeddings=True,
                rope_theta=5e5,
                rope_scaling=_LLAMA_3_2_ROPE,
                max_position_embeddings=131072,
            ),
        )
    for name, (vocabulary, shape, theta, longest, window) in _MISTRAL.items():
        yield (
            name,
            _spec(
                vocabulary,
                shape,
                rope_theta=theta,
                max_position_embeddings=longest,
                sliding_window=window,
                architecture="MistralForCausalLM",
            ),
        )
    for name, (vocabulary, shape) in _QWEN_2_5.items():
        yield (
            name,
            _spec(
                vocabulary,
                shape,
                tie_word_embeddings=name in _TIED,
                attention_bias=True,
                rms_norm_eps=1e-6,
                rope_theta=1e6,
                max_position_embeddings=32768,
                architecture="Qwen2ForCausalLM",
            ),
        )
    for name, shape in _QWEN_3.items():
        yield (
            name,
            _spec(
                151936,
                shape,
                tie_word_embeddings=name in _TIED,
                rms_norm_eps=1e-6,
                rope_theta=1e6,
                max_position_embeddings=40960,
                architecture="Qwen3ForCausalLM",
                qk_norm=True,
            ),
        )
    for family, theta, longest in (("smollm", 1e4, 2048), ("smollm2", 1e5, 8192)):
        for size, shape in _SMOLLM.items():
            yield (
                f"{family}-{size}",
                _spec(49152, shape, tie_word_embeddings=True, rope_theta=theta, max_position_embeddings=longest),
            )


def _spec(vocabulary: int, shape: _Shape, **others: object) -> ModelSpec:
    hidden, ffn, layers, heads, kv_heads, head_dim = shape
    return ModelSpec(vocabulary, hidden, ffn, layers, heads, kv_heads, head_dim, **others)  # type: ignore[arg-type]
