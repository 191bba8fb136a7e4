"""Conversations to text by a chat template, and the parts of the text that are trained.

What the assistant says is found in one of two ways:

1. The template marks it with `{% generation %}` blocks: those are taken as they are.
2. Otherwise it is rendered turn by turn. A reply begins where the rendering of all turns before it, with the
   generation prompt, ends; and ends where the rendering of all turns up to it ends. Both must be a beginning of
   the whole rendering; if one is not, the conversation is refused and the first position that differs is named.

The token that ends the assistant's turn is trained on; white space that the template writes after it is not, for
nothing is generated there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from triweave.data.examples import Conversation, Message
from triweave.data.sandbox import GENERATION_END, GENERATION_START, CompiledTemplate, compile_template
from triweave.data.tokenizer import TextTokenizer, read_settings
from triweave.errors import InputError, Problem

LossOn = Literal["assistant", "completion", "all"]
Span = tuple[int, int]
"""First character and the one after the last, counted in the rendered text."""

MAX_TEMPLATE_BYTES = 256 * 1024


class CannotRender(Exception):
    """This conversation cannot be rendered, or what is trained in it cannot be told; says why."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template, ready to render."""

    source: str
    where: str
    """Where it was written: a file, or `tokenizer_config.json`."""
    compiled: CompiledTemplate
    variables: dict[str, str]
    """The tokenizer's special tokens by name."""
    control_tokens: frozenset[str]

    @property
    def sha256(self) -> str:
        """Identifies the text of the template."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation and the parts of it that are trained, in order."""

    text: str
    trained: tuple[Span, ...]


def load_chat_template(folder: Path, tokenizer: TextTokenizer, file: str | None = None) -> ChatTemplate | None:
    """The chat template in `file`; without one the folder's: chat_template.jinja, else tokenizer_config.json's.

    Returns None when there is none anywhere.

    Raises:
        InputError: the file is missing, too large, or not a Jinja template.
    """
    key = "data.chat_template"
    path = folder / "chat_template.jinja" if file is None else Path(file).expanduser()
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            rule = f"has {path.stat().st_size:,} bytes; a chat template has at most {MAX_TEMPLATE_BYTES:,}"
            raise InputError(Problem(key, path, rule))
        try:
            return make_chat_template(path.read_text(encoding="utf-8"), tokenizer, str(path))
        except UnicodeDecodeError:
            raise InputError(Problem(key, path, "is not UTF-8 text")) from None
    if file is not None:
        raise InputError(Problem(key, file, "is not a file"))
    config = folder / "tokenizer_config.json"
    source = read_settings(config, key).get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if "default" not in named:
            rule = f"has chat templates {', '.join(map(str, named))} and none called default; write one to a file"
            raise InputError(Problem(key, config, rule))
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise InputError(Problem(key, config, "must hold the chat template as a string or a list of named ones"))
    return make_chat_template(source, tokenizer, str(config))


def make_chat_template(source: str, tokenizer: TextTokenizer, where: str) -> ChatTemplate:
    """Compile the Jinja text `source`.

    Raises:
        InputError: it is too large or not a Jinja template.
    """
    size = len(source.encode())
    if size > MAX_TEMPLATE_BYTES:
        rule = f"has {size:,} bytes; a chat template has at most {MAX_TEMPLATE_BYTES:,}"
        raise InputError(Problem("data.chat_template", where, rule))
    try:
        compiled = compile_template(source, now=datetime.now())
    except TemplateSyntaxError as error:
        raise InputError(
            Problem(
                "data.chat_template",
                None,
                f"is not a Jinja template ({error.message})",
                where=f"{where}:{error.lineno}",
            )
        ) from None
    except (TemplateError, RecursionError) as error:
        raise InputError(Problem("data.chat_template", where, f"is not a Jinja template ({error})")) from None
    return ChatTemplate(source, where, compiled, dict(tokenizer.special_tokens), tokenizer.control_tokens)


