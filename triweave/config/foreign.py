"""Keys of other training tools: what an unknown key is called here, with the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from triweave.config.arithmetic import Given
from triweave.config.foreign_keys import TABLE
from triweave.config.kinds import Scalar


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell about a foreign key: the rule, and our key with its value as far as that is known."""

    rule: str
    nearest: str | None


def answer(name: str, value: Scalar, given: Given) -> Answer | None:
    """What the foreign key `name` (lower case, underscores) is called here; None if no tool is known to use it.

    Args:
        name: The key without its section.
        value: What it holds; None for a list or a section.
        given: Every scalar of the file by its key without section, for the arithmetic.
    """
    row = next((row for row in TABLE if name in row.names), None)
    if row is None:
        return None
    tools = row.names[name]
    if row.ours is None:
        return Answer(f"is a key of {tools}; there is no such key here: {row.says}", None)
    work = row.work(value, given) if row.work else None
    parts = [row.says, work.text if work else ""]
    told = "; ".join(part for part in parts if part)
    rule = f"is a key of {tools}; here it is {row.ours}{f': {told}' if told else ''}"
    result = work.result if work else row.values.get(value)
    return Answer(rule, row.ours if result is None else f"{row.ours}: {result}")
