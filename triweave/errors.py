"""What can go wrong, as a tree. Each class carries the exit code of the command line.

TriweaveError
├── InputError        2  what the user gave is wrong: a key, a value, the rule, the nearest legal value
├── AnswerIsNo        1  the question was fine and the answer is no: does not fit, differs, unhealthy
└── RunFailed         1  a run that was right to start could not go on
    ├── GivenUp       1  ... so often that nobody is to start it again
    └── Refused       1  rank 0 does not begin, and tells why itself
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class TriweaveError(Exception):
    """Base of everything triweave raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong input: which key, what it holds, the rule with both numbers, the nearest legal value.

    >>> print(Problem("layout.tp", 4, "must divide the 9 attention heads", nearest="3"))
    layout.tp = 4: must divide the 9 attention heads; nearest: 3
    """

    key: str
    value: object
    rule: str
    nearest: str | None = None
    where: str | None = None
    """Where the value was written, as `file:line`; None when it is a default or came from a call."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        value = "" if self.value is None else f" = {self.value}"
        nearest = f"; nearest: {self.nearest}" if self.nearest is not None else ""
        return f"{place}{self.key}{value}: {self.rule}{nearest}"


class InputError(TriweaveError):
    """Wrong input. Holds every problem that was found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class AnswerIsNo(TriweaveError):
    """The input was fine and the answer is no."""


class RunFailed(TriweaveError):
    """A run could not go on, for a reason that is not the run file's."""


class GivenUp(RunFailed):
    """A run that has failed so often in a row that whoever starts it again is to stop."""


class Refused(RunFailed):
    """What the other ranks meet where rank 0 does not begin: it has told why, and they go without a word."""


def closest(word: str, choices: Sequence[str]) -> str | None:
    """The choice that `word` was most likely meant to be, or None if none is near."""
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return matches[0] if matches else None


def nearest_number(value: int, legal: Iterable[int]) -> str | None:
    """The legal number nearest to `value` (the smaller of two equally near ones), or None if there is none."""
    best = min(legal, key=lambda number: (abs(number - value), number), default=None)
    return None if best is None else str(best)


def divisors(number: int) -> list[int]:
    """All positive divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
