"""Weights, run files and chat templates that mean harm, read by what reads them."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fault_cases.hostile_case import Bait, Case
from fault_cases.small_checkpoints import CONFIG
from tokenizers import Tokenizer, models

from triweave.checkpoint.hugging_face_read import WeightReader
from triweave.config.load import load_run
from triweave.data.examples import Conversation, Message
from triweave.data.template import CannotRender, make_chat_template, render
from triweave.data.tokenizer import load_tokenizer
from triweave.errors import InputError
from triweave.model_spec import spec_from_folder
from triweave.weights_index import weight_problems


def weight_cases() -> list[Case]:
    """Hugging Face folders."""

    def read(folder: Path) -> None:
        spec = spec_from_folder(folder)
        if problems := weight_problems(folder, spec):
            raise InputError(problems)
        with WeightReader(folder, spec) as reader:
            for tensor in spec.tensors():
                reader.read(tensor.name, dtype=torch.float32)

    def header(content: bytes, length: int | None = None, data: bytes = b"") -> Callable[[Path], None]:
        size = struct.pack("<Q", len(content) if length is None else length)
        return lambda folder: (folder / "model.safetensors").write_bytes(size + content + data) and None

    def entries(values: dict[str, Any], data: bytes = b"") -> Callable[[Path], None]:
        return header(json.dumps(values).encode(), data=data)

    def index(weight_map: object) -> Callable[[Path], None]:
        content = json.dumps({"weight_map": weight_map})
        return lambda folder: (folder / "model.safetensors.index.json").write_text(content) and None

    def config(content: str) -> Callable[[Path], None]:
        return lambda folder: (folder / "config.json").write_text(content) and None

    norm = "model.norm.weight"
    empty = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(400_000)}
    return [
        Case("a header of 2^62 bytes", header(b"{}", 2**62), read),
        Case("400,000 empty tensors", entries(empty), read),
        Case("100,000 brackets", header(b"[" * 100_000), read),
        Case("a shape of 10^18", entries({norm: {"dtype": "F32", "shape": [10**18], "data_offsets": [0, 4]}}), read),
        Case("(0, 2^62)", entries({norm: {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}), read),
        Case(
            "a tensor called ../../x",
            entries({"../../x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
            read,
        ),
        Case("index leads to a folder beside", index({norm: "../beside/step-1/__0_0.distcp"}), read),
        Case("index leads to /etc/passwd", index({norm: "/etc/passwd"}), read),
        Case("index is a list", index([1, 2]), read),
        Case("pickled weights", lambda f: (f / "pytorch_model.bin").write_bytes(pickle.dumps(Bait(f))) and None, read),
        Case("config: 100,000 brackets", config("[" * 100_000), read),
        Case("config: 10^12 layers", config(json.dumps({**CONFIG, "num_hidden_layers": 10**12})), read),
        Case("config asks for its own code", config(json.dumps({**CONFIG, "auto_map": {"AutoModel": "x.Y"}})), read),
    ]


def run_file_cases() -> list[Case]:
    """YAML."""

    def read(folder: Path) -> None:
        load_run(folder / "run.yaml", [])

    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
    )
    texts = {
        "a bomb of aliases": bomb,
        "an anchor": "model: &m {path: model}\ndata: {train: a}\nx: *m\n",
        "a key twice": "seed: 1\nseed: 2\nmodel: {path: model}\ndata: {train: a}\n",
        "a Python tag": "model: !!python/object/apply:os.mkdir [bait]\ndata: {train: a}\n",
        "another tag": "model: !path {path: model}\ndata: {train: a}\n",
        "100,000 brackets": "[" * 100_000,
        "a merge": "model: {<<: {path: model}}\ndata: {train: a}\n",
        "two documents": "model: {path: model}\n---\ndata: {train: a}\n",
        "zero bytes": "model: {path: \0}\n",
        "a number of 100,000 digits": f"seed: {'9' * 100_000}\nmodel: {{path: model}}\ndata: {{train: a}}\n",
    }
    return [
        Case(name, lambda f, text=text: (f / "run.yaml").write_text(text) and None, read)  # type: ignore[misc]
        for name, text in texts.items()
    ]


def template_cases() -> list[Case]:
    """Jinja."""
    conversation = Conversation((Message("user", "a"), Message("assistant", "b")), "here")

    doubling = "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ? n.x %}{% endfor %}"

    def read(folder: Path) -> None:
        (folder / "tokenizer.json").write_text(Tokenizer(models.BPE({"a": 0}, [])).to_str())
        template = make_chat_template((folder / "chat.jinja").read_text(), load_tokenizer(folder), "chat.jinja")
        with suppress(CannotRender):
            render(template, conversation)

    texts = {
        "a walk through classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "a walk by filter": "{{ (''|attr('__class__'))|attr('__mro__') }}",
        "a walk by format": "{{ '{0.__class__.__mro__}'.format('') }}",
        "globals of a function": "{{ cycler.__init__.__globals__.os.mkdir('bait') }}",
        "an import": "{% import 'os' as os %}{{ os.mkdir('bait') }}",
        "an include": "{% include '/etc/passwd' %}",
        "loops that do not end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "a product of 10^10": "{{ 'a' * 10000000000 }}",
        "a centred word": "{{ 'a'|center(10000000000) }}",
        "a long number": "{{ 9 ** 9 ** 9 }}",
        "doubling": doubling.replace("?", "+"),
        "doubling by tilde": doubling.replace("?", "~"),
        "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "replace that grows": "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
        "joins that grow": "{{ (['a' * 60000] * 60000)|join('b') }}",
    }
    return [
        Case(name, lambda f, text=text: (f / "chat.jinja").write_text(text) and None, read)  # type: ignore[misc]
        for name, text in texts.items()
    ]
