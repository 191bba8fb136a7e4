"""What the ranks hold, put together into whole tensors: each rank tells its slices, one process lays them out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triweave.model_spec import ModelSpec
from triweave.parameters import Piece
from triweave.training.engine import Engine

State = dict[str, dict[str, Tensor]]
"""By kind (weight, gradient, exp_avg, exp_avg_sq) and by Hugging Face name."""


class Held(NamedTuple):
    """Elements `[start, start + len(values))` of a piece, counted row by row."""

    kind: str
    piece: Piece
    start: int
    values: np.ndarray


def held_slices(engine: Engine) -> list[Held]:
    """Everything that this rank's shards hold of weights, gradients and moments."""
    held = []
    for unit in engine.sharding.units:
        flat = {"weight": unit.master, "gradient": unit.gradient}
        flat |= {kind: torch.full_like(unit.master, torch.nan) for kind in ("exp_avg", "exp_avg_sq")}
        for part, moments in engine.optimizer.states():
            if part.unit is unit:
                for kind in ("exp_avg", "exp_avg_sq"):
                    flat[kind][part.inside] = moments[kind]
        for segment in unit.segments():
            inside = unit.in_shard(segment.start, segment.stop)
            if inside is not None:
                start = unit.shard_start + inside.start - segment.start
                held += [Held(kind, segment.piece, start, flat[kind][inside].numpy().copy()) for kind in flat]
    return held


def assemble(spec: ModelSpec, ranks: list[list[Held]]) -> State:
    """Whole tensors. Ranks that hold the same element must agree on it bit for bit, and every element be held."""
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
    kinds = ("weight", "gradient", "exp_avg", "exp_avg_sq")
    state = {kind: {name: torch.full(shape, torch.nan) for name, shape in shapes.items()} for kind in kinds}
    for kind, piece, start, values in (held for rank in ranks for held in rank):
        window = state[kind][piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
        flat = window.reshape(-1).clone()
        there, here = flat[start : start + len(values)], torch.from_numpy(values)
        assert there.isnan().logical_or(there == here).all(), f"ranks disagree on the {kind} of {piece.name}"
        there.copy_(here)
        window.copy_(flat.view(window.shape))
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            assert not tensor.isnan().any(), f"nobody holds all of the {kind} of {name}"
    return state


def differences(ours: State, theirs: State, *kinds: str) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [
        f"{kind}.{name}"
        for kind in kinds
        for name, value in ours[kind].items()
        if not torch.equal(value, theirs[kind][name])
    ]
