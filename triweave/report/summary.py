"""A run in numbers: what `triweave report --json` prints and the page shows first."""

from __future__ import annotations

from statistics import median
from typing import Any

from triweave.cluster import GIB
from triweave.report.read import Json, RunRecord


def summary(record: RunRecord) -> dict[str, Any]:
    """Plan and measurement side by side; None where one of them is not there."""
    last = record.steps[-1] if record.steps else {}
    said = record.forecast or {}
    step: Json = said.get("step") or {}
    stages = memory_by_stage(record)
    peaks = [value for _, value in record.series("peak_allocated_gib")]
    taken = typical(record, "step_s")
    return {
        "run": record.name,
        "layout": said.get("layout"),
        "cluster": said.get("cluster"),
        "steps": last.get("step", 0),
        "tokens": last.get("tokens"),
        "loss": {"first": record.steps[0].get("loss") if record.steps else None, "last": last.get("loss")},
        "validation": {line["step"]: line.get("val_loss") for line in record.validation},
        "step_s": {"predicted": step.get("step_s"), "range": step.get("range_s"), "measured": taken},
        "tokens_per_s_per_gpu": {
            "predicted": step.get("tokens_per_s_per_gpu"),
            "measured": typical(record, "tokens_per_s_per_gpu"),
        },
        "mfu_causal": {"predicted": step.get("mfu_causal"), "measured": typical(record, "mfu_causal")},
        "mfu_full": {"predicted": step.get("mfu_full"), "measured": typical(record, "mfu_full")},
        "peak_allocated_gib": {
            "predicted": max((stage["predicted_gib"] for stage in stages), default=None),
            "measured": max(peaks, default=None),
        },
        "capacity_gib": said["capacity_bytes"] / GIB if said.get("capacity_bytes") else None,
        "goodput": last.get("goodput"),
        "stages": stages,
        "problems": list(record.problems),
    }


def typical(record: RunRecord, key: str) -> float | None:
    """Median over the steps that speed is judged by."""
    values = [value for step in record.settled if isinstance(value := step.get(key), int | float)]
    return median(values) if values else None


def memory_by_stage(record: RunRecord) -> list[dict[str, Any]]:
    """Of each stage what was said and what was measured, by part; GiB."""
    measured = {row["stage"]: row for row in (record.memory or {}).get("stages", ())}
    found = []
    for stage in (record.forecast or {}).get("stages", ()):
        row = measured.get(stage["stage"])
        found.append(
            {
                "stage": stage["stage"],
                "predicted_gib": (row["told"] if row else stage)["allocated_bytes"] / GIB,
                "measured_gib": row["measured"]["allocated_bytes"] / GIB if row else None,
                "reserved_gib": row["measured"]["reserved_bytes"] / GIB if row else None,
                "used_gib": stage["used_bytes"] / GIB,
                "at": stage["at"],
                "predicted": _gib(row["told"]["parts"] if row else parts_of(stage["components"])),
                "measured": _gib(row["measured"]["parts"]) if row else None,
            }
        )
    return found


def parts_of(components: Json) -> dict[str, int]:
    """The closed form's components in the parts that a run measures; what lies beside the tensors is left out."""
    names = {"weights": "weights", "gradients": "gradients", "master weights": "master weights"}
    names["moments"] = "optimizer moments"
    parts = dict.fromkeys((*names.values(), "activations and the rest"), 0)
    for name, size in components.items():
        if name not in ("allocator", "CUDA context", "NCCL"):
            parts[names.get(name, "activations and the rest")] += size
    return parts


def off(predicted: float | None, measured: float | None) -> float | None:
    """Signed error of a prediction, None where one of both is missing."""
    return predicted / measured - 1 if predicted is not None and measured else None


def _gib(parts: Json) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}
