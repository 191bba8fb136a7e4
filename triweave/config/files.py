"""What a run reads and where it writes: that the paths of its file are there, and are what they should be."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from triweave.config.schema import DataConfig, Run
from triweave.errors import Problem, closest

MAX_NEIGHBOURS = 10_000
"""Names of a folder that are compared with a missing one."""

# os.path answers False where pathlib raises: a folder that may not be entered, a name that is too long.


def file_problems(run: Run) -> list[Problem]:
    """Paths of `run` that are missing or of the wrong kind; what is in the model folder is checked elsewhere."""
    return [*_data(run.data), *_tokenizer(run.data, run.model.path), *_output(run)]


def neighbour(path: Path) -> str | None:
    """The path beside a missing one whose name is most like it."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_NEIGHBOURS)]
    except (OSError, ValueError):
        return None
    near = closest(path.name, names)
    return str(path.with_name(near)) if near else None


def _missing(key: str, path: str) -> Problem:
    return Problem(key, path, "does not exist", neighbour(Path(path)) if path else None)


def _data(data: DataConfig) -> Iterator[Problem]:
    if not data.train:
        yield Problem("data.train", "[]", "must name at least one file or folder")
    for path in data.train:
        if not os.path.exists(path):
            yield _missing("data.train", path)
    if isinstance(data.validation, str) and not os.path.exists(data.validation):
        yield _missing("data.validation", data.validation)
    if data.chat_template is not None and not os.path.isfile(data.chat_template):
        if os.path.exists(data.chat_template):
            yield Problem("data.chat_template", data.chat_template, "is a folder; it must be a file")
        else:
            yield _missing("data.chat_template", data.chat_template)


def _tokenizer(data: DataConfig, model_path: str) -> Iterator[Problem]:
    if data.format == "tokens":
        return
    key, folder = ("model.path", model_path) if data.tokenizer is None else ("data.tokenizer", data.tokenizer)
    if data.tokenizer is not None and os.path.isfile(folder):
        yield Problem(key, folder, "is a file; it must be the folder of tokenizer.json", os.path.dirname(folder) or ".")
    elif not os.path.isdir(folder):
        if data.tokenizer is not None:  # a missing model folder is told by what reads the model
            yield _missing(key, folder)
    elif not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        rule = "has no tokenizer.json; data.tokenizer may name another folder, and data.format: tokens needs none"
        yield Problem(key, folder, rule)


def _output(run: Run) -> Iterator[Problem]:
    folder = Path(run.output_dir)
    existing = next((path for path in (folder, *folder.parents) if os.path.exists(path)), None)
    if run.checkpoint.path == "":
        yield Problem("checkpoint.path", '""', "must name a folder or a URL", "null")
    if not run.output_dir:
        yield Problem("output_dir", '""', "must name a folder", "runs/run")
    elif existing is not None and not existing.is_dir():
        rule = "is a file; it must be a folder" if existing == folder else f"cannot be made: {existing} is a file"
        yield Problem("output_dir", run.output_dir, rule)
    is_place = "://" in run.resume or os.path.isdir(run.resume)  # who opens a URL tells what is wrong with it
    if run.resume not in ("auto", "never") and not is_place:
        near = closest(run.resume, ("auto", "never"))
        yield Problem("resume", run.resume, "must be auto, never or the folder or URL of a checkpoint", near)
