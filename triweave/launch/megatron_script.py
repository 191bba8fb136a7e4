"""Reads a bash script that starts Megatron-LM, without running it: what the last and longest command line is given.

Variables and arrays are filled in as far as the script itself sets them. What bash alone could tell (`$(...)`, `$1`,
the environment) stays as it is written.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^}]*)|:?\?[^}]*)?\}|([A-Za-z_]\w*))")
_LONE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_BEFORE = ("export", "local", "declare", "readonly")
_REDIRECTION = re.compile(r"\d?[<>]")
MOST_DEPTH = 8
"""Variables within variables: deeper, they hold themselves."""


@dataclass(frozen=True, slots=True)
class Script:
    """What was found."""

    launcher: tuple[str, ...]
    """Words before the Python file: torchrun and its options."""
    words: tuple[str, ...]
    """Words after it: the arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script exports."""


class _Lines(io.StringIO):
    """Gives a comment's text without the line break that ends it: shlex would swallow both."""

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # typeshed's base is of bytes
        """The rest of the line."""
        begin = self.tell()
        text = super().readline()
        if text.endswith("\n"):
            self.seek(begin + len(text) - 1)
        return text


def read_script(text: str) -> Script:
    """The command of a script, or of a text that holds arguments alone.

    Raises:
        ValueError: quotes that are not closed.
    """
    scalars: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    exported: dict[str, str] = {}
    best: list[str] = []
    for statement in _statements(text):
        words = _assign(statement, scalars, arrays, exported)
        filled = [one for word in words if not _REDIRECTION.match(word) for one in _fill(word, scalars, arrays)]
        if sum(word.startswith("--") for word in filled) >= max(1, sum(word.startswith("--") for word in best)):
            best = filled
    file = next((number for number, word in enumerate(best) if word.endswith(".py")), None)
    if file is None:
        first = next((number for number, word in enumerate(best) if word.startswith("--")), 0)
        return Script((), tuple(best[first:]), exported)
    return Script(tuple(best[:file]), tuple(best[file + 1 :]), exported)


Statement = list[str | tuple[str, bool, list[str]]]
"""Words, and arrays as (name, whether they go on, elements)."""


def _statements(text: str) -> Iterator[Statement]:
    """Words between line breaks and separators."""
    reader = shlex.shlex(
        _Lines(text.replace("\\\r\n", " ").replace("\\\n", " ")), posix=True, punctuation_chars="();|&\n"
    )
    reader.whitespace = " \t\r"
    reader.whitespace_split = True
    statement: Statement = []
    array: tuple[str, bool, list[str]] | None = None
    substituted = 0
    for mark in _tokens(reader):
        if substituted:
            # Inside $( ... ): nothing of it is known.
            substituted += {"(": 1, ")": -1}.get(mark, 0)
        elif array is not None:
            if mark == ")":
                statement.append(array)
                array = None
            elif mark != "\n":
                array[2].append(mark)
        elif mark == "(" and statement and isinstance(statement[-1], str) and statement[-1].endswith("$"):
            statement[-1] += "(...)"
            substituted = 1
        elif mark == "(" and statement and isinstance(last := statement[-1], str) and last.endswith("="):
            statement.pop()
            array = (last.rstrip("+="), last.endswith("+="), [])
        elif mark in "();|&\n":
            if statement:
                yield statement
            statement = []
        else:
            statement.append(mark)
    if statement:
        yield statement


def _tokens(reader: shlex.shlex) -> Iterator[str]:
    """Tokens, every mark of its own."""
    for mark in reader:
        yield from mark if mark and set(mark) <= set("();|&\n") else (mark,)


def _assign(
    statement: Statement, scalars: dict[str, str], arrays: dict[str, list[str]], exported: dict[str, str]
) -> list[str]:
    """Take the assignments at the head of a statement in; returns the words after them."""
    words = list(statement)
    exports = bool(words) and words[0] in _BEFORE
    if exports:
        words.pop(0)
    while words:
        head = words[0]
        if isinstance(head, tuple):
            name, goes_on, elements = head
            filled = [one for element in elements for one in _fill(element, scalars, arrays)]
            arrays[name] = [*(arrays.get(name, []) if goes_on else []), *filled]
        elif match := _ASSIGNMENT.fullmatch(head):
            value = _expand(match[3], scalars, arrays)
            scalars[match[1]] = f"{scalars.get(match[1], '')}{value}" if match[2] else value
            if exports:
                exported[match[1]] = scalars[match[1]]
        else:
            break
        words.pop(0)
    return [word for word in words if isinstance(word, str)]


def _fill(word: str, scalars: Mapping[str, str], arrays: Mapping[str, list[str]]) -> list[str]:
    """A word with its variables filled in; one that is a variable and nothing else may become several."""
    lone = _LONE.fullmatch(word)
    if lone and lone[1] in arrays:
        return arrays[lone[1]]
    if lone and lone[1] in scalars:
        value = scalars[lone[1]]
        # The old way: GPT_ARGS="--num-layers 24 ..." and later $GPT_ARGS.
        return shlex.split(value) if value.strip().startswith("--") else [value]
    return [_expand(word, scalars, arrays)]


def _expand(text: str, scalars: Mapping[str, str], arrays: Mapping[str, list[str]], depth: int = 0) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in arrays:
            return " ".join(arrays[name])
        return scalars.get(name, match[0] if default is None else default)

    filled = _VARIABLE.sub(value, text)
    return filled if filled == text or depth == MOST_DEPTH else _expand(filled, scalars, arrays, depth + 1)
