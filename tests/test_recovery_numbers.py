"""Losses and gradients that are no numbers: nothing is updated, and where they came from is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense import Held, assemble, held_slices
from hypothesis import given
from hypothesis import strategies as st
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config

from triweave.data.dataset import open_dataset, write_dataset
from triweave.data.packing import Packing
from triweave.layout import Layout, even_layers
from triweave.model_spec import spec_from_folder
from triweave.recovery.spikes import LEAST, Spikes
from triweave.training.engine import Engine
from triweave.training.not_finite import Finding, find_not_finite, in_order_of_use, keep_batch
from triweave.training.step import train_step

SEQ = 8
SAMPLES = make_samples(8, 1, SEQ, 300, packed=False)
LAYOUTS = [
    Layout(tp=2, pp=2),
    Layout(dp=2, shard="none"),
    Layout(dp=2, shard="gradients"),
    Layout(dp=2, shard="full"),
    Layout(pp=2, dp=2, schedule="zero-bubble"),
    Layout(pp=2, vpp=2, schedule="interleaved"),
]


def engine_on(folder: Path, layout: Layout) -> Engine:
    """An engine for four layers and eight sequences."""
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    return engine_for(folder, layout, SEQ, len(SAMPLES) // layout.dp, weights="random")


class Poison:
    """A forward hook that puts a NaN into what a module makes of one micro-batch."""

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.now = -1

    def watch(self, action: Any) -> None:
        """`Pipeline.before_action`: which micro-batch is computed."""
        if action is not None:
            self.now = action.micro_batch

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        """Spoil one value."""
        if self.now != self.micro_batch:
            return None
        spoilt = output.clone()
        spoilt.view(-1)[0] = math.nan
        return spoilt


def poison(engine: Engine, layer: int, micro_batch: int, dp_rank: int) -> None:
    """Spoil the attention output of a layer on one data-parallel rank, if this rank holds it."""
    spoiler = Poison(micro_batch)
    engine.pipeline.before_action = spoiler.watch
    for stage in engine.stages.values():
        if str(layer) in stage.model.layers and engine.groups.at.dp == dp_rank:
            stage.model.layers[str(layer)].self_attn.o_proj.register_forward_hook(spoiler)


def poisoned_on_rank(rank: int, folder: Path, layout: Layout) -> tuple[list[Held], list[Held], Any, Finding | None]:
    """State before and after a step with a NaN in layer 1, micro-batch 2 of the last data-parallel rank."""
    engine = engine_on(folder, layout)
    batch = local_batch(SAMPLES, engine.layout, engine.groups.at.dp)
    train_step(engine, batch, 1e-2, 1.0)
    before = held_slices(engine)
    poison(engine, 1, 2, layout.dp - 1)
    numbers = train_step(engine, batch, 1e-2, 1.0)
    for unit in engine.sharding.units:
        unit.gradient.zero_()  # it is no number, which is how a slice that nobody holds is told
    after = held_slices(engine)
    steps = {float(state["step"]) for _, state in engine.optimizer.states()}
    return before, after, (numbers, steps), find_not_finite(engine, batch)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nan_updates_nothing_and_is_named(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """A NaN in one activation leaves weights and moments as they were, and every rank names where it arose."""
    folder = tiny_config(tmp_path)
    spec = spec_from_folder(folder)
    answers = ranks.run(layout.world_size, poisoned_on_rank, folder, layout)
    before, after = (assemble(spec, [answer[moment] for answer in answers]) for moment in (0, 1))
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(value, after[kind][name]) for name, value in before[kind].items()), kind
    for _, _, ((loss, norm), steps), found in answers:
        assert not (math.isfinite(loss) and math.isfinite(norm))
        assert steps == {2.0}
        assert found is not None
        assert (found.parameter, found.phase) == ("model.layers.1.self_attn.o_proj.weight", "makes")
        assert (found.micro_batch, found.dp_rank) == (2, layout.dp - 1)


def gradient_poisoned_on_rank(rank: int, folder: Path, layout: Layout) -> Finding | None:
    """What is found when only a gradient is no number: that of what layer 2's MLP makes."""
    engine = engine_on(folder, layout)

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        output.register_hook(lambda grad: grad * math.inf)

    for stage in engine.stages.values():
        if "2" in stage.model.layers:
            stage.model.layers["2"].mlp.down_proj.register_forward_hook(spoil)
    return find_not_finite(engine, local_batch(SAMPLES, engine.layout, engine.groups.at.dp))


