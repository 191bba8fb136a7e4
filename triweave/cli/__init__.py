"""The command line: a file a verb, read only when the verb is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from triweave import __version__
from triweave.errors import TriweaveError

VERBS = {
    "demo": "Fine-tune a real checkpoint on a grid of processes of this machine, from nothing to an answer.",
    "train": "Train what a run file describes.",
    "verify": "Prove that a layout computes what one process computes.",
    "data": "Show what a run file's data becomes: counts, lengths, and which tokens are trained.",
    "schema": "Print the JSON schema of run files, for editors.",
}
"""One line each; the verb's own file holds the rest of its help."""


def make_app(chosen: str | None = None) -> App:
    """The application; only the chosen verb is imported, and its help is its own docstring."""
    app = App(
        name="triweave",
        version=__version__,
        help="Plan, prove and run 3D-parallel training of Llama-family models.",
        help_format="plaintext",
    )
    for verb, line in VERBS.items():
        app.command(f"triweave.cli.{verb}:{verb}", name=verb, help=None if verb == chosen else line)
    return app


def main(words: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 good, 1 the answer is no, 2 the input is wrong, 130 interrupted."""
    words = sys.argv[1:] if words is None else words
    try:
        code = make_app(words[0] if words else None)(words, result_action="return_value")
    except TriweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
