"""Which model a folder of weights belongs to: its config.json, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triweave.config.load import load_run
from triweave.conversion.kinds import MODEL_FOLDER, Found
from triweave.errors import InputError, Problem
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.training.checkpoints import RUN_FILE


@dataclass(frozen=True, slots=True)
class Model:
    """What goes with weights."""

    spec: ModelSpec
    folder: Path
    """Has config.json."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, where it is another one."""
    chat_template: str | None = None
    """What was trained with, where it is not the tokenizer's own."""


def model_of(source: Found, named: Path | None) -> Model:
    """The model of a source: `--model`, or what stands beside it.

    A Hugging Face folder is its own. In a checkpoint of a run lies the run file; in one that was converted, a folder
    with config.json.

    Raises:
        InputError: it cannot be found, or is none that this code computes.
    """
    if named is not None:
        return Model(spec_from_folder(named), named)
    if source.kind == "hf":
        return Model(spec_from_folder(source.folder), source.folder)
    for folder in (source.root / MODEL_FOLDER, source.folder.parent / MODEL_FOLDER):
        if folder.is_dir():
            return Model(spec_from_folder(folder), folder)
    if source.kind == "triweave" and (source.folder / RUN_FILE).is_file():
        return _of_run(source.folder / RUN_FILE)
    rule = f"is needed: {source.root} does not say which model it is; give the folder of its config.json"
    raise InputError(Problem("--model", None, rule))


def _of_run(run_file: Path) -> Model:
    run = load_run(run_file, ())
    folder = Path(run.model.path)
    if not folder.is_dir():
        rule = f"is needed: {run_file} names model.path = {folder}, which is no folder here"
        raise InputError(Problem("--model", None, rule))
    template = None
    if run.data.chat_template is not None:
        try:
            template = Path(run.data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                Problem("data.chat_template", run.data.chat_template, f"cannot be read ({error})")
            ) from None
    tokenizer = Path(run.data.tokenizer) if run.data.tokenizer else None
    return Model(spec_from_folder(folder), folder, tokenizer, template)
