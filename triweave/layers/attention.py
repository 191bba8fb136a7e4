"""Grouped-query attention (Ainslie et al. 2305.13245), its heads split over the tensor-parallel ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from triweave.groups import Group, alone
from triweave.layers.attention_kernels import cudnn_fits, edges_fit, takes_edges, takes_groups
from triweave.layers.context_parallel import attend_in_context
from triweave.layers.documents import ContextDocuments, Documents, Packed, block_causal_mask
from triweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from triweave.layers.rotary import Rotation, rotate_queries_and_keys
from triweave.layers.tensor_parallel import TensorParallel
from triweave.model_spec import ModelSpec
from triweave.rules import HEAD_STEP

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Fastest first, as measured on Hopper (cuDNN about twice as fast as the built-in FlashAttention 2)."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Which kernels may compute attention, in order of preference."""

    backends: tuple[SDPBackend, ...] = ()
    """Empty leaves the choice to torch (the CPU)."""

    def in_words(self, dtype: torch.dtype, head_dim: int, *, packed: bool) -> str:
        """What the log shows: the kernel of whole sequences and, where some are `packed`, that of their documents."""
        if not self.backends:
            return "torch on cpu"
        rows_fit = head_dim % HEAD_STEP == 0
        able = {"cudnn": cudnn_fits(dtype, head_dim), "flash": dtype is not torch.float32, "efficient": rows_fit}
        names = [name for name, backend in BACKENDS.items() if backend in self.backends and able.get(name, True)]
        shown = ", else ".join(names[:2])
        documents = "by flash" if "flash" in names and edges_fit(dtype, head_dim) else "behind a mask"
        return f"{shown}; packed documents {documents}" if packed else shown


def choose_kernel(wanted: str, device: torch.device) -> AttentionKernel:
    """The kernel for `model.attention`: `auto` takes the first of `BACKENDS` that the inputs allow."""
    if device.type == "cpu":
        return AttentionKernel()
    return AttentionKernel(tuple(BACKENDS.values()) if wanted == "auto" else (BACKENDS[wanted],))


class Attention(nn.Module):
    """Queries, keys and values from one column-parallel product, heads apart, output by a row-parallel product.

    A rank holds whole groups: its query heads and the key/value heads that they read. With more ranks than
    key/value heads, several ranks hold the same one and their gradients are summed (`Piece.partial`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        kernel: AttentionKernel,
        *,
        cp: Group | None = None,
        fp8: bool = False,
    ) -> None:
        """`cp` are the ranks that hold the other slices of the same sequences; None where there are none."""
        super().__init__()
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_attention_heads // tp.size
        self.num_kv_heads = max(1, spec.num_key_value_heads // tp.size)
        self.cp = cp or alone()
        self.kernel = kernel
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, width, tp, bias=spec.attention_bias, fp8=fp8)
        self.o_proj = RowParallelLinear(self.num_heads * self.head_dim, spec.hidden_size, tp, fp8=fp8)

    def forward(self, qkv: Tensor, rotation: Rotation, documents: Packed | None) -> Tensor:
        """What `qkv_proj` gave, `[seq, batch, (heads + 2 kv_heads)/tp * head_dim]`, to `[seq/tp, batch, hidden]`.

        A context-parallel rank has its own slices of the sequence: seq is 1/cp of it here.
        """
        q, k, v = rotate_queries_and_keys(qkv, rotation, self.num_heads, self.num_kv_heads)
        if isinstance(documents, ContextDocuments) or (documents is None and self.cp.size > 1):
            out = attend_in_context(q, k, v, documents, self.cp, self.kernel.backends)
        else:
            out = attend(q, k, v, documents, self.kernel)
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, kernel: AttentionKernel) -> Tensor:
    """Causal attention, inside each document where documents are given.

    Documents are FlashAttention's wherever the kernel may be that; another one computes them behind a mask.

    Args:
        q: `[seq, batch, heads, head_dim]`.
        k: `[seq, batch, kv_heads, head_dim]`.
        v: as `k`.
        documents: what was packed together, None when every sequence is one document.
        kernel: what may compute it.

    Returns:
        `[seq, batch, heads, head_dim]`.
    """
    if documents is not None and takes_edges(q, kernel.backends):
        return _attend_varlen(q, k, v, documents)
    mask = None if documents is None else block_causal_mask(documents)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [batch, heads, seq, head_dim]
    if q.shape[1] != k.shape[1] and not takes_groups(q, kernel.backends):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    choice = sdpa_kernel(list(kernel.backends), set_priority=True) if kernel.backends else nullcontext()
    with choice:
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.permute(2, 0, 1, 3)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """FlashAttention over documents laid end to end: no mask is made and nothing is computed across documents."""
    from torch.nn.attention.varlen import varlen_attn

    seq, batch = q.shape[:2]
    arguments: dict[str, Any] = {"window_size": (-1, 0)}
    if q.shape[2] != k.shape[2]:
        if _takes_grouped_heads(varlen_attn):
            arguments["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))  # [batch * seq, heads, head_dim]
    cu, longest = documents.cu_seqlens, documents.max_seqlen
    out: Any = varlen_attn(q, k, v, cu, cu, longest, longest, **arguments)
    attended: Tensor = out.unflatten(0, (batch, seq)).transpose(0, 1)
    return attended


def _takes_grouped_heads(varlen_attn: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
