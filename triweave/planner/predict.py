"""Predicts published runs, row by row, and says by how much it was wrong where the row holds a measurement.

The measured columns are read after the prediction and only to compare.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from triweave.errors import InputError, Problem
from triweave.planner.machine import Machine
from triweave.planner.memory import predict_memory
from triweave.planner.memory_replay import fits
from triweave.planner.profile import Profile
from triweave.planner.profile_machine import is_foreign, machine_from_profile
from triweave.planner.published_memory import capacity_of, case_of
from triweave.planner.time_rows import Run, run_of_row, step_s_of_row
from triweave.planner.time_step import StepTime, predict_step

COLUMNS = [
    "source",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq",
    "gpus",
    "gpus_per_node",
    "gpu_type",
    "gbs",
    "mbs",
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
    "zero",
    "sp",
    "precision",
    "recompute",
]
"""What describes a run; the columns of what was measured may be missing."""
MEASURED = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s", "peak_mem_gib")

WHOLE_NUMBERS = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq",
    "gpus",
    "gpus_per_node",
    "gbs",
    "mbs",
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
)
"""Positive where they are not empty."""

Row = Mapping[str, str]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, its missing measured columns empty.

    Raises:
        InputError: no such file, no CSV, or a column missing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(Problem("ROWS.csv", path, f"cannot be read ({error})")) from None
    if missing := [name for name in COLUMNS if name not in names]:
        raise InputError(Problem("ROWS.csv", path, f"lacks the columns {', '.join(missing)}"))
    return [{name: row.get(name) or "" for name in (*COLUMNS, *MEASURED)} for row in rows]


def predict_row(row: Row, profile: Profile | None = None) -> dict[str, Any]:
    """The prediction for one row, with the reason for each part that cannot be predicted.

    A profile prices the rows of its own GPU, and no others.
    """
    answer: dict[str, Any] = {"step_s": None, "tokens_per_s_per_gpu": None, "peak_gib": None, "fits": None}
    if wrong := [f"{name} = {row[name]}" for name in WHOLE_NUMBERS if not _is_whole(row[name])]:
        reason = f"{', '.join(wrong)}: must be a positive whole number"
        return answer | {"unpredicted": {"step_s": reason, "peak_gib": reason}}
    unpredicted = {}
    run = run_of_row(row)
    if isinstance(run, str):
        unpredicted["step_s"] = run
    else:
        time = step_of_run(run, on=None if profile is None else _on_profile(profile, run))
        answer |= {
            "step_s": time.step_s,
            "step_s_range": list(time.range_s),
            "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        }
    try:
        answer |= _memory(row, capacity_of(row["gpu_type"]))
    except InputError as error:
        unpredicted["peak_gib"] = str(error)
    if unpredicted:
        answer["unpredicted"] = unpredicted
    return answer


def _on_profile(profile: Profile, run: Run) -> Machine:
    """The row's machine by the profile, with the network that the row's source names."""
    if is_foreign(profile, run.cluster) or run.on.name != run.cluster.gpu.name:
        return run.on
    return replace(_machine(profile, run.cluster), nic_bytes_per_s=run.on.nic_bytes_per_s)


_machine = lru_cache(maxsize=256)(machine_from_profile)


def _is_whole(cell: str) -> bool:
    return not cell or (cell.isdecimal() and int(cell) > 0)


def _memory(row: Row, capacity_bytes: int | None) -> dict[str, Any]:
    case = case_of(row)
    question: dict[str, Any] = {
        "seq_len": case.seq_len,
        "num_micro_batches": case.num_micro_batches,
        "dtype": case.dtype,
        "assumptions": case.assumptions,
    }
    stages = predict_memory(case.spec, case.layout, **question)
    of_metric = {"allocated": "peak_allocated_bytes", "reserved": "reserved_bytes", "used": "used_bytes"}
    peak = max(getattr(stage, of_metric[case.metric]) for stage in stages) / case.unit
    fit = fits(case.spec, case.layout, capacity_bytes=capacity_bytes, **question) if capacity_bytes else None
    return {"peak_gib": peak, "peak_is": case.metric, "fits": fit}


def errors_of(row: Row, answer: Mapping[str, Any]) -> dict[str, float | bool]:
    """Signed relative errors (predicted over measured, less 1) of what the row measured."""
    errors: dict[str, float | bool] = {}
    if not all(_is_whole(row[name]) for name in WHOLE_NUMBERS):
        return errors
    ran_out = row["mfu"] == "OOM"
    row = {**row, **{name: row[name] if _is_positive(row[name]) else "" for name in MEASURED}}
    measured_step = step_s_of_row(row)
    if measured_step and answer["step_s"] is not None:
        errors["step_s"] = answer["step_s"] / measured_step - 1
        errors["tokens_per_s_per_gpu"] = measured_step / answer["step_s"] - 1
    if row["peak_mem_gib"] and answer["peak_gib"] is not None:
        errors["peak_gib"] = answer["peak_gib"] / float(row["peak_mem_gib"]) - 1
    if answer["fits"] is not None and (ran_out or measured_step):
        errors["fits_right"] = answer["fits"] != ran_out
        errors["missed_out_of_memory"] = answer["fits"] and ran_out
    return errors


def _is_positive(cell: str) -> bool:
    try:
        return 0 < float(cell) < float("inf")
    except ValueError:
        return False


def summary(errors: Sequence[Mapping[str, float | bool]]) -> dict[str, Any]:
    """Mean absolute, mean signed and worst error of each quantity; how often `fits` was right, or missed a death."""
    told: dict[str, Any] = {}
    for name in ("step_s", "tokens_per_s_per_gpu", "peak_gib"):
        values = [float(one[name]) for one in errors if name in one]
        if values:
            told[name] = {
                "rows": len(values),
                "mean_absolute": sum(map(abs, values)) / len(values),
                "mean_signed": sum(values) / len(values),
                "worst": max(values, key=abs),
            }
    right = [bool(one["fits_right"]) for one in errors if "fits_right" in one]
    if right:
        missed = sum(bool(one["missed_out_of_memory"]) for one in errors if "fits_right" in one)
        told["fits"] = {"rows": len(right), "right": sum(right) / len(right), "missed": missed / len(right)}
    return told


def step_of_run(run: Run, on: Machine | None = None) -> StepTime:
    """The step of a row's run, on its own machine or on another that measured tables describe."""
    return predict_step(
        run.decoder,
        run.layout,
        run.cluster,
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        precision=run.precision,
        stack=run.stack,
        on=run.on if on is None else on,
    )
