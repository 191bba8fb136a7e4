"""Predicted and measured memory and step time of configurations that nobody chose: drawn by seed, told first, run then.

    python bench/campaign.py --predict                      # any machine; writes the predictions, seals them
    python bench/campaign.py --run --seconds 330            # two H200; appends rows, a second call goes on
    python bench/campaign.py --table                        # any machine; reads both files, computes nothing anew
    python bench/campaign.py --predict --run --table --times-only --seed 1 --profile here.yaml   # step times, in one go
    python bench/campaign.py --predict --run --table --small --results runs/rehearsal   # a rehearsal on a CPU

`--predict` writes for every configuration what `triweave check` says of its ranks (allocated, reserved, used), what the
planner's closed form says, and the planner's step time and range with the machine profile of `--profile`;
`--times-only` leaves out what memory alone needs: `check`, which takes minutes, and the ranks that run alone. Each row
of the run names the predictions that it was run against by their hash; a table is made of one such pair alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from campaign_cases import Case, draw_cases, from_json
from campaign_measure import Session, run_campaign
from campaign_table import table
from measuring import without_gpu
from result_file import result_file

from triweave.dryrun.memory import RankMemory, rank_memory
from triweave.layout import Coordinates
from triweave.planner.assumptions import OURS
from triweave.planner.memory import StageMemory, predict_memory
from triweave.planner.profile import Profile
from triweave.planner.profile_machine import machine_from_profile, profile_of
from triweave.planner.time_step import predict_step


def predict(case: Case, profile: Profile) -> dict[str, Any]:
    """Everything that is said of a case before it is run."""
    return tell_memory(case) | tell_time(case, profile)


def tell_time(case: Case, profile: Profile) -> dict[str, Any]:
    """The planner's step, its range and its parts; nothing of a rank that runs alone."""
    if case.rank is not None:
        return {}
    machine = machine_from_profile(profile, case.cluster)
    step = predict_step(
        case.spec, case.layout, case.cluster, seq_len=case.seq_len, global_batch=case.global_batch, on=machine
    )
    return {"step": {"step_s": step.step_s, "range_s": list(step.range_s), "breakdown": asdict(step.breakdown)}}


def tell_memory(case: Case) -> dict[str, Any]:
    """What the check and the closed form say of a case's ranks."""
    run, layout = case.resolved, case.layout
    alone = case.rank is not None
    stages = range(layout.pp) if case.rank is None else [layout.coordinates(case.rank).pp]
    # Ranks of a stage are alike, and one that runs alone plays its own place.
    ranks = [case.rank if case.rank is not None else layout.rank(Coordinates(0, 0, 0, stage)) for stage in stages]
    memory = predict_memory(
        case.spec,
        layout,
        seq_len=case.seq_len,
        num_micro_batches=run.num_micro_batches,
        assumptions=replace(OURS, gpus_per_node=run.gpus_per_node),
    )
    told: dict[str, Any] = {
        "stages": list(stages),
        "check": [told_memory(rank_memory(run, rank, expandable=case.expandable, one_gpu=alone)) for rank in ranks],
        "planner": [told_plan(memory[stage]) for stage in stages],
    }
    # Alone a rank has no peers to copy from, which the closed form always has: it is held against the rank in its grid.
    told["check_grid"] = told["check"] if not alone else [told_memory(rank_memory(run, rank)) for rank in ranks]
    return told


def told_memory(one: RankMemory) -> dict[str, Any]:
    """What the check says of a rank, in bytes."""
    return {
        "rank": one.rank,
        "allocated_bytes": one.peak_bytes,
        "peer_bytes": one.peer_bytes,
        "reserved_bytes": one.reserved_bytes,
        "used_bytes": one.used_bytes,
        "at": one.at,
        "components": dict(one.components),
    }


def told_plan(stage: StageMemory) -> dict[str, Any]:
    """What the closed form says of a stage, in bytes; copies between ranks are in what it calls allocated."""
    return {
        "allocated_bytes": stage.peak_allocated_bytes,
        "reserved_bytes": stage.reserved_bytes,
        "used_bytes": stage.used_bytes,
        "at": stage.at,
        "components": dict(stage.components),
    }


def write_predictions(path: Path, profile: str, seed: int, *, small: bool, times_only: bool) -> None:
    """Draw, predict, write."""
    begin, measured = time.monotonic(), profile_of(profile)
    cases = draw_cases(seed, small=small, times_only=times_only)
    if times_only:
        told = [tell_time(case, measured) for case in cases]
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=without_gpu) as pool:
            told = list(pool.map(partial(predict, profile=measured), cases))
    found = [{"case": case.to_json(), "predicted": one} for case, one in zip(cases, told, strict=True)]
    flags = f"{' --times-only' if times_only else ''}{' --small' if small else ''}"
    command = f"python bench/campaign.py --predict --seed {seed} --profile {Path(profile).name}{flags}"
    head = {"command": command, "torch": torch.__version__, "profile": measured.source}
    path.write_text(json.dumps({**head, "cases": found}, indent=1), encoding="utf-8")
    print(f"predicted {len(cases)} configurations in {time.monotonic() - begin:.0f} s: {path}", file=sys.stderr)


def seal(path: Path) -> str:
    """Hash of a file of predictions: rows and table name it, so that none of them is of other predictions."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--results", type=result_file, default="runs/campaign", help="beginning of the three files' names"
    )
    parser.add_argument("--profile", default="h200", help="machine profile: a file, or one that comes with the package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=330.0, help="no configuration is begun later than this")
    parser.add_argument("--only", default="", help="run those whose name holds this")
    parser.add_argument("--times-only", action="store_true", help="only what has a step time, and no memory")
    parser.add_argument("--small", action="store_true", help="tiny configurations, for a CPU")
    options = parser.parse_args()
    end_s = time.monotonic() + options.seconds
    told = options.results.with_suffix(".predictions.json")
    rows = options.results.with_suffix(".rows.jsonl")
    if options.predict:
        write_predictions(told, options.profile, options.seed, small=options.small, times_only=options.times_only)
    if not told.exists():
        parser.error(f"no predictions in {told}: nothing is run that was not predicted; --predict writes them")
    if options.run:
        # Multicast needs the fabric manager to grant it, which not every host does, and nothing here uses it.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        cases = [from_json(one["case"]) for one in json.loads(told.read_text())["cases"]]
        session = Session(rows, seal(told), end_s)
        wanted = [case for case in cases if options.only in case.name]
        run_campaign(wanted, session, gpus=2 if options.small else torch.cuda.device_count())
    if options.table:
        lines = table(json.loads(told.read_text()), seal(told), Session(rows, seal(told), 0).rows())
        options.results.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
