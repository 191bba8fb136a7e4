"""The run files of `examples/`: each loads by itself, and is legal for the model it names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from triweave.config.load import load_run
from triweave.config.schema import Run
from triweave.config.validate import validate
from triweave.errors import InputError

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))

# Hidden, MLP, layers, heads, key/value heads, vocabulary and longest sequence, as the models' publishers give them.
PUBLISHED = {
    "Meta-Llama-3-70B": (8192, 28672, 80, 64, 8, 128256, 8192),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256, 131072),
    "SmolLM2-135M-Instruct": (576, 1536, 30, 9, 3, 49152, 8192),
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def listed() -> dict[str, str]:
    """Layout of every example, as the page of examples gives it."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\]\((\S+\.yaml)\) \| [^|]+ \| ([^|,]+)", page)
    return {name: layout.strip() for name, layout in rows}


def provided(run: Run) -> Run:
    """The same run with stand-ins, below the current folder, for the model and data that it names."""
    model = Path(run.model.path)
    model.mkdir(parents=True)
    sizes = dict(zip(SIZES, PUBLISHED[model.name], strict=True))
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    (model / "tokenizer.json").write_text("{}")
    for name in (*run.data.train, run.data.validation):
        if isinstance(name, str):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).touch()
    return replace(run, model=replace(run.model, weights="random"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_loads(path: Path) -> None:
    """An example is a valid run file by itself, without the model and data it names."""
    assert isinstance(load_run(path), Run)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_legal(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example breaks no rule for the real model's sizes, and its layout is the one the page gives."""
    monkeypatch.chdir(tmp_path)
    assert str(validate(provided(load_run(path))).layout) == listed()[path.name]


def test_illegal_example_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins do not hide what is wrong with a run."""
    monkeypatch.chdir(tmp_path)
    run = provided(load_run(FOLDER / "smollm2-135m-cpu.yaml", ["--data.seq_len", "256"]))
    with pytest.raises(InputError, match="must be a multiple of tp = 3"):
        validate(run)


def test_every_example_is_listed() -> None:
    """The page of examples names every example, and no other."""
    assert sorted(listed()) == [path.name for path in EXAMPLES]
