"""`triweave verify`."""

from __future__ import annotations

import functools
from pathlib import Path

from triweave.cli.options import Json, Nproc, Overrides


def verify(
    run_file: Path,
    *overrides: Overrides,
    nproc: Nproc = None,
    json: Json = False,
) -> int:
    """Prove that a layout computes what one process computes.

    Runs the first sequences of the training data through `transformers` in one process and through the layout on
    its own ranks, and compares the output of every module, the loss and the gradient of every parameter. Exit
    code 0 if they agree, 1 if not; the first module that differs is named.

    Example: triweave verify run.yaml --layout.tp 3 --layout.pp 2

    Args:
        run_file: The run file.
        overrides: Keys of the run file with new values.
        nproc: Ranks to start on this host; left out, as many as the layout has.
        json: Print one JSON document.
    """
    from triweave.training.start import start
    from triweave.verify.run import small_batch, verify_rank, write_references

    return start(
        run_file,
        overrides,
        nproc,
        functools.partial(verify_rank, json),
        adjust=small_batch,
        before_ranks=write_references,
    )
