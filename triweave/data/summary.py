"""What a data set turned out to be, in numbers and warnings: what `triweave data` shows and the cache remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triweave.data.formats import Decision
from triweave.data.packing import Packing
from triweave.data.tokenize import Tally

_HISTOGRAM_BINS = 32


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What was read from some files. Counts are examples, lengths are tokens before anything was cut."""

    files: int
    examples: int
    format: str
    reason: str
    """Why the records were taken for this format."""
    truncated: int
    dropped_long: int
    split: int
    untrained: int
    """Dropped, for none of their tokens would be trained."""
    first_untrained: str
    not_ending_with_reply: int
    double_bos: int
    no_end_of_turn: int
    repeated: int
    """Examples that are equal to an earlier one, token by token."""
    non_ascii_share: float
    """Share of the characters."""
    longest: int
    p50: int
    p95: int
    p99: int
    histogram: tuple[int, ...]
    """Examples of each length class."""
    histogram_width: int
    """Tokens that one class spans; class `i` holds lengths above `i * width`, up to `(i + 1) * width`."""


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """One half of the data, training or validation, as sequences."""

    examples: int
    """Documents in the sequences: examples, or pieces of them."""
    tokens: int
    trained_tokens: int
    sequences: int
    efficiency: float
    """Share of the sequences' room that holds a token."""
    fingerprint: str
    """Hash of everything a training step reads: equal on two machines when they train on the same data."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All that is known about a prepared data set."""

    seq_len: int
    packing: bool
    loss_on: str
    chat_template: str | None
    """Where the chat template was written; None where none was needed."""
    source: SourceSummary
    validation_source: SourceSummary | None
    """What a validation path held; None when validation is a share of `source`."""
    train: SplitSummary
    validation: SplitSummary | None

    @property
    def fingerprint(self) -> str:
        """Identifies the training data; a run that resumes must find the same one."""
        return self.train.fingerprint


def summarise_source(files: int, decision: Decision, tally: Tally, repeated: int, seq_len: int) -> SourceSummary:
    """Put the counts of a reading together."""
    lengths = np.asarray(tally.lengths, dtype=np.int64)
    p50, p95, p99 = (int(value) for value in np.percentile(lengths, (50, 95, 99), method="higher"))
    longest = int(lengths.max())
    width = -(-max(longest, seq_len) // _HISTOGRAM_BINS)
    counts = np.bincount((lengths - 1) // width, minlength=_HISTOGRAM_BINS)
    return SourceSummary(
        files=files,
        examples=tally.examples,
        format=decision.format,
        reason=decision.reason,
        truncated=tally.truncated,
        dropped_long=tally.dropped_long,
        split=tally.split,
        untrained=tally.untrained,
        first_untrained=tally.first_untrained,
        not_ending_with_reply=tally.not_ending_with_reply,
        double_bos=tally.double_bos,
        no_end_of_turn=tally.no_end_of_turn,
        repeated=repeated,
        non_ascii_share=tally.non_ascii / tally.characters if tally.characters else 0.0,
        longest=longest,
        p50=p50,
        p95=p95,
        p99=p99,
        histogram=tuple(counts.tolist()),
        histogram_width=width,
    )


def summarise_split(packing: Packing, trained_tokens: int, fingerprint: str) -> SplitSummary:
    """Put the numbers of one half together."""
    examples = sum(map(len, packing.sequences))
    return SplitSummary(examples, packing.used, trained_tokens, len(packing.sequences), packing.efficiency, fingerprint)


def summary_from_dict(value: dict[str, Any]) -> Summary:
    """The inverse of `dataclasses.asdict`, for what JSON made of it."""

    def source(given: dict[str, Any]) -> SourceSummary:
        return SourceSummary(**{**given, "histogram": tuple(given["histogram"])})

    return Summary(
        **{
            **value,
            "source": source(value["source"]),
            "validation_source": source(value["validation_source"]) if value["validation_source"] else None,
            "train": SplitSummary(**value["train"]),
            "validation": SplitSummary(**value["validation"]) if value["validation"] else None,
        }
    )


def warnings(summary: Summary) -> list[str]:
    """What is worth a look before training on it, one sentence each."""
    found = _source_warnings("data.train", summary.source, summary.seq_len)
    if summary.validation_source is not None:
        found += _source_warnings("data.validation", summary.validation_source, summary.seq_len)
    if summary.validation is None and summary.source.examples == 1:
        found.append("data.validation: one example cannot be shared out, so nothing is held out; name a file.")
    return found


def _source_warnings(key: str, source: SourceSummary, seq_len: int) -> list[str]:
    cases: Sequence[tuple[int, str]] = (
        (source.untrained, f"dropped: none of their tokens is trained (first: {source.first_untrained})."),
        (source.truncated, f"cut off at seq_len = {seq_len:,} tokens; the longest has {source.longest:,}."),
        (
            source.dropped_long,
            f"dropped: longer than seq_len = {seq_len:,} tokens; the longest has {source.longest:,}.",
        ),
        (source.not_ending_with_reply, "do not end with the assistant; what follows its last reply is not trained."),
        (source.double_bos, "begin with two beginning-of-text tokens: the text brings its own."),
        (
            source.no_end_of_turn,
            "train a reply that does not end with a control token, so the model would not learn to stop; the chat "
            "template must write its end-of-turn token, inside {% generation %} where it has that.",
        ),
        (source.repeated, "repeat an earlier example token by token."),
    )
    return [f"{key}: {count:,} of {source.examples:,} examples {text}" for count, text in cases if count]
