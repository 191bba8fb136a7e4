"""Replicas held against each other: one flipped bit is found, with its rank and its parameter, wherever it is."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_line import make_workspace, read_lines
from hypothesis import given
from hypothesis import strategies as st
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor

import triweave.training.loop as loop
from triweave.config.load import load_run
from triweave.config.validate import ResolvedRun, validate
from triweave.data.cache import PreparedData, prepare
from triweave.layout import Layout, even_layers
from triweave.training.engine import Engine
from triweave.training.process import Process
from triweave.training.replicas import checksum, compare_replicas, has_replicas
from triweave.training.start_ranks import run_ranks
from triweave.training.step import train_step

SEQ = 8
NAME = "model.layers.2.mlp.up_proj.weight"


def flip(engine: Engine, kind: str, name: str = NAME) -> bool:
    """Flip the lowest bit of the last number of a parameter that this rank holds; whether it holds one."""
    bits = {2: torch.int16, 4: torch.int32}
    for unit in engine.sharding.units:
        for segment in unit.segments():
            if segment.piece.name != name:
                continue
            inside = unit.in_shard(segment.start, segment.stop)
            if kind == "weight":
                held: Tensor | None = unit.weight[segment.start : segment.stop]
            elif inside is None:
                held = None
            elif kind == "master weight":
                held = unit.master[inside]
            else:
                part, state = next(
                    (part, state)
                    for part, state in engine.optimizer.states()
                    if part.unit is unit and part.inside.start <= inside.start < part.inside.stop
                )
                held = state["exp_avg_sq"][inside.start - part.inside.start : inside.stop - part.inside.start]
            if held is not None:
                held[-1:].view(bits[held.element_size()]).bitwise_xor_(1)
                return True
    return False


def compare_on_rank(
    rank: int, folder: Path, layout: Layout, dtype: str, kind: str, odd: int
) -> tuple[str | None, str | None, bool]:
    """What is said after a step, what after a bit of rank `odd` was flipped, and whether it holds that parameter."""
    layout = replace(layout, layers=even_layers(4, layout.num_stages))
    samples = make_samples(4 * layout.dp, 1, SEQ, 300, packed=False)
    engine = engine_for(folder, layout, SEQ, 4, weights="random", dtype=dtype)
    train_step(engine, local_batch(samples, layout, engine.groups.at.dp), 1e-2, 1.0)
    before = compare_replicas(engine)
    held = flip(engine, kind) if rank == odd else False
    return before, compare_replicas(engine), held


CASES = {
    "none": (Layout(dp=3, shard="none"), "weight", 1, "0, 2"),
    "none-master": (Layout(dp=3, shard="none"), "master weight", 2, "0, 1"),
    "optimizer": (Layout(dp=4), "weight", 3, "0, 1, 2"),
    "gradients": (Layout(dp=3, shard="gradients"), "weight", 0, "1, 2"),
    "optimizer-groups": (Layout(dp=6, shard_group=2), "weight", 4, "0, 1, 2, 3, 5"),
    "tp2": (Layout(tp=2, dp=3), "weight", 3, "1, 5"),
    "full-groups-of-1": (Layout(dp=3, shard="full", shard_group=1), "second moment", 1, "0, 2"),
}


@pytest.mark.parametrize(("layout", "kind", "odd", "others"), CASES.values(), ids=CASES.keys())
def test_one_bit_is_found(ranks: Ranks, tmp_path: Path, layout: Layout, kind: str, odd: int, others: str) -> None:
    """Trained replicas agree; with a bit flipped all ranks name the rank, the parameter and who holds it otherwise."""
    answers = ranks.run(layout.world_size, compare_on_rank, tiny_config(tmp_path), layout, "bfloat16", kind, odd)
    assert answers[odd][2]
    for before, after, _ in answers:
        assert before is None
        assert after == f"rank {odd} holds another {kind} of {NAME} than its replicas on rank {others}"


@pytest.mark.parametrize("kind", ["master weight", "second moment"])
def test_shards_are_compared_across_groups(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Of two groups each holds a part once: a difference is seen, and that nobody can say which is wrong."""
    layout = Layout(dp=4, shard="full", shard_group=2)
    for odd in (1, 2):
        answers = ranks.run(4, compare_on_rank, tiny_config(tmp_path), layout, "bfloat16", kind, odd)
        pair = ", ".join(map(str, sorted((odd, (odd + 2) % 4))))
        said = f"ranks {pair} must hold the same, and the {kind} of {NAME} differs between them"
        for before, after, _ in answers:
            assert before is None
            assert after == (f"{said}; which is wrong cannot be told" if answers[odd][2] else None)
        assert answers[1][2] or odd == 2


