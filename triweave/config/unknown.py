"""What to say about a key that does not exist: another tool's name, the right section, or the nearest spelling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triweave.config.arithmetic import Given
from triweave.config.foreign import answer
from triweave.config.foreign_keys import TABLE
from triweave.config.kinds import Scalar as Value
from triweave.config.kinds import keys
from triweave.config.tree import Node, Scalar, Section, join, shown
from triweave.errors import Problem, closest


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an unknown key is."""

    problem: Problem
    meant: str | None = None
    """The key of the same section that it is a misspelling of."""
    certain: bool = False
    """Whether it was recognised; a nearest spelling is only a guess."""


@dataclass(frozen=True, slots=True)
class UnknownKeys:
    """Explains unknown keys of a file that should hold a `root` dataclass and holds the scalars `given`."""

    root: type
    given: Given
    file: str = "run file"
    """What such a file is called."""

    def explain(self, names: Sequence[str], section: str, name: str, node: Node) -> Explanation:
        """What the key `name` is, found in `section` (dotted; empty at the top), which has the keys `names`."""
        path, plain = join(section, name), normalised(name)
        value = node.value if isinstance(node, Scalar) else None
        visible = None if isinstance(node, Section) else shown(node)

        def problem(rule: str, nearest: str | None) -> Problem:
            return Problem(path, visible, rule, nearest, node.where)

        if plain in names:
            return Explanation(problem(f"is spelt {plain} here", join(section, plain)), meant=plain, certain=True)
        if name.partition(":")[0] in names:
            return Explanation(problem("lacks a space after the colon", name.replace(":", ": ", 1)), certain=True)
        if (found := answer(TABLE, plain, value, self.given)) is not None:
            return Explanation(problem(found.rule, found.nearest), certain=True)
        ours = [key.name for key in keys(self.root)]
        if "." in name and name in ours:
            parent, _, leaf = name.rpartition(".")
            return Explanation(problem("has a dot, which makes no section", f"{parent}: {{{leaf}: ...}}"), certain=True)
        if homes := [key for key in ours if _leaf(key) == plain]:
            return Explanation(problem(_belongs(homes), " or ".join(homes)), certain=True)
        rule = f"is not a key of {section or f'a {self.file}'}"
        if (near := closest(plain, names)) is not None:
            return Explanation(problem(rule, join(section, near)), meant=near)
        near_leaf = closest(plain, [_leaf(key) for key in ours])
        return Explanation(problem(rule, " or ".join(key for key in ours if _leaf(key) == near_leaf) or None))

    def strangers(self, section: Section, name: str, *, certain: bool) -> Iterator[Problem]:
        """What is in an unknown section called `name`; only what is recognised for certain, or everything."""
        for key, child in section.entries.items():
            explained = self.explain((), name, key, child)
            if explained.certain or not certain:
                yield explained.problem
            if isinstance(child, Section):
                yield from self.strangers(child, join(name, key), certain=certain or explained.certain)


def normalised(name: str) -> str:
    """A key in the spelling of the tables: `--Micro-Batch` is `micro_batch`."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def scalars(node: Node) -> Iterator[tuple[str, Value]]:
    """Every scalar in a tree with its key, normalised and without section."""
    if isinstance(node, Section):
        for name, child in node.entries.items():
            if isinstance(child, Scalar):
                yield normalised(name), child.value
            yield from scalars(child)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _belongs(homes: list[str]) -> str:
    sections = [home.rpartition(".")[0] for home in homes]
    if sections == [""]:
        return "belongs at the top of the file, in no section"
    return f"belongs in the section {' or '.join(sections)}"
