"""Models that are only a config.json: enough to draw random weights, and made without transformers."""

from __future__ import annotations

import json
from pathlib import Path

_DEFAULTS: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}


def tiny_config(folder: Path, **overrides: object) -> Path:
    """Write the config of a tiny Llama into `folder`, which is made, and return the folder.

    Drawn weights (`weights: random`) are large enough that a wrong slice or a lost term shows in the loss.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_DEFAULTS | overrides), encoding="utf-8")
    return folder
