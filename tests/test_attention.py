"""Attention and rotary embedding: against transformers, against the definition, and document by document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from triweave.dryrun.card import Card
from triweave.dryrun.lone_rank import lone_rank
from triweave.groups import Group
from triweave.layers.attention import (
    BACKENDS,
    AttentionKernel,
    Documents,
    attend,
    block_causal_mask,
    choose_kernel,
)
from triweave.layers.attention_kernels import Sight, _kernel, takes_groups
from triweave.layers.context_parallel import attend_in_context
from triweave.layers.documents import documents_in_context
from triweave.layers.rotary import Rotation, inverse_frequencies, make_rotation
from triweave.model_spec import ModelSpec, RopeScaling

SPEC = ModelSpec(300, 64, 96, 1, 8, 4, 8)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that follow the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LLAMA_3_1 = RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("scaling", [None, LLAMA_3_1], ids=["default", "llama3"])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_rotary_equals_transformers(head_dim: int, scaling: RopeScaling | None) -> None:
    """Rotated queries and keys are those of LlamaRotaryEmbedding, at positions that start again and at far ones."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    spec = replace(SPEC, head_dim=head_dim, rope_theta=500000.0, rope_scaling=scaling)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 5000], [0, 1, 0, 1, 0, 8191, 8192, 131071]]).t()
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(inverse_frequencies(spec), theirs.inv_freq, rtol=1e-6, atol=0)

    q, k = random(8, 2, 4, head_dim), random(8, 2, 2, head_dim, seed=1)
    cos, sin = theirs(q, positions.t())
    expected = apply_rotary_pos_emb(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
    rotation = make_rotation(theirs.inv_freq, positions, torch.float32)
    for ours, whole in zip((rotation(q), rotation(k)), expected, strict=True):
        assert torch.equal(ours.permute(1, 2, 0, 3), whole)
    assert make_rotation(theirs.inv_freq, positions, torch.bfloat16).cos.dtype is torch.bfloat16


@given(offset=st.integers(0, 1000), distance=st.integers(0, 50))
def test_rotary_is_relative(offset: int, distance: int) -> None:
    """The product of a rotated query and a rotated key depends on how far apart they are, not on where."""
    frequencies = inverse_frequencies(SPEC).double()
    q, k = random(1, 1, 1, 8).double(), random(1, 1, 1, 8, seed=1).double()

    def product(at_q: int, at_k: int) -> Tensor:
        # Angles in float64: float32's would be rounded by 1e-4 at position 1000.
        angles = [torch.cat((p * frequencies, p * frequencies)).view(1, 1, 1, 8) for p in (at_q, at_k)]
        rotated = [Rotation(a.cos(), a.sin())(t) for a, t in zip(angles, (q, k), strict=True)]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(product(offset + distance, offset), product(distance, 0), rtol=1e-9, atol=1e-9)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one document by its definition; `[seq, heads, head_dim]`, each query group with its key."""
    seq, heads, head_dim = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def documents_of(lengths: list[list[int]]) -> Documents:
    """Documents of given lengths, one list a sequence."""
    ids = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in lengths], dim=1)
    flat = [0, *(n for row in lengths for n in row)]
    return Documents(ids, torch.tensor(flat).cumsum(0, dtype=torch.int32), max(flat))


@pytest.mark.parametrize("kernel", [AttentionKernel(), AttentionKernel((SDPBackend.MATH,))], ids=["torch", "math"])
@settings(max_examples=15)
@given(data=st.data(), heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]), batch=st.integers(1, 2))
def test_packed_attention_is_each_documents_own(
    kernel: AttentionKernel, data: st.DataObject, heads: tuple[int, int], batch: int
) -> None:
    """Outputs and gradients of packed documents are those of each document alone, grouped heads included."""
    seq, (num_heads, kv_heads) = 12, heads
    cuts = [sorted(data.draw(st.sets(st.integers(1, seq - 1), max_size=4))) for _ in range(batch)]
    lengths = [[b - a for a, b in zip([0, *row], [*row, seq], strict=True)] for row in cuts]
    plain = all(len(row) == 1 for row in lengths) and data.draw(st.booleans())
    inputs = [random(seq, batch, n, 8, seed=n).requires_grad_() for n in (num_heads, kv_heads)]
    inputs.append(random(seq, batch, kv_heads, 8, seed=9).requires_grad_())
    upstream = random(seq, batch, num_heads, 8, seed=5)

    out = attend(*inputs, None if plain else documents_of(lengths), kernel)
    ours = torch.autograd.grad(out, inputs, upstream)
    expected = torch.stack(
        [
            torch.cat([softmax_attention(*parts) for parts in zip(*(t[:, b].split(row) for t in inputs), strict=True)])
            for b, row in enumerate(lengths)
        ],
        dim=1,
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_mask_keeps_documents_apart() -> None:
    """A query may see a key of its own document up to itself: lower triangles along the diagonal."""
    mask = block_causal_mask(documents_of([[2, 1], [1, 2]]))
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    assert mask[1, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]


def test_kernel_is_the_one_asked_for() -> None:
    """On a GPU `auto` allows every kernel, fastest first, and a name allows that one alone; the CPU has no choice."""
    gpu = torch.device("cuda")
    assert choose_kernel("auto", gpu).backends == tuple(BACKENDS.values())
    for name in BACKENDS:
        assert choose_kernel(name, gpu) == AttentionKernel((BACKENDS[name],))
    assert choose_kernel("flash", torch.device("cpu")).backends == ()


class Operations(TorchDispatchMode):
    """Notes the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one and run it."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


EDGES, BLOCKS, SCORES = "_varlen_attn", "_scaled_dot_product_efficient_attention", "_safe_softmax"
"""What torch calls the operations of FlashAttention over documents, of `efficient`, and in the midst of `math`."""


@pytest.mark.parametrize(
    ("wanted", "dtype", "cp", "operation", "shown"),
    [
        ("auto", torch.bfloat16, 1, EDGES, "cudnn, else flash; packed documents by flash"),
        ("auto", torch.bfloat16, 2, "_flash_attention_forward", "cudnn, else flash; packed documents by flash"),
        ("auto", torch.float32, 1, BLOCKS, "efficient, else math; packed documents behind a mask"),
        ("auto", torch.float32, 2, "logsumexp", "efficient, else math; packed documents behind a mask"),
        ("flash", torch.bfloat16, 1, EDGES, "flash; packed documents by flash"),
        ("flash", torch.bfloat16, 2, "_flash_attention_forward", "flash; packed documents by flash"),
        ("efficient", torch.bfloat16, 1, BLOCKS, "efficient; packed documents behind a mask"),
        ("math", torch.bfloat16, 1, SCORES, "math; packed documents behind a mask"),
        ("math", torch.bfloat16, 2, "logsumexp", "math; packed documents behind a mask"),
        ("math", torch.float32, 1, SCORES, "math; packed documents behind a mask"),
    ],
)
def test_packed_documents_go_through_the_kernel_asked_for(
    wanted: str, dtype: torch.dtype, cp: int, operation: str, shown: str
) -> None:
    """On a GPU the kernel that is asked for computes packed documents too, with and without cp; so says the log."""
    meta, whole = torch.device("meta"), documents_of([[6, 10]])
    chosen = choose_kernel(wanted, meta)
    documents = (whole if cp == 1 else documents_in_context(whole, 0, cp)).to(meta)
    with lone_rank(0, cp), Operations() as seen, Card(wanted, lambda storage: None):
        q, k, v = (torch.empty(16 // cp, 1, 4, 64, dtype=dtype, device=meta) for _ in range(3))
        if cp == 1:
            out = attend(q, k, v, documents, chosen)
        else:
            group = Group(tuple(range(cp)), 0, dist.group.WORLD)
            out = attend_in_context(q, k, v, documents, group, chosen.backends)
    assert out.shape == q.shape
    assert operation in seen.names
    assert chosen.in_words(dtype, 64, packed=True) == shown
    assert chosen.in_words(dtype, 64, packed=False) == shown.partition(";")[0]


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("wanted", "dtype"), [("auto", torch.float32), ("efficient", torch.bfloat16)])
def test_grouped_heads_do_not_hold_all_scores(wanted: str, dtype: torch.dtype, packed: bool) -> None:
    """`efficient`, all that float32 has, takes no grouped heads: it is given a key/value head for each head."""
    meta = torch.device("meta")
    documents = documents_of([[6, 10]]).to(meta) if packed else None
    with Operations() as seen, Card(wanted, lambda storage: None):
        q = torch.empty(16, 1, 8, 64, dtype=dtype, device=meta)
        k = torch.empty(16, 1, 2, 64, dtype=dtype, device=meta)
        out = attend(q, k, k, documents, choose_kernel(wanted, meta))
    assert out.shape == q.shape
    assert BLOCKS in seen.names
    assert SCORES not in seen.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_behind_the_efficient_kernel_has_the_type_of_the_queries(dtype: torch.dtype) -> None:
    """torch makes numbers of a boolean mask, which backward keeps: in float32 four bytes a pair of tokens, not one."""
    meta, masks = torch.device("meta"), []

    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == BLOCKS:
                masks.append(args[3].dtype)
            return func(*args, **(kwargs or {}))

    with Masks(), Card("efficient", lambda storage: None):
        q = torch.empty(16, 1, 4, 64, dtype=dtype, device=meta)
        attend(q, q, q, documents_of([[6, 10]]).to(meta), choose_kernel("efficient", meta))
    assert masks == [dtype]


def test_grouped_heads_are_left_to_kernels_that_take_them() -> None:
    """In 16 bits, by matrix products alone, and on the CPU no key is repeated."""
    meta = torch.device("meta")
    for wanted, dtype in (("auto", torch.bfloat16), ("flash", torch.bfloat16), ("math", torch.float32)):
        with Operations() as seen, Card(wanted, lambda storage: None):
            q, k = (torch.empty(16, 1, heads, 64, dtype=dtype, device=meta) for heads in (8, 2))
            attend(q, k, k, None, choose_kernel(wanted, meta))
        assert BLOCKS not in seen.names, wanted
    assert takes_groups(torch.empty(1, 8, 16, 64), (SDPBackend.EFFICIENT_ATTENTION,))


def test_heads_that_flash_cannot_take_are_packed_behind_a_mask() -> None:
    """Heads of 100 are no multiple of 16 bytes, which FlashAttention's form for documents wants and does not make."""
    meta = torch.device("meta")
    with Operations() as seen, Card("auto", lambda storage: None):
        q = torch.empty(16, 1, 4, 100, dtype=torch.bfloat16, device=meta)
        chosen = choose_kernel("auto", meta)
        attend(q, q, q, documents_of([[6, 10]]).to(meta), chosen)
    assert "_varlen_attn" not in seen.names
    assert chosen.in_words(torch.bfloat16, 100, packed=True) == "flash, else math; packed documents behind a mask"


def test_deterministic_runs_leave_cudnn() -> None:
    """cuDNN's attention depends on timing: where torch is told to use no such kernel, a part is FlashAttention's."""
    with Card("auto", lambda storage: None):
        q = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16, device="meta")
        chosen = [_kernel(q, Sight(), tuple(BACKENDS.values()))]
        torch.use_deterministic_algorithms(True)
        try:
            chosen.append(_kernel(q, Sight(), tuple(BACKENDS.values())))
            shown = choose_kernel("auto", q.device).in_words(q.dtype, 64, packed=False)
        finally:
            torch.use_deterministic_algorithms(False)
    assert shown == "flash, else efficient"
    assert chosen == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
