"""Attention over a part of the keys, with the log-sum-exp of its scores, forward and backward.

Whoever sees the keys in parts adds the parts up by their log-sum-exps, and hands the sum's back to each backward:
`exp(score - logsumexp)` is then the probability among all keys, and what the part gives is its share of the gradients
(Dao 2307.08691, section 3.1; Liu et al. 2310.01889). PyTorch's public attention gives no log-sum-exp, so its operators
are called by name. They are the same from torch 2.11 to 2.13, but for the last dim of cuDNN's log-sum-exp: it stays as
it came.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from triweave.layers.documents import Edges
from triweave.rules import CUDNN_HEAD, FLASH_HEAD, HEAD_STEP

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Sight:
    """Which of the keys a query sees; all of them without more being said."""

    causal: bool = False
    """Query `i` sees keys up to `i`; there are as many keys as queries."""
    mask: Tensor | None = None
    """Boolean `[batch, 1, queries, keys]`, true where a query sees a key, and each sees one at least."""


def cudnn_fits(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN's attention has a kernel for heads of this type and size (`sdp_utils.cpp`).

    It has none whose result does not depend on timing: where torch is told to use no other, torch leaves it too.
    """
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim <= CUDNN_HEAD and head_dim % HEAD_STEP == 0
    return fits and not torch.are_deterministic_algorithms_enabled()


