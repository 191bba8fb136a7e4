"""`triweave probe`."""

from __future__ import annotations

import functools
import json as json_module
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from triweave.cli.options import Json, Nproc
from triweave.errors import InputError, Problem
from triweave.training.import_torch import import_torch

DEFAULT_OUT = Path("profile.yaml")


def probe(
    *,
    out: Path = DEFAULT_OUT,
    nproc: Nproc = None,
    minutes: float = 10.0,
    only: str = "",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    name: str | None = None,
    force: bool = False,
    json: Json = False,
) -> int:
    """Measure this machine: products, attention, memory, links, overlap, host. `plan --profile` prices with it.

    Under torchrun each process is a rank; without it the ranks are started on this host. What was measured is kept
    after each part, and is not measured again when the same command is given again. Exit code 1 when the time was over
    before everything was measured.

    Example: triweave probe --out h200.yaml; triweave plan --profile h200.yaml ...

    Args:
        out: The profile.
        nproc: GPUs to measure together; left out, all of this host.
        minutes: How long it may take.
        only: Parts, with commas between: gemm, attention, memory, links, copies, overlap, layers, host, fp8.
        device: cpu runs the whole of it small, on the CPU: a rehearsal.
        name: What the GPU counts as in the catalogue (h200-141gb), where its own name does not say.
        force: Overwrite what another machine measured.
        json: Print the profile as one JSON document.
    """
    if not minutes > 0:  # nor what is no number
        raise InputError(Problem("--minutes", minutes, "must be above 0", "10"))
    if nproc is not None and nproc < 1:
        raise InputError(Problem("--nproc", nproc, "must be at least 1", "1"))
    from triweave.training.process import let_segments_grow, started_by_launcher

    let_segments_grow()
    launched = started_by_launcher()
    if launched is not None and nproc is not None:
        raise InputError(Problem("--nproc", nproc, f"a launcher has started {launched.world_size} ranks already"))

    # Only now torch: input errors are told at once.
    import_torch()
    import torch

    from triweave.probe.run import Options, chosen_parts, device_of, missing
    from triweave.probe.run import probe as probe_rank
    from triweave.training.process import Process
    from triweave.training.start_ranks import run_as_rank, run_ranks

    parts = tuple(part for part in only.split(",") if part)
    if only and not parts:
        raise InputError(Problem("--only", only, "names no part", "gemm"))
    options = Options(out, parts, minutes, device, name, force)
    wanted = chosen_parts(parts)
    ranks = nproc or (1 if device == "cpu" else max(1, torch.cuda.device_count()))
    if launched is None:
        device_of(options, Process(local_world_size=ranks))
    rank = functools.partial(probe_rank, options)
    try:
        code = run_ranks(ranks, rank) if launched is None else run_as_rank(launched, rank)
    except KeyboardInterrupt:
        code = 130
    if launched is not None and launched.rank != 0:
        return code
    if code in (0, 1) and out.exists():
        from triweave.planner.profile import read_profile
        from triweave.probe.table import to_text

        profile = read_profile(out)
        print(json_module.dumps(asdict(profile)) if json else "\n".join(to_text(profile)))
        if left := missing(profile, wanted):
            print(f"not measured: {', '.join(left)}; the same command continues", file=sys.stderr)
    if code == 130 and out.exists():
        print(f"interrupted; {out} keeps what was measured, and the same command continues", file=sys.stderr)
    return code
