"""Attention of a context-parallel rank: the queries of two slices of each sequence over the keys of all ranks.

Keys and values are gathered in forward and, so that nothing of the whole sequence is kept, again in backward; the
gradients of the whole are reduce-scattered. Why no ring: docs/decisions/0013.

Of `2 size` slices rank `r` has the r-th and the r-th from the end. Those of the first half are gathered together, and
those of the second half beside; what a slice sees is then its own keys (causally) and whole slices of other ranks that
lie one after the other:

    own keys                 computed while others are on their way
    the first half           the first slice sees those of ranks before this one, the second slice all
    the second half          the second slice sees those of ranks after this one; the first sees none

The parts are added up by their log-sum-exps. Packed documents are computed in one part, over the keys of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from triweave.collectives import (
    Pending,
    all_gather,
    finish,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
    sum_parts,
)
from triweave.groups import Group
from triweave.layers.attention_kernels import (
    Sight,
    attend_documents,
    attend_documents_backward,
    attend_part,
    attend_part_backward,
    takes_edges,
)
from triweave.layers.documents import ContextDocuments

FIRST, SECOND = 0, 1
"""A rank's slices: the one of the sequence's first half, and the one of its second."""

Seen = tuple[int, int, int]
"""One of this rank's slices, and the ranks `[start, stop)` whose slices of some half it sees whole."""


def seen_whole(rank: int, size: int) -> tuple[tuple[Seen, ...], tuple[Seen, ...]]:
    """What a rank's slices see of other ranks' slices of the first half, and of those of the second half.

    >>> seen_whole(1, 4)
    (((0, 0, 1), (1, 0, 4)), ((1, 2, 4),))
    """
    of_first: tuple[Seen, ...] = ((FIRST, 0, rank), (SECOND, 0, size))
    of_second: tuple[Seen, ...] = ((SECOND, rank + 1, size),)
    found = tuple(tuple(one for one in half if one[1] < one[2]) for half in (of_first, of_second))
    return found[FIRST], found[SECOND]


def attend_in_context(
    q: Tensor, k: Tensor, v: Tensor, documents: ContextDocuments | None, cp: Group, backends: Collection[SDPBackend]
) -> Tensor:
    """Causal attention of a rank's queries, inside each document where documents are given.

    Forward: keys and values of all ranks are gathered, shard(0) -> replicate, and what each rank's own queries see is
    summed: shard(0) -> shard(0). Backward: they are gathered again, and their gradients reduce-scattered, partial ->
    shard(0).

    Args:
        q: `[seq/cp, batch, heads, head_dim]`, the rank's two slices one after the other; so are all.
        k: `[seq/cp, batch, kv_heads, head_dim]`.
        v: as `k`.
        documents: what was packed together, None when every sequence is one document; the same choice on all ranks.
        cp: the context-parallel ranks, two or more.
        backends: what may compute it on a GPU.

    Returns:
        `[seq/cp, batch, heads, head_dim]`.
    """
    attended: Tensor
    if documents is None:
        attended = _Attend.apply(q, k, v, cp, backends)
    else:
        attended = _AttendDocuments.apply(q, k, v, documents, cp, backends)
    return attended


Part = tuple[Tensor, Tensor]
"""What attention over a part of the keys gave: `[batch, heads, slice, head_dim]`, and its log-sum-exp."""


