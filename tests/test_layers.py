"""The layers, split over tensor-parallel ranks, against the same layer in one piece by torch or transformers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear

from triweave import overlap
from triweave.gradients import WeightGradients, main_grad
from triweave.groups import Group
from triweave.layers.cross_entropy import IGNORE, vocab_parallel_cross_entropy
from triweave.layers.embedding import VocabParallelEmbedding
from triweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from triweave.layers.norm import RMSNorm
from triweave.layers.swiglu import SwiGLU, swiglu
from triweave.layers.tensor_parallel import TensorParallel
from triweave.model_spec import ModelSpec
from triweave.parameters import vocab_rows
from triweave.transport.messages import Messages

SEQ, BATCH, HIDDEN, WIDE = 8, 3, 12, 20
SPEC = ModelSpec(300, 64, 96, 1, 8, 4, 8)
BF16_EPS = 2.0**-8


def tensor_parallel(rank: int, size: int, sequence_parallel: bool = False, messages: bool = False) -> TensorParallel:
    """All ranks as one tensor-parallel group."""
    group = Group(tuple(range(size)), rank, dist.group.WORLD)
    return TensorParallel(group, sequence_parallel, chosen=Messages(group) if messages else None)


def random(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    """The same numbers on every rank."""
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A copy that autograd gives a gradient."""
    return value.detach().clone().to(dtype).requires_grad_()


