"""The Triton kernels against float64 formulas and torch's own autograd, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from kernel_standins import INTERPRETED
from torch import Tensor
from torch.nn.functional import rms_norm, silu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if not INTERPRETED and (DEVICE == "cpu" or find_spec("triton") is None):
    pytest.skip("neither a GPU with Triton nor Triton's interpreter", allow_module_level=True)

from triweave.config.schema import OptimizerConfig  # noqa: E402
from triweave.kernels import adamw, copies, cross_entropy, fp8, norm, partial_sums, rotary, swiglu  # noqa: E402
from triweave.kernels.noted import noted_amax  # noqa: E402
from triweave.layers.rotary import Rotation  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}
"""Relative error of one rounding, a little more in float32 for what is computed on the way. The interpreter cuts bits
off where a GPU rounds to nearest."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Numbers that follow the seed alone."""
    return (std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def near(ours: Tensor, theirs: Tensor, slack: float = 1.0) -> None:
    """Each number is the float64 result, rounded once to its type; sums may lose a few units of the largest number."""
    rounding = ROUNDING[ours.dtype] * slack
    largest = theirs.abs().max().item()
    few = 2.0**-20 * largest if ours.dtype is torch.float32 else 2.0**-16 * largest
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rounding, atol=few * slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 2, 1000), (9, 1, 2048)])
def test_both_places_get_every_number_and_nothing_beside_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Less than a block, blocks that are not full, and several; what lies next to a place stays."""
    source = random(*shape, dtype=dtype)
    room, out = (
        torch.full((2, *shape), 7.0, device=DEVICE, dtype=dtype),
        torch.full((3, *shape), 7.0, device=DEVICE, dtype=dtype),
    )
    copies.copy_to_both(source, room[0], out[1])
    assert torch.equal(room[0], source)
    assert torch.equal(out[1], source)
    assert (room[1] == 7).all()
    assert (out[::2] == 7).all()


ROWS_AND_WIDTHS = [(1, 16), (5, 48), (7, 64), (3, 1000), (2, 2050)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), ROWS_AND_WIDTHS)
def test_norm_is_the_formula(rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Norm, stream and all gradients are float64's rounded once, for widths that fill a block and that do not."""
    x, update = random(rows, 1, hidden, dtype=dtype), random(rows, 1, hidden, seed=1, dtype=dtype)
    weight = random(hidden, seed=2, dtype=dtype)
    grad_normed, grad_stream = (random(rows, 1, hidden, seed=seed, dtype=dtype) for seed in (3, 4))

    stream, normed = norm.add_and_normalize(x, update, weight, EPS)
    near(stream, x.double() + update.double())
    assert torch.equal(normed, norm.normalize(stream, weight, EPS))
    whole, gain = stream.double().requires_grad_(), weight.double().requires_grad_()
    expected = rms_norm(whole, gain.shape, gain, EPS)
    near(normed, expected.detach())

    (of_norm, of_weight) = torch.autograd.grad(expected, (whole, gain), grad_normed.double())
    for beside in (None, grad_stream):
        grad, grad_weight = norm.norm_backward(grad_normed, beside, stream, weight, EPS)
        near(grad, of_norm if beside is None else of_norm + beside.double())
        assert grad_weight.dtype is torch.float32
        near(grad_weight, of_weight, slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
def test_swiglu_is_the_formula(rows: int, width: int, dtype: torch.dtype) -> None:
    """SwiGLU and its gradient are float64's rounded once."""
    gate_up = random(rows, 1, 2 * width, dtype=dtype, std=3)
    upstream = random(rows, 1, width, seed=1, dtype=dtype)
    whole = gate_up.double().requires_grad_()
    gate, up = whole.chunk(2, -1)
    expected = silu(gate) * up
    product = swiglu.swiglu_forward(gate_up, notes=True)
    near(product, expected.detach(), slack=2)
    (gradient,) = torch.autograd.grad(expected, whole, upstream.double())
    ours = swiglu.swiglu_backward(upstream, gate_up, notes=True)
    near(ours, gradient, slack=2)
    for made in (product, ours):
        noted = noted_amax(made)
        assert noted is not None
        near(noted.to(dtype), made.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "mantissa"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
@pytest.mark.parametrize(("tokens", "features"), [(1, 1), (16, 48), (130, 144), (256, 128)])
def test_cast_is_torch_s_cast(tokens: int, features: int, kind: torch.dtype, mantissa: int, dtype: torch.dtype) -> None:
    """Both orders hold what torch makes of the tensor times the power of two that brings it under fp8's largest."""
    x = random(tokens, features, dtype=dtype, std=3)
    amax = fp8.largest_magnitudes(x)
    assert amax.max() == x.abs().max().float()
    rows, columns, inverse_scale = fp8.cast(x, amax, kind, rows=True, columns=True)
    assert rows is not None
    assert columns is not None
    assert torch.equal(rows.view(torch.uint8), columns.view(torch.uint8).t())
    scale = 2.0 ** torch.floor(torch.log2(torch.finfo(kind).max / amax.max().double()))
    assert inverse_scale.item() == 1 / scale.item()
    expected = (x.float() * scale.float()).to(kind)
    same = rows.view(torch.uint8) == expected.view(torch.uint8)
    if INTERPRETED:
        # It rounds halves up, and forgets to carry into the exponent: what became a power of two is left out.
        digits = (x.float() * scale.float()).frexp().mantissa.abs() * 2 ** (mantissa + 1)
        same |= (expected.view(torch.uint8) & (2**mantissa - 1)) == 0
        same |= digits.frac() == 0.5
        assert same.float().mean() > 0.999, "subnormals alone are rounded otherwise"
    else:
        assert same.all()
    for wanted in ((True, False), (False, True)):
        alone = fp8.cast(x, amax, kind, rows=wanted[0], columns=wanted[1])
        for mine, both, asked in zip(alone, (rows, columns), wanted, strict=False):
            assert (mine is not None) == asked
            assert mine is None or torch.equal(mine.view(torch.uint8), both.view(torch.uint8))


@pytest.mark.parametrize("divisor", [None, 3.7])
@pytest.mark.parametrize("numel", [64, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_is_torchs(numel: int, divisor: float | None, dtype: torch.dtype) -> None:
    """Masters and moments follow torch's AdamW in float64 over five steps, and the weights are the masters rounded.

    Moments in bfloat16 are rounded once a step, after the masters have followed them: torch's then go on from ours.
    """
    config = OptimizerConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master, weight = random(numel), torch.full((numel,), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    moments = [torch.zeros_like(master, dtype=dtype) for _ in range(2)]
    theirs = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.1)
    by = None if divisor is None else torch.tensor(divisor, device=DEVICE)
    for step in range(1, 6):
        gradient = random(numel, seed=step)
        rates = adamw.step_rates(torch.tensor(float(step), device=DEVICE), by, 1e-2, config)
        adamw.adamw_step(
            master, *moments, gradient, weight, rates, config, learning_rate=1e-2, weight_decay=config.weight_decay
        )
        theirs.grad = gradient.double() / (divisor or 1.0)
        optimizer.step()
        torch.testing.assert_close(master.double(), theirs.detach(), rtol=2e-6, atol=2e-7)
        for ours, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
            exact = optimizer.state[theirs][name]
            rounding = 2e-5 if dtype is torch.float32 else ROUNDING[dtype] + 2e-5
            torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=1e-7)
            if dtype is not torch.float32:
                exact.copy_(ours)
        near(weight, master.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "numel"), [(3, 7), (4, 2048), (5, 2049), (8, 5000)])
def test_parts_are_summed_in_order(parts: int, numel: int, dtype: torch.dtype) -> None:
    """Parts of any number give the float64 sum rounded once, in the order given."""
    given = [random(numel, seed=seed, dtype=dtype) for seed in range(parts)]
    near(partial_sums.sum_in_order(given), torch.stack(given).double().sum(0), slack=2)
    in_order = given[0].float()
    for part in given[1:]:
        in_order = in_order + part.float()
    if dtype is torch.float32:
        assert torch.equal(partial_sums.sum_in_order(given), in_order)


HEADS = [(4, 2, 8), (6, 3, 10), (5, 1, 64), (20, 5, 16)]


def angles(seq: int, batch: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[seq, batch, 1, head_dim]`, both halves alike."""
    half = random(seq, batch, 1, head_dim // 2, seed=9, std=3)
    angle = torch.cat((half, half), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_rotary_is_the_formula(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Queries and keys are rotated in place and values left; gradients in any memory order are rotated back."""
    seq, batch = 3, 2
    cos, sin = angles(seq, batch, head_dim, dtype)
    rotation = Rotation(cos.double(), sin.double())
    qkv = random(seq, batch, heads + 2 * kv_heads, head_dim, dtype=dtype)
    expected = torch.cat((rotation(qkv[:, :, : heads + kv_heads].double()), qkv[:, :, heads + kv_heads :].double()), 2)
    rotary.rotate_in_place(qkv, heads + kv_heads, cos, sin)
    near(qkv, expected, slack=2)
    assert torch.equal(qkv[:, :, heads + kv_heads :].double(), expected[:, :, heads + kv_heads :])

    def grads(order: tuple[int, ...]) -> list[Tensor]:
        shapes = [(seq, batch, count, head_dim) for count in (heads, kv_heads, kv_heads)]
        made = [random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
        inverse = tuple(order.index(dim) for dim in range(4))
        return [grad.permute(order).contiguous().permute(inverse) for grad in made]

    for order in [(0, 1, 2, 3), (1, 2, 0, 3), (1, 0, 2, 3), (3, 0, 1, 2)]:
        q, k, v = grads(order)
        back = rotation.inverse()
        theirs = torch.cat((back(q.double()), back(k.double()), v.double()), 2).flatten(2)
        near(rotary.gather_rotated_back(q, k, v, cos, sin), theirs, slack=2)


def test_one_table_serves_every_sequence() -> None:
    """Angles that all sequences of a micro-batch share may be given once."""
    cos, sin = angles(3, 1, 8, torch.float32)
    qkv = random(3, 2, 4, 8)
    once = qkv.clone()
    rotary.rotate_in_place(once, 3, cos, sin)
    rotary.rotate_in_place(qkv, 3, cos.repeat(1, 2, 1, 1), sin.repeat(1, 2, 1, 1))
    assert torch.equal(once, qkv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("std", [0.1, 10.0, 1e4])
@pytest.mark.parametrize(
    ("columns", "num_valid"), [(1, 1), (7, 7), (64, 60), (64, 0), (4096, 4096), (5000, 4500), (8200, 8192)]
)
def test_cross_entropy_is_the_formula(columns: int, num_valid: int, std: float, dtype: torch.dtype) -> None:
    """Statistics and gradient are float64's whatever padding holds, for targets here, on another rank and ignored."""
    logits = random(4, 1, columns, dtype=dtype, std=std)
    logits[..., num_valid:] = 7e4
    last = max(num_valid - 1, 0)
    targets = torch.tensor([[0], [last], [-100], [columns]], device=DEVICE)
    if num_valid == 0:
        targets -= 2 * columns  # no token is in the padding
    scale = torch.tensor([[0.5], [0.25], [0.0], [2.0]], device=DEVICE)

    highest, total, target = cross_entropy.logit_statistics(logits, targets, num_valid)
    scores = logits.double()
    here = [scores[0, 0, 0], scores[1, 0, last]] if num_valid else scores.new_zeros(2)
    assert torch.equal(target.double(), torch.stack([*here, *scores.new_zeros(2)]).unsqueeze(1))
    if num_valid == 0:
        assert torch.equal(highest, torch.full_like(highest, -torch.inf))
        assert torch.equal(total, torch.zeros_like(total))
        highest, total = torch.ones_like(highest), torch.ones_like(total)
    else:
        valid = scores[..., :num_valid]
        assert torch.equal(highest.double(), valid.amax(-1))
        torch.testing.assert_close(total.double(), (valid - valid.amax(-1, True)).exp().sum(-1), rtol=1e-5, atol=0)

    one_hot = torch.arange(columns, device=DEVICE) == targets.unsqueeze(-1)
    expected = torch.zeros_like(scores)
    if num_valid:
        expected[..., :num_valid] = scores[..., :num_valid].softmax(-1) - one_hot[..., :num_valid].double()
    version = logits._version
    cross_entropy.logits_to_gradient(logits, targets, num_valid, highest, total, scale)
    assert logits._version > version, "autograd would not notice that the logits are gone"
    rounding = 1e-5 if dtype is torch.float32 else ROUNDING[dtype]
    # Exponentials of float32 differences: 1e-6 of the largest probability.
    torch.testing.assert_close(logits.double(), expected * scale.unsqueeze(-1), rtol=rounding, atol=2e-6)


def results(seed: int) -> list[Tensor]:
    """What every kernel makes of numbers that follow the seed."""
    dtype, cos_sin = torch.bfloat16, angles(5, 1, 8, torch.bfloat16)
    x, y, w = (random(5, 1, 96, seed=seed + n, dtype=dtype) for n in range(3))
    qkv, logits = x.clone().view(5, 1, 12, 8), y.clone()
    rotary.rotate_in_place(qkv, 9, *cos_sin)
    targets = torch.arange(5, device=DEVICE).unsqueeze(1)
    statistics = cross_entropy.logit_statistics(logits, targets, 90)
    cross_entropy.logits_to_gradient(logits, targets, 90, *statistics[:2], torch.ones_like(statistics[0]))
    heads = x.view(5, 1, 12, 8)
    return [
        *norm.add_and_normalize(x, y, w[0, 0], EPS),
        *norm.norm_backward(x, y, w, w[0, 0], EPS),
        swiglu.swiglu_forward(x),
        swiglu.swiglu_backward(y[..., :48], x),
        qkv,
        rotary.gather_rotated_back(*heads.split((6, 3, 3), 2), *cos_sin),
        *statistics,
        logits,
    ]


def test_same_inputs_give_the_same_bits() -> None:
    """Repeats are bit-identical, and other inputs give other bits."""
    once, again, other = results(0), results(0), results(50)
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(once, other, strict=True))


@pytest.mark.parametrize("fault", ["sign of the angle", "another epsilon", "a column of padding", "halves exchanged"])
def test_small_faults_are_seen(fault: str) -> None:
    """The comparisons above refuse results that are wrong in one small thing."""
    x, weight = random(3, 1, 64), random(64, seed=1)
    if fault == "sign of the angle":
        cos, sin = angles(3, 1, 8, torch.float32)
        heads = x.view(3, 1, 8, 8)
        q, k, v = heads.split((4, 2, 2), 2)
        ours = rotary.gather_rotated_back(q, k, v, cos, -sin).view(3, 1, 8, 8)[:, :, :4]
        theirs = Rotation(cos.double(), -sin.double())(q.double())
    elif fault == "another epsilon":
        ours, theirs = norm.normalize(x, weight, 1e-4), rms_norm(x.double(), (64,), weight.double(), EPS)
    elif fault == "a column of padding":
        ours = cross_entropy.logit_statistics(x, torch.zeros(3, 1, dtype=torch.long, device=DEVICE), 63)[1]
        theirs = (x.double() - x.double().amax(-1, True)).exp().sum(-1)
    else:
        up, gate = x.double().chunk(2, -1)
        ours, theirs = swiglu.swiglu_forward(x), silu(gate) * up
    with pytest.raises(AssertionError):
        near(ours, theirs, slack=4)
