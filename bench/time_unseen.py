"""Predictions for GPUs whose own training runs had no part in any number, and for this project's own runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean

from time_cases import Case, predict_run, score, variant

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.layout import Layout, even_layers
from triweave.planner.machine import Machine, machine
from triweave.planner.time_listing import layer_operations
from triweave.planner.time_parts import place_of
from triweave.planner.time_shapes import decoder_of
from triweave.planner.time_step import predict_step
from triweave.planner.time_trainer import EAGER, FUSED, TRIWEAVE_EAGER, TRIWEAVE_FUSED


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


HOPPER_FP8, BLACKWELL_FP8 = (1403 / 1979) / (794 / 989), (3432 / 4500) / (1745 / 2250)
"""Share of peak of the best fp8 product over that of the best bf16 product (machine-learning-engineering's tables)."""
A100_SHARE = 0.76 / (271 / 312)
"""What products of training shapes reach of the best product on an A100."""

UNSEEN = (
    Unseen("A100 80 GB", ("A100-SXM-80GB", "A100-80GB", "A800", "A100"), 0.76, 0.0, "products of an A100", True),
    Unseen("A100 40 GB", ("A100-SXM-40GB",), 0.76, 0.0, "products of an A100"),
    Unseen("H100", ("H100-SXM-80GB", "H100-80GB", "H100"), 0.74, 0.74 * HOPPER_FP8, "products of an H200"),
    Unseen(
        "H100, second way",
        ("H100-SXM-80GB", "H100-80GB", "H100"),
        794 / 989 * A100_SHARE,
        1403 / 1979 * A100_SHARE,
        "its best product, at A100's share of its own",
    ),
    Unseen("H200", ("H200",), 0.74, 0.74 * HOPPER_FP8, "its own products"),
    Unseen("B200", ("B200-180GB", "B200"), 0.48, 0.48 * BLACKWELL_FP8, "products of a B200"),
    Unseen("GB200", ("GB200", "Blackwell"), 0.48, 0.48 * BLACKWELL_FP8, "products of a B200"),
)


@lru_cache(maxsize=64)
def _as_unseen(machine: Machine, matmul_ceiling: float, fp8_ceiling: float) -> Machine:
    return replace(machine, matmul_ceiling=matmul_ceiling, fp8_ceiling=fp8_ceiling)


def _is_of(case: Case, gpu: Unseen) -> bool:
    """Cards held below their power are another machine."""
    name, source = case.row["gpu_type"], case.row["source"]
    if name.endswith(("500W", "limited")) or source.startswith("torchao"):
        return False
    return name.startswith(gpu.row_names) and ("40GB" in name) == ("40 GB" in gpu.name)


def unseen_gpus(cases: Sequence[Case]) -> list[list[str]]:
    """One row a GPU: all its rows, priced without any number that came from them."""
    table = []
    for gpu in UNSEEN:
        members = [case for case in cases if _is_of(case, gpu)]
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
        step = predict_step(spec, layout, cluster, seq_len=seq, global_batch=batch, stack=TRIWEAVE_EAGER)
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


def one_layer() -> list[list[str]]:
    """A layer of Llama-3-8B, 8,192 tokens on one H200, operation by operation, eager and fused."""
    decoder, layout = decoder_of(find_model("meta-llama/Llama-3.1-8B")), Layout()
    table = []
    for title, stack, kernels in (("eager", TRIWEAVE_EAGER, EAGER), ("fused", TRIWEAVE_FUSED, FUSED)):
        place = place_of(decoder, layout, machine("h200-141gb"), stack, seq_len=8192, gpus_per_node=1, precision="bf16")
        groups: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        for one in layer_operations(place, kernels):
            name = "matrix products" if one.flops and one.name != "attention" else one.name.split(":")[0]
            sums = groups[name]
            sums[0] += one.flops / 1e12
            sums[1] += one.bytes / 1e9
            sums[2 if one.direction == "forward" else 3] += 1e3 * one.seconds
        groups["all"] = [sum(column) for column in zip(*groups.values(), strict=True)]
        table += [[title, name, *(f"{value:.2f}" for value in sums)] for name, sums in groups.items()]
    return table