class _Attend(torch.autograd.Function):
    """Every sequence one document."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Group, backends: Collection[SDPBackend]) -> Tensor:
        ctx.cp, ctx.backends = cp, backends
        queries, size = _halves(q), q.shape[0] // 2
        own, arriving = _start_gathers(k, v, cp, (FIRST, SECOND))
        parts: list[list[Part]] = [
            [attend_part(half, *_keys_and_values(keys), Sight(causal=True), backends)]
            for half, keys in zip(queries, own, strict=True)
        ]
        # What is not needed any more is let go of: of the whole sequence there is much.
        own.clear()
        for seen in seen_whole(cp.rank, cp.size):
            gathered = finish(arriving.pop(0))
            for mine, start, stop in seen:
                keys = _keys_and_values(gathered[start * size : stop * size])
                parts[mine].append(attend_part(queries[mine], *keys, Sight(), backends))
                del keys
        del gathered
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        logsumexp = [_add_up(found, half) for found, half in zip(parts, _halves(out), strict=True)]
        ctx.save_for_backward(q, k, v, out, torch.stack(logsumexp).contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        cp, queries, size = ctx.cp, _halves(q), q.shape[0] // 2
        # The second half first: its gradients then leave while those of the first, half of all there is to do, are
        # computed. The other way round the last rank would have both only at its end.
        own, arriving = _start_gathers(k, v, cp, (SECOND, FIRST))
        outs, grads = _halves(out), _halves(grad_out.contiguous())
        of_queries: list[list[Tensor]] = [[], []]

        def add_share(mine: int, keys: Tensor, sight: Sight, grad_keys: Tensor) -> None:
            known = grads[mine], queries[mine], *_keys_and_values(keys), outs[mine], logsumexp[mine]
            of_q, *of_keys = attend_part_backward(*known, sight, ctx.backends)
            of_queries[mine].append(of_q.permute(2, 0, 1, 3))
            for total, more in zip(_keys_and_values(grad_keys), of_keys, strict=True):
                total.add_(more)

        of_own = [torch.zeros_like(keys) for keys in own]
        for mine in (FIRST, SECOND):
            add_share(mine, own[mine], Sight(causal=True), of_own[mine])
        own.clear()
        totals: list[Tensor] = []
        leaving: list[Pending] = []
        for seen in reversed(seen_whole(cp.rank, cp.size)):
            gathered = finish(arriving.pop(0))
            totals.append(torch.zeros_like(gathered))
            for mine, start, stop in seen:
                rows = slice(start * size, stop * size)
                add_share(mine, gathered[rows], Sight(), totals[-1][rows])
            leaving.append(start_reduce_scatter(totals[-1], cp))
        del gathered
        grad_q = torch.empty_like(out)
        for half, found in zip(grad_q.chunk(2), of_queries, strict=True):
            half.copy_(sum_parts(found))
            found.clear()
        of_second, of_first = (finish(one) for one in leaving)
        grad_keys = torch.cat([of_first.add_(of_own[FIRST]), of_second.add_(of_own[SECOND])])
        grad_k, grad_v = grad_keys.chunk(2, dim=2)
        return grad_q, grad_k, grad_v, None, None


def _add_up(parts: list[Part], out: Tensor) -> Tensor:
    """Attention over all of the parts' keys, rounded once into `out`; returns its log-sum-exp."""
    if len(parts) == 1:
        out.copy_(parts[0][0])
        return parts[0][1]
    total = torch.stack([logsumexp for _, logsumexp in parts]).logsumexp(0)
    shares = [(logsumexp - total).exp() for _, logsumexp in parts]
    shares = [share if share.dim() == out.dim() else share.unsqueeze(-1) for share in shares]
    summed = parts[0][0] * shares[0]
    for (part, _), share in zip(parts[1:-1], shares[1:-1], strict=True):
        summed.addcmul_(part, share)
    torch.addcmul(summed, parts[-1][0], shares[-1], out=out)
    return total


