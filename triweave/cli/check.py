"""`triweave check`."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from triweave.cli.options import Json, Overrides
from triweave.config.load import load_run
from triweave.config.validate import ResolvedRun, validate
from triweave.errors import InputError


def check(
    run_file: Path,
    /,
    *overrides: Overrides,
    ranks: str = "first,middle,last",
    on_gpu: bool = False,
    rank: int = 0,
    json: Json = False,
) -> int:
    """Run the real training step of some ranks with no GPU: peak memory, what it is made of, and where it peaks.

    Each rank is played in turn by this process: its stages, schedule, sharding and optimizer are the trainer's own,
    its card and the other ranks are not there. Needs neither weights nor data; `model.path` may be a name of the
    catalogue. Exit code 1 when a rank does not fit on the card of `cluster`.

    Example: triweave check run.yaml --ranks first,last --layout.tp 8

    Args:
        run_file: The run file.
        overrides: Keys of the run file with new values.
        ranks: first, middle, last (of the pipeline), all (one of each stage), or numbers with commas between.
        on_gpu: Run `--rank` for real on this machine's first GPU, made as small as the cluster's: measured peak, time
            of each action. The other ranks are not there, collectives are local copies.
        rank: The rank for --on-gpu.
        json: Print one JSON document.
    """
    resolved = validate(load_run(run_file, overrides), dry=True)

    # Only now torch: input errors are told at once.
    from triweave.dryrun import check as dryrun

    if on_gpu:
        return _on_gpu(resolved, rank, json=json)
    checked = dryrun.check(resolved, dryrun.chosen_ranks(ranks, resolved.layout), _progress)
    if json:
        print(json_module.dumps(dryrun.to_json(checked)))
    else:
        print("\n".join(dryrun.to_text(checked)))
    return 0 if checked.all_fit else 1


def _on_gpu(resolved: ResolvedRun, rank: int, *, json: bool) -> int:
    from triweave.dryrun.check import outside_grid
    from triweave.dryrun.on_gpu import answer

    if not 0 <= rank < resolved.layout.world_size:
        raise InputError(outside_grid("--rank", rank, resolved.layout))
    told = answer(resolved, rank)
    if json:
        print(json_module.dumps(told))
    else:
        for name, value in told.items():
            print(f"{name:18} {value:.4g}" if isinstance(value, float) else f"{name:18} {value}")
    return 0 if told["fits"] else 1


def _progress(rank: int) -> None:
    if sys.stderr.isatty():
        print(f"\rplaying rank {rank}\x1b[K\r", end="", file=sys.stderr, flush=True)