def render(template: ChatTemplate, conversation: Conversation, loss_on: LossOn = "assistant") -> Rendered:
    """Render `conversation` and find what `loss_on` and the messages' own flags train.

    Raises:
        CannotRender: the template refuses the conversation, or the turns of the assistant cannot be told apart.
    """
    messages = conversation.messages
    text, blocks = _render(template, conversation, len(messages))
    if loss_on == "all":
        banned = [_turn(template, conversation, text, i) for i, message in enumerate(messages) if not message.trained]
        return Rendered(text, _complement(banned, len(text)))
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    wanted = [i for i in (replies[-1:] if loss_on == "completion" else replies) if messages[i].trained]
    if not template.compiled.marks_generation:
        return Rendered(text, tuple(_turn(template, conversation, text, i) for i in wanted))
    if wanted == replies:
        return Rendered(text, blocks)
    if len(blocks) == len(replies):
        return Rendered(text, tuple(block for i, block in zip(replies, blocks, strict=True) if i in wanted))
    # A template may write several blocks a turn: keep the blocks that begin inside a wanted turn.
    turns = [_turn(template, conversation, text, i) for i in wanted]
    return Rendered(text, tuple(block for block in blocks if any(first <= block[0] < last for first, last in turns)))


def _render(
    template: ChatTemplate, conversation: Conversation, turns: int, *, prompt: bool = False
) -> tuple[str, tuple[Span, ...]]:
    """Text of the first `turns` messages and its generation blocks; `prompt` adds the head of the next reply."""
    messages = [_variables(message) for message in conversation.messages[:turns]]
    tools = list(conversation.tools) if conversation.tools else None
    try:
        # Nothing but JSON's own types may reach a template, and no text may hold the marks of a block.
        plain = json.dumps([messages, tools], ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise CannotRender(f"holds a value that is not JSON ({error})") from None
    if GENERATION_START in plain or GENERATION_END in plain:
        raise CannotRender("holds the Unicode noncharacter U+FDD0 or U+FDD1")
    try:
        marked = template.compiled.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **template.variables
        )
    except Exception as error:  # a template can raise whatever its expressions raise
        raise CannotRender(f"the chat template refuses it: {error}") from None
    return _strip_marks(marked)


def _variables(message: Message) -> dict[str, Any]:
    content = {} if message.content is None else {"content": message.content}
    return {"role": message.role, **content, **message.extra}


def _strip_marks(marked: str) -> tuple[str, tuple[Span, ...]]:
    """Text without the marks of generation blocks, and the outermost blocks."""
    parts: list[str] = []
    spans: list[Span] = []
    length = depth = start = 0
    for piece in marked.split(GENERATION_START):
        if parts:
            start = length if depth == 0 else start
            depth += 1
        for number, part in enumerate(piece.split(GENERATION_END)):
            if number:
                depth -= 1
                if depth == 0:
                    spans.append((start, length))
            parts.append(part)
            length += len(part)
    return "".join(parts), tuple(spans)


def _turn(template: ChatTemplate, conversation: Conversation, text: str, index: int) -> Span:
    """Where message `index` stands in `text`; of a reply, what the assistant writes itself."""
    is_reply = conversation.messages[index].role == "assistant"
    before = _beginning(template, conversation, text, index, prompt=is_reply)
    until = _beginning(template, conversation, text, index + 1)
    if not is_reply:
        return before, until
    said = text[before:until]
    if said.startswith(tuple(template.control_tokens)) and before == len(_render(template, conversation, index)[0]):
        raise CannotRender(
            f"the chat template {template.where} does not answer to add_generation_prompt, so where the assistant "
            "begins to write cannot be told; mark it with {% generation %}"
        )
    trimmed = said.rstrip()
    return before, before + len(trimmed if trimmed.endswith(tuple(template.control_tokens)) else said)


def _beginning(
    template: ChatTemplate, conversation: Conversation, text: str, turns: int, *, prompt: bool = False
) -> int:
    """Length of the rendering of the first `turns` messages, which `text` must begin with."""
    if turns == 0 and not prompt:
        return 0
    if turns == len(conversation.messages):
        return len(text)
    part, _ = _render(template, conversation, turns, prompt=prompt)
    if not text.startswith(part):
        at = next((i for i, (one, other) in enumerate(zip(part, text, strict=False)) if one != other), len(text))
        raise CannotRender(
            f"its first {turns} turns render differently alone than inside the conversation, first at character {at} "
            f"({_excerpt(part, at)} alone, {_excerpt(text, at)} inside), so what the assistant said cannot be told "
            f"apart; mark it with {{% generation %}} in the chat template ({template.where})"
        )
    return len(part)


def _excerpt(text: str, at: int) -> str:
    return repr(text[at : at + 20]) if at < len(text) else "the end"


def _complement(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    """The parts of `[0, length)` that no span covers; spans are in order."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return tuple((first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last)
