"""What a record becomes, whatever its format: a conversation, a text, or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str | None
    """None where the turn is nothing but `extra`, as with tool calls."""
    trained: bool = True
    """False where the record says not to train on it. Whether it is trained on is then `data.loss_on`'s choice."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys (`tool_calls`, `name`, `reasoning_content`, ...), which the chat template sees as they are."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that a chat template renders."""

    messages: tuple[Message, ...]
    where: str = ""
    tools: tuple[Any, ...] | None = None
    """Tool schemas, for chat templates that list them."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document; every token is trained."""

    text: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """An example that was tokenised before."""

    input_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    where: str = ""


Example = Conversation | Text | Tokens
