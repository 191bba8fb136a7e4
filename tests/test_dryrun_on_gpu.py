"""One rank for real: run here on the CPU, where times are the host's and there is no memory to measure."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
import torch

from triweave.config.schema import DataConfig, ModelConfig, Run, RuntimeConfig, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun import on_gpu
from triweave.dryrun.on_gpu import Measured, fewer_micro_batches, flops_of, grid_step, measure_rank, mfu_of
from triweave.layout import Layout, Schedule, even_layers
from triweave.model_spec import ModelSpec
from triweave.schedule.actions import Kind
from triweave.training.step import train_step

SPEC = ModelSpec(128, 32, 64, 8, 4, 4, 8, max_position_embeddings=256)
SEQ = 32


def resolved(layout: Layout, micro_batches: int) -> ResolvedRun:
    """A run of a tiny model."""
    layout = replace(layout, layers=even_layers(SPEC.num_hidden_layers, layout.num_stages))
    run = Run(
        model=ModelConfig(path="none", weights="random"),
        data=DataConfig(train=("none",), seq_len=SEQ, packing=False),
        train=TrainConfig(global_batch=micro_batches * layout.dp, steps=1),
    )
    return ResolvedRun(run, SPEC, layout, None, micro_batches, layout.world_size)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=4),
        Layout(tp=4, sequence_parallel=False),
        Layout(pp=2, vpp=2, schedule="interleaved"),
        Layout(tp=2, pp=2, schedule="zero-bubble"),
        Layout(dp=8, shard="full"),
        Layout(tp=2, dp=4, shard="gradients", recompute=("layer",)),
        Layout(pp=2, dp=4),
    ],
    ids=str,
)
def test_every_rank_runs_alone(layout: Layout) -> None:
    """First and last rank of every kind of layout run their steps, all of their actions, and stay finite."""
    run = resolved(layout, 4)
    for rank in (0, layout.world_size - 1):
        found = measure_rank(run, rank, torch.device("cpu"), steps=1)
        assert isinstance(found, Measured)
        stages = layout.stages_of(layout.coordinates(rank).pp)
        assert {stage for _, stage in found.actions} == set(stages)
        assert all(seconds > 0 for seconds in found.actions.values())
        assert isfinite(found.loss)
        assert isfinite(found.grad_norm)
        assert found.grad_norm > 0


@pytest.mark.parametrize("wanted", [False, True])
def test_kernels_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """A rank's steps run with `runtime.deterministic` as the run has it, and torch is left as it was."""
    seen = []

    def step(*arguments: object) -> tuple[float, float]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return train_step(*arguments)

    monkeypatch.setattr(on_gpu, "train_step", step)
    run = resolved(Layout(tp=2), 2)
    run = replace(run, run=replace(run.run, runtime=RuntimeConfig(deterministic=wanted)))
    found = measure_rank(run, 0, torch.device("cpu"), steps=1)
    assert isinstance(found, Measured)
    assert isfinite(found.loss)
    assert seen == [wanted, wanted]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_flops_of_the_actions_are_those_of_the_step(schedule: Schedule) -> None:
    """Summed over stages, actions and tensor-parallel ranks, a micro-batch takes the model's FLOPs a token."""
    run = resolved(Layout(tp=2, pp=4, schedule=schedule), 4)
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if schedule == "zero-bubble" else (Kind.BACKWARD,)
    for causal in (True, False):
        total = sum(
            flops_of(run, (kind, stage), causal=causal) for stage in range(4) for kind in (Kind.FORWARD, *split)
        )
        assert 2 * total == pytest.approx(SEQ * SPEC.flops_per_token(SEQ, causal=causal))


def test_the_grid_from_one_rank() -> None:
    """With equal stages 1F1B takes (micro-batches + stages - 1) times an action's forward and backward."""
    run = resolved(Layout(pp=4), 12)

    def one(rank: int, stage: int) -> Measured:
        return Measured(rank, 0.0, {(Kind.FORWARD, stage): 1.0, (Kind.BACKWARD, stage): 2.0}, 0.0, 0, 0, 4, 0.0, 0.0)

    timeline = grid_step(run, [one(0, 0), one(2, 2), one(3, 3)], link_bandwidth=1e30)
    assert timeline.total_s == pytest.approx((12 + 3) * 3.0)
    with pytest.raises(ValueError, match="stage 1"):
        grid_step(run, [one(0, 0), one(3, 3)], link_bandwidth=1e30)


def test_mfu_of_the_steady_state() -> None:
    """A rank that takes exactly what the peak allows reaches all of it."""
    run = resolved(Layout(tp=2), 4)
    actions = {(kind, 0): flops_of(run, (kind, 0), causal=True) / 1e12 for kind in (Kind.FORWARD, Kind.BACKWARD)}
    assert mfu_of(run, actions, 1e12, causal=True) == pytest.approx(1.0)


def test_fewer_micro_batches() -> None:
    """The batch shrinks with the micro-batches, and never grows."""
    run = resolved(Layout(dp=2), 8)
    assert fewer_micro_batches(run, 3).run.train.global_batch == 6
    assert fewer_micro_batches(run, 99) == run
