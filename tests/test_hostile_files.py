"""Files that somebody made to hurt: each is refused soon, in little memory, by a message that names file and rule."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_configs import tiny_config
from tiny_tokenizer import save_tokenizer

from triweave.config.load import load_run
from triweave.data import sources
from triweave.data.problems import Problems
from triweave.data.sources import read_records
from triweave.data.template import load_chat_template
from triweave.data.tokenizer import load_tokenizer
from triweave.errors import InputError
from triweave.model_spec import spec_from_folder
from triweave.weights_index import weights_index

SECONDS = 10.0
"""Of the processor, with memory traced, which makes all of it several times slower."""
MEMORY_BYTES = 2**30

DEEP = "[" * 200_000 + "]" * 200_000


def refused(read: Callable[[], object]) -> str:
    """What is said; the bounds of time and memory hold."""
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(InputError) as raised:
        read()
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < MEMORY_BYTES
    return str(raised.value)


def header(described: dict[str, Any]) -> bytes:
    """The start of a safetensors file."""
    raw = json.dumps(described).encode()
    return struct.pack("<Q", len(raw)) + raw


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
WEIGHTS: dict[str, tuple[bytes, str]] = {
    "a million empty tensors": (header({f"t{n:040d}": EMPTY for n in range(1_000_000)}), "the limit is 8388608"),
    "brackets without end": (struct.pack("<Q", 2 * 200_000) + DEEP.encode(), "is not JSON"),
    "a number of a million digits": (
        struct.pack("<Q", 1_000_006) + b'{"a":' + b"9" * 1_000_000 + b"}",
        "is not JSON",
    ),
    "a shape beyond all memory": (
        header({"t": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}) + bytes(4),
        "takes",
    ),
    "ten thousand dimensions": (
        header({"t": {"dtype": "F32", "shape": [2**62] * 10_000, "data_offsets": [0, 4]}}) + bytes(4),
        "without a dtype, a shape and two data_offsets",
    ),
    "two tensors in one place": (
        header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}) + bytes(4),
        "the tensor before it ends at",
    ),
    "an unknown type": (header({"t": {"dtype": "PICKLE", "shape": [], "data_offsets": [0, 0]}}), "holds 't' as PICKLE"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, tmp_path: Path) -> None:
    """A header is believed in nothing."""
    content, says = WEIGHTS[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refused(lambda: weights_index(tmp_path))
    assert says in message
    assert "model.safetensors" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "may only name .safetensors files that lie beside it"),
        ('{"weight_map": {"a": "/etc/model.safetensors"}}', "may only name .safetensors files that lie beside it"),
        ('{"weight_map": {"a": "model.bin"}}', "may only name .safetensors files that lie beside it"),
        ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "a key appears twice"),
        ('{"weight_map": {"a": ["b.safetensors"]}}', "has no weight_map"),
        (DEEP, "is not JSON"),
        (" " * (8 * 2**20 + 1), "such a file has at most 8,388,608"),
    ],
)
def test_index(content: str, says: str, tmp_path: Path) -> None:
    """An index may name files beside it, each tensor once."""
    (tmp_path / "model.safetensors.index.json").write_text(content)
    message = refused(lambda: weights_index(tmp_path))
    assert says in message
    assert "index.json" in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_hidden_layers": 10**12},
            "num_hidden_layers = 1000000000000: must be a positive whole number of at most",
        ),
        ({"vocab_size": 10**9}, "vocab_size = 1000000000: must be a positive whole number of at most 16,777,216"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"max_position_embeddings": 10**20}, "max_position_embeddings"),
        ({"rope_theta": float("inf")}, "rope_theta = inf: must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a positive number"),
        (
            {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
            "names code of the model's own, which is never run here",
        ),
        ({"architectures": ["EvilForCausalLM"], "trust_remote_code": True}, "is not one of LlamaForCausalLM"),
    ],
)
def test_config(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Numbers of a config.json are bounded, and code that it names is a reason to refuse it."""
    message = refused(lambda: spec_from_folder(tiny_config(tmp_path, **changes)))
    assert says in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (DEEP, "is not JSON"),
        ('{"a": ' + "9" * 10_000 + "}", "is not JSON"),
        ('{"vocab_size": 1, "vocab_size": 2}', "a key appears twice"),
        (" " * (2**20 + 1), "such a file has at most 1,048,576"),
        ("[]", "is not a JSON object"),
    ],
)
def test_json_of_a_model(content: str, says: str, tmp_path: Path) -> None:
    """A config.json is bounded in size and depth before anything of it is used."""
    (tmp_path / "config.json").write_text(content)
    message = refused(lambda: spec_from_folder(tmp_path))
    assert says in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", DEEP, "is not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": [], "merges": 3}}', "is not a tokenizer"),
        ("tokenizer_config.json", DEEP, "is not JSON"),
        ("tokenizer_config.json", " " * (16 * 2**20 + 1), "such a file has at most 16,777,216"),
        ("special_tokens_map.json", "[]", "is not a JSON object"),
        ("chat_template.jinja", "{{ 'a' | center(10 ** 10) }}" * 20_000, "a chat template has at most"),
        ("chat_template.jinja", "{{ (" * 5_000, "is not a Jinja template"),
        ("chat_template.jinja", "{% if a %}" * 5_000, "is not a Jinja template"),
    ],
)
def test_tokenizer(file: str, content: str, says: str, tmp_path: Path) -> None:
    """Every file of a tokenizer is bounded; none of them gets further than its reader."""
    save_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    message = refused(lambda: load_chat_template(tmp_path, load_tokenizer(tmp_path)))
    assert says in message
    assert file in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: &a [x, x]\nb: [*a, *a]\n", "is an alias"),
        ("seed: 1\nseed: 2\n", "is given twice"),
        ("seed: " + "[" * 100_000, "levels of nesting"),
        ("seed: !!python/object/apply:os.system [id]\n", "has a tag"),
        ("#" * (2**20 + 1), "a run file has at most"),
    ],
)
def test_run_file(content: str, says: str, tmp_path: Path) -> None:
    """A run file has no aliases, no tags, no key twice, no depth."""
    (tmp_path / "run.yaml").write_text(content)
    message = refused(lambda: load_run(tmp_path / "run.yaml", ()))
    assert says in message
    assert "run.yaml" in message


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.jsonl", DEEP + "\n", "a.jsonl:1: data.train: is JSON nested too deep"),
        ("a.jsonl", '{"text": ' + "9" * 10_000 + "}\n", "a.jsonl:1"),
        ("a.jsonl", '{"text": "' + "x" * 2_000_000, "a.jsonl:1: data.train: is a line of more than 1,000,000 bytes"),
        ("a.json", "[" + "1," * 600_000 + "1]", "a.json: data.train: has 1,200,003 bytes, more than 1,000,000"),
        ("a.json", DEEP, "is JSON nested too deep"),
    ],
)
def test_data(file: str, content: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are bounded in size and depth; the place is told."""
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1_000_000)
    monkeypatch.setattr(sources, "MAX_JSON_BYTES", 1_000_000)
    (tmp_path / file).write_text(content)

    def read() -> None:
        problems = Problems()
        assert list(read_records([tmp_path / file], problems)) == []
        problems.raise_any()

    assert says in refused(read)
