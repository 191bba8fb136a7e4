"""`triweave check`."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from triweave.cli.options import Json, Overrides, Whole
from triweave.config.load import load_run
from triweave.config.validate import ResolvedRun, validate
from triweave.errors import InputError, Problem
from triweave.training.import_torch import import_torch

USUAL_RANKS = "first,middle,last"


def check(
    run_file: Path,
    /,
    *overrides: Overrides,
    ranks: str = USUAL_RANKS,
    fixed_segments: bool = False,
    on_gpu: bool = False,
    rank: Whole | None = None,
    device: str | None = None,
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
        fixed_segments: The caching allocator as it is without PYTORCH_ALLOC_CONF=expandable_segments:True.
        on_gpu: Run the ranks for real, one after the other, on one GPU made as small as the cluster's: measured peak,
            time of each action, and the step of the whole grid from them. The other ranks are not there, collectives
            are local copies.
        rank: One rank, in place of --ranks.
        device: The GPU of --on-gpu: cuda, cuda:N; cpu rehearses it.
        json: Print one JSON document.
    """
    resolved = validate(load_run(run_file, overrides), dry=True)
    if device is not None and not on_gpu:
        raise InputError(Problem("--device", device, "is where --on-gpu runs, which was not given"))

    # Only now torch: input errors are told at once.
    import_torch()
    from triweave.dryrun import check as dryrun

    chosen = dryrun.chosen_ranks(ranks, resolved.layout)
    if rank is not None:
        if ranks != USUAL_RANKS:
            raise InputError(Problem("--rank", rank, f"stands in place of --ranks, which is given as {ranks}"))
        if not 0 <= rank < resolved.layout.world_size:
            raise InputError(dryrun.outside_grid("--rank", rank, resolved.layout))
        chosen = (rank,)
    if on_gpu:
        return _on_gpu(resolved, chosen, "cuda" if device is None else device, expandable=not fixed_segments, json=json)
    checked = dryrun.check(resolved, chosen, _progress, expandable=not fixed_segments)
    if json:
        print(json_module.dumps(dryrun.to_json(checked)))
    else:
        print("\n".join(dryrun.to_text(checked)))
    return 0 if checked.all_fit else 1


def _on_gpu(resolved: ResolvedRun, ranks: tuple[int, ...], device: str, *, expandable: bool, json: bool) -> int:
    from triweave.dryrun.on_gpu_answer import answer, device_of, to_text

    told = answer(resolved, ranks, device_of(device), expandable=expandable)
    if json:
        print(json_module.dumps(told))
    else:
        print("\n".join(to_text(told, resolved.num_micro_batches)))
    return 0 if told["fits"] else 1


def _progress(rank: int) -> None:
    if sys.stderr.isatty():
        print(f"\rplaying rank {rank}\x1b[K\r", end="", file=sys.stderr, flush=True)
