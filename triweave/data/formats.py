"""Records to examples: which format a data set is in, and one shape for all of them.

| format   | keys of a record                                     | becomes                |
|----------|------------------------------------------------------|------------------------|
| messages | `messages: [{role, content}]` (OpenAI)               | `Conversation`         |
| sharegpt | `conversations: [{from, value}]`                     | `Conversation`         |
| prompt   | `prompt` and `completion` (or `response`)            | `Conversation`         |
| alpaca   | `instruction`, `output`, `input`, `system`, `history`| `Conversation`         |
| text     | `text`                                               | `Text`                 |
| tokens   | `input_ids` and, if some are not trained, `labels`   | `Tokens`               |

A message's `weight` (0 or 1), `train` or `loss` (true or false) says whether it may be trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triweave.data.examples import Conversation, Example, Message, Text, Tokens
from triweave.data.problems import Problems
from triweave.data.sources import Record
from triweave.errors import InputError, Problem, closest

Format = Literal["messages", "sharegpt", "prompt", "alpaca", "text", "tokens"]

# In the order in which they are named; a format matches when every key of one of its rows is there.
SIGNATURES: dict[Format, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "prompt": (("prompt", "completion"), ("prompt", "response")),
    "alpaca": (("instruction", "output"),),
    "text": (("text",),),
    "tokens": (("input_ids",),),
}

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Roles as they are written, and the role that the chat template sees."""

FLAGS = ("weight", "train", "loss")

UNTRAINED = -100
"""The label of a token that is not trained, as Hugging Face and PyTorch write it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The format of a data set, and why it was taken for that."""

    format: Format
    reason: str


def read_examples(
    records: Iterator[Record], wanted: Format | Literal["auto"], problems: Problems, key: str = "data.train"
) -> tuple[Decision, Iterator[Example]]:
    """Decide the format by the first record, and normalise all of them to it.

    Rows with a fault inside go to `problems`. A row of another format ends the reading: the file is mixed.

    Raises:
        InputError: there is no record, or the first one matches no format or more than one.
    """
    first = next(records, None)
    if first is None:
        problems.raise_any()
        raise InputError(Problem(key, None, "holds no records"))
    try:
        decision = decide(first, wanted)
    except InputError:
        problems.raise_any()
        raise
    return decision, _normalised(itertools.chain([first], records), decision.format, problems, key)


def decide(record: Record, wanted: Format | Literal["auto"]) -> Decision:
    """The format of `record`; `auto` tells it by the keys and refuses to choose between two.

    Raises:
        InputError: no format matches, or more than one does.
    """
    if wanted != "auto":
        return Decision(wanted, f"data.format is {wanted}")
    matches = [name for name in SIGNATURES if matched_keys(record.value, name)]
    keys = ", ".join(record.value) or "none"
    if not matches:
        rows = (" and ".join(keys) for rows in SIGNATURES.values() for keys in rows)
        rule = f"cannot be told from the keys of the first record ({keys}); it needs one of: {'; '.join(rows)}"
        raise InputError(Problem("data.format", "auto", rule, where=record.where))
    if len(matches) > 1:
        found = " and ".join(f"{name} ({' + '.join(matched_keys(record.value, name))})" for name in matches)
        rule = f"the first record could be {found}; say which"
        raise InputError(Problem("data.format", "auto", rule, " or ".join(matches), record.where))
    names = " and ".join(f"`{name}`" for name in matched_keys(record.value, matches[0]))
    return Decision(matches[0], f"the first record ({record.where}) has {names}")


def matched_keys(value: Mapping[str, Any], name: Format) -> tuple[str, ...]:
    """The keys by which a record is taken for `name`; empty when it is not. A key that holds null is not there."""
    return next((keys for keys in SIGNATURES[name] if all(value.get(key) is not None for key in keys)), ())


def normalise(record: Record, name: Format) -> Example:
    """One record of format `name` as an example.

    Raises:
        ValueError: says what is wrong with the record.
    """
    value = record.value
    if name == "messages":
        return Conversation(_messages(value["messages"], "messages"), record.where, _tools(value))
    if name == "sharegpt":
        system = _optional_system(value)
        return Conversation((*system, *_messages(value["conversations"], "conversations")), record.where, _tools(value))
    if name == "prompt":
        return Conversation(_prompt(value), record.where, _tools(value))
    if name == "alpaca":
        return Conversation(_alpaca(value), record.where)
    if name == "text":
        return Text(_string(value, "text"), record.where)
    return _tokens(value, record.where)


