"""Tiny random models and a tiny tokenizer, in real Hugging Face folders that transformers wrote.

    folder = tiny_llama(tmp_path / "model", **STYLES["qwen2"])
    tokenizer = tiny_tokenizer(folder)

Sizes divide by 4 (heads 8, key/value heads 4), so tensor-parallel sizes 1, 2 and 4 are legal; weights are large
enough that a wrong slice or a lost term shows in the loss.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 384
"""Of the models and of the tokenizer: 3 special tokens, 256 bytes and 125 merges."""

STYLES: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "tied": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 256},
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-6},
}
"""Overrides of `tiny_llama`: one style for each thing that differs inside the Llama family."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_DEFAULTS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

_TEXT = (
    "A pipeline splits the layers of a model over several devices, and a tensor-parallel group splits every layer. "
    "The quick brown fox jumps over the lazy dog. What is the answer? The answer is 42, and the question is how "
    "many micro-batches of 8 sequences make a batch of 336. user assistant system hello world "
)


def tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    std: float = 0.1,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random Llama-family model as a Hugging Face folder and return the folder.

    Args:
        folder: destination, made when missing.
        seed: of the weights. A tensor's values follow (seed, name, shape) alone.
        std: of matrices and biases; norms are 1 plus as much noise.
        dtype: type of the stored weights.
        max_shard_size: of transformers' save_pretrained; "100KB" gives several files.
        **overrides: keys of the config; `model_type` picks llama, mistral or qwen2. See `STYLES`.
    """
    config = AutoConfig.for_model(**(_DEFAULTS | overrides))
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            noise = std * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tiny_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer with a ChatML template into `folder` and return the folder.

    Ids 0, 1, 2 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`; every text encodes and decodes to itself.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
