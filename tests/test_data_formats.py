"""Records to examples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triweave.data.examples import Conversation, Example, Message, Text, Tokens
from triweave.data.formats import SIGNATURES, Decision, read_examples
from triweave.data.problems import Problems
from triweave.data.sources import Record
from triweave.errors import InputError

USER, REPLY = Message("user", "Hi"), Message("assistant", "Hello")
OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


def records(*values: dict[str, Any]) -> Iterator[Record]:
    return (Record(value, f"f:{line}") for line, value in enumerate(values, start=1))


def examples(*values: dict[str, Any], wanted: Any = "auto") -> tuple[Decision, list[Example]]:
    problems = Problems()
    decision, found = read_examples(records(*values), wanted, problems)
    listed = list(found)
    problems.raise_any()
    return decision, listed


def refusal(*values: dict[str, Any], wanted: Any = "auto") -> str:
    with pytest.raises(InputError) as raised:
        examples(*values, wanted=wanted)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("messages", OPENAI, (USER, REPLY)),
        ("messages", {**OPENAI, "prompt": "Hi", "prompt_id": 3}, (USER, REPLY)),
        ("messages", {"messages": SHAREGPT["conversations"]}, (USER, REPLY)),
        ("sharegpt", {"conversations": OPENAI["messages"]}, (USER, REPLY)),
        ("sharegpt", SHAREGPT, (USER, REPLY)),
        ("sharegpt", {**SHAREGPT, "system": "Be kind"}, (Message("system", "Be kind"), USER, REPLY)),
        ("prompt", {"prompt": "Hi", "completion": "Hello"}, (USER, REPLY)),
        ("prompt", {"prompt": "Hi", "response": "Hello"}, (USER, REPLY)),
        ("prompt", {"prompt": [OPENAI["messages"][0]], "completion": [OPENAI["messages"][1]]}, (USER, REPLY)),
        ("alpaca", {"instruction": "Hi", "output": "Hello"}, (USER, REPLY)),
        ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello", "system": None}, (USER, REPLY)),
        ("alpaca", {"instruction": "Hi", "input": "you", "output": "Hello"}, (Message("user", "Hi\nyou"), REPLY)),
        (
            "alpaca",
            {"instruction": "Hi", "output": "Hello", "system": "S", "history": [["a", "b"]]},
            (Message("system", "S"), Message("user", "a"), Message("assistant", "b"), USER, REPLY),
        ),
    ],
)  # fmt: skip
def test_conversations_of_every_format_become_one_shape(
    name: str, value: dict[str, Any], expected: tuple[Message, ...]
) -> None:
    """The format is told from the keys, and its turns come out the same way."""
    decision, found = examples(value)
    assert decision.format == name
    assert "f:1" in decision.reason
    assert found == [Conversation(expected, "f:1")]


def test_text_and_tokens_become_themselves() -> None:
    """Documents stay texts; labels of -100 are not trained, and without labels everything is."""
    assert examples({"text": "abc", "meta": 1})[1] == [Text("abc", "f:1")]
    assert examples({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]})[1] == [
        Tokens((5, 6, 7), (False, True, False), "f:1")
    ]
    assert examples({"input_ids": [5, 6], "labels": None})[1] == [Tokens((5, 6), (True, True), "f:1")]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss": False}, {"weight": 1, "train": False}])
def test_flags_take_a_message_out(flag: dict[str, object]) -> None:
    """OpenAI's weight and the others' train and loss; None is no flag, and they never reach the template."""
    turns = [OPENAI["messages"][0], {**OPENAI["messages"][1], **flag}, {**OPENAI["messages"][1], "weight": None}]
    conversation = examples({"messages": turns})[1][0]
    assert isinstance(conversation, Conversation)
    assert [message.trained for message in conversation.messages] == [True, False, True]
    assert conversation.messages[1].extra == {}


def test_further_keys_reach_the_template() -> None:
    """Tool calls, names and tools pass through; a reply of tool calls alone has no content."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answer = {"role": "tool", "name": "f", "content": "3"}
    value = {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]}
    value["messages"] += [call, answer]
    found = examples({**value, "tools": [{"name": "f"}]})[1][0]
    assert found == Conversation(
        (
            USER,
            Message("assistant", None, extra={"tool_calls": call["tool_calls"]}),
            Message("tool", "3", extra={"name": "f"}),
        ),
        "f:1",
        ({"name": "f"},),
    )


def test_page_shows_every_format() -> None:
    """The records on the page about data are told for the formats that they stand beside."""
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\{.*?\})` \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(SIGNATURES)
    for name, record in rows:
        value = {"text": "x"} if name == "text" else json.loads(record)
        assert examples(value)[0].format == name


def test_two_formats_are_never_guessed_between() -> None:
    """Stanford's Alpaca also carries `text`: both are named, and the run file's word decides."""
    value = {"instruction": "Hi", "input": "", "output": "Hello", "text": "whole prompt"}
    message = refusal(value)
    assert "f:1: data.format = auto: the first record could be alpaca (instruction + output) and text (text)" in message
    assert message.endswith("nearest: alpaca or text")
    assert examples(value, wanted="text")[1] == [Text("whole prompt", "f:1")]


def test_unknown_keys_are_listed_beside_the_known_formats() -> None:
    """Preference pairs are no format: the message says what was found and what would do."""
    message = refusal({"chosen": "a", "rejected": "b"})
    assert "the first record (chosen, rejected)" in message
    assert all(" and ".join(keys) in message for rows in SIGNATURES.values() for keys in rows)


def test_mixed_file_names_the_first_row_that_differs() -> None:
    """Row 3 is the first of another format, and the last one looked at; a null is an absent key."""
    message = refusal(OPENAI, OPENAI, {"text": "x", "messages": None}, SHAREGPT)
    assert message.count("\n") == 0
    assert message == "f:3: data.train: is the first record that is not messages: it has text, messages, not messages"
    assert refusal({"text": "x"}, wanted="prompt").startswith(
        "f:1: data.train: is not prompt: it has text, not prompt and"
    )


def test_no_records_at_all_are_refused() -> None:
    """An empty data set trains nothing."""
    assert refusal() == "data.train: holds no records"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"messages": "Hi"}, "messages must be a list"),
        ({"messages": ["Hi"]}, "messages[0] must be an object"),
        ({"messages": [{"content": "Hi"}]}, "messages[0] has no role (or from)"),
        ({"messages": [{"role": "usr", "content": "Hi"}]}, "did you mean user?"),
        ({"messages": [{"role": "user", "from": "human", "content": "Hi"}]}, "has both role and from"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be a string or a list of text blocks"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "must be 0 or 1"),
        ({**OPENAI, "tools": "none"}, "tools must be a list"),
        ({"prompt": "a", "completion": OPENAI["messages"]}, "must both be strings or both be lists"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "has both completion and response"),
        ({"instruction": 3, "output": "b"}, "instruction must be a string"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "history[0] must be a pair of strings"),
        ({"text": 3}, "text must be a string"),
        ({"input_ids": []}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [1, True]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries, input_ids 2"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels are not shifted"),
    ],
)  # fmt: skip
def test_fault_inside_a_record_is_said(value: dict[str, Any], message: str) -> None:
    """Every fault names the row and the place in it."""
    assert refusal(value).startswith("f:1: data.train: ")
    assert message in refusal(value)


def test_all_faulty_rows_are_named_at_once() -> None:
    """One reading of the data names every bad row."""
    lines = refusal(OPENAI, {"messages": []}, OPENAI, {"messages": [{"role": "x", "content": ""}]}).splitlines()
    assert [line[:4] for line in lines] == ["f:2:", "f:4:"]
