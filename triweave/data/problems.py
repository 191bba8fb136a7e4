"""Collects what is wrong with many rows, so that one reading of the data names all of it."""

from __future__ import annotations

from triweave.errors import InputError, Problem


class Problems:
    """Wrong rows found so far; `limit` of them end the reading, so that a wholly wrong file is not read to its end."""

    def __init__(self, limit: int = 20) -> None:
        self._found: list[Problem] = []
        self._limit = limit

    def add(self, problem: Problem) -> None:
        """Remember `problem`.

        Raises:
            InputError: it was the last one that is worth collecting.
        """
        self._found.append(problem)
        if len(self._found) >= self._limit:
            self.raise_any()

    def raise_any(self) -> None:
        """Stop here if anything was wrong.

        Raises:
            InputError: holds everything that was added.
        """
        if self._found:
            raise InputError(self._found)
