"""Runs and settings for the tests of the files that start runs, and readers of these files that are not ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

from triweave.config.load import load_words
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun, validate
from triweave.launch.job import Settings

WORKDIR = "/shared/llama"
BASIC = {
    "model.path": "meta-llama/Llama-3-70B",
    "cluster": "4x8xh100-80gb",
    "layout.tp": "8",
    "layout.pp": "4",
    "data.train": "[train.jsonl]",
    "train.steps": "500",
    "output_dir": "runs/llama3-70b",
}


def resolved_run(**changed: str | None) -> ResolvedRun:
    """A valid run; keys are given with `__` for the dot, None leaves one out."""
    keys = BASIC | {key.replace("__", "."): value for key, value in changed.items()}
    words = [f"{key}={value}" for key, value in keys.items() if value is not None]
    return validate(load_words(Run, words, "run"), dry=True)


def settings(**changed: object) -> Settings:
    """Settings that every engine can do with."""
    given = {"run_file": "run.yaml", "workdir": WORKDIR, "image": "registry.example/triweave:1", "claim": "work"}
    return Settings(**(given | changed))  # type: ignore[arg-type]


def check_bash(text: str) -> None:
    """Fail unless bash can read a script."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def fake_python(folder: Path) -> Path:
    """A stand-in for the nodes' interpreter: it writes down its arguments and some of its environment, one a line."""
    path = folder / "fake python"
    path.write_text(
        '#!/bin/bash\nprintf "%s\\n" "$@" > "$RECORD.words"\nenv > "$RECORD.environment"\nexit "${FAKE_EXIT:-0}"\n'
    )
    path.chmod(0o755)
    return path
