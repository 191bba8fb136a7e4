"""What was said of a run before it began, held against what it took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import engine_for
from tiny_configs import tiny_config

from triweave.catalogue import find_model
from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run, TrainConfig
from triweave.config.validate import ResolvedRun
from triweave.dryrun.check import check, to_json
from triweave.layout import Layout, even_layers
from triweave.moments import MOMENTS_BYTES
from triweave.planner.forecast import cluster_seen, forecast, run_identity
from triweave.planner.memory import predict_memory
from triweave.schedule.actions import Action, Kind
from triweave.training.clock import Clock
from triweave.training.foretold import REST, Foretold, Peak, compare, measure, told_peaks

GIB = 2**30


def resolved(layout: Layout, seq_len: int = 512) -> ResolvedRun:
    """A run of a narrow Llama."""
    spec = replace(find_model("llama-3.2-1b"), num_hidden_layers=4)
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    run = Run(
        model=ModelConfig(path="", weights="random"),
        data=DataConfig(train=("",), seq_len=seq_len, packing=False),
        train=TrainConfig(global_batch=4 * layout.dp),
    )
    return ResolvedRun(run, spec, layout, None, 4, layout.world_size)


def peak(allocated: float, rest: float) -> Peak:
    """GiB at most, of which `rest` come and go."""
    parts = {"weights": int((allocated - rest) * GIB), REST: int(rest * GIB)}
    return Peak(int(allocated * GIB), int(allocated * GIB), parts)


def test_a_close_prediction_is_told_and_a_far_one_warned_of() -> None:
    """One line a stage; beyond 1 % a second, which names the part that differs most."""
    near = list(compare([peak(40.2, 10)], [peak(40, 10)], "the check"))
    assert len(near) == 1
    assert "stage 0: 40.00 GiB at most, 40.20 predicted (+0.50%, the check)" in near[0]
    far = list(compare([peak(40, 10), peak(38, 8)], [peak(40, 10), peak(40, 10)], "the check"))
    assert len(far) == 3
    assert far[2].startswith("warning")
    assert "stage 1 was predicted 5.0% too low" in far[2]
    assert f"{REST}: 8.00 GiB for 10.00" in far[2]


def test_the_closed_form_is_what_is_said(tmp_path: Path) -> None:
    """Without an answer of the check each stage's peak is the planner's, and its parts add up to it."""
    run = resolved(Layout(pp=2))
    source, told = told_peaks(run, forecast(run, None), tmp_path)
    stages = predict_memory(run.spec, run.layout, seq_len=512, num_micro_batches=4)
    assert source == "the planner's closed form"
    assert [one.allocated for one in told] == [stage.peak_allocated_bytes for stage in stages]
    assert all(sum(one.parts.values()) == one.allocated for one in told)
    assert told[0].parts["optimizer moments"] == stages[0].components["moments"]


def test_the_check_goes_first_if_it_is_of_this_run(tmp_path: Path) -> None:
    """`check.json` in the run's folder is taken for the very run that it was made for, and for no other."""
    run = resolved(Layout(pp=2))
    answer = to_json(check(run, (0, 1)))
    (tmp_path / "check.json").write_text(json.dumps(answer))
    source, told = told_peaks(run, forecast(run, None), tmp_path)
    assert source == "triweave check"
    assert [one.allocated / GIB for one in told] == pytest.approx([rank["peak_gib"] for rank in answer["ranks"]])
    other = resolved(Layout(pp=2), seq_len=256)
    assert run_identity(other) != run_identity(run)
    assert told_peaks(other, forecast(other, None), tmp_path)[0] == "the planner's closed form"
    small = replace(run, run=replace(run.run, optimizer=OptimizerConfig(moments="bfloat16")))
    assert told_peaks(small, forecast(small, None), tmp_path)[0] == "the planner's closed form"
    (tmp_path / "check.json").write_text("{")
    assert told_peaks(run, forecast(run, None), tmp_path)[0] == "the planner's closed form"


def test_parts_are_measured(tmp_path: Path) -> None:
    """Weights, sums, master weights and moments are counted tensor by tensor: 2, 4, 4 and 8 or 4 bytes a parameter."""
    tiny_config(tmp_path)
    for moments, of_moments in MOMENTS_BYTES.items():
        engine = engine_for(tmp_path, Layout(layers=(4,)), 8, 1, moments, weights="random", dtype="bfloat16")
        numel = sum(unit.numel for unit in engine.sharding.units)
        (found,) = measure(engine)
        sizes = [found.parts[name] for name in ("weights", "gradients", "master weights", "optimizer moments")]
        assert sizes == [2 * numel, 4 * numel, 4 * numel, of_moments * numel]
        assert sum(found.parts.values()) == found.allocated


def test_a_cpu_says_nothing_of_memory(tmp_path: Path) -> None:
    """The forecast is written all the same; nobody counts what tensors take there."""
    tiny_config(tmp_path)
    engine = engine_for(tmp_path, Layout(layers=(4,)), 8, 1, weights="random")
    foretold = Foretold(resolved(Layout()), engine, tmp_path / "run", speaks=True)
    foretold.before(2)
    assert foretold.after(2) == []
    assert json.loads((tmp_path / "run" / "forecast.json").read_text())["stages"][0]["allocated_bytes"] > 0
    assert not (tmp_path / "run" / "memory.json").exists()
    assert engine.groups.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_card_is_known_by_its_name(name: str, gpu: str | None) -> None:
    """The driver's name gives the catalogue's card, or none."""
    found = cluster_seen(name, 8, 16)
    assert (found.gpu.name if found else None) == gpu
    if found:
        assert (found.num_nodes, found.gpus_per_node) == (2, 8)


def test_a_clock_takes_nobody_s_place(tmp_path: Path) -> None:
    """While a step is timed whoever was told of actions before is told still, the watch over hangs above all."""
    pipeline = engine_for(tiny_config(tmp_path), Layout(layers=(4,)), 8, 1, weights="random").pipeline
    told: list[Action | None] = []
    pipeline.before_action = told.append
    clock, action = Clock(torch.device("cpu")), Action(Kind.FORWARD, 0, 0)
    leave = clock.follow(pipeline)
    clock.start()
    pipeline.before_action(action)
    pipeline.after_action(action)
    pipeline.before_action(None)
    assert told == [action, None]
    assert [span.action for span in clock.stop()[1]] == [action]
    leave()
    pipeline.before_action(action)
    assert told == [action, None, action]
