"""YAML text as a tree that remembers its lines: the part of YAML 1.2 that settings need, and none of its traps.

Refused: anchors and aliases, tags, a key given twice, more than one document. Plain scalars mean what YAML 1.2's core
schema says: `2e-5` is a number, `yes` is text, `010` is no octal number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from triweave.config.kinds import Scalar as Value
from triweave.errors import InputError, Problem

MAX_DEPTH = 16
"""Nesting beyond this is no run file; it keeps hostile input from exhausting the stack."""

MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

_STANDARD_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_WORDS: dict[str, Value] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value: the text between the quotes, or the plain text that `resolve` reads."""

    text: str
    quoted: bool
    where: str

    @property
    def value(self) -> Value:
        """What it means."""
        return self.text if self.quoted else resolve(self.text)

    def __str__(self) -> str:
        return f'"{self.text}"' if self.quoted else self.text or "null"


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of nodes."""

    items: tuple[Node, ...]
    where: str

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.items))}]"


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping from keys to nodes; a node's `where` is the line of its key."""

    where: str
    entries: dict[str, Node] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{{{', '.join(f'{key}: {node}' for key, node in self.entries.items())}}}"


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that was already reported as a problem."""

    where: str

    def __str__(self) -> str:
        return "..."


Node = Scalar | Listing | Section | Refused


def resolve(text: str) -> Value:
    """What a scalar without quotes means: YAML 1.2's core schema, except that octal and hexadecimal are text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text)
    return text


def read_tree(text: str, place: Callable[[int], str], problems: list[Problem]) -> Node | None:
    """Read one YAML document; None if it is empty.

    Args:
        text: The document.
        place: From a line number, counted from 1, to how a message names the place.
        problems: Receives what is refused; the tree holds a `Refused` there.

    Raises:
        InputError: the text is not YAML. A reader cannot know what follows a syntax error, so this one stands alone.
    """
    reader = _Reader(iter(yaml.parse(text, Loader=yaml.SafeLoader)), place, problems)
    try:
        return reader.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        hint = "; indent with spaces" if "\\t" in said else ""
        raise InputError(_broken(f"{said}{hint}", place(mark.line + 1 if mark else 1))) from None
    except yaml.reader.ReaderError as error:
        character = chr(error.character) if isinstance(error.character, int) else error.character
        said = f"the character {character!a} is not allowed"
        raise InputError(_broken(said, place(text.count("\n", 0, error.position) + 1))) from None


def _broken(said: str, where: str) -> Problem:
    return Problem("YAML syntax", None, said, where=where)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns PyYAML's events into nodes."""

    events: Iterator[Any]
    place: Callable[[int], str]
    problems: list[Problem]

    def document(self) -> Node | None:
        next(self.events)  # the start of the stream
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return None
        node = self.node(next(self.events), "", 0)
        next(self.events)  # the end of the document
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            self.refuse("document", after, "is a second document: a run file holds one")
        return node

    def node(self, event: Any, key: str, depth: int, where: str | None = None) -> Node:
        where = where or self.line(event)
        if isinstance(event, yaml.AliasEvent):
            self.refuse(key, event, "is an alias: write the value out", f"*{event.anchor}")
            return Refused(where)
        if event.anchor is not None:
            self.refuse(key, event, "has an anchor: write values out where they are needed", f"&{event.anchor}")
        tagged = event.tag is not None
        if tagged:
            self.refuse(key, event, "has a tag: write the bare value", event.tag.replace(_STANDARD_TAG, "!!"))
        if depth > MAX_DEPTH:
            raise InputError(_broken(f"more than {MAX_DEPTH} levels of nesting", where))
        node: Node
        if isinstance(event, yaml.MappingStartEvent):
            node = self.section(key, depth, where)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Listing(tuple(self.items(key, depth)), where)
        else:
            node = Scalar(event.value, event.style is not None, where)
        return Refused(where) if tagged else node

    def items(self, key: str, depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            yield self.node(event, key, depth + 1)

    def section(self, key: str, depth: int, where: str) -> Section:
        section = Section(where)
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            name = self.node(event, key, depth + 1)
            path = join(key, name.text if isinstance(name, Scalar) else str(name))
            child = self.node(next(self.events), path, depth + 1, self.line(event))
            if not isinstance(name, Scalar):
                self.refuse(key or "document", event, "has a list or a section for a key: keys are words")
            elif (first := section.entries.get(name.text)) is not None:
                self.refuse(path, event, f"is given twice, first at {first.where}", shown(child))
            else:
                section.entries[name.text] = child
        return section

    def line(self, event: Any) -> str:
        return self.place(event.start_mark.line + 1)

    def refuse(self, key: str, event: Any, rule: str, value: object = None) -> None:
        self.problems.append(Problem(key, value, rule, where=self.line(event)))


def shown(node: Node) -> str:
    """A node as a message repeats it: on one line and not too long."""
    text = str(node).replace("\n", " ")
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def join(section: str, name: str) -> str:
    """The dotted name of a key in a section; the root's name is empty."""
    return f"{section}.{name}" if section else name
