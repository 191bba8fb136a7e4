"""The layers as they run on a GPU, their kernels stood in for: wiring, gradients and memory, against plain torch."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocated
from kernel_standins import INTERPRETED, kernel_path
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy

from triweave.gradients import main_grad
from triweave.kernels.dispatch import uses_kernels
from triweave.layers.attention import AttentionKernel
from triweave.layers.cross_entropy import IGNORE, vocab_parallel_cross_entropy
from triweave.layers.norm import ResidualRMSNorm
from triweave.layers.rotary import Rotation, inverse_frequencies, make_rotation, rotate_queries_and_keys
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Recompute
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec

SPEC = ModelSpec(300, 64, 96, 1, 8, 4, 8)
SEQ, BATCH = 16, 2
PATHS = [True, pytest.param(False, marks=pytest.mark.skipif(not INTERPRETED, reason="no Triton interpreter"))]
RECOMPUTE: list[tuple[Recompute, ...]] = [
    *((), ("norm",), ("swiglu",), ("attention",), ("mlp",), ("layer",)),
    *(("norm", "attention"), ("norm", "swiglu")),
]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that follow the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_results(recompute: tuple[Recompute, ...], dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """Output and gradients of one layer, and the bytes that it keeps between forward and backward."""
    layer = DecoderLayer(SPEC, TensorParallel(), AttentionKernel(), recompute).to(dtype)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number) / 5)
    positions = torch.arange(SEQ).unsqueeze(1).expand(SEQ, BATCH)
    rotation = make_rotation(inverse_frequencies(SPEC), positions, dtype)
    upstream = random(SEQ, BATCH, SPEC.hidden_size, seed=5).to(dtype)
    with Allocated() as allocated:
        x = random(SEQ, BATCH, SPEC.hidden_size, seed=77).to(dtype).requires_grad_()
        y = layer(x, rotation, None)
        edge, output = get_gradient_edge(y), y.detach().clone()
        del y
    kept = allocated.alive_bytes() - output.nbytes
    torch.autograd.backward((edge,), (upstream,))
    assert x.grad is not None
    return [output, x.grad, *(main_grad(parameter) for parameter in layer.parameters())], kept


@pytest.mark.parametrize("stand_ins", PATHS, ids=["stand-ins", "triton"])
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["-".join(options) or "none" for options in RECOMPUTE])
def test_layer_is_the_same_by_either_path(recompute: tuple[Recompute, ...], stand_ins: bool) -> None:
    """A layer computes with kernels what it computes without, whatever is recomputed, and keeps as many bytes."""
    expected, kept = layer_results((), torch.float32)
    _, plain = layer_results(recompute, torch.float32)
    with kernel_path(stand_ins=stand_ins):
        ours, ours_kept = layer_results(recompute, torch.float32)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5 * theirs.abs().max().item())
    assert ours_kept == plain
    assert (ours_kept < kept) == bool(recompute)


def test_recomputed_is_bit_identical() -> None:
    """With kernels too, gradients do not depend on what is recomputed, in the type that is trained in."""
    with kernel_path(stand_ins=True):
        without, _ = layer_results((), torch.bfloat16)
        for recompute in RECOMPUTE:
            again, _ = layer_results(recompute, torch.bfloat16)
            assert all(torch.equal(*pair) for pair in zip(again, without, strict=True)), recompute


def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that forgets the gradient of the residual stream changes the layer's gradients."""
    import kernel_standins

    right = kernel_standins.norm_backward
    with kernel_path(stand_ins=True):
        expected, _ = layer_results((), torch.float32)
    monkeypatch.setattr(kernel_standins, "norm_backward", lambda grad, _, *rest: right(grad, None, *rest))
    with kernel_path(stand_ins=True):
        wrong, _ = layer_results((), torch.float32)
    assert (wrong[1] - expected[1]).norm() > 0.1 * expected[1].norm()


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "stand-ins"])
def test_residual_norm_is_sum_and_norm(kernels: bool) -> None:
    """Stream, norm and the gradients of both summands are those of `x + update` followed by a norm."""
    x, update = (random(SEQ, 32, seed=seed).requires_grad_() for seed in (0, 1))
    norm = ResidualRMSNorm(32, 1e-5, TensorParallel())
    norm.weight.data.copy_(random(32, seed=2))
    of_stream, of_norm = random(SEQ, 32, seed=3), random(SEQ, 32, seed=4)
    total = x + update
    expected = torch.nn.functional.rms_norm(total, (32,), norm.weight, 1e-5)
    theirs = torch.autograd.grad((total, expected), (x, update, norm.weight), (of_stream, of_norm))
    if kernels:
        with kernel_path(stand_ins=True):
            outputs = norm(x, update)
            ours = torch.autograd.grad(outputs, (x, update), (of_stream, of_norm))
    else:
        outputs = norm(x, update)
        ours = torch.autograd.grad(outputs, (x, update), (of_stream, of_norm))
    for mine, whole in zip((*outputs, *ours, main_grad(norm.weight)), (total, expected, *theirs), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)


def test_rotated_heads_are_views_of_the_product() -> None:
    """Queries, keys and values share the product's memory; gradients are those of each rotated apart."""
    positions = torch.arange(SEQ).unsqueeze(1).expand(SEQ, BATCH)
    rotation = make_rotation(inverse_frequencies(SPEC), positions, torch.float64)
    rotation = Rotation(rotation.cos.double(), rotation.sin.double())
    qkv = random(SEQ, BATCH, 16 * 8).double().requires_grad_()
    q, k, v = qkv.unflatten(-1, (16, 8)).split((8, 4, 4), dim=2)
    expected = (rotation(q), rotation(k), v)
    upstream = [random(*part.shape, seed=seed).double() for seed, part in enumerate(expected)]
    (theirs,) = torch.autograd.grad(expected, qkv, upstream)

    product = qkv * 1
    ours = rotate_queries_and_keys(product, rotation, 8, 4)
    assert {part.untyped_storage().data_ptr() for part in ours} == {product.untyped_storage().data_ptr()}
    for mine, whole in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, qkv, upstream)[0], theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "stand-ins"])
def test_logits_become_their_gradient(kernels: bool) -> None:
    """The scale of the loss reaches the gradient, which lies where the logits were; a second backward is refused."""
    logits = random(SEQ, BATCH, 40).requires_grad_()
    targets = torch.randint(0, 33, (SEQ, BATCH), generator=torch.Generator().manual_seed(1))
    targets[3] = IGNORE
    expected = 0.125 * cross_entropy(logits[..., :33].flatten(0, 1), targets.flatten(), reduction="sum")
    (theirs,) = torch.autograd.grad(expected, logits)

    def both() -> tuple[Tensor, Tensor, Tensor]:
        product = logits * 1
        product.retain_grad()
        loss = vocab_parallel_cross_entropy(product, targets, 33, TensorParallel())
        (ours,) = torch.autograd.grad(loss, logits, torch.tensor(0.125), retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return loss, ours, product

    if kernels:
        with kernel_path(stand_ins=True):
            loss, ours, product = both()
    else:
        loss, ours, product = both()
    torch.testing.assert_close(0.125 * loss, expected)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(product, theirs, rtol=1e-5, atol=1e-7)


def test_plain_torch_where_there_is_no_gpu() -> None:
    """A CPU tensor is never given to a kernel, whether Triton is installed or not."""
    assert not uses_kernels(torch.ones(1))
