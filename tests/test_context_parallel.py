"""Context parallelism: which rank sees which keys, and what parts of an attention add up to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor
from torch.nn.attention import SDPBackend

from triweave.groups import Group
from triweave.layers import context_parallel
from triweave.layers.attention_kernels import Sight, attend_part, attend_part_backward
from triweave.layers.context_parallel import attend_in_context, seen_whole
from triweave.layers.documents import Documents, Edges, block_causal_mask, documents_in_context, own_slices
from triweave.layout import Layout, context_slices

MATH = (SDPBackend.MATH,)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`[batch, heads, queries, head_dim]` by the definition, in float64; a key head is read by a group of heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, dim=1) for one in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def packed(lengths: list[list[int]]) -> Documents:
    """Documents of these lengths, a list a sequence, all sequences of one length."""
    seq = sum(lengths[0])
    ids = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in lengths], dim=1)
    starts = [row * seq + sum(one[:n]) for row, one in enumerate(lengths) for n in range(len(one))]
    return Documents(ids, torch.tensor([*starts, seq * len(lengths)], dtype=torch.int32), max(map(max, lengths)))


@st.composite
def packings(draw: st.DrawFn) -> tuple[Documents, int]:
    """Documents of some sequences, and a number of context-parallel ranks that can share them."""
    cp, batch = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    seq = 2 * cp * draw(st.integers(1, 4))
    lengths = []
    for _ in range(batch):
        cuts = sorted(draw(st.sets(st.integers(1, seq - 1), max_size=6)))
        lengths.append([stop - start for start, stop in zip([0, *cuts], [*cuts, seq], strict=True)])
    return packed(lengths), cp


@pytest.mark.parametrize("cp", range(2, 9))
def test_ranks_see_what_is_before_them(cp: int) -> None:
    """Own slices and those seen whole are all slices up to a query's own, and every rank sees equally many."""
    counts = set()
    for rank in range(cp):
        seen = {mine: set() for mine in (0, 1)}
        for half, parts in enumerate(seen_whole(rank, cp)):
            for mine, start, stop in parts:
                seen[mine] |= {context_slices(other, cp)[half] for other in range(start, stop)}
        for mine, number in enumerate(context_slices(rank, cp)):
            assert seen[mine] == set(range(number))
        counts.add(sum(map(len, seen.values())))
    assert len(counts) == 1


@given(packings())
def test_documents_of_a_rank_are_those_of_the_whole(case: tuple[Documents, int]) -> None:
    """A rank's mask has the rows of the block-causal mask that are its own; so do the edges of its two slices."""
    documents, cp = case
    seq, batch = documents.ids.shape
    whole = block_causal_mask(documents).squeeze(1)  # [batch, seq, seq]
    for rank in range(cp):
        mine = documents_in_context(documents, rank, cp)
        rows = own_slices(torch.arange(seq), rank, cp)
        expected = whole[:, rows][..., mine.key_places]
        assert torch.equal(mine.mask().squeeze(1), expected)

        by_edges = torch.zeros(batch, len(rows), seq * batch, dtype=torch.bool)
        own = len(rows) // 2
        for number, part in enumerate(mine.slices):
            queries_at, keys_at, most_queries, most_keys = part.edges
            sizes = queries_at.diff(), keys_at.diff()
            assert (most_queries, most_keys) == tuple(int(one.max()) for one in sizes)
            for document in range(len(queries_at) - 1):
                asking = range(int(queries_at[document]), int(queries_at[document + 1]))
                keys = part.rows[int(keys_at[document]) : int(keys_at[document + 1])]
                for query in asking:
                    sequence, place = divmod(query, own)
                    visible = keys[: len(keys) - (asking.stop - 1 - query)]
                    by_edges[sequence, number * own + place, visible] = True
        for sequence in range(batch):
            assert torch.equal(by_edges[sequence][:, sequence::batch], expected[sequence])
            by_edges[sequence][:, sequence::batch] = False
        assert not by_edges.any(), "no query sees another sequence"


@pytest.mark.parametrize("backends", [(), MATH], ids=["flash", "math"])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_a_part_is_an_attention(backends: tuple[SDPBackend, ...], kind: str) -> None:
    """Output, log-sum-exp and gradients of one part are those of the definition in float64, for grouped heads too."""
    torch.manual_seed(0)
    keys = 6 if kind == "causal" else 9
    q, k, v = (torch.randn(2, heads, rows, 16) for heads, rows in ((8, 6), (2, keys), (2, keys)))
    mask = torch.ones(2, 1, 6, keys, dtype=torch.bool)
    if kind == "causal":
        mask = mask.tril()
    elif kind == "mask":
        mask = torch.rand(mask.shape) > 0.4
        mask[..., 0] = True
    sight = Sight(kind == "causal", mask if kind == "mask" else None)
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    expected, grad_out = attention(*leaves, mask), torch.randn_like(q)
    out, logsumexp = attend_part(q, k, v, sight, backends)
    found = attend_part_backward(grad_out, q, k, v, out, logsumexp.contiguous(), sight, backends)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=0, atol=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, grad_out.double()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@contextmanager
