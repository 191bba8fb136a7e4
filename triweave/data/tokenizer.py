"""The tokenizer of a Hugging Face folder: tokenizer.json, and the special tokens that its configuration names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from triweave.errors import InputError, Problem
from triweave.json_file import read_json_object

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_SETTINGS_BYTES = 16 * 2**20
"""Of tokenizer_config.json, which may list every added token and hold the chat template."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer that turns text into ids. Truncation and padding that its file may ask for are off."""

    backend: tokenizers.Tokenizer
    where: Path
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, ... as the folder names them; chat templates see these."""
    control_tokens: frozenset[str]
    """Every token that is no text: beginning, end of turn, role markers."""
    control_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    sha256: str
    """Of tokenizer.json and the special tokens: two tokenizers with the same one give the same ids."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding | Exception]:
        """Encode `texts`, several at a time. A text that cannot be encoded gives its exception, not an encoding."""
        try:
            return list(self.backend.encode_batch(texts, add_special_tokens=add_special_tokens))
        except BaseException as error:
            # A regular expression that gives up panics, and a panic derives from BaseException (tokenizers 0.23).
            if not _is_tokenizers_own(error):
                raise
            if len(texts) == 1:
                return [ValueError(f"the tokenizer refuses this text ({error})")]
        return [encoded for text in texts for encoded in self.encode([text], add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(folder: Path, key: str = "data.tokenizer") -> TextTokenizer:
    """The tokenizer in `folder`.

    Raises:
        InputError: no tokenizer.json, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        rule = f"has no tokenizer.json{_sentencepiece_hint(folder)}" if folder.is_dir() else "is not a folder"
        raise InputError(Problem(key, folder, rule))
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        rule = f"has {path.stat().st_size:,} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES:,}"
        raise InputError(Problem(key, path, rule))
    content = path.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise InputError(Problem(key, path, f"is not a tokenizer ({error})")) from None
    backend.no_truncation()
    backend.no_padding()
    special = _special_tokens(folder, key)
    control = {token: number for number, token in _control_tokens(backend).items()}
    control |= {token: number for token in special.values() if (number := backend.token_to_id(token)) is not None}
    identity = hashlib.sha256(content)
    identity.update(json.dumps(special, sort_keys=True).encode())
    return TextTokenizer(
        backend,
        path,
        special,
        frozenset(control),
        frozenset(control.values()),
        control.get(special.get("bos_token", "")),
        control.get(special.get("eos_token", "")),
        identity.hexdigest(),
    )


def read_settings(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file.

    Raises:
        InputError: the file holds something else, or is too large.
    """
    return read_json_object(path, key, MAX_SETTINGS_BYTES) if path.is_file() else {}


def _special_tokens(folder: Path, key: str) -> dict[str, str]:
    """Special tokens by name; tokenizer_config.json has the last word over the older special_tokens_map.json."""
    named = read_settings(folder / "special_tokens_map.json", key)
    named |= {name: token for name, token in read_settings(folder / "tokenizer_config.json", key).items() if token}
    special: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = named.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return special


def _control_tokens(backend: tokenizers.Tokenizer) -> dict[int, str]:
    return {number: token.content for number, token in backend.get_added_tokens_decoder().items() if token.special}


def _sentencepiece_hint(folder: Path) -> str:
    if not (folder / "tokenizer.model").is_file():
        return ""
    return ", only tokenizer.model; load and save it once with transformers' AutoTokenizer, which writes tokenizer.json"


def _is_tokenizers_own(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