def test_gradient_that_is_no_number_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """With a finite loss it is the parameter that backward comes to first."""
    folder = tiny_config(tmp_path)
    for found in ranks.run(2, gradient_poisoned_on_rank, folder, Layout(pp=2)):
        assert found is not None
        assert found.parameter == "model.layers.2.mlp.down_proj.weight"
        assert found.phase == "gets a gradient that is"


def test_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    """A damaged weight is told as such, before anything is computed with it."""
    engine = engine_on(tiny_config(tmp_path), Layout())
    unit = next(unit for unit in engine.sharding.units if unit.name == "layers.3")
    segment = next(segment for segment in unit.segments() if "up_proj" in segment.piece.name)
    unit.master[segment.start] = math.inf
    found = find_not_finite(engine, local_batch(SAMPLES, engine.layout, 0))
    assert found == Finding("model.layers.3.mlp.up_proj.weight", "holds", 0, 0, 0)


def test_sound_batch_gives_no_finding(tmp_path: Path) -> None:
    """What was a transient fault is not found again, and the weights take the next step as if nothing had been."""
    engines = [engine_on(tiny_config(tmp_path), Layout()) for _ in range(2)]
    batch = local_batch(SAMPLES, engines[0].layout, 0)
    assert find_not_finite(engines[0], batch) is None
    assert train_step(engines[0], batch, 1e-2, 1.0) == train_step(engines[1], batch, 1e-2, 1.0)


def test_order_of_use_is_the_forward_s(tmp_path: Path) -> None:
    """Norms come before what they feed, whatever the order in a Hugging Face folder."""
    spec = spec_from_folder(tiny_config(tmp_path, num_hidden_layers=2))
    names = in_order_of_use(tensor.name for tensor in spec.tensors())
    assert sorted(names) == sorted(tensor.name for tensor in spec.tensors())
    short = [name.removeprefix("model.").removesuffix(".weight") for name in names]
    assert short[:4] == [
        "embed_tokens",
        "layers.0.input_layernorm",
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.k_proj",
    ]
    assert short[-4:] == ["layers.1.mlp.up_proj", "layers.1.mlp.down_proj", "norm", "lm_head"]


def test_kept_batch_can_be_read_again(tmp_path: Path) -> None:
    """The file holds exactly the tokens of the sequences, and needs no pickle."""
    tokens = np.arange(10, dtype=np.int32)
    starts = np.asarray([0, 4, 10], dtype=np.int64)
    write_dataset(tmp_path / "data", Packing(((0,), (1,)), 10, 16), np.arange(2), starts, tokens, tokens > 0)
    keep_batch(tmp_path / "kept" / "step-3.npz", open_dataset(tmp_path / "data", 8), [1, 0])
    with np.load(tmp_path / "kept" / "step-3.npz", allow_pickle=False) as kept:
        assert kept["ids"].tolist() == [1, 0]
        assert kept["lengths"].tolist() == [6, 4]
        assert kept["tokens"].tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]


@given(st.lists(st.floats(2.0, 2.1), min_size=LEAST, max_size=100), st.floats(3.0, 1e3))
def test_spike_is_told_and_noise_is_not(losses: list[float], spike: float) -> None:
    """Losses within a twentieth of each other are no spikes at 10 deviations; half as much again is one."""
    spikes = Spikes(10.0)
    assert not any(spikes.take(loss) for loss in losses)
    assert spikes.take(spike if spike > 1.5 * 2.1 else 1.5 * 2.1 + spike)


def test_new_level_is_soon_the_rule() -> None:
    """A loss that stays high is told at first and no longer once it is the median."""
    spikes = Spikes(10.0)
    told = [bool(spikes.take(loss)) for loss in [2.0] * 40 + [9.0] * 60]
    assert told[40]
    assert not any(told[90:])
    assert not any(told[:40])
