"""First weights: read from a Hugging Face folder by slices, or drawn at random by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from triweave.checkpoint.hugging_face_read import WeightReader
from triweave.model_spec import ModelSpec
from triweave.parameters import Piece
from triweave.sharding import Unit, filling


def load_weights(units: Iterable[Unit], folder: Path, spec: ModelSpec) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only the slices that it holds."""
    with WeightReader(folder, spec) as reader:
        for unit in filling(units):
            for segment in unit.segments():
                piece = segment.piece
                values = reader.read(
                    piece.name, dim=piece.dim, start=piece.start, stop=piece.stop, dtype=unit.weight.dtype
                )
                unit.weight[segment.start : segment.stop].copy_(values.reshape(-1))


def draw_weights(units: Iterable[Unit], spec: ModelSpec, seed: int) -> None:
    """Fill this rank's parameters with new random weights.

    Each tensor's numbers depend on the seed and its own name only, so every layout starts from the same model.
    """
    for unit in filling(units):
        for segment in unit.segments():
            values = _drawn_slice(segment.piece, spec, seed)
            unit.weight[segment.start : segment.stop].copy_(values.reshape(-1))


def _drawn_slice(piece: Piece, spec: ModelSpec, seed: int) -> Tensor:
    if len(piece.shape) == 1:
        # Norm weights start at one, biases at zero.
        return torch.full(piece.local_shape, 1.0 if piece.name.endswith("norm.weight") else 0.0)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    whole = torch.empty(piece.shape).normal_(0.0, spec.initializer_range, generator=generator)
    return whole.narrow(piece.dim, piece.start, piece.stop - piece.start)
