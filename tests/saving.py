"""Small engines that are saved and loaded in the tests of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from parity import engine_for, local_batch, make_samples

from triweave.checkpoint.places import open_store
from triweave.errors import RunFailed
from triweave.layout import Layout, even_layers
from triweave.training.engine import Engine
from triweave.training.run_progress import RunProgress
from triweave.training.saver import Saver
from triweave.training.step import train_step

SEQ = 8
SAMPLES = make_samples(6, 1, SEQ, 300, packed=False)
Trained = list[tuple[float, float]]


def engine_on(folder: Path, layout: Layout, **model: object) -> Engine:
    """An engine for four layers and six sequences."""
    if not layout.layers:
        layout = replace(layout, layers=even_layers(4, layout.num_stages))
    return engine_for(folder, layout, SEQ, len(SAMPLES) // layout.dp, **({"weights": "random"} | model))


def train(engine: Engine, steps: int) -> Trained:
    """Losses and gradient norms of some steps."""
    batch = local_batch(SAMPLES, engine.layout, engine.groups.at.dp, engine.groups.at.cp)
    return [train_step(engine, batch, 1e-2, 1.0) for _ in range(steps)]


def progress(step: int, updates: int | None = None) -> RunProgress:
    """Where a run is."""
    return RunProgress(step, 42, 6, "fingerprint", "a grid", updates)


def save(
    where: Path | str, engine: Engine, step: int, keep: int = 9, asynchronous: Literal["auto", "off"] = "off"
) -> str:
    """Save an engine as it is; returns the checkpoint's path."""
    saver = Saver(open_store(where), engine, keep, asynchronous)
    saver.save(progress(step), "seed: 42\n")
    saver.finish()
    if saver.unsaved is not None:
        raise RunFailed(saver.unsaved)
    return f"{where}/step-{step}"
