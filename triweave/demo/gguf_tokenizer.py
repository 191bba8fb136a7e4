"""The tokenizer inside a GGUF file, as the files that tokenizers and transformers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from triweave.errors import RunFailed

_CONTROL = 3
"""GGUF's type of a token that marks structure, such as `<|im_start|>`, and is never cut into pieces."""

_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which holds the chat template, into `folder`.

    Raises:
        RunFailed: the file has another kind of tokenizer than the demo's.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{name: tokens[metadata[key]] for name, key in _SPECIAL_TOKENS.items()},
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describe.

    The pre-tokenizer `smollm` is llama.cpp's name for: every digit alone, then GPT-2's pattern. transformers 5.24
    reads the file without the first half, and so encodes spaces and line breaks before a digit in other tokens
    than the model was trained on.

    Raises:
        RunFailed: the file has another kind of tokenizer.
    """
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise RunFailed(f"the demo reads a gpt2/smollm tokenizer and the GGUF file has {'/'.join(kind)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as a person would like to read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
