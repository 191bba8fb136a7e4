"""Keys given on the command line: `--layout.tp 4`, `--layout.tp=4` or `layout.tp=4`, laid over the file's tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from triweave.config.tree import Node, Refused, Scalar, Section, read_tree
from triweave.errors import InputError, Problem

COMMAND_LINE = "on the command line"


def apply_overrides(root: Section, words: Sequence[str], problems: list[Problem]) -> Section:
    """A copy of `root` in which every key of `words` holds its new value.

    A value is a YAML scalar, or a list such as `[swiglu, norm]`; quotes make it text.
    """
    seen: set[str] = set()
    for key, text in _pairs(words, problems):
        if key in seen:
            problems.append(Problem(key, text, "is given twice", where=COMMAND_LINE))
            continue
        seen.add(key)
        root = _replaced(root, key.split("."), _value(key, text, problems))
    return root


def _pairs(words: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, str]]:
    """Keys with the text of their values."""
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        key, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals:
            if not waiting or waiting[0].startswith("--"):
                problems.append(Problem(key, None, "needs a value", f"--{key}=VALUE", COMMAND_LINE))
                continue
            text = waiting.popleft()
        elif not equals or not key:
            problems.append(Problem(word, None, "must be KEY=VALUE or --KEY VALUE", where=COMMAND_LINE))
            continue
        yield key, text


def _value(key: str, text: str, problems: list[Problem]) -> Node:
    # Without quotes or brackets the word is the value: a file name with `#` or `: ` in it needs no YAML quoting.
    if text[:1] not in ("[", "{", '"', "'"):
        return Scalar(text, quoted=False, where=COMMAND_LINE)
    found: list[Problem] = []
    try:
        node = read_tree(text, lambda line: COMMAND_LINE, found)
    except InputError as error:
        node, found = None, [*error.problems]
    problems.extend(Problem(key, text, problem.rule, where=COMMAND_LINE) for problem in found)
    if isinstance(node, Section):
        problems.append(Problem(key, text, f"is a section: give its keys one by one, as {key}.KEY", where=COMMAND_LINE))
    return node if node is not None and not found and not isinstance(node, Section) else Refused(COMMAND_LINE)


def _replaced(section: Section, path: Sequence[str], value: Node) -> Section:
    """`section` with the node at `path` exchanged; sections on the way are made where there are none."""
    name, *rest = path
    child = section.entries.get(name)
    if rest and not isinstance(child, Section):
        if child is not None:  # the file holds something that is no section there: the loader says so
            return section
        child = Section(COMMAND_LINE)
    new = _replaced(child, rest, value) if rest and isinstance(child, Section) else value
    return Section(section.where, {**section.entries, name: new})
