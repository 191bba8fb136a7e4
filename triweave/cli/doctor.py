"""`triweave doctor`."""

from __future__ import annotations

import functools
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from triweave.cli.options import Json, Nproc
from triweave.errors import InputError, Problem
from triweave.training.import_torch import import_torch

if TYPE_CHECKING:
    from triweave.doctor.run import Report

HERE = Path()


def doctor(
    run_file: Path | None = None,
    /,
    *,
    nproc: Nproc = None,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    out: Path = HERE,
    profile: str | None = None,
    timeout: float = 120.0,
    json: Json = False,
) -> int:
    """Examine the machines of a job: GPUs, links, network, disks, versions, clocks; each fault with its cure.

    Under torchrun, with the job's own arguments, each process is a rank and all hosts are examined together; without
    it the ranks are started on this host. Exit code 1 when something is wrong. docs/doctor.md has every finding.

    Example: triweave doctor; torchrun --nnodes 4 --nproc-per-node 8 ... -m triweave doctor run.yaml

    Args:
        run_file: A run file: its layout's groups are measured, its output folder's disk is tried.
        nproc: Ranks to start on this host; left out, a GPU each, or 2 where there is none.
        device: cpu leaves GPUs alone.
        out: Folder whose disk is tried, where no run file names one.
        profile: Machine profile to compare links with: a file, or the name of one that comes with the package (h200).
        timeout: Seconds in which every rank must come, and a collective end.
        json: Print one JSON document.
    """
    if nproc is not None and nproc < 1:
        raise InputError(Problem("--nproc", nproc, "must be at least 1", "1"))
    if not timeout > 0:  # nor what is no number
        raise InputError(Problem("--timeout", timeout, "must be above 0", "120"))
    from triweave.training.process import started_by_launcher

    launched = started_by_launcher()
    if launched is not None and nproc is not None:
        raise InputError(Problem("--nproc", nproc, f"a launcher has started {launched.world_size} ranks already"))
    from triweave.doctor.wanted import wanted_by
    from triweave.planner.profile_machine import profile_of

    wanted, folder = wanted_by(run_file, None if launched is None else launched.world_size)
    known = None if profile is None else profile_of(profile)

    # Only now torch: input errors are told at once.
    import_torch()
    import torch

    from triweave.doctor.run import Options, visit
    from triweave.training.start_ranks import run_as_rank, run_ranks

    options = Options(folder or out, device, wanted, known, timeout)
    rank = functools.partial(visit, options, functools.partial(_print, json))
    if launched is not None:
        return run_as_rank(launched, rank)
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    layout = wanted.layout.world_size if wanted.layout is not None else 2
    return run_ranks(nproc or gpus or layout, rank)


def _print(as_json: bool, report: Report) -> None:
    from triweave.doctor.table import to_json, to_text

    print(json_module.dumps(to_json(report)) if as_json else "\n".join(to_text(report)), flush=True)
