"""Every sample once: the sequences that reach the model before and after resumes on other layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ranks import Ranks
from saving import SEQ, engine_on, save
from tiny_configs import tiny_config

from triweave.data.dataset import Dataset
from triweave.layout import Layout
from triweave.training.batches import training_batch
from triweave.training.checkpoints import load_checkpoint
from triweave.training.step import train_step

SEED, GLOBAL_BATCH, NUM_SEQUENCES = 7, 6, 60
STEPS = 4
"""On each of the grids: two passes over the data in all, and no grid ends with one."""
GRIDS = [
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=4),
    Layout(pp=2, vpp=2, dp=3, shard="none", schedule="interleaved"),
    Layout(dp=6, shard="full"),
    Layout(),
]


def told_apart() -> Dataset:
    """Sequences that each consist of their own number."""
    tokens = np.repeat(np.arange(NUM_SEQUENCES, dtype=np.int32), SEQ)
    trained = np.ones(len(tokens), dtype=np.bool_)
    trained[::SEQ] = False
    starts = np.arange(0, len(tokens) + 1, SEQ, dtype=np.int64)
    numbers = np.arange(NUM_SEQUENCES, dtype=np.int64)
    counts = np.full(NUM_SEQUENCES, SEQ - 1, dtype=np.int64)
    return Dataset(SEQ, tokens, trained, starts, np.arange(NUM_SEQUENCES + 1), counts, numbers)


def go_on(
    rank: int, folder: Path, layout: Layout, where: Path, done: int, steps: int
) -> list[tuple[int, int, list[int]]]:
    """Resume and train some steps; for each the step, the data-parallel rank and the sequences that it was given."""
    engine = engine_on(folder, layout)
    if done:
        done = load_checkpoint(where / f"step-{done}", engine).step
    seen = []
    for step in range(done, done + steps):
        batch = training_batch(told_apart(), engine, seed=SEED, step=step, global_batch=GLOBAL_BATCH)
        train_step(engine, batch, 1e-3, 1.0)
        given = [int(column[0]) for part in batch.inputs for column in part.tokens.t()]
        assert all((part.tokens == part.tokens[0]).all() for part in batch.inputs)
        seen.append((step, engine.groups.at.dp, given))
    save(where, engine, done + steps)
    return seen


def course(ranks: Ranks, folder: Path, where: Path, grids: list[Layout], steps: int) -> list[list[int]]:
    """The sequences of every step, in the order of the global batch. Ranks that compute the same are given the same."""
    given: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(grids):
        for seen in ranks.run(layout.world_size, go_on, folder, layout, where, number * steps, steps):
            for step, dp_rank, sequences in seen:
                assert given.setdefault((step, dp_rank), sequences) == sequences
    taken: list[list[int]] = [[] for _ in range(steps * len(grids))]
    for (step, _), sequences in sorted(given.items()):
        taken[step] += sequences
    return taken


def test_none_twice_and_none_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """Over five grids, each resumed from the one before, a pass takes every sequence once, in the order of one grid."""
    folder = tiny_config(tmp_path / "model")
    moved = course(ranks, folder, tmp_path / "moved", GRIDS, STEPS)
    for epoch in (moved[:10], moved[10:]):
        assert sorted(number for step in epoch for number in step) == list(range(NUM_SEQUENCES))
    assert moved[:10] != moved[10:]
    assert moved == course(ranks, folder, tmp_path / "stayed", [Layout()], len(GRIDS) * STEPS)
