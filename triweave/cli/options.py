"""Options that several verbs take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token


def whole_number(kind: object, tokens: Sequence[Token]) -> Any:
    """A whole number of the command line; cyclopts itself would round 2.5.

    Raises:
        ValueError: it is none, which cyclopts tells.
    """
    if not re.fullmatch(r"[+-]?\d{1,18}", tokens[0].value, re.ASCII):
        raise ValueError
    return int(tokens[0].value)


Overrides = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
"""Words that change keys of the run file: `--layout.tp 4`."""

Whole = Annotated[int, Parameter(converter=whole_number)]
"""A whole number."""

Nproc = Annotated[int | None, Parameter(name="--nproc", converter=whole_number)]
"""Ranks to start on this host."""

Json = Annotated[bool, Parameter(name="--json", negative="")]
"""Print one JSON document and nothing else."""
