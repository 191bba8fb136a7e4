"""Examples to tokens, and which of them are trained.

`trained[t]` says whether predicting token `t` counts. The first token of an example is never predicted, so it is
never trained; that one rule keeps every example's targets inside the example, however it is packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from triweave.data.examples import Conversation, Example, Text, Tokens
from triweave.data.problems import Problems
from triweave.data.template import CannotRender, ChatTemplate, LossOn, Rendered, render
from triweave.data.tokenizer import TextTokenizer
from triweave.errors import InputError, Problem

TooLong = Literal["error", "truncate", "drop", "split"]

_BATCH_EXAMPLES = 256
_BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """One example, or one piece of a document, in tokens."""

    input_ids: npt.NDArray[np.int32]
    """[length]"""
    trained: npt.NDArray[np.bool_]
    """[length]: whether predicting this token counts."""
    where: str
    source: int
    """Number of the example that it comes from; the pieces of a document share it."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Everything that decides which tokens an example becomes."""

    tokenizer: TextTokenizer | None
    """None where every example is tokenised already."""
    template: ChatTemplate | None
    vocab_size: int
    """Rows of the model's embedding."""
    seq_len: int
    loss_on: LossOn
    too_long: TooLong
    key: str = "data.train"


@dataclass(slots=True)
class Tally:
    """What was met on the way, counted in examples; fills up while `tokenize_examples` runs."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each example that trains something, before anything was cut."""
    truncated: int = 0
    dropped_long: int = 0
    split: int = 0
    untrained: int = 0
    """Dropped: no token of theirs would have been trained."""
    first_untrained: str = ""
    not_ending_with_reply: int = 0
    double_bos: int = 0
    no_end_of_turn: int = 0
    """A trained part does not end with a control token: the model would not learn to stop."""
    characters: int = 0
    non_ascii: int = 0

    @property
    def examples(self) -> int:
        """Examples that were read."""
        return len(self.lengths) + self.untrained


def tokenize_examples(
    examples: Iterable[Example], how: Tokenizing, problems: Problems, tally: Tally
) -> Iterator[TokenizedExample]:
    """Tokenise `examples` in their order, a batch at a time, cut to `how.seq_len` as `how.too_long` says.

    Rows that cannot be tokenised go to `problems`.

    Raises:
        InputError: at the end, when examples are too long and `too_long` is `error`, or when no example trains
            anything; at the first example that needs what the tokenizer's folder does not have.
    """
    first_long: TokenizedExample | None = None
    num_long = 0
    for batch in _batches(examples):
        for example in _tokenize_batch(batch, how, problems, tally):
            if not example.trained.any():
                tally.untrained += 1
                tally.first_untrained = tally.first_untrained or example.where
                continue
            tally.lengths.append(len(example))
            if len(example) > how.seq_len and how.too_long == "error":
                first_long = first_long or example
                num_long += 1
            else:
                yield from _cut(example, how, tally)
    problems.raise_any()
    if first_long is not None:
        raise InputError(_too_long(first_long, num_long, max(tally.lengths), how))
    if not tally.lengths and tally.untrained:
        raise InputError(_nothing_trained(tally, how))


def _batches(examples: Iterable[Example]) -> Iterator[list[tuple[int, Example]]]:
    batch: list[tuple[int, Example]] = []
    characters = 0
    for number, example in enumerate(examples):
        batch.append((number, example))
        characters += len(example.text) if isinstance(example, Text) else 0
        if len(batch) == _BATCH_EXAMPLES or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenize_batch(
    batch: list[tuple[int, Example]], how: Tokenizing, problems: Problems, tally: Tally
) -> Iterator[TokenizedExample]:
    """Tokenise one batch. All of its examples are of one kind: a data set has one format."""
    made: Iterator[TokenizedExample]
    if isinstance(batch[0][1], Tokens):
        made = (_from_tokens(number, example) for number, example in batch if isinstance(example, Tokens))
    elif isinstance(batch[0][1], Text):
        made = _from_texts([(n, example) for n, example in batch if isinstance(example, Text)], how, problems, tally)
    else:
        chats = [(n, example) for n, example in batch if isinstance(example, Conversation)]
        made = _from_conversations(chats, how, problems, tally)
    for example in made:
        largest, smallest = int(example.input_ids.max(initial=0)), int(example.input_ids.min(initial=0))
        if largest >= how.vocab_size or smallest < 0:
            wrong = largest if largest >= how.vocab_size else smallest
            rule = f"holds token id {wrong}; the model's vocabulary has {how.vocab_size} (0 to {how.vocab_size - 1})"
            problems.add(Problem(how.key, None, rule, where=example.where))
        else:
            yield example


def _from_tokens(number: int, example: Tokens) -> TokenizedExample:
    # Ids beyond int32 are beyond any vocabulary: bring them to its edge, where the check of ids finds them.
    ids = np.clip(np.asarray(example.input_ids, dtype=np.int64), -1, np.iinfo(np.int32).max)
    return _example(ids.astype(np.int32), np.asarray(example.trained, dtype=np.bool_), example.where, number)


def _from_texts(
    batch: list[tuple[int, Text]], how: Tokenizing, problems: Problems, tally: Tally
) -> Iterator[TokenizedExample]:
    """Documents: the tokenizer adds its own beginning, the end of text is added here unless it is there already."""
    tokenizer = _tokenizer(how)
    if tokenizer.eos_id is None:
        rule = "names no eos_token in tokenizer_config.json; text needs one to end each document"
        raise InputError(Problem("data.tokenizer", tokenizer.where.parent, rule))
    encodings = tokenizer.encode([text.text for _, text in batch], add_special_tokens=True)
    for (number, text), encoding in zip(batch, encodings, strict=True):
        if isinstance(encoding, Exception):
            problems.add(Problem(how.key, None, str(encoding), where=text.where))
            continue
        ids = encoding.ids if encoding.ids[-1:] == [tokenizer.eos_id] else [*encoding.ids, tokenizer.eos_id]
        _count_text(text.text, tally)
        tally.double_bos += _begins_twice(ids, tokenizer.bos_id)
        yield _example(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_), text.where, number)


