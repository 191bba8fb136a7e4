"""Memory that a CUDA operation takes while it runs and that no tensor of the program shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_FLOAT32 = 4


def scratch_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes that `func` takes beside its outputs; 0 for nearly all."""
    scratch = _SCRATCH.get(func)
    return 0 if scratch is None else scratch(args)


def _cudnn_backward(args: Sequence[Any]) -> int:
    """The gradient of the queries is summed in float32."""
    return int(args[1].numel()) * _FLOAT32


def _flash_backward(args: Sequence[Any]) -> int:
    """As cuDNN; and keys and values get a gradient for every query head before those of a group are summed."""
    query, key = args[1], args[2]
    group = query.shape[1] // key.shape[1]
    expanded = 0 if group == 1 else 2 * group * key.numel() * key.element_size()
    return _cudnn_backward(args) + int(expanded)


def _safe_softmax(args: Sequence[Any]) -> int:
    """The softmax before rows without any key are set to zero, and which entries those are (`SoftMax.cpp`)."""
    scores: Tensor = args[0]
    return scores.numel() * (scores.element_size() + 1)


_aten = torch.ops.aten
_SCRATCH: dict[Any, Callable[[Sequence[Any]], int]] = {
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._flash_attention_backward.default: _flash_backward,
    _aten._safe_softmax.default: _safe_softmax,
}
