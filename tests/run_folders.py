"""Run directories as `train` leaves them, made of the planner's own forecast and of steps that are invented."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.config.document import to_yaml
from triweave.config.schema import DataConfig, ModelConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.layout import Layout, even_layers
from triweave.planner.forecast import forecast
from triweave.report.summary import parts_of
from triweave.schedule.build import build_schedule
from triweave.schedule.simulate import simulate


def gpu_run(folder: Path, *, steps: int = 400, layout: Layout | None = None, cluster: str = "4x8xh100-80gb") -> Path:
    """A run of Llama-3-70B, all of whose files are there."""
    spec = find_model("llama-3.1-70b")
    layout = layout or Layout(tp=8, pp=4, recompute=("norm", "swiglu"))
    layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
    machines, batch, seq = parse_cluster(cluster), 32 * layout.dp, 4096
    run = Run(
        model=ModelConfig(path="meta-llama/Llama-3.1-70B"),
        data=DataConfig(train=("chats.jsonl",), seq_len=seq, packing=False),
        cluster=cluster,
        train=TrainConfig(global_batch=batch),
    )
    resolved = ResolvedRun(run, spec, layout, machines, layout.micro_batches(batch), machines.gpus_per_node)
    said = forecast(resolved, machines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(to_yaml(run), encoding="utf-8")
    write(folder / "forecast.json", said)
    rng = random.Random(0)  # noqa: S311 - no secret
    stages = []
    for stage in said["stages"]:
        told = {"allocated_bytes": stage["allocated_bytes"], "reserved_bytes": stage["reserved_bytes"]}
        parts = parts_of(stage["components"])
        told["parts"] = parts
        more = int(0.003 * stage["allocated_bytes"])
        measured = {"allocated_bytes": stage["allocated_bytes"] + more, "reserved_bytes": stage["reserved_bytes"]}
        last = "activations and the rest"
        measured["parts"] = {**parts, last: parts[last] + more}
        stages.append({"stage": stage["stage"], "told": told, "measured": measured})
    write(folder / "memory.json", {"source": "the planner's closed form", "stages": stages})
    step_s = said["step"]["step_s"] * 1.021
    costs = said["step"]["actions_s"]
    schedule = build_schedule(layout.schedule, layout.pp, layout.vpp, resolved.num_micro_batches)
    seen = simulate(schedule, lambda one: costs[one.kind.value][one.stage] * rng.uniform(0.98, 1.06), 1e-4)
    told_ranks = [
        [(one.action.kind.value, one.action.stage, one.action.micro_batch, one.start_s + 0.01, one.end_s + 0.01)
         for one in rank]
        for rank in seen.spans
    ]  # fmt: skip
    head = {"schedule": layout.schedule, "pp": layout.pp, "vpp": layout.vpp}
    write(folder / "pipeline.json", {**head, "micro_batches": resolved.num_micro_batches, "ranks": told_ranks})
    peak = max(stage["measured"]["allocated_bytes"] for stage in stages) / 2**30
    lines = []
    for step in range(1, steps + 1):
        taken = step_s * (rng.uniform(0.995, 1.02) if step > 2 else 3.0)
        tokens = batch * seq / taken / layout.world_size
        share = tokens * spec.flops_per_token(seq, causal=True) / machines.gpu.peak_flops
        lines.append(
            {
                "step": step,
                "loss": 1.1 + 1.3 * math.exp(-step / 90) + rng.uniform(-0.05, 0.05),
                "grad_norm": 0.6 + 3 * math.exp(-step / 20) + rng.uniform(0, 0.2),
                "lr": 1e-5 * min(1, step / 40) * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
                "tokens": step * batch * seq,
                "step_s": taken,
                "tokens_per_s_per_gpu": tokens,
                "mfu_causal": share,
                "mfu_full": share * 1.04,
                "peak_allocated_gib": peak,
                "peak_reserved_gib": peak * 1.01,
                "goodput": 0.98 - 0.4 * math.exp(-step / 10),
            }
        )
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(
        folder / "validation.jsonl",
        [{"step": step, "val_loss": 1.15 + 1.25 * math.exp(-step / 90)} for step in range(0, steps + 1, 100)],
    )
    return folder


def write(path: Path, value: Any) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