class _AttendDocuments(torch.autograd.Function):
    """Sequences of several documents: the keys of all ranks at once, as they are gathered."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: ContextDocuments,
        cp: Group,
        backends: Collection[SDPBackend],
    ) -> Tensor:
        ctx.documents, ctx.cp, ctx.backends = documents, cp, backends
        keys = all_gather(torch.cat((k, v), dim=2), cp)
        by_edges = takes_edges(q, backends)
        out, logsumexp = _by_edges(q, keys, documents) if by_edges else _by_mask(q, keys, documents, backends)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        keys = all_gather(torch.cat((k, v), dim=2), ctx.cp)
        known = grad_out.contiguous(), q, keys, out, logsumexp, ctx.documents
        by_edges = takes_edges(q, ctx.backends)
        grad_q, total = _by_edges_backward(*known) if by_edges else _by_mask_backward(*known, ctx.backends)
        grad_k, grad_v = reduce_scatter(total, ctx.cp).chunk(2, dim=2)
        return grad_q, grad_k, grad_v, None, None, None


def _by_mask(
    q: Tensor, keys: Tensor, documents: ContextDocuments, backends: Collection[SDPBackend]
) -> tuple[Tensor, Tensor]:
    """Output as `q`, and log-sum-exp; `keys` are those of all ranks, `[seq, batch, 2 kv_heads, head_dim]`."""
    sight = Sight(mask=documents.mask())
    out, logsumexp = attend_part(q.permute(1, 2, 0, 3), *_keys_and_values(keys), sight, backends)
    return out.permute(2, 0, 1, 3).contiguous(), logsumexp.contiguous()


def _by_mask_backward(
    grad_out: Tensor,
    q: Tensor,
    keys: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: ContextDocuments,
    backends: Collection[SDPBackend],
) -> tuple[Tensor, Tensor]:
    """Gradients of `q` and `keys`."""
    grad_out, q, out = (one.permute(1, 2, 0, 3) for one in (grad_out, q, out))
    known = grad_out, q, *_keys_and_values(keys), out, logsumexp, Sight(mask=documents.mask())
    grad_q, grad_k, grad_v = attend_part_backward(*known, backends)
    return grad_q.permute(2, 0, 1, 3), _laid_out(grad_k, grad_v)


def _by_edges(q: Tensor, keys: Tensor, documents: ContextDocuments) -> tuple[Tensor, Tensor]:
    """As `_by_mask`; nothing is computed across documents, and keys before a slice's first document are not read."""
    found = []
    for half, part in zip(q.chunk(2), documents.slices, strict=True):
        k, v = keys.flatten(0, 1)[part.rows].chunk(2, dim=1)
        found.append(attend_documents(_end_to_end(half), k, v, part.edges))
    out = torch.cat([_by_sequence(half, q.shape[1]) for half, _ in found])
    return out, torch.stack([logsumexp for _, logsumexp in found])


def _by_edges_backward(
    grad_out: Tensor, q: Tensor, keys: Tensor, out: Tensor, logsumexp: Tensor, documents: ContextDocuments
) -> tuple[Tensor, Tensor]:
    """Gradients of `q` and `keys`."""
    grad_q, total = [], torch.zeros_like(keys)
    halves = zip(grad_out.chunk(2), q.chunk(2), out.chunk(2), logsumexp, documents.slices, strict=True)
    for grad, half, attended, of_scores, part in halves:
        k, v = keys.flatten(0, 1)[part.rows].chunk(2, dim=1)
        known = _end_to_end(grad), _end_to_end(half), k, v, _end_to_end(attended), of_scores
        of_q, of_k, of_v = attend_documents_backward(*known, part.edges)
        grad_q.append(_by_sequence(of_q, q.shape[1]))
        total.flatten(0, 1).index_add_(0, part.rows, torch.cat((of_k, of_v), dim=1))
    return torch.cat(grad_q), total


def _end_to_end(x: Tensor) -> Tensor:
    """`[seq, batch, heads, head_dim]` as `[batch * seq, heads, head_dim]`."""
    return x.transpose(0, 1).flatten(0, 1)


def _by_sequence(x: Tensor, batch: int) -> Tensor:
    """The way back."""
    whole: Tensor = x.unflatten(0, (batch, -1))
    return whole.transpose(0, 1)


def _start_gathers(k: Tensor, v: Tensor, cp: Group, order: tuple[int, int]) -> tuple[list[Tensor], list[Pending]]:
    """This rank's slices of keys and values, `[slice, batch, 2 kv_heads, head_dim]`, and in `order` those of all."""
    own = [torch.cat(both, dim=2) for both in zip(k.chunk(2), v.chunk(2), strict=True)]
    return own, [start_all_gather(own[mine], cp) for mine in order]


def _halves(x: Tensor) -> list[Tensor]:
    """Two slices of `[2 slice, batch, heads, head_dim]`, each as kernels want it: `[batch, heads, slice, head_dim]`."""
    return [half.permute(1, 2, 0, 3) for half in x.chunk(2)]


def _keys_and_values(both: Tensor) -> tuple[Tensor, Tensor]:
    """`[keys, batch, 2 kv_heads, head_dim]` as two views `[batch, kv_heads, keys, head_dim]`."""
    k, v = both.permute(1, 2, 0, 3).chunk(2, dim=1)
    return k, v


def _laid_out(k: Tensor, v: Tensor) -> Tensor:
    """The way back: two `[batch, kv_heads, keys, head_dim]` as `[keys, batch, 2 kv_heads, head_dim]`."""
    return torch.cat((k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)), dim=2)