def near(ours: Tensor | None, theirs: Tensor | None, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Float32 sums in another order: 1e-5 of values around 1."""
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=rtol, atol=atol)


# --- products ---------------------------------------------------------------------------------------------------------


def check_linears(
    rank: int, size: int, sequence_parallel: bool, dtype: torch.dtype, piece_tokens: int | None = None
) -> None:
    """Both products against `torch.nn.functional.linear`: output, input gradient, summed weight gradients.

    With `piece_tokens` they are done in pieces of at least so many rows.
    """
    with patch.object(overlap, "MIN_PIECE_TOKENS", piece_tokens):
        check_both(rank, tensor_parallel(rank, size, sequence_parallel, piece_tokens is not None), dtype)


def check_both(rank: int, tp: TensorParallel, dtype: torch.dtype) -> None:
    """Both products of a group against torch."""
    size, sequence_parallel = tp.size, tp.sequence_parallel
    # In bfloat16 every product is rounded once, and what ranks add up, or hand on, once more.
    tolerance = 1e-5 if dtype is torch.float32 else 4 * BF16_EPS
    for kind in ("column", "row"):
        w, b = random(WIDE, HIDDEN, seed=1, std=0.3).to(dtype), random(WIDE, seed=2).to(dtype)
        column = kind == "column"
        with_bias = column and size > 1
        layer: ColumnParallelLinear | RowParallelLinear
        if column:
            layer = ColumnParallelLinear(HIDDEN, WIDE // size, tp, bias=with_bias).to(dtype)
            layer.weight.data.copy_(w.chunk(size, 0)[rank])
            if layer.bias is not None:
                layer.bias.data.copy_(b.chunk(size)[rank])
        else:
            layer = RowParallelLinear(HIDDEN // size, WIDE, tp).to(dtype)
            layer.weight.data.copy_(w.chunk(size, 1)[rank])
        whole_w, whole_b = leaf(w), leaf(b)
        for call in range(3):
            x = random(SEQ, BATCH, HIDDEN, seed=10 + call).to(dtype)
            upstream = random(SEQ, BATCH, WIDE, seed=20 + call).to(dtype)
            whole_x = leaf(x)
            whole_y = linear(whole_x, whole_w, whole_b if with_bias else None)
            whole_y.backward(upstream.float())
            assert whole_x.grad is not None

            def sequence(t: Tensor) -> Tensor:
                return t.chunk(size, 0)[rank] if sequence_parallel else t

            def feature(t: Tensor) -> Tensor:
                return t.chunk(size, -1)[rank]

            before, after = (sequence, feature) if column else (feature, sequence)
            mine = leaf(before(x), dtype)
            y = layer(mine)
            near(y, after(whole_y), tolerance, tolerance * 4)
            y.backward(after(upstream))
            near(mine.grad, before(whole_x.grad), tolerance, tolerance * 4)
        assert layer.weight.grad is None
        assert main_grad(layer.weight).dtype is torch.float32
        assert whole_w.grad is not None
        near(main_grad(layer.weight), whole_w.grad.chunk(size, 0 if column else 1)[rank], tolerance, tolerance * 16)
        if with_bias:
            assert whole_b.grad is not None
            near(main_grad(layer.bias), whole_b.grad.chunk(size)[rank], tolerance, tolerance * 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_products_equal_linear(ranks: Ranks, size: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    """Column- and row-parallel products give torch's outputs and gradients; weight gradients add up over calls."""
    ranks.run(size, check_linears, size, sequence_parallel, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "piece_tokens"), [(2, 1), (4, 1), (4, 2 * SEQ // 4 * BATCH), (4, 2048)])
def test_products_in_pieces_equal_linear(ranks: Ranks, size: int, piece_tokens: int, dtype: torch.dtype) -> None:
    """Products that are done piece by piece, a rank's slice or several at a time, give torch's results too."""
    ranks.run(size, check_linears, size, True, dtype, piece_tokens)


def test_gradients_are_summed_in_float32() -> None:
    """A hundred bfloat16 gradients add up to a hundred times one; in bfloat16 the sum would stop growing."""
    layer = ColumnParallelLinear(HIDDEN, WIDE, TensorParallel(), bias=True).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    norm = RMSNorm(WIDE, 1e-5, TensorParallel()).bfloat16()
    torch.nn.init.ones_(norm.weight)
    x, once = random(SEQ, BATCH, HIDDEN).bfloat16(), []
    for call in range(100):
        norm(layer(x)).backward(random(SEQ, BATCH, WIDE, seed=3).bfloat16())
        if call == 0:
            once = [main_grad(p).clone() for p in (layer.weight, layer.bias, norm.weight)]
    for parameter, first in zip((layer.weight, layer.bias, norm.weight), once, strict=True):
        near(main_grad(parameter), 100 * first, rtol=1e-5, atol=1e-4)
    drifted = sum([once[0].bfloat16()] * 99, once[0].bfloat16())
    assert (drifted.float() - 100 * once[0]).norm() > 0.01 * (100 * once[0]).norm()


def check_deferring(rank: int, size: int, messages: bool) -> None:
    """Weight work that is put off gives the same bits later, and nothing before it runs."""
    tp = tensor_parallel(rank, size, sequence_parallel=size > 1, messages=messages)
    layers = torch.nn.ModuleList(
        [
            RMSNorm(HIDDEN, 1e-5, tp),
            ColumnParallelLinear(HIDDEN, WIDE // size, tp, bias=True),
            RowParallelLinear(WIDE // size, HIDDEN, tp),
        ]
    )
    for number, parameter in enumerate(layers.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=100 * rank + number))
    rows = SEQ // size

    def backward(number: int) -> Tensor | None:
        x = random(rows, BATCH, HIDDEN, seed=number + 10 * rank).requires_grad_()
        y = x
        for layer in layers:
            y = layer(y)
        y.backward(random(rows, BATCH, HIDDEN, seed=50 + number))
        return x.grad

    at_once = [backward(number) for number in range(3)]
    sums = [main_grad(parameter).clone() for parameter in layers.parameters()]
    for parameter in layers.parameters():
        main_grad(parameter).zero_()
    put_off = []
    for number in range(3):
        with tp.weight_gradients.deferring() as work:
            gradient = backward(number)
        assert gradient is not None
        assert torch.equal(gradient, at_once[number])
        put_off.append(work)
    assert all(not main_grad(parameter).any() for parameter in layers.parameters())
    with torch.no_grad():  # as the pipeline runs it
        for work in put_off:
            for one in work:
                one()
    for parameter, whole in zip(layers.parameters(), sums, strict=True):
        assert torch.equal(main_grad(parameter), whole)


@pytest.mark.parametrize(("size", "messages"), [(1, False), (2, False), (2, True), (4, True)])
def test_weight_gradients_can_wait(ranks: Ranks, size: int, messages: bool) -> None:
    """Weight gradients that are put off come out bit for bit the same, whatever communication they need."""
    ranks.run(size, check_deferring, size, messages)


def test_order_of_weight_gradients() -> None:
    """Work runs at once outside `deferring`; inside it is kept in order, also when the block raises."""
    gradients, done = WeightGradients(), []
    gradients.submit(lambda: done.append("now"))

    def fail_while_deferring() -> list[Any]:
        with gradients.deferring() as work:
            gradients.submit(lambda: done.append("first"))
            gradients.submit(lambda: done.append("second"))
            raise KeyError
        return work

    with pytest.raises(KeyError):
        fail_while_deferring()
    gradients.submit(lambda: done.append("after"))
    assert done == ["now", "after"]


def test_deferred_transfer_starts_before_the_product_ahead_of_it() -> None:
    """Outside `deferring` a transfer starts where it is submitted; inside it starts one piece of work earlier."""
    gradients, done = WeightGradients(), []

    def submit_all() -> None:
        gradients.submit(lambda: done.append("transfer of the first"), one_earlier=True)
        for name in ("first", "second"):
            gradients.submit(lambda name=name: done.append(name))
        gradients.submit(lambda: done.append("transfer of the third"), one_earlier=True)
        gradients.submit(lambda: done.append("third"))

    submit_all()
    assert done == ["transfer of the first", "first", "second", "transfer of the third", "third"]
    done.clear()
    with gradients.deferring() as work:
        submit_all()
    for one in work:
        one()
    assert done == ["transfer of the first", "first", "transfer of the third", "second", "third"]


# --- embedding and loss -----------------------------------------------------------------------------------------------


def check_embedding(rank: int, size: int, sequence_parallel: bool, vocab: int) -> None:
    """Lookup and its gradient against `torch.nn.functional.embedding`, repeated tokens and padding rows included."""
    tp = tensor_parallel(rank, size, sequence_parallel)
    rows = vocab_rows(vocab, size)
    table = torch.zeros(rows * size, HIDDEN)
    table[:vocab] = random(vocab, HIDDEN)
    layer = VocabParallelEmbedding(rows, HIDDEN, tp)
    layer.weight.data.copy_(table.chunk(size, 0)[rank])
    whole = leaf(table)
    for call in range(2):
        tokens = torch.randint(0, vocab, (SEQ, BATCH), generator=torch.Generator().manual_seed(call))
        upstream = random(SEQ, BATCH, HIDDEN, seed=call)
        expected = embedding(tokens, whole)
        expected.backward(upstream)
        y = layer(tokens)
        assert torch.equal(y, expected.chunk(size, 0)[rank] if sequence_parallel else expected)
        y.backward(upstream.chunk(size, 0)[rank] if sequence_parallel else upstream)
    assert layer.weight.grad is None
    assert whole.grad is not None
    near(main_grad(layer.weight), whole.grad.chunk(size, 0)[rank])


@pytest.mark.parametrize("vocab", [3, 10, 16])
@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, True), (4, False), (4, True)])
def test_embedding_equals_torch(ranks: Ranks, size: int, sequence_parallel: bool, vocab: int) -> None:
    """A vocabulary split over ranks looks up exactly what one table holds, also where ranks have padding alone."""
    ranks.run(size, check_embedding, size, sequence_parallel, vocab)


def loss_case(seed: int, vocab: int, scale: float, ignored: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of a given size, and targets of which a share is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(4, 2, vocab, generator=generator)).to(dtype)
    targets = torch.randint(0, vocab, (4, 2), generator=generator)
    targets[torch.rand(4, 2, generator=generator) < ignored] = IGNORE
    return logits, targets


def check_loss(rank: int, size: int, cases: list[tuple[int, int, float, float, torch.dtype]]) -> None:
    """Loss and gradient of each case against `torch.nn.functional.cross_entropy` in float32 on the whole logits."""
    tp = tensor_parallel(rank, size)
    for case in cases:
        logits, targets = loss_case(*case)
        vocab, dtype = logits.shape[-1], logits.dtype
        whole = leaf(logits)
        expected = cross_entropy(whole.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        (0.25 * expected).backward()

        rows = vocab_rows(vocab, size)
        padded = torch.full((4, 2, rows * size), 7e4).to(dtype)  # what padding holds must not matter
        padded[..., :vocab] = logits
        mine = leaf(padded.chunk(size, -1)[rank], dtype)
        loss = vocab_parallel_cross_entropy(mine * 1, targets, vocab, tp)
        assert loss.dtype is torch.float32
        near(loss, expected, rtol=1e-5, atol=1e-4)
        (0.25 * loss).backward()
        gradient = torch.zeros(4, 2, rows * size)
        assert whole.grad is not None
        gradient[..., :vocab] = whole.grad
        # Rounded to bfloat16 twice: before and after the scale of the loss.
        rtol = 1e-4 if dtype is torch.float32 else 2 * BF16_EPS
        near(mine.grad, gradient.chunk(size, -1)[rank], rtol=rtol, atol=1e-6)


CASES = st.tuples(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 1.0, 10.0, 1e4]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@pytest.mark.parametrize("size", [1, 2, 4])
# A failure ends the processes, so that shrinking it would take minutes.
@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(cases=st.lists(CASES, min_size=8, max_size=8))
def test_loss_equals_torch(ranks: Ranks, size: int, cases: list[tuple[int, int, float, float, torch.dtype]]) -> None:
    """Any logits, targets, vocabulary (padded or not) and type give torch's loss and gradient."""
    ranks.run(size, check_loss, size, cases)


@pytest.mark.parametrize("sure", [3.0, 6.0, 12.0])
def test_sure_tokens_still_learn(sure: float) -> None:
    """In bfloat16 a probability near 1 rounds to 1; the gradient of its logit is still what is left to learn."""
    logits = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    logits[..., 0] = sure
    logits.requires_grad_()
    vocab_parallel_cross_entropy(logits, torch.zeros(1, 1, dtype=torch.long), 2, TensorParallel()).backward()
    left = torch.sigmoid(torch.tensor(-sure))
    # The difference itself is float32's: 6e-8 of 1.
    near(logits.grad, torch.tensor([[[-left, left]]]), rtol=BF16_EPS, atol=1e-7)


# --- norm, rotary, MLP ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    """RMSNorm and both its gradients are those of LlamaRMSNorm in float64, rounded once."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(HIDDEN, eps=1e-3)
    weight, x, upstream = (t.to(dtype) for t in (random(HIDDEN), random(SEQ, HIDDEN, seed=1), random(SEQ, HIDDEN)))
    theirs.weight.data.copy_(weight)
    whole = leaf(x)
    expected = theirs(whole)
    expected.backward(upstream.float())
    norm = RMSNorm(HIDDEN, 1e-3, TensorParallel()).to(dtype)
    norm.weight.data.copy_(weight)
    mine = leaf(x, dtype)
    y = norm(mine)
    y.backward(upstream)
    tolerance = 1e-5 if dtype is torch.float32 else 2 * BF16_EPS
    near(y, expected, tolerance, tolerance)
    near(mine.grad, whole.grad, tolerance, 4 * tolerance)
    near(main_grad(norm.weight), theirs.weight.grad, tolerance, 4 * tolerance)
    assert norm.weight.grad is None


def test_mlp_equals_transformers() -> None:
    """SwiGLU's output and all its gradients are those of LlamaMLP."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    theirs = LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDE, num_attention_heads=2))
    ours = SwiGLU(HIDDEN, WIDE, TensorParallel(), recompute=False)
    ours.gate_up_proj.weight.data.copy_(torch.cat((theirs.gate_proj.weight, theirs.up_proj.weight)))
    ours.down_proj.weight.data.copy_(theirs.down_proj.weight)
    x, upstream = random(SEQ, BATCH, HIDDEN), random(SEQ, BATCH, HIDDEN, seed=1)
    whole, mine = leaf(x), leaf(x)
    expected = theirs(whole)
    expected.backward(upstream)
    y = ours(ours.gate_up_proj(mine))
    y.backward(upstream)
    near(y, expected)
    near(mine.grad, whole.grad)
    gate_up = torch.cat((theirs.gate_proj.weight.grad, theirs.up_proj.weight.grad))
    near(main_grad(ours.gate_up_proj.weight), gate_up)
    near(main_grad(ours.down_proj.weight), theirs.down_proj.weight.grad)


def test_swiglu_gradient_is_its_derivative() -> None:
    """The hand-written backward of `silu(gate) * up` agrees with finite differences."""
    assert torch.autograd.gradcheck(swiglu, random(3, 2, 10).double().requires_grad_())