def edges_fit(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention's form for documents takes such heads: it fills no rows up (`flash_api.cpp`)."""
    return dtype is not torch.float32 and head_dim <= FLASH_HEAD and head_dim % HEAD_STEP == 0


def takes_edges(q: Tensor, backends: Collection[SDPBackend]) -> bool:
    """Whether packed documents are computed from edge to edge, by FlashAttention; elsewhere a mask says who sees whom.

    Args:
        q: queries, whose last dim is the head's.
        backends: what may compute it; empty where nobody has chosen.
    """
    allowed = not backends or SDPBackend.FLASH_ATTENTION in backends
    return q.is_cuda and allowed and edges_fit(q.dtype, q.shape[-1])


def takes_groups(q: Tensor, backends: Collection[SDPBackend]) -> bool:
    """Whether several heads of queries may read one key/value head: by every kernel but `efficient`.

    Where that is the only fast one, as for float32, matrix products would be taken in its place, which hold the scores
    of all heads: with a key/value head for each head they are not.

    Args:
        q: queries, whose last dim is the head's.
        backends: what may compute it; empty where nobody has chosen.
    """
    others = {SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION} if q.dtype is not torch.float32 else set()
    efficient = SDPBackend.EFFICIENT_ATTENTION in backends and q.shape[-1] % HEAD_STEP == 0
    return not (q.is_cuda and efficient and others.isdisjoint(backends))


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, backends: Collection[SDPBackend]
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the given keys alone.

    Args:
        q: `[batch, heads, queries, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`, each head read by `heads / kv_heads` query heads.
        v: as `k`.
        sight: which queries see which keys.
        backends: what may compute it on a GPU. float32 and masks are left to matrix products.

    Returns:
        `[batch, heads, queries, head_dim]`, and the log-sum-exp of each query's scores, float32 `[batch, heads,
        queries]` or with a last dim of 1.
    """
    found: tuple[Tensor, Tensor]
    kernel = _kernel(q, sight, backends)
    if kernel is None:
        found = _by_products(q, k, v, sight)
    elif kernel is SDPBackend.CUDNN_ATTENTION:
        found = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, sight.causal)[:2]
    elif q.is_cuda:
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, sight.causal)[:2]
    else:
        bias = _bias(sight, q.dtype)
        found = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, sight.causal, attn_mask=bias)
    return found


def attend_part_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    sight: Sight,
    backends: Collection[SDPBackend],
) -> tuple[Tensor, Tensor, Tensor]:
    """The part's share of the gradients of `q`, `k` and `v`.

    torch keeps cuDNN's plans by the strides of `q`, `k` and `v` alone: `out` and `grad_out` must lie in memory as they
    did in any call with the same of those.

    Args:
        grad_out: gradient of the output of the attention over all keys, contiguous in its last dim.
        q: as in `attend_part`, as are `k`, `v`, `sight` and `backends`.
        k: see there.
        v: see there.
        out: output of the attention over all keys.
        logsumexp: of the attention over all keys, in the form that `attend_part` gave, contiguous.
        sight: see there.
        backends: see there.
    """
    grads: tuple[Tensor, Tensor, Tensor]
    kernel = _kernel(q, sight, backends)
    if kernel is None:
        return _by_products_backward(grad_out, q, k, v, out, logsumexp, sight)
    if not q.is_cuda:
        bias = _bias(sight, q.dtype)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, logsumexp, 0.0, sight.causal, attn_mask=bias
        )
        return grads
    # Nothing is dropped, so no random state is read; None for edges says that all sequences are of one length.
    state, edges = no_random_state(q.device), (None, None, q.shape[2], k.shape[2])
    if kernel is SDPBackend.CUDNN_ATTENTION:
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, logsumexp, *state, None, *edges, 0.0, sight.causal
        )
    else:
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, logsumexp, *edges, 0.0, sight.causal, *state
        )
    return grads


def attend_documents(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents that are laid end to end; the last query of each sees all of its keys.

    On a GPU, in 16 bits: FlashAttention, which aligns its causal mask to the last query and the last key.

    Args:
        q: `[queries, heads, head_dim]`.
        k: `[keys, kv_heads, head_dim]`.
        v: as `k`.
        edges: of the documents.

    Returns:
        As `q`, and float32 `[heads, queries]`.
    """
    found: tuple[Tensor, Tensor] = _aten._flash_attention_forward(
        q, k, v, *edges, 0.0, True, False, window_size_left=-1, window_size_right=0
    )[:2]
    return found


def attend_documents_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    edges: Edges,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, `k` and `v` of `attend_documents`, from what it took and gave."""
    state = no_random_state(q.device)
    grads: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
        grad_out, q, k, v, out, logsumexp, *edges, 0.0, True, *state, window_size_left=-1, window_size_right=0
    )
    return grads


def no_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """What a backward takes for the random state of a forward that has dropped nothing."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _kernel(q: Tensor, sight: Sight, backends: Collection[SDPBackend]) -> SDPBackend | None:
    """The fastest kernel that is allowed and takes these inputs; None leaves it to matrix products."""
    if not q.is_cuda:
        return None if set(backends) == {SDPBackend.MATH} else SDPBackend.FLASH_ATTENTION
    if sight.mask is not None or q.dtype is torch.float32:
        return None
    if SDPBackend.CUDNN_ATTENTION in backends and cudnn_fits(q.dtype, q.shape[-1]):
        return SDPBackend.CUDNN_ATTENTION
    # The operator itself wants rows of whole 16 bytes; the public function would fill them up.
    flash = SDPBackend.FLASH_ATTENTION in backends and q.shape[-1] % 8 == 0
    return SDPBackend.FLASH_ATTENTION if flash else None


def _bias(sight: Sight, dtype: torch.dtype) -> Tensor | None:
    """The mask as what is added to the scores; the CPU's kernel takes it in the type of the queries."""
    if sight.mask is None:
        return None
    return torch.zeros_like(sight.mask, dtype=dtype).masked_fill_(~sight.mask, -math.inf)


# --- by matrix products ---------------------------------------------------------------------------------------------


def _by_products(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, sight)
    logsumexp = scores.logsumexp(-1)
    out = (scores - logsumexp.unsqueeze(-1)).exp_() @ _keys(v)
    return out.flatten(1, 2).to(q.dtype), logsumexp.flatten(1, 2)


def _by_products_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    share = (_scores(q, k, sight) - _grouped(logsumexp, k).unsqueeze(-1)).exp_()
    grad = _grouped(grad_out, k)
    # What every score of a query has in common (Dao et al. 2205.14135, equation 4).
    common = (grad * _grouped(out, k)).sum(-1, keepdim=True)
    grad_v = (share.transpose(-1, -2) @ grad).sum(2)
    grad_scores = share.mul_(grad @ _keys(v).transpose(-1, -2) - common).div_(math.sqrt(q.shape[-1]))
    grad_q = (grad_scores @ _keys(k)).flatten(1, 2)
    grad_k = (grad_scores.transpose(-1, -2) @ _grouped(q, k)).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, sight: Sight) -> Tensor:
    """float32 `[batch, kv_heads, group, queries, keys]`, minus infinity where a query does not see a key."""
    scores = _grouped(q, k) @ _keys(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if sight.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(hidden, -math.inf)
    if sight.mask is not None:
        scores = scores.masked_fill_(~sight.mask.unsqueeze(2), -math.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """In float32, `[batch, heads, ...]` as `[batch, kv_heads, group, ...]`: a group reads one key head."""
    grouped: Tensor = x.float().unflatten(1, (k.shape[1], -1))
    return grouped


def _keys(k: Tensor) -> Tensor:
    """Keys, or values, in float32, for all heads of a group."""
    return k.float().unsqueeze(2)
