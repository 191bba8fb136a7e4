"""Shows what a run will train on before it trains: `triweave data RUN.yaml`.

The numbers, the warnings, a histogram of the lengths, and one example with its trained parts set between ⟦ and ⟧,
so that they are seen without colour too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from triweave.config.schema import Run
from triweave.data.build import Progress
from triweave.data.cache import PreparedData, make_job, prepare
from triweave.data.sampler import steps_for
from triweave.data.summary import SourceSummary, Summary, warnings
from triweave.data.tokenizer import TextTokenizer
from triweave.errors import InputError, Problem
from triweave.model_spec import ModelSpec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SHOWN_CHARACTERS = 4000

# Data must not steer the terminal: control characters but line feed and tab are shown as their pictures.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an example whose tokens are all trained, or all not."""

    text: str
    trained: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class Preview:
    """A prepared data set and one of its training examples."""

    summary: Summary
    steps_an_epoch: int
    warnings: tuple[str, ...]
    example: int
    """Number of the example among the training examples as they were read, from 0."""
    segments: tuple[Segment, ...]
    """The example; without a tokenizer (data that was tokenised before) its tokens as numbers."""

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON's own types."""
        return dataclasses.asdict(self)


def preview(run: Run, spec: ModelSpec, *, example: int = 0, progress: Progress | None = None) -> Preview:
    """Prepare the data of `run` (which training then finds done) and look at training example `example`.

    Raises:
        InputError: the data does not allow it, or there is no such example.
        RunFailed: the disk failed.
    """
    prepared = prepare(run, spec.vocab_size, progress)
    summary = prepared.summary
    if not 0 <= example < summary.train.examples:
        rule = f"must be from 0 to {summary.train.examples - 1}: there are {summary.train.examples} training examples"
        raise InputError(Problem("example", example, rule, "0" if example < 0 else str(summary.train.examples - 1)))
    return Preview(
        summary,
        steps_for(1, summary.train.sequences, run.train.global_batch),
        tuple(warnings(summary)),
        example,
        _segments(prepared, make_job(run, spec.vocab_size).tokenizer, example),
    )


def render(shown: Preview, console: Console) -> None:
    """Print `shown`: the table, the lengths, the example, and the warnings last, where they are seen."""
    from rich.text import Text

    console.print(_table(shown))
    for line in length_histogram(shown.summary.source, shown.summary.seq_len):
        console.print(Text(line), no_wrap=True, crop=True)
    console.print(Text(f"\ntraining example {shown.example}: what is trained stands between ⟦ and ⟧"))
    text = Text()
    for segment in shown.segments:
        visible = segment.text.translate(_CONTROL_PICTURES)
        text.append(f"⟦{visible}⟧" if segment.trained else visible, "bold underline" if segment.trained else "dim")
    hidden = len(text) - _SHOWN_CHARACTERS
    console.print(text[:_SHOWN_CHARACTERS])
    if hidden > 0:
        console.print(Text(f"... {hidden:,} characters more"))
    for warning in shown.warnings:
        console.print(Text(f"\nwarning: {warning}"), style="yellow")


def length_histogram(source: SourceSummary, seq_len: int) -> list[str]:
    """Lines of text: examples by length in tokens, and where `seq_len` lies.

    A line begins with the longest length of its class. Classes beyond the longest example are left out.
    """
    top = max(source.histogram)
    last = max(i for i, count in enumerate(source.histogram) if count)
    mark = f"{seq_len:>9,} {'┄' * _BAR_WIDTH} seq_len"
    lines = []
    for i, count in enumerate(source.histogram[: last + 1]):
        eighths = -(-count * _BAR_WIDTH * 8 // top)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        first, upto = i * source.histogram_width + 1, (i + 1) * source.histogram_width
        lines.append(f"{upto:>9,} {bar} {count:,}" if count else f"{upto:>9,}")
        if first <= seq_len <= upto:
            lines.append(mark)
    return lines if mark in lines else [*lines, mark]


def _table(shown: Preview) -> Table:
    from rich.table import Table

    summary, source, train = shown.summary, shown.summary.source, shown.summary.train
    validation = summary.validation
    rows = (
        ("format", f"{source.format}: {source.reason}"),
        ("chat template", summary.chat_template or "none"),
        ("examples", f"{source.examples:,} in {source.files:,} file{'s' if source.files != 1 else ''}"),
        ("dropped, cut, split", f"{source.untrained + source.dropped_long:,}, {source.truncated:,}, {source.split:,}"),
        ("tokens", f"{train.tokens:,}"),
        ("trained tokens", f"{train.trained_tokens:,} ({train.trained_tokens / train.tokens:.1%})"),
        ("length", f"50 % {source.p50:,}, 95 % {source.p95:,}, 99 % {source.p99:,}, longest {source.longest:,}"),
        ("sequences", f"{train.sequences:,} of {summary.seq_len:,} tokens, {train.efficiency:.1%} full"),
        ("steps an epoch", f"{shown.steps_an_epoch:,}"),
        ("validation", f"{validation.examples:,} examples, {validation.tokens:,} tokens" if validation else "none"),
        ("non-ASCII characters", f"{source.non_ascii_share:.1%}"),
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _segments(prepared: PreparedData, tokenizer: TextTokenizer | None, example: int) -> tuple[Segment, ...]:
    """One training example, in the order they were read, cut where trained and untrained tokens meet."""
    dataset = prepared.train()
    document = int(np.argsort(dataset.examples, kind="stable")[example])
    first, last = dataset.document_starts[document : document + 2]
    ids, trained = dataset.tokens[first:last], dataset.trained[first:last]
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    segments: list[Segment] = []
    shown = ""
    for begin, end in pairwise(edges):
        # A token's text can depend on what stands before it (a leading space): decode from the beginning, always.
        whole = tokenizer.decode(ids[:end].tolist()) if tokenizer else " ".join(map(str, ids[:end].tolist())) + " "
        segments.append(Segment(whole[len(shown) :], bool(trained[begin]), end - begin))
        shown = whole
    return tuple(segments)
