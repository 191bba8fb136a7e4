"""Makes a prepared data set: reads, tokenises, splits, packs, writes. One process does it, before any rank trains."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from triweave.config.schema import DataConfig
from triweave.data.dataset import write_dataset
from triweave.data.formats import read_examples
from triweave.data.once import MARK
from triweave.data.packing import one_each, pack
from triweave.data.problems import Problems
from triweave.data.sources import read_records
from triweave.data.split import content_hash, held_out
from triweave.data.summary import SourceSummary, SplitSummary, Summary, summarise_source, summarise_split
from triweave.data.template import ChatTemplate
from triweave.data.tokenize import Tally, Tokenizing, tokenize_examples
from triweave.data.tokenizer import TextTokenizer
from triweave.errors import InputError, Problem

Progress = Callable[[str, int], None]
"""Told what is being done, and how many examples (or, while waiting, seconds) that took so far."""

TRAIN, VALIDATION, TEMPLATE = "train", "validation", "chat_template.jinja"

_PROGRESS_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a prepared data set depends on."""

    data: DataConfig
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    """Files of a validation path; empty where validation is a share."""
    share: float
    seed: int
    vocab_size: int
    tokenizer: TextTokenizer | None
    template: ChatTemplate | None


@dataclass(frozen=True, slots=True)
class _Source:
    """Tokenised examples of some files, in their order."""

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    """[examples + 1]"""
    documents: array[int]
    """[examples]: the document that each example is (a piece of)."""
    hashes: array[int]
    summary: SourceSummary


def build(folder: Path, job: Job, progress: Progress | None = None) -> None:
    """Fill the empty `folder` with the training and validation sequences of `job`.

    Raises:
        InputError: the data, or the tokenizer's folder, does not allow it; every problem that was found.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    source = _tokenize(scratch / TRAIN, job, job.train, "data.train", progress)
    other: _Source | None = None
    validation: SplitSummary | None = None
    if job.validation:
        other = _tokenize(scratch / VALIDATION, job, job.validation, "data.validation", progress)
        train = _write(folder / TRAIN, job, source, np.arange(len(source.hashes)))
        validation = _write(folder / VALIDATION, job, other, np.arange(len(other.hashes)))
    else:
        mask = held_out(source.hashes, source.documents, job.share)
        train = _write(folder / TRAIN, job, source, np.flatnonzero(~mask))
        if mask.any():
            validation = _write(folder / VALIDATION, job, source, np.flatnonzero(mask))
    templated = source.summary.format not in ("text", "tokens") and job.template is not None
    summary = Summary(
        seq_len=job.data.seq_len,
        packing=job.data.packing,
        loss_on=job.data.loss_on,
        chat_template=job.template.where if job.template is not None and templated else None,
        source=source.summary,
        validation_source=other.summary if other is not None else None,
        train=train,
        validation=validation,
    )
    if job.template is not None and templated:
        (folder / TEMPLATE).write_text(job.template.source, encoding="utf-8")
    del source, other  # unmaps the scratch files
    for path in sorted(scratch.iterdir()):
        path.unlink()
    scratch.rmdir()
    (folder / MARK).write_text(json.dumps(dataclasses.asdict(summary), indent=1), encoding="utf-8")


def _tokenize(scratch: Path, job: Job, files: tuple[Path, ...], key: str, progress: Progress | None) -> _Source:
    """Tokenise `files` to disk: only a few numbers an example stay in memory."""
    problems, tally = Problems(), Tally()
    decision, examples = read_examples(read_records(files, problems, key), job.data.format, problems, key)
    if job.data.too_long == "split" and decision.format not in ("text", "tokens"):
        rule = f"cuts text and tokens only: a piece of a conversation ({decision.format}) lacks what it answers"
        raise InputError(Problem("data.too_long", "split", rule, "truncate or drop"))
    how = Tokenizing(
        job.tokenizer, job.template, job.vocab_size, job.data.seq_len, job.data.loss_on, job.data.too_long, key
    )
    lengths, documents, hashes = array("q"), array("q"), array("Q")
    paths = (Path(f"{scratch}.tokens"), Path(f"{scratch}.trained"))
    with ExitStack() as stack:
        tokens_file, trained_file = (stack.enter_context(path.open("wb")) for path in paths)
        for example in tokenize_examples(examples, how, problems, tally):
            tokens_file.write(example.input_ids.tobytes())
            trained_file.write(example.trained.tobytes())
            lengths.append(len(example))
            documents.append(example.source)
            hashes.append(content_hash(example.input_ids, job.seed))
            if progress is not None and len(lengths) % _PROGRESS_EVERY == 0:
                progress("tokenised", len(lengths))
    if not lengths:
        rule = f"every example is longer than seq_len = {job.data.seq_len:,} tokens and was dropped"
        raise InputError(Problem(key, None, rule))
    if progress is not None:
        progress("tokenised", len(lengths))
    repeated = len(hashes) - len(set(hashes))
    return _Source(
        np.memmap(paths[0], dtype=np.int32, mode="r"),
        np.memmap(paths[1], dtype=np.bool_, mode="r"),
        np.concatenate([[0], np.cumsum(np.asarray(lengths))]).astype(np.int64),
        documents,
        hashes,
        summarise_source(len(files), decision, tally, repeated, job.data.seq_len),
    )


def _write(folder: Path, job: Job, source: _Source, examples: npt.NDArray[np.int64]) -> SplitSummary:
    """Pack the chosen examples of `source` and write them."""
    lengths = np.diff(source.starts)[examples].tolist()
    packing = (pack if job.data.packing else one_each)(lengths, job.data.seq_len)
    fingerprint = write_dataset(folder, packing, examples, source.starts, source.tokens, source.trained)
    trained = np.load(folder / "trained_counts.npy", allow_pickle=False)
    return summarise_split(packing, int(trained.sum()), fingerprint)
