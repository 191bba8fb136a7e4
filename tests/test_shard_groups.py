"""Shard groups (HSDP): what is summed in two steps is what is summed in one, where the order of sums allows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import Held, State, assemble, differences, held_slices
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config

from triweave.layers.cross_entropy import IGNORE
from triweave.layout import Layout
from triweave.model_spec import spec_from_folder
from triweave.sharding import Unit
from triweave.training.step import train_step
from triweave.verify.reference import Sample

SEQ = 8
DP = 4


def samples_of(trains: set[int], micro_batches: int) -> list[Sample]:
    """Micro-batches of each rank, of which only those of the ranks `trains` have tokens with a loss."""
    samples = make_samples(micro_batches * DP, 1, SEQ, 300, packed=False)
    return [
        sample if number // micro_batches in trains else Sample(sample.inputs, torch.full_like(sample.targets, IGNORE))
        for number, sample in enumerate(samples)
    ]


def train_on_rank(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], max_norm: float
) -> tuple[list[tuple[float, float]], list[Held]]:
    """Losses and norms of three steps, and the state that they leave."""
    engine = engine_for(folder, layout, SEQ, len(samples) // DP, weights="random", dtype="bfloat16")
    batch = local_batch(samples, layout, engine.groups.at.dp)
    return [train_step(engine, batch, 1e-2, max_norm) for _ in range(3)], held_slices(engine)


def trained(
    ranks: Ranks, folder: Path, layout: Layout, samples: list[Sample], max_norm: float = 0.0
) -> tuple[list[tuple[float, float]], State]:
    """What one layout computes; every rank says the same, and ranks that hold the same part agree on every bit."""
    layout = replace(layout, layers=(4,))
    answers = ranks.run(layout.world_size, train_on_rank, folder, layout, samples, max_norm)
    assert all(said == answers[0][0] for said, _ in answers)
    return answers[0][0], assemble(spec_from_folder(folder), [held for _, held in answers])


@pytest.mark.parametrize(("shard", "micro_batches"), [("optimizer", 2), ("gradients", 1), ("full", 1)])
def test_bit_for_bit_where_no_sum_is_rounded_otherwise(
    ranks: Ranks, tmp_path: Path, shard: Any, micro_batches: int
) -> None:
    """With two ranks that add something, one in each group, three steps equal those of one group in every bit.

    (a + 0) + (b + 0) is (a + 0 + b) + 0 in float32; with four summands (a + b) + (c + d) is rounded otherwise. So it is
    where shards of several micro-batches are added up before they are summed across (`gradients`, `full`), not after.
    The squared norm is a sum over other parts of a unit: it may differ in the last bit, and must not scale anything.
    """
    folder, samples = tiny_config(tmp_path), samples_of({0, 3}, micro_batches)
    one, state = trained(ranks, folder, Layout(dp=DP, shard=shard), samples)
    two, other = trained(ranks, folder, Layout(dp=DP, shard=shard, shard_group=2), samples)
    assert [loss for loss, _ in one] == [loss for loss, _ in two]
    assert [norm for _, norm in one] == pytest.approx([norm for _, norm in two], rel=1e-6)
    assert differences(state, other, "weight", "gradient", "exp_avg", "exp_avg_sq") == []


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "full"])
def test_rounding_is_all_that_differs(ranks: Ranks, tmp_path: Path, shard: Any) -> None:
    """Where all ranks add something and the norm clips, losses and norms are those of one group but for rounding."""
    folder, samples = tiny_config(tmp_path), samples_of(set(range(DP)), 2)
    one, _ = trained(ranks, folder, Layout(dp=DP, shard=shard), samples, 0.1)
    two, _ = trained(ranks, folder, Layout(dp=DP, shard=shard, shard_group=2), samples, 0.1)
    # Adam's first steps are of the learning rate's size whatever the gradient: weights in bf16 may round apart.
    assert [number for step in two for number in step] == pytest.approx(
        [number for step in one for number in step], rel=1e-3
    )
    assert two[0] == pytest.approx(one[0], rel=1e-6)


def exact_on_rank(rank: int, folder: Path, layout: Layout) -> list[tuple[float, bool]]:
    """For each unit the elements of its reduced sums that are no sum of whole numbers that every rank added."""
    engine = engine_for(folder, layout, SEQ, 2, weights="random")
    found = []
    for unit in engine.sharding.units:
        unit.zero_gradients()
        unit.begin_gradients()
        generator = torch.Generator().manual_seed(7)
        parts = [torch.randint(-1000, 1000, (unit.numel,), generator=generator).float() for _ in range(DP)]
        whole = unit.whole_gradient
        assert whole is not None
        for parameter in unit.parameters:
            unit.view(whole, parameter).copy_(unit.view(parts[engine.groups.at.dp], parameter))
            unit._holders[parameter.name].main_grad_is_former = False  # type: ignore[attr-defined]
        unit.start_reduction().finish()
        across = unit.start_sum_across() if unit.shards_gradients else None
        if across is not None:
            across.wait()
        held = torch.zeros(unit.numel)
        for parameter in unit.parameters:
            unit.view(held, parameter).copy_(unit.view(sum(parts), parameter))  # type: ignore[arg-type]
        found.append((float(held.abs().max()), torch.equal(unit.gradient, held[unit.shard_start : unit.shard_stop])))
    return found


@pytest.mark.parametrize(("shard", "group"), [("optimizer", 2), ("gradients", 2), ("full", 2), ("full", 1)])
def test_each_part_is_summed_over_all_ranks_once(ranks: Ranks, tmp_path: Path, shard: Any, group: int) -> None:
    """Sums of whole numbers are exact in any order: every rank's part of every unit is that of all four."""
    layout = Layout(dp=DP, shard=shard, shard_group=group, layers=(4,))
    for found in ranks.run(DP, exact_on_rank, tiny_config(tmp_path), layout):
        assert all(largest > 1000 and equal for largest, equal in found)


def places_on_rank(rank: int, folder: Path, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Groups of this rank, and the shard that it owns of the first layer."""
    engine = engine_for(folder, layout, SEQ, 2, weights="random")
    unit: Unit = engine.sharding.units[1]
    return engine.groups.shards.ranks, engine.groups.across.ranks, unit.shard_start, unit.shard_stop


def test_neighbours_share_and_their_likes_are_across(ranks: Ranks, tmp_path: Path) -> None:
    """Of TP 2 x DP 4 in groups of 2 each rank shares with its neighbour, and sums with whoever owns the same part."""
    layout = Layout(tp=2, dp=DP, shard="full", shard_group=2, layers=(4,))
    found = ranks.run(8, places_on_rank, tiny_config(tmp_path), layout)
    assert [shards for shards, *_ in found] == [(0, 2), (1, 3)] * 2 + [(4, 6), (5, 7)] * 2
    assert [across for _, across, *_ in found] == [(0, 4), (1, 5), (2, 6), (3, 7)] * 2
    for _, across, start, stop in found:
        assert {found[rank][2:] for rank in across} == {(start, stop)}
