"""`triweave launch`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from triweave.cli.options import Overrides, Whole
from triweave.config.load import load_run
from triweave.config.validate import validate
from triweave.errors import InputError, Problem, closest
from triweave.launch.job import Kind, Settings


def launch(
    run_file: Path | None = None,
    /,
    *overrides: Overrides,
    to: str | None = None,
    out: Path | None = None,
    force: bool = False,
    name: str | None = None,
    workdir: str | None = None,
    python: str = "python",
    time_limit: str | None = None,
    warning: Whole | None = None,
    restarts: Whole = 0,
    partition: str | None = None,
    account: str | None = None,
    image: str | None = None,
    claim: str | None = None,
    kind: Kind = "job",
    from_megatron: str | None = None,
) -> int:
    """Write the files that start a run: torchrun, Slurm, Kubernetes, SkyPilot, Ray, or Megatron-LM with its layout.

    Needs neither GPU nor weights nor data. The files are sized from the run file's `cluster` and layout. With
    --from-megatron it is the other way round: a run file from a Megatron-LM script.

    Example: triweave launch run.yaml --to slurm --time-limit 24:00:00

    Args:
        run_file: The run file.
        overrides: Keys of the run file with new values; the files pass them on.
        to: torchrun, slurm, kubernetes, skypilot, ray or megatron.
        out: Folder of the files; left out, the one of the run file. With --from-megatron, the run file to write.
        force: Replace files that are there.
        name: Of the job and its files; left out, the last part of output_dir.
        workdir: Folder on the nodes that the run file's paths start from; left out, this one.
        python: Interpreter on the nodes.
        time_limit: Slurm: [DAYS-]HH:MM:SS; left out, what the plan predicts for train.steps.
        warning: Seconds before its end in which a run is asked to save; left out, from the plan.
        restarts: How often a crash is started again.
        partition: Slurm's partition.
        account: Slurm's account.
        image: Container image with triweave in it (kubernetes, skypilot).
        claim: Kubernetes: PersistentVolumeClaim with model, data and checkpoints, mounted at --workdir.
        kind: Kubernetes: job, jobset or trainjob.
        from_megatron: A script that starts Megatron-LM, or a text of its arguments.
    """
    if from_megatron is not None:
        return _from_megatron(from_megatron, out, force=force)
    if run_file is None:
        raise InputError(Problem("run file", None, "is missing; or give --from-megatron SCRIPT"))

    from triweave.launch.engines import ENGINES
    from triweave.launch.write import write_files

    if to is None or to not in ENGINES:
        rule = f"must be one of {', '.join(ENGINES)}"
        raise InputError(Problem("--to", to, rule, closest(to, list(ENGINES)) if to else None))
    resolved = validate(load_run(run_file, overrides), dry=True)
    settings = Settings(
        run_file=str(run_file),
        workdir=os.getcwd() if workdir is None else workdir,
        overrides=overrides,
        name=name,
        python=python,
        time_limit=time_limit,
        warning_s=warning,
        restarts=restarts,
        partition=partition,
        account=account,
        image=image,
        claim=claim,
        kind=kind,
    )
    engine = ENGINES[to]
    folder = run_file.parent if out is None else out
    for path in write_files(folder, engine.files(resolved, settings), force=force):
        print(f"wrote     {path}")
    print(f"start     {engine.command(resolved, settings, str(folder))}")
    return 0


def _from_megatron(source: str, out: Path | None, *, force: bool) -> int:
    from triweave.launch.megatron_import import read_source, run_file_from
    from triweave.launch.write import write_files

    text = run_file_from(read_source(source))
    if out is None:
        print(text, end="")
        return 0
    (path,) = write_files(out.parent, {out.name: text}, force=force)
    print(f"wrote {path}; next: triweave check {path}", file=sys.stderr)
    return 0
