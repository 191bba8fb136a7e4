"""This project's own runs on two H200: what was measured, what was predicted before and is now, and why."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import MappingProxyType

from triweave.catalogue import find_model
from triweave.cluster import parse_cluster
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.planner.machine import Machine, machine
from triweave.planner.time_listing import layer_operations
from triweave.planner.time_parts import place_of
from triweave.planner.time_shapes import decoder_of
from triweave.planner.time_stack import EAGER_ROTARY, Bytes, Copies, Stack
from triweave.planner.time_step import StepTime, predict_step
from triweave.planner.time_trainer import EAGER, FUSED, TRIWEAVE_EAGER, TRIWEAVE_FUSED

GPU = "h200-141gb"


@dataclass(frozen=True)
class Own:
    """A run of `bench/speed.py`."""

    model: str
    layout_name: str
    spec: ModelSpec
    layout: Layout
    seq: int
    batch: int
    measured_s: float
    told_s: float
    """Predicted before it ran."""

    def predict(self, stack: Stack, on: Machine | None = None) -> StepTime:
        cluster = parse_cluster(f"1x2x{GPU}")
        return predict_step(
            self.spec, self.layout, cluster, seq_len=self.seq, global_batch=self.batch, stack=stack, on=on
        )


def read_own(results: Path) -> Iterator[Own]:
    """The runs of a results file."""
    from speed import LAYOUTS
    from speed import cases as shapes

    for told in json.loads(results.read_text(encoding="utf-8")):
        spec, seq, batch = shapes(small=False)[told["model"]]
        layout = LAYOUTS[told["layout"]]
        layout = replace(layout, layers=even_layers(spec.num_hidden_layers, layout.num_stages))
        yield Own(told["model"], told["layout"], spec, layout, seq, batch, told["step_s"], told["predicted_step_s"])


def own_runs(runs: Sequence[Own]) -> list[list[str]]:
    """Measured, the error before the run and now, and the forecast for fused kernels and overlap."""
    table, before, now = [], [], []
    for run in runs:
        step = run.predict(TRIWEAVE_EAGER)
        before.append(run.told_s / run.measured_s - 1)
        now.append(step.step_s / run.measured_s - 1)
        table.append(
            [
                run.model,
                run.layout_name,
                f"{run.measured_s:.3f}",
                f"{100 * before[-1]:+.1f} %",
                f"{100 * now[-1]:+.1f} %",
                "yes" if step.range_s[0] <= run.measured_s <= step.range_s[1] else "no",
                f"{run.predict(TRIWEAVE_FUSED).step_s:.3f}",
            ]
        )
    table.append(["mean", "", "", f"{100 * mean(before):+.1f} %", f"{100 * mean(now):+.1f} %", "", ""])
    sizes = [f"{100 * mean(map(abs, errors)):.1f} %" for errors in (before, now)]
    return [*table, ["mean of sizes", "", "", *sizes, "", ""]]


CAUSES: tuple[tuple[str, dict[str, object]], ...] = (
    ("SwiGLU's backward, 10 kernels", {"activation": Bytes(10, 56)}),
    ("views are slower", {name: getattr(TRIWEAVE_EAGER, name) for name in ("activation", "rotary", "heads")}),
    ("passes over shards", {name: getattr(TRIWEAVE_EAGER, name) for name in ("gather_copies", "scatter_copies")}),
    ("optimizer's passes", {"optimizer": TRIWEAVE_EAGER.optimizer}),
    ("loss, embedding", {name: getattr(TRIWEAVE_EAGER, name) for name in ("loss", "lookup")}),
)
"""What was not counted before the runs, in the order in which it is added."""


def own_causes(runs: Sequence[Own]) -> list[list[str]]:
    """Milliseconds of a step that each cause adds, after those before it."""
    table = []
    for run in runs:
        without = replace(machine(GPU), nvlink_gather=MappingProxyType({}))
        stack = replace(
            TRIWEAVE_EAGER,
            activation=Bytes(10, 40),
            rotary=EAGER_ROTARY,
            heads=Bytes(2, 4),
            loss=Bytes(26, 20),
            lookup=Bytes(4, 12),
            optimizer=34.0,
            gather_copies=Copies(),
            scatter_copies=Copies(),
        )
        steps = [run.predict(stack, without).step_s, run.predict(stack).step_s]
        for _, changes in CAUSES:
            stack = replace(stack, **changes)  # type: ignore[arg-type]
            steps.append(run.predict(stack).step_s)
        added = [f"{1e3 * (after - before):.0f}" for before, after in pairwise(steps)]
        left = f"{1e3 * (run.measured_s - steps[-1]):+.0f}"
        table.append([run.model, run.layout_name, f"{1e3 * (run.measured_s - steps[0]):.0f}", *added, left])
    return table


def one_layer() -> list[list[str]]:
    """A layer of Llama-3-8B, 8,192 tokens on one H200, operation by operation, eager and fused."""
    decoder, layout = decoder_of(find_model("meta-llama/Llama-3.1-8B")), Layout()
    table = []
    for title, stack, kernels in (("eager", TRIWEAVE_EAGER, EAGER), ("fused", TRIWEAVE_FUSED, FUSED)):
        place = place_of(decoder, layout, machine(GPU), stack, seq_len=8192, gpus_per_node=1, precision="bf16")
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
