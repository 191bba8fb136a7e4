"""Causal attention, forward and backward, by the kernel that training takes, over the views that the layers give it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from triweave.layers.attention import AttentionKernel, attend, choose_kernel
from triweave.planner import profile
from triweave.planner.profile import AttentionTable
from triweave.probe.session import Session
from triweave.probe.shapes import AttentionShape, attention_shapes
from triweave.probe.soak import Call, soak


def measure_attention(session: Session) -> tuple[AttentionTable, ...]:
    """All shapes of the family."""
    shapes = attention_shapes(session.small)
    kernel = choose_kernel("auto", session.device)
    calls = [call for shape in shapes for call in _calls(session, shape, kernel)]
    seconds = [round(took, 9) for took in soak(session, calls, "attention", rounds=6)]
    forwards, backwards = seconds[::2], seconds[1::2]
    points = tuple((*shape, ahead, back) for shape, ahead, back in zip(shapes, forwards, backwards, strict=True))
    return (AttentionTable(name_of(session, kernel), points),)


def _calls(session: Session, shape: AttentionShape, kernel: AttentionKernel) -> tuple[Call, Call]:
    batch, seq, heads, kv_heads, head_dim = shape
    qkv = session.random(seq, batch, heads + 2 * kv_heads, head_dim)
    q, k, v = (part.detach().requires_grad_() for part in qkv.split((heads, kv_heads, kv_heads), dim=2))
    upstream = session.random(seq, batch, heads, head_dim)

    def forward() -> Tensor:
        return attend(q, k, v, None, kernel)

    def without_graph() -> Tensor:
        with torch.no_grad():
            return forward()

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, (q, k, v), upstream)

    return Call("attention", without_graph), Call("attention", backward, forward)


def name_of(session: Session, kernel: AttentionKernel) -> profile.AttentionKernel:
    """What the planner calls the first of the kernel's backends that computes here."""
    if not session.on_gpu:
        return "torch"
    names: dict[SDPBackend, profile.AttentionKernel] = {
        SDPBackend.CUDNN_ATTENTION: "cudnn",
        SDPBackend.FLASH_ATTENTION: "flash2",
    }
    q, k, v = (session.random(128, 1, heads, 128) for heads in (4, 2, 2))
    for backend in kernel.backends:
        try:
            attend(q, k, v, None, AttentionKernel((backend,)))
        except RuntimeError:
            continue
        return names.get(backend, "torch")
    return "torch"
