"""Prepares the data of a run once: the same data, tokenizer and settings are found again on disk.

This happens before any process group exists, so a long tokenisation cannot run into a collective's time limit.
Every rank calls `prepare`; one of them builds, the others wait for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triweave.config.schema import Run
from triweave.data.build import TEMPLATE, TRAIN, VALIDATION, Job, Progress, build
from triweave.data.dataset import Dataset, open_dataset
from triweave.data.once import MARK, build_once
from triweave.data.sources import data_files
from triweave.data.summary import Summary, summary_from_dict
from triweave.data.template import load_chat_template
from triweave.data.tokenizer import load_tokenizer
from triweave.errors import InputError, Problem, RunFailed

_VERSION = 1
"""Counts changes of this code that change the prepared data."""

_SMALL_BYTES = 16 * 2**20
_EDGE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set on disk, ready to train on."""

    folder: Path
    summary: Summary

    def train(self) -> Dataset:
        """The training sequences, mapped into memory."""
        return open_dataset(self.folder / TRAIN, self.summary.seq_len)

    def validation(self) -> Dataset | None:
        """The held-out sequences; None when nothing is held out."""
        return open_dataset(self.folder / VALIDATION, self.summary.seq_len) if self.summary.validation else None

    def chat_template(self) -> str | None:
        """The text of the chat template that was used, to go with the trained weights; None for text and tokens."""
        path = self.folder / TEMPLATE
        return path.read_text(encoding="utf-8") if path.is_file() else None


def prepare(
    run: Run,
    vocab_size: int,
    progress: Progress | None = None,
    *,
    cache_dir: Path | None = None,
    timeout_s: float = 6 * 3600.0,
) -> PreparedData:
    """Tokenise, split and pack the data of `run`, or find that this was done before.

    Args:
        run: its `data`, `seed` and `output_dir` are read, and `model.path` for the tokenizer.
        vocab_size: rows of the model's embedding; every token id must be below.
        progress: told now and then how far it is.
        cache_dir: where prepared data is kept; left out, `output_dir/data`.
        timeout_s: seconds to wait for another process that is preparing the same data.

    Raises:
        InputError: something is wrong with the data or the settings; every problem that was found.
        RunFailed: the disk, or the process that was waited for, failed.
    """
    job = make_job(run, vocab_size)
    target = (cache_dir or Path(run.output_dir).expanduser() / "data") / job_key(job)

    def waiting(seconds: float) -> None:
        if progress is not None:
            progress("waiting", int(seconds))

    try:
        build_once(target, lambda folder: build(folder, job, progress), timeout_s=timeout_s, waiting=waiting)
        value = json.loads((target / MARK).read_text(encoding="utf-8"))
        return PreparedData(target, summary_from_dict(value))
    except OSError as error:
        raise RunFailed(f"cannot prepare the data in {target.parent} ({error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunFailed(f"{target / MARK} is damaged ({error}); delete {target} and it is made again") from None


def make_job(run: Run, vocab_size: int) -> Job:
    """Look up what the data of `run` is made from.

    Raises:
        InputError: a file is missing, or a setting is out of its range; every problem that was found.
    """
    data = run.data
    problems: list[Problem] = []
    if data.seq_len < 2:
        problems.append(Problem("data.seq_len", data.seq_len, "must be at least 2: one token predicts the next", "2"))
    share = data.validation
    if not isinstance(share, str) and not 0 <= share < 1:
        rule = "must be a share of the examples, 0 or more and below 1, or a path"
        problems.append(Problem("data.validation", share, rule, "0" if share < 0 else "0.5"))
    if run.seed < 0:
        problems.append(Problem("seed", run.seed, "must not be negative", "0"))
    folder = Path(data.tokenizer if data.tokenizer is not None else run.model.path).expanduser()
    key = "model.path" if data.tokenizer is None else "data.tokenizer"
    train: tuple[Path, ...] = ()
    validation: tuple[Path, ...] = ()
    tokenizer = template = None
    try:
        train = data_files(data.train, "data.train")
    except InputError as error:
        problems.extend(error.problems)
    try:
        validation = data_files([share], "data.validation") if isinstance(share, str) else ()
    except InputError as error:
        problems.extend(error.problems)
    try:
        if data.format != "tokens":
            tokenizer = load_tokenizer(folder, key)
            template = load_chat_template(folder, tokenizer, data.chat_template)
    except InputError as error:
        problems.extend(error.problems)
    if problems:
        raise InputError(problems)
    held_out = 0.0 if isinstance(share, str) else float(share)
    return Job(data, train, validation, held_out, run.seed, vocab_size, tokenizer, template)


def job_key(job: Job) -> str:
    """Names what `job` makes: the same key, the same data."""
    config = dataclasses.asdict(job.data)
    # These are covered by what they lead to.
    for name in ("train", "validation", "tokenizer", "chat_template"):
        del config[name]
    parts = {
        "version": _VERSION,
        "config": config,
        "train": [_file_identity(file) for file in job.train],
        "validation": [_file_identity(file) for file in job.validation],
        "share": job.share,
        "seed": job.seed if job.share else None,
        "vocab_size": job.vocab_size,
        "tokenizer": job.tokenizer.sha256 if job.tokenizer else None,
        "template": job.template.sha256 if job.template else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _file_identity(file: Path) -> Sequence[str | int]:
    """Name and content of a file. Of a large one: its size, the time of its last change, and both its ends."""
    stat = file.stat()
    identity = hashlib.sha256()
    with file.open("rb") as content:
        if stat.st_size <= _SMALL_BYTES:
            identity.update(content.read())
            return (file.name, stat.st_size, identity.hexdigest())
        identity.update(content.read(_EDGE_BYTES))
        content.seek(-_EDGE_BYTES, 2)
        identity.update(content.read())
    return (file.name, stat.st_size, stat.st_mtime_ns, identity.hexdigest())
