"""Options that several verbs take."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Overrides = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
"""Words that change keys of the run file: `--layout.tp 4`."""

Nproc = Annotated[int | None, Parameter(name="--nproc")]
"""Ranks to start on this host."""

Json = Annotated[bool, Parameter(name="--json", negative="")]
"""Print one JSON document and nothing else."""
