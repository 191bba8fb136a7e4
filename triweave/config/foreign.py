"""Keys of other training tools: what an unknown key is called here, with the arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triweave.config.arithmetic import Given, Work
from triweave.config.kinds import Scalar


@dataclass(frozen=True, slots=True)
class Foreign:
    """What several tools call one thing."""

    ours: str | None
    """Our key; None if there is nothing to set."""
    theirs: str
    """Their keys, each with the tools that use it: `lr (torchtune and litgpt), max_lr (Megatron-Bridge)`."""
    says: str = ""
    """What our key means, where that could be misread."""
    values: Mapping[Any, str] = field(default_factory=dict)
    """Our value for some of theirs."""
    work: Work | None = None
    """Our value by arithmetic, where the keys do not hold the same number."""

    @property
    def names(self) -> dict[str, str]:
        """Their keys, and the tools that use each."""
        return dict(re.findall(r"(\w+) \(([^)]*)\)", self.theirs))


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell about a foreign key: the rule, and our key with its value as far as that is known."""

    rule: str
    nearest: str | None


def answer(table: Iterable[Foreign], name: str, value: Scalar, given: Given) -> Answer | None:
    """What the foreign key `name` is called here; None if no row of the table has it.

    Args:
        table: The rows to look in.
        name: The key without its section, in lower case and with underscores.
        value: What it holds; None for a list or a section.
        given: Every scalar of the file by its key without section, for the arithmetic.
    """
    row = next((row for row in table if name in row.names), None)
    if row is None:
        return None
    tools = row.names[name]
    if row.ours is None:
        return Answer(f"is a key of {tools}; there is no such key here: {row.says}", None)
    work = row.work(value, given) if row.work else None
    told = "; ".join(part for part in (row.says, work.text if work else "") if part)
    rule = f"is a key of {tools}; here it is {row.ours}{f': {told}' if told else ''}"
    result = work.result if work else row.values.get(value.lower() if isinstance(value, str) else value)
    return Answer(rule, row.ours if result is None else f"{row.ours}: {result}")
