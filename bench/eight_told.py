"""What is said of the cases of `bench/eight.py` before one of them runs: memory by `check`, seconds by the planner.

Two files, each named by the hash of its bytes in every row that runs after it. Memory needs no GPU and no profile, and
takes minutes: it is told ahead, on any machine. Seconds are told with the profile that was measured just before, and
with one that comes with the package.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from measuring import without_gpu
from triweave_case import cluster_of, layout_of, resolved_of
from workload import Case

from triweave.dryrun.memory import rank_memory
from triweave.errors import InputError
from triweave.layout import Coordinates
from triweave.planner.profile import Profile
from triweave.planner.profile_machine import machine_from_profile, profile_of
from triweave.planner.time_actions import action_costs
from triweave.planner.time_step import predict_step
from triweave.planner.time_trainer import trainer_with

SHIPPED = "h200-x2"
"""The profile of the package that holds most: of two GPUs, carried over to larger groups as the planner does it."""


def seal(path: Path) -> str:
    """Hash of a file of predictions."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write(path: Path, cases: dict[str, Any], **about: Any) -> None:
    """Put a file of predictions in place, whole or not at all."""
    head = {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__, **about}
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**head, "cases": cases}, indent=1), encoding="utf-8")
    part.rename(path)


def tell_memory(cases: list[Case]) -> dict[str, Any]:
    """What `check` says of every case, one rank of each stage that runs; in processes, for it takes a while."""
    jobs = [(case, rank) for case in cases for rank in ranks_of(case)]
    found: dict[str, Any] = {case.name: [] for case in cases}
    spawn = multiprocessing.get_context("spawn")
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=without_gpu) as pool:
        for (case, _), told in zip(jobs, pool.map(_memory_of, jobs), strict=True):
            found[case.name].append(told)
    return found


def ranks_of(case: Case) -> list[int]:
    """The first rank of each pipeline stage that runs; the others of a stage are like it."""
    layout = layout_of(case)
    stages = [int(case.options["stage"])] if case.system == "stage" else range(layout.pp)
    return [layout.rank(Coordinates(0, 0, 0, stage)) for stage in stages]


def _memory_of(job: tuple[Case, int]) -> dict[str, Any]:
    case, rank = job
    one = rank_memory(resolved_of(case), rank)
    # Memory that peers read is on both sides: torch's allocator does not count it.
    allocated = one.peak_bytes + one.peer_bytes
    return {"rank": rank, "allocated_bytes": allocated, "used_bytes": one.used_bytes, "at": one.at}


def tell_times(cases: list[Case], probed: Path) -> dict[str, Any]:
    """What the planner says of every case with each profile; in place of seconds why there are none."""
    profiles = {"probed": str(probed), "shipped": SHIPPED}
    return {case.name: {name: _time_of(case, words) for name, words in profiles.items()} for case in cases}


def _time_of(case: Case, profile: str) -> dict[str, Any]:
    try:
        return seconds_of(case, profile_of(profile))
    except InputError as error:
        return {"why_not": str(error).splitlines()[0]}


def seconds_of(case: Case, profile: Profile) -> dict[str, Any]:
    """Seconds of a step, or of one micro-batch of a stage that runs without the others.

    Raises:
        InputError: the profile prices no such machine.
    """
    spec, layout, cluster = case.spec, layout_of(case), cluster_of(case)
    size = {"seq_len": case.seq_len, "global_batch": case.sequences}
    stack = trainer_with(resolved_of(case).run.optimizer.moments)
    machine = machine_from_profile(profile, cluster)
    if case.system != "stage":
        step = predict_step(spec, layout, cluster, **size, stack=stack, on=machine)
        return {"seconds": step.step_s, "range_s": list(step.range_s), "source": profile.source}
    costs = action_costs(spec, layout, cluster, **size, on=machine)
    stage = int(case.options["stage"])
    # Forward and backward take as long as the GPU needs, or the host to issue them.
    return {"seconds": max(costs.stages[stage].total, costs.hosts[stage].total), "source": profile.source}
