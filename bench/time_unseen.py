"""Predictions for GPUs whose own training runs had no part in any number, and for this project's own runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean

from time_cases import Case, predict_run, score, variant

from triweave.cluster import parse_cluster
from triweave.layout import even_layers
from triweave.planner.machine import Machine
from triweave.planner.time_step import predict_step
from triweave.planner.time_trainer import TRIWEAVE_FUSED


@dataclass(frozen=True)
class Unseen:
    """A kind of GPU, and its share of peak as known without any training run on it."""

    name: str
    row_names: tuple[str, ...]
    matmul_ceiling: float
    fp8_ceiling: float
    known_from: str
    own_stacks: bool = False
    """Whether its stacks were calibrated on this GPU: their efficiency is then 1."""


FP8_OVER_BF16 = 0.83
"""Shares of peak of the best fp8 and bf16 products, H100: 1403/1979 over 794/989, less what casts cost beside them."""

UNSEEN = (
    Unseen("A100 80 GB", ("A100-SXM-80GB", "A100-80GB", "A800", "A100"), 0.76, 0.0, "products of an A100", True),
    Unseen("A100 40 GB", ("A100-SXM-40GB",), 0.76, 0.0, "products of an A100"),
    Unseen("H100", ("H100-SXM-80GB", "H100-80GB", "H100"), 0.74, 0.74 * FP8_OVER_BF16, "products of an H200"),
    Unseen("H200", ("H200",), 0.74, 0.74 * FP8_OVER_BF16, "its own products"),
    Unseen("B200", ("B200-180GB", "B200"), 0.48, 0.48 * FP8_OVER_BF16, "products of a B200"),
    Unseen("GB200", ("GB200", "Blackwell"), 0.48, 0.48 * FP8_OVER_BF16, "products of a B200"),
)


@lru_cache(maxsize=64)
def _as_unseen(machine: Machine, matmul_ceiling: float, fp8_ceiling: float) -> Machine:
    return replace(machine, matmul_ceiling=matmul_ceiling, fp8_ceiling=fp8_ceiling)


def unseen_gpus(cases: Sequence[Case]) -> list[list[str]]:
    """One row a GPU: all its rows, priced without any number that came from them."""
    table = []
    taken: set[int] = set()
    for gpu in UNSEEN:
        # The longest names first: A100-SXM-40GB is no A100 of 80 GB, the cards of 500 W and those held back are none.
        members = [
            case
            for case in cases
            if case.row["gpu_type"].startswith(gpu.row_names)
            and not case.row["gpu_type"].endswith(("500W", "limited"))
            and not case.row["source"].startswith("torchao")
            and ("40GB" in case.row["gpu_type"]) == ("40 GB" in gpu.name)
            and id(case) not in taken
        ]
        taken |= {id(case) for case in members}
        if not members:
            continue
        ours = []
        for case in members:
            on = _as_unseen(case.run.on, gpu.matmul_ceiling, gpu.fp8_ceiling)
            stack = variant(case.run.stack, 1.0, case.run.stack.links) if gpu.own_stacks else case.run.stack
            ours.append(predict_run(replace(case.run, on=on, stack=stack)))
        result = score(members, [step for step, _ in ours], [bounds for _, bounds in ours])
        table.append(
            [gpu.name, gpu.known_from, str(result.n), *result.cells[:2], f"{100 * (result.inside or 0):.0f} %"]
        )
    return table


def own_runs(results: Path) -> list[list[str]]:
    """Runs of `bench/speed.py`: measured, predicted before they ran, predicted now, and with fused kernels."""
    from speed import LAYOUTS
    from speed import cases as shapes

    cluster = parse_cluster("1x2xh200-141gb")
    table, before, now = [], [], []
    for told in json.loads(results.read_text(encoding="utf-8")):
        spec, seq, batch = shapes(small=False)[told["model"]]
        layout = LAYOUTS[told["layout"]]
        layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
        step = predict_step(spec, layout, cluster, seq_len=seq, global_batch=batch)
        fused = predict_step(spec, layout, cluster, seq_len=seq, global_batch=batch, stack=TRIWEAVE_FUSED)
        measured = told["step_s"]
        before.append(told["predicted_step_s"] / measured - 1)
        now.append(step.step_s / measured - 1)
        table.append(
            [
                told["model"],
                told["layout"],
                f"{measured:.3f}",
                f"{100 * before[-1]:+.1f} %",
                f"{100 * now[-1]:+.1f} %",
                "yes" if step.range_s[0] <= measured <= step.range_s[1] else "no",
                f"{fused.step_s:.3f}",
            ]
        )
    table.append(
        ["mean", "", "", f"{100 * mean(before):+.1f} %", f"{100 * mean(now):+.1f} %", "", ""],
    )
    table.append(
        ["mean of sizes", "", "", f"{100 * mean(map(abs, before)):.1f} %", f"{100 * mean(map(abs, now)):.1f} %", "", ""]
    )
    return table
