"""Help, version, schema and data: what answers at once, and in a form that scripts read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import environment, linked_workspace, made_once, make_workspace, python, triweave

import triweave as package
from triweave.cli import VERBS

SLOW_S = 3.0
"""Start-up takes about 0.3 s on an idle machine; beyond this something heavy is imported."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that is only read."""
    return made_once(tmp_path_factory, "inputs", make_workspace)


def imports(*words: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run triweave and see which top-level packages it imported."""
    done = python("triweave", *words, cwd=cwd, env={"PYTHONPROFILEIMPORTTIME": "1"})
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_version(tmp_path: Path) -> None:
    """`--version` prints the version and nothing else."""
    assert triweave("--version", cwd=tmp_path).stdout == f"{package.__version__}\n"


def test_help_lists_every_verb(tmp_path: Path) -> None:
    """The overview has a line for each verb."""
    done = triweave("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert [verb for verb in VERBS if not re.search(rf"^│ {verb} +[A-Z]", done.stdout, re.MULTILINE)] == []


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_shows_an_example(tmp_path: Path, verb: str) -> None:
    """It is made from the verb's own docstring, without importing torch or what comes with it."""
    done, packages = imports(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert f"Example: triweave {verb}" in done.stdout
    assert not packages & {"torch", "numpy", "transformers", "tokenizers", "safetensors"}


def test_refusal_imports_no_torch(source: Path, tmp_path: Path) -> None:
    """What is wrong with a run file, or with its data, is told before torch is imported."""
    folder = linked_workspace(source, tmp_path / "here")
    (folder / "empty.jsonl").touch()
    for words in (["--layout.tp=3"], ["--data.train=empty.jsonl"]):
        done, packages = imports("train", "run.yaml", *words, cwd=folder)
        assert done.returncode == 2
        assert "triweave" in packages
        assert "torch" not in packages


def test_start_is_quick(source: Path, tmp_path: Path) -> None:
    """Help and the refusal of a run file come at once."""
    folder = linked_workspace(source, tmp_path / "here")
    for words in (["--help"], ["train", "run.yaml", "--layout.tp=3"]):
        began = time.monotonic()
        triweave(*words, cwd=folder)
        taken = time.monotonic() - began
        print(f"triweave {' '.join(words)}: {taken:.2f} s")
        assert taken < SLOW_S


def test_schema_is_json(tmp_path: Path) -> None:
    """The schema of run files is one JSON document that names the sections of a run."""
    schema = json.loads(triweave("schema", cwd=tmp_path).stdout)
    assert schema["type"] == "object"
    assert {"model", "layout", "data", "train", "output_dir", "seed"} <= set(schema["properties"])
    assert set(schema["required"]) == {"model", "data"}


def test_data_as_json(source: Path, tmp_path: Path) -> None:
    """`data --json` tells the counts, and shows the chosen example cut where trained and untrained text meet."""
    folder = linked_workspace(source, tmp_path / "here")
    done = triweave("data", "run.yaml", "--example", "3", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["summary"]["train"]["examples"], shown["summary"]["validation"]["examples"]) == (40, 10)
    assert [(segment["text"], segment["trained"]) for segment in shown["segments"]] == [
        ("<|im_start|>user\nWhat is 3 plus 3?<|im_end|>\n<|im_start|>assistant\n", False),
        ("The answer is 6.<|im_end|>", True),
        ("\n", False),
    ]


def test_data_for_people(source: Path, tmp_path: Path) -> None:
    """Without `--json` the same is a table, a histogram and the example with what is trained between brackets."""
    folder = linked_workspace(source, tmp_path / "here")
    done = triweave("data", "run.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "⟦The answer is 0.<|im_end|>⟧" in done.stdout
    assert "\x1b" not in done.stdout


def test_reader_that_has_gone_is_no_error(source: Path, tmp_path: Path) -> None:
    """Output into a closed pipe, as by `| head`, ends without a complaint, be it found in writing or at the end."""
    folder = linked_workspace(source, tmp_path / "here")
    for words in (["schema"], ["data", "run.yaml", "--json"]):
        ours, theirs = os.pipe()
        os.close(ours)
        command = (sys.executable, "-m", "triweave", *words)
        done = subprocess.run(command, cwd=folder, env=environment(), stdout=theirs, stderr=subprocess.PIPE, timeout=60)
        os.close(theirs)
        assert (done.returncode, done.stderr) == (0, b"")