def _from_conversations(
    batch: list[tuple[int, Conversation]], how: Tokenizing, problems: Problems, tally: Tally
) -> Iterator[TokenizedExample]:
    """Conversations: the template writes every special token itself, so the tokenizer adds none."""
    tokenizer = _tokenizer(how)
    if how.template is None:
        rule = "has no chat template; name a file with one in data.chat_template"
        raise InputError(Problem("data.tokenizer", tokenizer.where.parent, rule))
    rendered: list[tuple[int, Conversation, Rendered]] = []
    for number, conversation in batch:
        try:
            rendered.append((number, conversation, render(how.template, conversation, how.loss_on)))
        except CannotRender as error:
            problems.add(Problem(how.key, None, str(error), where=conversation.where))
    encodings = tokenizer.encode([text.text for _, _, text in rendered], add_special_tokens=False)
    for (number, conversation, text), encoding in zip(rendered, encodings, strict=True):
        if isinstance(encoding, Exception):
            problems.add(Problem(how.key, None, str(encoding), where=conversation.where))
            continue
        ids = np.asarray(encoding.ids, dtype=np.int32)
        trained = trained_tokens(encoding, text)
        _count_text(text.text, tally)
        tally.double_bos += _begins_twice(encoding.ids, tokenizer.bos_id)
        tally.not_ending_with_reply += conversation.messages[-1].role != "assistant"
        if how.loss_on != "all":
            tally.no_end_of_turn += not _ends_turns(ids, trained, tokenizer)
        yield _example(ids, trained, conversation.where, number)


def trained_tokens(encoding: tokenizers.Encoding, rendered: Rendered) -> npt.NDArray[np.bool_]:
    """[length]: the tokens that overlap a trained part of the text, as transformers' assistant mask counts them."""
    trained = np.zeros(len(encoding.ids), dtype=np.bool_)
    if rendered.trained == ((0, len(rendered.text)),):
        trained[:] = True
    elif rendered.trained:
        starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        for first, last in rendered.trained:
            trained |= (ends > first) & (starts < last)
    return trained


def _example(ids: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_], where: str, source: int) -> TokenizedExample:
    trained[:1] = False
    return TokenizedExample(ids, trained, where, source)


def _cut(example: TokenizedExample, how: Tokenizing, tally: Tally) -> Iterator[TokenizedExample]:
    """The example in pieces of at most `seq_len` tokens."""
    seq_len = how.seq_len
    if len(example) <= seq_len:
        yield example
    elif how.too_long == "drop":
        tally.dropped_long += 1
    elif how.too_long == "truncate":
        tally.truncated += 1
        cut = replace(example, input_ids=example.input_ids[:seq_len], trained=example.trained[:seq_len])
        if cut.trained.any():
            yield cut
        else:
            tally.lengths.pop()
            tally.untrained += 1
            tally.first_untrained = tally.first_untrained or example.where
    else:
        tally.split += 1
        # Each piece begins with the last token of the one before: so every token is predicted exactly once.
        for first in range(0, len(example) - 1, seq_len - 1):
            piece = slice(first, first + seq_len)
            trained = example.trained[piece].copy()
            trained[0] = False
            if trained.any():
                yield replace(example, input_ids=example.input_ids[piece], trained=trained)


def _tokenizer(how: Tokenizing) -> TextTokenizer:
    if how.tokenizer is None:
        raise ValueError("text and conversations need a tokenizer")
    return how.tokenizer


def _count_text(text: str, tally: Tally) -> None:
    tally.characters += len(text)
    if not text.isascii():
        tally.non_ascii += len(text) - len(text.encode("ascii", "ignore"))


def _begins_twice(ids: list[int], bos_id: int | None) -> bool:
    return bos_id is not None and ids[:2] == [bos_id, bos_id]


def _ends_turns(ids: npt.NDArray[np.int32], trained: npt.NDArray[np.bool_], tokenizer: TextTokenizer) -> bool:
    """Whether every trained part ends with a control token, or with one and white space, as some templates train it."""
    for end in np.flatnonzero(trained & ~np.append(trained[1:], False)):
        last = int(end)
        while trained[last] and tokenizer.decode([int(ids[last])]).isspace():
            last -= 1
        if int(ids[last]) not in tokenizer.control_ids:
            return False
    return True


def _too_long(first: TokenizedExample, count: int, longest: int, how: Tokenizing) -> Problem:
    rule = (
        f"{count:,} of the examples in {how.key} are longer than seq_len = {how.seq_len:,} tokens; the longest has "
        f"{longest:,}, the first ({first.where}) {len(first):,}. Set it to truncate, drop or split (text only), or "
        f"set data.seq_len to {longest:,}"
    )
    return Problem("data.too_long", "error", rule, "truncate")


def _nothing_trained(tally: Tally, how: Tokenizing) -> Problem:
    rule = (
        f"none of the {tally.untrained:,} examples in {how.key} has a token to train on (first: "
        f"{tally.first_untrained}), so the loss would be 0; do the assistant's messages have another role or "
        "weight 0, or are they cut off by too_long?"
    )
    return Problem("data.loss_on", how.loss_on, rule, "all")