def _normalised(records: Iterator[Record], name: Format, problems: Problems, key: str) -> Iterator[Example]:
    for number, record in enumerate(records):
        if not matched_keys(record.value, name):
            needed = " or ".join(" and ".join(keys) for keys in SIGNATURES[name])
            keys = ", ".join(record.value) or "no keys"
            which = "is the first record that is not" if number else "is not"
            rule = f"{which} {name}: it has {keys}, not {needed}"
            problems.add(Problem(key, None, rule, where=record.where))
            problems.raise_any()
        try:
            yield normalise(record, name)
        except ValueError as error:
            problems.add(Problem(key, None, str(error), where=record.where))


def _messages(values: object, key: str) -> tuple[Message, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{key} must be a list of messages")
    if not values:
        raise ValueError(f"{key} must not be empty")
    return tuple(_message(value, f"{key}[{number}]") for number, value in enumerate(values))


def _message(value: object, key: str) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object with role and content")
    given = {name: item for name, item in value.items() if item is not None}
    if "role" in given and "from" in given:
        raise ValueError(f"{key} has both role and from; one must go")
    role_key, content_key = ("from", "value") if "from" in given else ("role", "content")
    if role_key not in given:
        raise ValueError(f"{key} has no role (or from)")
    written = given.pop(role_key)
    role = ROLES.get(written) if isinstance(written, str) else None
    if role is None:
        near = closest(str(written), list(ROLES))
        raise ValueError(
            f"{key}.{role_key} = {written} must be one of {', '.join(ROLES)}{f'; did you mean {near}?' if near else ''}"
        )
    trained = _flag(given, key)
    content = _content(given.pop(content_key, None), f"{key}.{content_key}")
    if content is None and not given:
        raise ValueError(f"{key} has no {content_key}")
    return Message(role, content, trained, given)


def _content(value: object, key: str) -> str | None:
    """A string; of a list of blocks, the texts in a row."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        texts = [block.get("text") if isinstance(block, Mapping) else None for block in value]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text is not None)
    raise ValueError(f"{key} must be a string or a list of text blocks")


def _flag(given: dict[str, Any], key: str) -> bool:
    """Take the training flags out of a message; True when it has none."""
    trained = True
    for name in FLAGS:
        if name not in given:
            continue
        value = given.pop(name)
        if value not in (0, 1):  # True and False are 1 and 0
            raise ValueError(f"{key}.{name} = {value} must be 0 or 1 (false or true): a loss is not weighted")
        trained = trained and bool(value)
    return trained


def _prompt(value: Mapping[str, Any]) -> tuple[Message, ...]:
    if value.get("completion") is not None and value.get("response") is not None:
        raise ValueError("has both completion and response; one must go")
    reply_key = "completion" if value.get("completion") is not None else "response"
    prompt, reply = value["prompt"], value[reply_key]
    if isinstance(prompt, str) and isinstance(reply, str):
        return (*_optional_system(value), Message("user", prompt), Message("assistant", reply))
    if isinstance(prompt, str) or isinstance(reply, str):
        raise ValueError(f"prompt and {reply_key} must both be strings or both be lists of messages")
    return (*_optional_system(value), *_messages(prompt, "prompt"), *_messages(reply, reply_key))


def _alpaca(value: Mapping[str, Any]) -> tuple[Message, ...]:
    turns: list[Message] = [*_optional_system(value)]
    for number, pair in enumerate(value.get("history") or ()):
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise ValueError(f"history[{number}] must be a pair of strings: what was asked, what was answered")
        turns += [Message("user", pair[0]), Message("assistant", pair[1])]
    instruction = _string(value, "instruction")
    if value.get("input"):
        instruction = f"{instruction}\n{_string(value, 'input')}"
    return (*turns, Message("user", instruction), Message("assistant", _string(value, "output")))


def _optional_system(value: Mapping[str, Any]) -> tuple[Message, ...]:
    return (Message("system", _string(value, "system")),) if value.get("system") else ()


def _tools(value: Mapping[str, Any]) -> tuple[Any, ...] | None:
    tools = value.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError("tools must be a list of tool schemas")
    return tuple(tools)


def _tokens(value: Mapping[str, Any], where: str) -> Tokens:
    ids = _integers(value, "input_ids")
    if value.get("labels") is None:
        return Tokens(ids, (True,) * len(ids), where)
    labels = _integers(value, "labels")
    if len(labels) != len(ids):
        raise ValueError(f"labels has {len(labels)} entries, input_ids {len(ids)}: they must be equally long")
    for position, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, UNTRAINED):
            raise ValueError(
                f"labels[{position}] = {label} must be input_ids[{position}] = {token} or {UNTRAINED}: "
                "labels are not shifted"
            )
    return Tokens(ids, tuple(label != UNTRAINED for label in labels), where)


def _integers(value: Mapping[str, Any], key: str) -> tuple[int, ...]:
    items = value[key]
    if not isinstance(items, Sequence) or not items or not all(type(item) is int for item in items):
        raise ValueError(f"{key} must be a list of whole numbers, at least one")
    return tuple(items)


def _string(value: Mapping[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"{key} must be a string")
    return text
