"""Examples to tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import CHATML, CHATML_GENERATION, LLAMA3, save_tokenizer, tokenizer_json, vocab_size
from tokenizers import Tokenizer

from triweave.data.examples import Conversation, Example, Message, Text, Tokens
from triweave.data.problems import Problems
from triweave.data.template import make_chat_template
from triweave.data.tokenize import Tally, TokenizedExample, Tokenizing, tokenize_examples
from triweave.data.tokenizer import load_tokenizer
from triweave.errors import InputError


@pytest.fixture(scope="module")
def how(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    template = make_chat_template(CHATML, tokenizer, "x")
    return Tokenizing(tokenizer, template, vocab_size(), seq_len=64, loss_on="assistant", too_long="error")


def chat(*contents: str, where: str = "f:1") -> Conversation:
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], text) for i, text in enumerate(contents)), where)


def tokenized(examples: Sequence[Example], how: Tokenizing) -> tuple[list[TokenizedExample], Tally]:
    problems, tally = Problems(), Tally()
    made = list(tokenize_examples(examples, how, problems, tally))
    problems.raise_any()
    return made, tally


def refusal(examples: Sequence[Example], how: Tokenizing) -> str:
    with pytest.raises(InputError) as raised:
        tokenized(examples, how)
    return str(raised.value)


def decode(how: Tokenizing, ids: Any) -> str:
    assert how.tokenizer is not None
    return how.tokenizer.decode([int(token) for token in ids])


def test_conversation_trains_the_reply_and_its_end(how: Tokenizing) -> None:
    """The trained tokens decode to what the assistant says and the token that ends its turn."""
    made, _ = tokenized([chat("Hi", "Hello there", "More", "No 🙂")], how)
    example = made[0]
    assert decode(how, example.input_ids[example.trained]) == "Hello there<|im_end|>No 🙂<|im_end|>"


def test_beginning_of_text_stands_once(how: Tokenizing) -> None:
    """The template writes it and the tokenizer would add it: a templated text is encoded without additions."""
    made, tally = tokenized([chat("Hi", "Hello")], how)
    bos = Tokenizer.from_str(tokenizer_json()).token_to_id("<s>")
    assert made[0].input_ids.tolist().count(bos) == 1
    assert made[0].input_ids[0] == bos
    assert tally.double_bos == 0


def test_double_beginning_of_text_is_counted(how: Tokenizing) -> None:
    """A template that writes it twice, and a text that brings its own, are told apart from the rest."""
    assert how.tokenizer is not None
    doubled = replace(how, template=make_chat_template("{{ bos_token }}" + CHATML, how.tokenizer, "x"))
    assert tokenized([chat("Hi", "Hello")], doubled)[1].double_bos == 1
    assert tokenized([Text("<s>abc"), Text("abc")], how)[1].double_bos == 1


def test_text_begins_and_ends_once(how: Tokenizing) -> None:
    """The tokenizer's own beginning, our end of text; one that is written out already is not doubled."""
    made, _ = tokenized([Text("The fox"), Text("The fox</s>")], how)
    assert [decode(how, example.input_ids) for example in made] == ["<s>The fox</s>"] * 2
    assert [example.trained.tolist() for example in made] == [[False] + [True] * (len(made[0]) - 1)] * 2


def test_first_token_is_never_trained(how: Tokenizing) -> None:
    """Nothing stands before it to predict it from, whatever the labels say."""
    made, _ = tokenized([Tokens((1, 2, 3), (True, True, True))], how)
    assert made[0].trained.tolist() == [False, True, True]


def test_examples_keep_their_order_over_batches(how: Tokenizing) -> None:
    """A thousand examples come out as they went in."""
    made, tally = tokenized([Text(f"{i}") for i in range(1000)], how)
    assert [example.source for example in made] == list(range(1000))
    assert [decode(how, example.input_ids) for example in made] == [f"<s>{i}</s>" for i in range(1000)]
    assert tally.examples == 1000


