"""`triweave verify`."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from triweave.cli.options import Json, Nproc, Overrides
from triweave.config.schema import Run


def verify(
    run_file: Path,
    /,
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
    from triweave.training.import_torch import import_torch
    from triweave.training.start import Job, start

    def job() -> Job:
        import_torch()
        from triweave.verify.run import verify_rank, write_references

        return Job(functools.partial(verify_rank, json), write_references)

    return start(run_file, overrides, nproc, job, adjust=small_batch, works_before=True)


def small_batch(run: Run, dp: int) -> Run:
    """The run with the smallest global batch that fills its pipeline: what one process can compute too."""
    layout = run.layout
    return replace(run, train=replace(run.train, global_batch=dp * layout.micro_batch * max(2, layout.pp)))
