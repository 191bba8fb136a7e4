"""Rotary position embedding (Su et al. 2104.09864) in Hugging Face's layout: halves rotated, nothing permuted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triweave.kernels.dispatch import uses_kernels
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

    def inverse(self) -> Rotation:
        """The rotation back, which is also what gradients go through."""
        return Rotation(self.cos, -self.sin)


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


def rotate_queries_and_keys(
    qkv: Tensor, rotation: Rotation, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys rotated where they lie, and the values beside them: three views of `qkv`.

    A copy of each would be one more to write and to keep. Whoever gave `qkv` must not need its values again; a
    product needs its inputs for backward, not its output.

    Args:
        qkv: contiguous `[seq, batch, (heads + 2 kv_heads) * head_dim]`, overwritten.
        rotation: of the same positions.
        num_heads: query heads.
        num_kv_heads: key heads, and value heads.

    Returns:
        `[seq, batch, heads, head_dim]` and twice `[seq, batch, kv_heads, head_dim]`.
    """
    q, k, v = _RotateInPlace.apply(qkv, rotation, num_heads, num_kv_heads)
    return q, k, v


class _RotateInPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, rotation: Rotation, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rotation = rotation
        # Detached: to autograd the three are results of this function, not views of a tensor that was changed.
        heads = qkv.detach().unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
        if uses_kernels(qkv):
            from triweave.kernels.rotary import rotate_in_place

            rotate_in_place(heads, num_heads + num_kv_heads, rotation.cos, rotation.sin)
        else:
            rotated = heads[:, :, : num_heads + num_kv_heads]
            rotated.copy_(rotation(rotated))
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None, None]:
        rotation: Rotation = ctx.rotation
        if uses_kernels(grad_q):
            from triweave.kernels.rotary import gather_rotated_back

            return gather_rotated_back(grad_q, grad_k, grad_v, rotation.cos, rotation.sin), None, None, None
        back = rotation.inverse()
        return torch.cat((back(grad_q), back(grad_k), grad_v), dim=2).flatten(2), None, None, None
