"""A run file, read strictly: every mistake at once, each with its place, its rule and the nearest legal value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from triweave.config.convert import WRONG, convert
from triweave.config.files import neighbour
from triweave.config.overrides import apply_overrides
from triweave.config.schema import Run
from triweave.config.tree import Node, Section, read_tree, shown
from triweave.config.unknown import UnknownKeys, scalars
from triweave.errors import InputError, Problem

MAX_FILE_BYTES = 2**20
"""A larger file is data or weights, given by mistake."""

T = TypeVar("T")


def load_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run file and lay the keys of the command line over it.

    Args:
        path: The YAML file.
        overrides: Words such as `--layout.tp 4` (two words), `--layout.tp=4` or `layout.tp=4`.

    Raises:
        InputError: the file cannot be read, is not YAML, or holds keys or values that a run does not have; with
            every problem that was found.
    """
    return load(Run, path, overrides)


def load(schema: type[T], path: Path, overrides: Sequence[str] = (), called: str = "run file") -> T:
    """`load_run` for a file that holds any dataclass of scalars, lists and other such dataclasses.

    Args:
        schema: The dataclass.
        path: The YAML file.
        overrides: As in `load_run`.
        called: What such a file is called in messages.

    Raises:
        InputError: as `load_run`.
    """
    problems: list[Problem] = []
    tree = read_tree(_text(path, called), lambda line: f"{path}:{line}", problems)
    tree = apply_overrides(_root(tree, path, called), overrides, problems)
    value = convert(schema, tree, "", UnknownKeys(schema, dict(scalars(tree)), called), problems)
    if value is WRONG or problems:
        raise InputError(sorted(problems, key=_line))
    loaded: T = value
    return loaded


def load_words(schema: type[T], words: Sequence[str], section: str) -> T:
    """A dataclass from `KEY=VALUE` words alone, every other key at its default.

    Args:
        schema: The dataclass.
        words: Such as `tp=8`.
        section: What to call it in messages.

    Raises:
        InputError: with every problem that was found.
    """
    problems: list[Problem] = []
    tree = apply_overrides(Section(section), words, problems)
    value = convert(schema, tree, "", UnknownKeys(schema, dict(scalars(tree))), problems)
    if value is WRONG or problems:
        raise InputError(problems)
    loaded: T = value
    return loaded


def _line(problem: Problem) -> tuple[bool, int]:
    """Sorts problems by line, those of the command line last."""
    line = (problem.where or "").rpartition(":")[2]
    return (not line.isdecimal(), int(line) if line.isdecimal() else 0)


def _root(tree: Node | None, path: Path, called: str) -> Section:
    if tree is None:
        raise InputError(Problem(called, path, "is empty"))
    if not isinstance(tree, Section):
        raise InputError(Problem(called, shown(tree), "must hold keys, as in `seed: 42`", where=tree.where))
    return tree


def _text(path: Path, called: str) -> str:
    def refuse(rule: str, nearest: str | None = None, where: str | None = None) -> InputError:
        return InputError(Problem(called, path, rule, nearest, where))

    try:
        if path.is_dir():
            raise refuse("is a folder")
        if not path.exists():
            raise refuse("does not exist", neighbour(path))
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            # A device or a pipe has no size, and may have no end.
            size = path.stat().st_size or f"more than {MAX_FILE_BYTES}"
            raise refuse(f"has {size} bytes; a {called} has at most {MAX_FILE_BYTES}")
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror})") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refuse("is not UTF-8 text", where=f"{path}:{line}") from None