def test_id_beyond_the_vocabulary_names_row_id_and_size(how: Tokenizing) -> None:
    """A tokenizer of another model: the row, the id and the vocabulary are said, for every such row."""
    rows = [
        Tokens((1, 9), (True, True), "f:1"),
        Tokens((1, 2), (True, True), "f:2"),
        Tokens((-1, 2), (True, True), "f:3"),
    ]
    rows.append(Tokens((1, 2**40), (True, True), "f:4"))
    lines = refusal(rows, replace(how, vocab_size=9)).splitlines()
    assert lines[0] == "f:1: data.train: holds token id 9; the model's vocabulary has 9 (0 to 8)"
    assert "f:3: data.train: holds token id -1" in lines[1]
    assert lines[2].startswith("f:4")
    assert "the model's vocabulary has 50" in refusal([chat("Hi", "Hello")], replace(how, vocab_size=50))


def test_untrained_examples_are_dropped_and_counted(how: Tokenizing) -> None:
    """An example without a reply trains nothing; the others stay."""
    made, tally = tokenized([chat("Hi", where="f:1"), chat("Hi", "Hello", where="f:2"), chat("Hi", where="f:3")], how)
    assert [example.where for example in made] == ["f:2"]
    assert (tally.untrained, tally.first_untrained, tally.not_ending_with_reply) == (2, "f:1", 2)


def test_nothing_trained_at_all_is_refused(how: Tokenizing) -> None:
    """A loss of 0.0 for a whole run is the classic: it is found before the run."""
    message = refusal([chat("Hi", where="f:1"), chat("Ho", where="f:2")], how)
    assert (
        "data.loss_on = assistant: none of the 2 examples in data.train has a token to train on (first: f:1)" in message
    )


def test_missing_end_of_turn_is_counted(how: Tokenizing) -> None:
    """A template whose replies end in plain text does not teach the model to stop."""
    assert how.tokenizer is not None
    plain = CHATML.replace("<|im_end|>", "\n")
    assert tokenized([chat("Hi", "Hello")], replace(how, template=make_chat_template(plain, how.tokenizer, "x")))[
        1
    ].no_end_of_turn
    assert not tokenized([chat("Hi", "Hello")], how)[1].no_end_of_turn
    # TRL's training templates put the line feed after the end of turn inside the block too.
    wide = CHATML_GENERATION.replace(
        "'<|im_end|>' }}{% endgeneration %}\n        {{- '\n' }}", "'<|im_end|>\n' }}{% endgeneration %}"
    )
    assert wide != CHATML_GENERATION
    made, tally = tokenized([chat("Hi", "Hello")], replace(how, template=make_chat_template(wide, how.tokenizer, "x")))
    assert decode(how, made[0].input_ids[made[0].trained]) == "Hello<|im_end|>\n"
    assert not tally.no_end_of_turn


def test_too_long_examples_are_an_error_with_its_numbers(how: Tokenizing) -> None:
    """How many, the longest, the first and the limit: enough to choose between the ways out."""
    rows = [Tokens(tuple(range(n)), (True,) * n, f"f:{n}") for n in (10, 70, 100, 64)]
    message = refusal(rows, how)
    assert "data.too_long = error: 2 of the examples in data.train are longer than seq_len = 64 tokens" in message
    assert "the longest has 100, the first (f:70) 70" in message


def test_too_long_examples_are_cut_or_dropped(how: Tokenizing) -> None:
    """`truncate` keeps the beginning, `drop` nothing; what trains nothing after the cut is dropped as untrained."""
    late = Tokens(tuple(range(70)), (False,) * 65 + (True,) * 5, "f:1")
    rows = [Tokens(tuple(range(n)), (True,) * n) for n in (10, 70)]
    made, tally = tokenized([*rows, late], replace(how, too_long="truncate"))
    assert [len(example) for example in made] == [10, 64]
    assert (tally.truncated, tally.untrained, tally.lengths) == (2, 1, [10, 70])
    made, tally = tokenized(rows, replace(how, too_long="drop"))
    assert [len(example) for example in made] == [10]
    assert tally.dropped_long == 1


