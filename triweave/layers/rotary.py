"""Rotary position embedding (Su et al. 2104.09864) in Hugging Face's layout: halves rotated, nothing permuted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triweave.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of every position of a micro-batch, each `[seq, batch, 1, head_dim]`."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `[seq, batch, heads, head_dim]`: pairs are (i, i + head_dim/2)."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Rotation per position of each pair of dimensions, float32 `[head_dim/2]`; Llama 3.1's scaling where asked."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    # Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1).
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_position_embeddings / wavelengths
    smooth = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def make_rotation(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of every position.

    Args:
        frequencies: `[head_dim/2]`, from `inverse_frequencies`.
        positions: `[seq, batch]`; they start again at 0 in every packed document.
        dtype: of the activations; angles are computed in float32 first.
    """
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
