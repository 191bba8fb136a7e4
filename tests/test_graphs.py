"""Layers as graphs: the same bits as without them, on every schedule, and only where they may be used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_standin import Rerun, graphs
from parity import engine_for, in_pieces, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor

from triweave.layout import Layout
from triweave.training.engine import Engine
from triweave.training.step import evaluate_step, train_step
from triweave.verify.reference import Sample

SEQ, VOCAB, MICRO_BATCHES, STEPS = 16, 300, 4, 3
How = Callable[[], AbstractContextManager[None]]


def after_steps(engine: Engine, samples: list[Sample], layout: Layout) -> tuple[list[Any], list[Tensor]]:
    """Losses and gradient norms of some steps with measurements between, and what the last leaves."""
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    told: list[Any] = []
    for _ in range(STEPS):
        told += [train_step(engine, batch, 1e-2, 1.0), evaluate_step(engine, batch)]
    units = engine.sharding.units
    return told, [*(unit.gradient.clone() for unit in units), *(unit.master.clone() for unit in units)]


def both_ways(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], how: How, model: dict[str, Any]
) -> tuple[list[str], list[int]]:
    """What differs in a bit with graphs and without, and the replays of each slot."""
    with how():
        plain = engine_for(folder, layout, SEQ, MICRO_BATCHES, weights="random", **model)
        told, tensors = after_steps(plain, samples, layout)
    capture = Rerun(reuses=layout.schedule != "zero-bubble")
    with how(), graphs(capture):
        engine = engine_for(folder, layout, SEQ, MICRO_BATCHES, weights="random", **model)
        again, ours = after_steps(engine, samples, layout)
    differing = [] if again == told else [f"{told} and {again}"]
    differing += [f"tensor {n}" for n, pair in enumerate(zip(tensors, ours, strict=True)) if not torch.equal(*pair)]
    return differing, [pool.replays for pool in capture.pools]


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": (Layout(), {}),
    "two-sequences": (Layout(micro_batch=2), {"dtype": "bfloat16"}),
    "fp8": (Layout(tp=2), {"dtype": "bfloat16", "fp8": True}),
    "fp8-alone": (Layout(recompute=("swiglu",)), {"dtype": "bfloat16", "fp8": True}),
    "tp4-pieces": (Layout(tp=4), {"how": in_pieces}),
    "packed": (Layout(micro_batch=2), {"packed": True}),
    "packed-zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble"), {"packed": True}),
    "gpipe": (Layout(pp=2, schedule="gpipe"), {}),
    "pp4": (Layout(pp=4, recompute=("layer",)), {}),
    "interleaved": (Layout(tp=2, pp=2, vpp=2, schedule="interleaved", recompute=("norm", "attention")), {}),
    "zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble", recompute=("norm", "swiglu")), {}),
    "zero-bubble-fp8": (Layout(pp=2, schedule="zero-bubble"), {"dtype": "bfloat16", "fp8": True}),
    "optimizer": (Layout(pp=2, dp=2, shard="optimizer"), {"dtype": "bfloat16"}),
    "replicas": (Layout(tp=2, dp=2, shard="none"), {}),
}


@pytest.mark.parametrize(("layout", "rest"), CASES.values(), ids=CASES.keys())
def test_graphs_change_no_bit(ranks: Ranks, tmp_path: Path, layout: Layout, rest: dict[str, Any]) -> None:
    """Losses, gradients and weights of three steps are those without graphs; from the second on all is replayed."""
    rest = dict(rest)
    how, packed = rest.pop("how", nullcontext), rest.pop("packed", False)
    folder = tiny_config(tmp_path, hidden_size=64, intermediate_size=96)
    samples = make_samples(MICRO_BATCHES * layout.dp, layout.micro_batch, SEQ, VOCAB, packed=packed)
    passes = 3 if layout.schedule == "zero-bubble" else 2
    for differing, replays in ranks.run(layout.world_size, both_ways, folder, layout, samples, how, rest):
        assert not differing
        layers = 4 // layout.pp
        assert sum(replays) == (STEPS - 1) * MICRO_BATCHES * layers * passes