def documents_by_edges() -> Iterator[None]:
    """The way through the code that a GPU takes in 16 bits, its kernel replaced by the definition."""

    def each(q: Tensor, k: Tensor, edges: Edges) -> Iterator[tuple[slice, slice, Sight]]:
        for one in range(len(edges[0]) - 1):
            asking, asked = (slice(int(edge[one]), int(edge[one + 1])) for edge in edges[:2])
            sees = torch.ones(asking.stop - asking.start, asked.stop - asked.start, dtype=torch.bool)
            yield asking, asked, Sight(mask=sees.tril(sees.shape[1] - sees.shape[0])[None, None])

    def heads_first(*tensors: Tensor) -> list[Tensor]:
        return [one.transpose(0, 1).unsqueeze(0) for one in tensors]

    def forward(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
        out, logsumexp = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
        for asking, asked, sight in each(q, k, edges):
            part, scores = attend_part(*heads_first(q[asking], k[asked], v[asked]), sight, MATH)
            out[asking], logsumexp[:, asking] = part[0].transpose(0, 1), scores[0]
        return out, logsumexp

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, edges: Edges
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for asking, asked, sight in each(q, k, edges):
            ours = heads_first(grad[asking], q[asking], k[asked], v[asked], out[asking])
            found = attend_part_backward(*ours, logsumexp[None, :, asking], sight, MATH)
            for total, rows, part in zip(grads, (asking, asked, asked), found, strict=True):
                total[rows] += part[0].transpose(0, 1)
        return grads

    with (
        patch.object(context_parallel, "takes_edges", lambda q, backends: True),
        patch.object(context_parallel, "attend_documents", forward),
        patch.object(context_parallel, "attend_documents_backward", backward),
    ):
        yield


def attend_on_rank(
    rank: int, size: int, documents: Documents | None, dtype: torch.dtype, by_edges: bool, backends: tuple[str, ...]
) -> float:
    """Largest relative error, by Frobenius norm, of this rank's output and of its gradients."""
    seq, batch, heads, kv_heads = 16, 2, 4, 2
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, kv_heads, kv_heads)
    whole = [torch.randn(seq, batch, count, 8, generator=generator).to(dtype) for count in shapes]
    grad_out = torch.randn(seq, batch, heads, 8, generator=generator).to(dtype)
    mask = block_causal_mask(documents or packed([[seq]] * batch))
    leaves = [one.double().requires_grad_() for one in whole]
    expected = attention(*(leaf.permute(1, 2, 0, 3) for leaf in leaves), mask).permute(2, 0, 1, 3)
    wanted = [expected, *torch.autograd.grad(expected, leaves, grad_out.double())]

    mine = [own_slices(one, rank, size).requires_grad_() for one in whole]
    group = Group(tuple(range(size)), rank, dist.group.WORLD)
    seen = None if documents is None else documents_in_context(documents, rank, size)
    allowed = tuple(getattr(SDPBackend, name) for name in backends)

    def run() -> list[Tensor]:
        out = attend_in_context(*mine, seen, group, allowed)
        return [out, *torch.autograd.grad(out, mine, own_slices(grad_out, rank, size))]

    if by_edges:
        with documents_by_edges():
            found = run()
    else:
        found = run()
    theirs = [own_slices(one, rank, size) for one in wanted]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, theirs, strict=True))


PACKED = packed([[3, 6, 1, 6], [8, 8]])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("documents", "dtype", "by_edges", "backends", "tolerance"),
    [
        (None, torch.float32, False, (), 1e-5),
        (None, torch.float32, False, ("MATH",), 1e-5),
        (PACKED, torch.float32, False, (), 1e-5),
        (PACKED, torch.float32, False, ("MATH",), 1e-5),
        (PACKED, torch.float32, True, (), 1e-5),
        # Of bfloat16: a few roundings of 2^-9 each in a part, in the sum of parts and in that of ranks.
        (None, torch.bfloat16, False, (), 2e-2),
        (PACKED, torch.bfloat16, False, (), 2e-2),
    ],
    ids=["whole", "products", "packed", "packed-products", "packed-by-edges", "whole-bfloat16", "packed-bfloat16"],
)
def test_parts_add_up_to_the_whole(
    ranks: Ranks,
    size: int,
    documents: Documents | None,
    dtype: torch.dtype,
    by_edges: bool,
    backends: tuple[str, ...],
    tolerance: float,
) -> None:
    """Each rank's output and gradients are its slices of the attention over whole sequences, in float64."""
    errors = ranks.run(size, attend_on_rank, size, documents, dtype, by_edges, backends)
    assert max(errors) < tolerance


def test_groups_of_the_same_weights() -> None:
    """The ranks that differ along dp and cp alone, and the shard groups where nothing else is asked."""
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    assert layout.same_weights_groups() == layout.shard_groups()
    assert layout.same_weights_groups()[0] == (0, 2, 4, 6)
    places = [layout.coordinates(rank) for rank in layout.same_weights_groups()[3]]
    assert {(at.tp, at.pp) for at in places} == {(1, 1)}
