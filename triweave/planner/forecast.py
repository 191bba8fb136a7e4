"""What the planner says of a run, as the run directory keeps it: memory by stage and part, step time, actions.

RUN_DIR/forecast.json    written by `train` before the first step, read by `report`
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from triweave.cluster import CATALOGUE, Cluster
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError
from triweave.planner.assumptions import OURS, Assumptions
from triweave.planner.machine import Machine, Precision
from triweave.planner.memory import StageMemory, predict_memory
from triweave.planner.time_actions import action_costs
from triweave.planner.time_step import predict_step
from triweave.planner.time_trainer import trainer_with
from triweave.schedule.actions import Kind

FORECAST_FILE = "forecast.json"
VERSION = 1


def run_identity(resolved: ResolvedRun) -> dict[str, Any]:
    """What memory and time of a run depend on, as JSON holds it: an answer for another run is none for this one."""
    run = resolved.run
    told = {
        "spec": asdict(resolved.spec),
        "layout": asdict(resolved.layout),
        "dtype": run.model.dtype,
        "fp8": run.model.fp8,
        "moments": run.optimizer.moments,
        "attention": run.model.attention,
        "seq_len": run.data.seq_len,
        "packing": run.data.packing,
        "global_batch": run.train.global_batch,
        "deterministic": run.runtime.deterministic,
        "overlap": [run.runtime.overlap_tp, run.runtime.overlap_dp],
    }
    as_read: dict[str, Any] = json.loads(json.dumps(told))
    return as_read


def assumptions_of(resolved: ResolvedRun) -> Assumptions:
    """The trainer's bookkeeping, as this run has it."""
    run = resolved.run
    return replace(OURS, gpus_per_node=resolved.gpus_per_node, moments=run.optimizer.moments, fp8=run.model.fp8)


def stages_of(resolved: ResolvedRun) -> tuple[StageMemory, ...]:
    """The closed form for each pipeline rank."""
    return predict_memory(
        resolved.spec,
        resolved.layout,
        seq_len=resolved.run.data.seq_len,
        num_micro_batches=resolved.num_micro_batches,
        dtype=resolved.run.model.dtype,
        assumptions=assumptions_of(resolved),
    )


def forecast(resolved: ResolvedRun, cluster: Cluster | None, on: Machine | None = None) -> dict[str, Any]:
    """Everything that is said before the first step.

    Args:
        resolved: the run.
        cluster: where it runs; None (a CPU, a card that is not known) says nothing of time.
        on: its measured speeds; None takes what is known of the GPU.
    """
    layout = resolved.layout
    usable = cluster.gpu.usable_bytes if cluster is not None else 0
    return {
        "version": VERSION,
        "run": run_identity(resolved),
        "layout": str(layout),
        "cluster": None if cluster is None else str(cluster),
        "gpus_per_node": resolved.gpus_per_node,
        "capacity_bytes": usable or None,
        "stages": [
            {
                "stage": one.pp_rank,
                "allocated_bytes": one.peak_allocated_bytes,
                "reserved_bytes": one.reserved_bytes,
                "used_bytes": one.used_bytes,
                "host_bytes": one.host_bytes,
                "at": one.at,
                "components": dict(one.components),
            }
            for one in stages_of(resolved)
        ],
        "step": None if cluster is None else _step(resolved, cluster, on),
    }


def _step(resolved: ResolvedRun, cluster: Cluster, on: Machine | None) -> dict[str, Any] | None:
    """Step time with its parts and its actions; None for a GPU without measured speeds."""
    run, layout = resolved.run, resolved.layout
    precision: Precision = "fp8" if run.model.fp8 else "bf16"
    question: dict[str, Any] = {
        "seq_len": run.data.seq_len,
        "global_batch": run.train.global_batch,
        "precision": precision,
        "stack": trainer_with(run.optimizer.moments),
        "on": on,
    }
    try:
        step = predict_step(resolved.spec, layout, cluster, **question)
        costs = action_costs(resolved.spec, layout, cluster, **question)
    except InputError:
        return None
    split = layout.schedule == "zero-bubble"
    kinds = (Kind.FORWARD, *((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.BACKWARD,)))
    return {
        "step_s": step.step_s,
        "range_s": list(step.range_s),
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu_causal": step.mfu.causal,
        "mfu_full": step.mfu.full,
        "bubble": step.bubble,
        "parts_s": asdict(step.breakdown),
        "actions_s": {kind.value: [cost.of(kind) for cost in costs.stages] for kind in kinds},
        "transfer_s": costs.transfer_s,
    }


def cluster_seen(device_name: str, gpus_per_node: int, world_size: int) -> Cluster | None:
    """The cluster that the ranks run on, from the name that the driver gives a GPU; None for one that is not known.

    >>> str(cluster_seen("NVIDIA H200", 2, 2))
    '1x2xh200-141gb'
    """
    words = set(device_name.lower().replace("-", " ").split())
    like = [gpu for name, gpu in CATALOGUE.items() if name.partition("-")[0] in words]
    # An A100 says which of the two it is; of the others there is one.
    like.sort(key=lambda gpu: len(words & set(gpu.name.split("-"))), reverse=True)
    return Cluster(max(1, world_size // gpus_per_node), gpus_per_node, like[0]) if like else None