def test_float32_weights_are_their_own_masters(ranks: Ranks, tmp_path: Path) -> None:
    """In float32 too, where the optimizer writes the weights themselves."""
    answers = ranks.run(3, compare_on_rank, tiny_config(tmp_path), Layout(dp=3), "float32", "weight", 2)
    assert {after for _, after, _ in answers} == {
        f"rank 2 holds another weight of {NAME} than its replicas on rank 0, 1"
    }


def test_what_is_kept_once_is_not_compared() -> None:
    """One rank, or weights that every rank holds another part of, have nothing to be held against."""
    assert not has_replicas(Layout(tp=8))
    assert not has_replicas(Layout(dp=4, shard="full"))
    assert has_replicas(Layout(dp=4, shard="full", shard_group=2))
    assert has_replicas(Layout(dp=2))


@given(st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0, 9), st.integers(1, 70), st.data())
def test_every_bit_counts(dtype: torch.dtype, start: int, size: int, data: st.DataObject) -> None:
    """A run of any length, anywhere in a buffer, has another sum with any one bit flipped, and the same without."""
    buffer = torch.randn(96).to(dtype)
    run = buffer[start : start + size]
    before = checksum(run)
    assert torch.equal(checksum(buffer.clone()[start : start + size]), before)
    bits = run.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    bits[at] ^= 1 << bit
    assert not torch.equal(checksum(run), before)


def flipped_run(resolved: ResolvedRun, prepared: PreparedData, process: Process) -> int:
    """Train, with a bit of rank 1 flipped after the sixth step."""
    steps = 0

    def step(engine: Engine, *rest: Any) -> tuple[float, float]:
        nonlocal steps
        said, steps = train_step(engine, *rest), steps + 1
        if steps == 6 and process.rank == 1:
            for unit in engine.sharding.units:
                unit.finish_gather()  # or what is still on its way would repair it
            flip(engine, "weight")
        return said

    with patch.object(loop, "train_step", step):
        return loop.train(resolved, prepared, process)


@pytest.mark.parametrize(("every", "step"), [(2, 6), (100, 6)])
def test_a_run_ends_before_it_saves_what_differs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], every: int, step: int
) -> None:
    """The run stops at the step of the comparison, says what to do, and keeps the checkpoints before it."""
    folder = make_workspace(tmp_path)
    words = ["--layout.tp=1", "--layout.pp=1", f"--train.compare_replicas_every={every}"]
    os.chdir(folder)
    resolved = validate(load_run(Path("run.yaml"), words), world_size=2)
    prepared = prepare(resolved.run, resolved.spec.vocab_size)
    assert run_ranks(2, functools.partial(flipped_run, resolved, prepared)) == 1
    said = capfd.readouterr().err
    assert f"step {step}: ranks 0, 1 must hold the same, and the weight of {NAME} differs" in said
    assert "goes on from the last checkpoint" in said
    assert [line["step"] for line in read_lines(folder / "out" / "metrics.jsonl")] == list(range(1, step + 1))
    assert [path.name for path in (folder / "out" / "checkpoints").glob("step-*")] == ["step-3"]