@settings(max_examples=50, deadline=None)
@given(length=st.integers(2, 60), seq_len=st.integers(2, 20))
def test_split_predicts_every_token_exactly_once(length: int, seq_len: int) -> None:
    """The pieces overlap by one token, so no prediction is lost at a cut and none is made twice."""
    how = Tokenizing(None, None, 1000, seq_len, "all", "split")
    made, _ = tokenized([Tokens(tuple(range(length)), (True,) * length)], how)
    predicted = [int(token) for piece in made for token in piece.input_ids[piece.trained]]
    assert predicted == list(range(1, length))
    assert all(2 <= len(piece) <= seq_len and not piece.trained[0] for piece in made)
    assert {piece.source for piece in made} == {0}


def test_text_that_the_tokenizer_refuses_is_named_alone(how: Tokenizing) -> None:
    """Half a surrogate pair, as broken JSON escapes leave it: its row is named, its neighbours are fine."""
    broken = json.loads('"\\ud83d"')
    message = refusal([Text("fine", "f:1"), Text(broken, "f:2"), Text("fine", "f:3")], how)
    assert message.startswith("f:2: data.train: the tokenizer refuses this text")
    assert message.count("\n") == 0


def test_tokenizer_that_panics_is_survived(tmp_path: Path) -> None:
    """A regular expression that gives up panics below Python; the row is named instead."""
    folder = save_tokenizer(tmp_path)
    value = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, value["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    how = Tokenizing(load_tokenizer(folder), None, vocab_size(), 64, "all", "error")
    message = refusal([Text("fine", "f:1"), Text("a" * 40 + "b", "f:2")], how)
    assert message.startswith("f:2: data.train: the tokenizer refuses this text")


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    """A tokenizer.json can carry both; data would be cut in silence."""
    backend = Tokenizer.from_str(tokenizer_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    folder = save_tokenizer(tmp_path)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    encoding = tokenizer.encode(["The quick brown fox jumps", "a"], add_special_tokens=False)
    assert [tokenizer.decode(e.ids) for e in encoding if not isinstance(e, Exception)] == [
        "The quick brown fox jumps",
        "a",
    ]


def test_folder_without_what_is_needed_is_named(tmp_path: Path) -> None:
    """No tokenizer.json, only the old kind, no JSON, no end of text, no chat template: each says what to do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "tokenizer.model").touch()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    for name, message in (
        ("none", "is not a folder"),
        ("empty", "has no tokenizer.json"),
        ("old", "only tokenizer.model; load and save it once with transformers"),
        ("bad", "is not a tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            load_tokenizer(tmp_path / name)
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "base", chat_template=None, eos_token=None))
    how = Tokenizing(tokenizer, None, vocab_size(), 64, "assistant", "error")
    assert "names no eos_token" in refusal([Text("a")], how)
    assert "has no chat template; name a file with one in data.chat_template" in refusal([chat("Hi", "Ho")], how)


def test_special_tokens_are_read_from_either_file(tmp_path: Path) -> None:
    """tokenizer_config.json has the last word over special_tokens_map.json."""
    folder = save_tokenizer(tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|im_end|>", "eos_token": "<|eot_id|>"}))
    special = load_tokenizer(folder).special_tokens
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_end|>"}


def test_trained_part_of_llama3_style_ends_with_its_own_token(how: Tokenizing) -> None:
    """The end of turn is not the end of text: <|eot_id|> is what is trained."""
    assert how.tokenizer is not None
    llama = replace(how, template=make_chat_template(LLAMA3, how.tokenizer, "x"))
    example = tokenized([chat("Hi", "Hello")], llama)[0][0]
    assert decode(how, example.input_ids[example.trained]) == "Hello<|eot_id|>"
    assert np.flatnonzero(example.trained)[-1] == len(example) - 1
