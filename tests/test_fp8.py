"""Products in fp8: what rounding to them costs, that no layout changes them, and that a model learns by them."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import kernel_standins
import pytest
import torch
from kernel_standins import kernel_path
from parity import engine_for, in_pieces, local_batch, make_reference, make_samples
from ranks import Ranks
from test_kernel_path import PATHS
from tiny_configs import tiny_config
from tiny_models import tiny_llama
from torch import Tensor

from triweave import overlap
from triweave.errors import InputError
from triweave.gradients import main_grad
from triweave.kernels.noted import note_amax
from triweave.layers import fp8
from triweave.layers.attention import AttentionKernel
from triweave.layers.fp8 import GRADIENTS, VALUES, both_ways, by_columns, by_rows, multiply
from triweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout, Recompute
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec
from triweave.rules import fp8_problems
from triweave.training.engine import check_fp8
from triweave.training.step import train_step
from triweave.verify.compare import Tolerance, compare_with_reference, in_fp8
from triweave.verify.reference import Reference, Sample

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
SEQ, VOCAB = 32, 96
ROUNDING = {VALUES: 2.0**-4, GRADIENTS: 2.0**-3}
"""Half the distance of two numbers that are neighbours, relative to them: three and two bits of mantissa."""


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that follow the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Frobenius norm of the difference, relative."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


# --- casts and products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 3e4, 1e20])
def test_cast_rounds_once(dtype: torch.dtype, magnitude: float) -> None:
    """Every number that is no subnormal keeps its leading digits, whatever the magnitude, and none overflows."""
    x = magnitude * random(48, 32)
    rows, columns = both_ways(x, dtype)
    assert torch.equal(rows.values.view(torch.uint8), columns.values.view(torch.uint8).t())
    back = rows.values.float() * rows.inverse_scale
    assert back.isfinite().all()
    # In the middle of the range above the smallest normal number, which the scale puts at 1e-4 of the largest.
    normal = x.abs() > 1e-4 * x.abs().max()
    assert ((back - x).abs() <= ROUNDING[dtype] * x.abs())[normal].all()
    assert (rows.values.float().abs().max() > torch.finfo(dtype).max / 4).item(), "half of the range is unused"


@pytest.mark.parametrize("parts", [2, 4])
def test_slices_are_cast_as_the_whole(parts: int) -> None:
    """Scales are powers of two: a slice in fp8, cast alone, is the slice of the whole, its subnormals apart."""
    x = random(64, 32)
    x[:16] /= 50
    rows = by_rows(x, VALUES)
    whole = rows.values.float() * rows.inverse_scale
    alone = [by_rows(part, VALUES) for part in x.chunk(parts)]
    together = torch.cat([part.values.float() * part.inverse_scale for part in alone])
    assert len({part.inverse_scale.item() for part in alone}) > 1
    subnormal = torch.finfo(VALUES).tiny * rows.inverse_scale
    assert torch.equal(together[x.abs() > subnormal], whole[x.abs() > subnormal])


def test_zeros_and_what_is_not_a_number() -> None:
    """Zeros stay zeros; an infinity or a NaN makes the product one that is not finite, and is not hidden."""
    ones = by_rows(torch.ones(16, 16), VALUES)
    assert not multiply(by_rows(torch.zeros(16, 16), VALUES), ones, torch.float32, fast=True).any()
    for bad in (torch.nan, torch.inf):
        x = random(16, 16)
        x[3, 4] = bad
        assert not multiply(by_rows(x, VALUES), ones, torch.float32, fast=True)[3].isfinite().any()


def test_product_is_that_of_the_casts() -> None:
    """What is multiplied are the casts times their scales, `[m, inner]` by `[n, inner]`."""
    a, b = random(48, 64), 1e-3 * random(32, 64, seed=1)
    a8, b8 = by_rows(a, GRADIENTS), by_columns(b.t(), VALUES)
    expected = (a8.values.double() * a8.inverse_scale) @ (b8.values.double() * b8.inverse_scale).t()
    torch.testing.assert_close(multiply(a8, b8, torch.float32, fast=False).double(), expected, rtol=1e-5, atol=1e-5)
    out = torch.empty(96, 32)
    multiply(a8.rows(16, 32), b8, torch.float32, fast=True, out=out[16:32])
    torch.testing.assert_close(out[16:32].double(), expected[16:32], rtol=1e-5, atol=1e-5)


def test_held_casts_stay_where_they_are() -> None:
    """Held casts of a weight that has changed are renewed at their next use, in the memory where they lay."""
    weight = torch.randn(32, 16)
    fp8.weight_by_rows(weight)
    fp8.hold_casts(weight)
    held = fp8.weight_by_rows(weight), fp8.weight_by_columns(weight)
    weight.mul_(7.3)
    fp8.forget_casts(weight, changed=True)
    again = fp8.weight_by_rows(weight), fp8.weight_by_columns(weight)
    for one, other, expected in zip(
        held, again, (fp8.by_rows(weight, fp8.VALUES), fp8.by_columns(weight, fp8.VALUES)), strict=True
    ):
        assert one.values.data_ptr() == other.values.data_ptr()
        assert torch.equal(other.values.float(), expected.values.float())
        assert torch.equal(one.inverse_scale, expected.inverse_scale)


def test_what_is_noted_of_a_tensor_ends_with_it() -> None:
    """A noted largest magnitude is used, and is not once the tensor was changed."""
    x = random(16, 16)
    note_amax(x, torch.tensor([1.0, 448.0 * 64]))
    assert by_rows(x, VALUES).inverse_scale.item() == 64
    x.add_(1)
    assert by_rows(x, VALUES).inverse_scale.item() < 1


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_near_the_exact_ones(kind: type, dtype: torch.dtype) -> None:
    """Output and gradients of a product are within what rounding two operands at random makes of them."""
    exact, ours = (kind(64, 96, TensorParallel(), fp8=use).to(dtype) for use in (False, True))
    results = []
    for layer in (exact, ours):
        layer.weight.data.copy_(random(96, 64))
        x = random(SEQ, 2, 64, seed=1).to(dtype).requires_grad_()
        y = layer(x)
        y.backward(random(SEQ, 2, 96, seed=2).to(dtype))
        results.append((y, x.grad, main_grad(layer.weight)))
    # Two operands, each off by 0.026 (three bits) or 0.053 (two) on average over numbers of all digits.
    for mine, theirs, allowed in zip(*reversed(results), (0.045, 0.07, 0.07), strict=True):
        assert 0.01 < relative(mine, theirs) < allowed


SPEC = ModelSpec(300, 64, 96, 1, 8, 4, 16)
RECOMPUTE: list[tuple[Recompute, ...]] = [(), ("norm",), ("swiglu",), ("attention",), ("mlp",), ("layer",)]


def layer_results(recompute: tuple[Recompute, ...]) -> list[Tensor]:
    """Output and gradients of a layer in fp8."""
    layer = DecoderLayer(SPEC, TensorParallel(), AttentionKernel(), recompute, fp8=True)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number) / 5)
    positions = torch.arange(SEQ).unsqueeze(1)
    x = random(SEQ, 1, 64, seed=77).requires_grad_()
    y = layer(x, make_rotation(inverse_frequencies(SPEC), positions, torch.float32), None)
    y.backward(random(SEQ, 1, 64, seed=5))
    assert x.grad is not None
    return [y.detach(), x.grad, *(main_grad(parameter) for parameter in layer.parameters())]


def test_recomputed_is_bit_identical() -> None:
    """Gradients do not depend on what is recomputed."""
    without = layer_results(())
    for recompute in RECOMPUTE[1:]:
        assert all(torch.equal(*pair) for pair in zip(layer_results(recompute), without, strict=True)), recompute


@pytest.mark.parametrize("stand_ins", PATHS, ids=["stand-ins", "triton"])
def test_layer_is_the_same_by_kernels(stand_ins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer computes with kernels what it computes without, and reads nothing again that SwiGLU's have read."""
    expected = layer_results(())
    kernel = kernel_standins if stand_ins else importlib.import_module("triweave.kernels.fp8")
    seen: list[tuple[int, ...]] = []
    largest = kernel.largest_magnitudes

    def watched(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return largest(x)

    monkeypatch.setattr(kernel, "largest_magnitudes", watched)
    with kernel_path(stand_ins=stand_ins):
        ours = layer_results(())
    for mine, theirs in zip(ours, expected, strict=True):
        # Triton's interpreter rounds to fp8 its own way; a sum in another order now and then rounds otherwise.
        assert relative(mine, theirs) < (0.03 if stand_ins else 0.4)
    # Four weights; both norms' and attention's output; the gradients of o's, down's and qkv's output.
    assert len(seen) == 10
    assert (SEQ, 1, 96) not in seen, "SwiGLU's product is noted"
    assert (SEQ, 1, 192) not in seen, "and so is the gradient of gate and up"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_sizes_that_fp8_has_not_are_told() -> None:
    """Every size of a rank's products that is no multiple of 16 is named with both numbers; legal ones are not."""
    assert not fp8_problems(SPEC, Layout(tp=2), SEQ)
    odd = ModelSpec(300, 72, 88, 1, 4, 4, 10)
    told = [str(problem) for problem in fp8_problems(odd, Layout(tp=2, micro_batch=3), 20)]
    assert len(told) == 5
    for size, message in zip((72, 20, 20, 44, 60), told, strict=True):
        assert "multiples of 16" in message
        assert f"is {size}" in message


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_without_fp8_are_refused(capability: tuple[int, int], refused: bool) -> None:
    """Ampere is refused in one message with both numbers; Ada, Hopper and the CPU are not."""
    check_fp8(torch.device("cpu"))
    with (
        patch("torch.cuda.get_device_capability", lambda _: capability),
        patch("torch.cuda.get_device_name", lambda _: "A100"),
    ):
        if refused:
            with pytest.raises(InputError, match=rf"8\.9 or more; A100 has {capability[0]}\.{capability[1]}"):
                check_fp8(torch.device("cuda"))
        else:
            check_fp8(torch.device("cuda"))


# --- a whole model ----------------------------------------------------------------------------------------------------

MODEL: dict[str, object] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": VOCAB}
STEPS = 2


def run_steps(rank: int, folder: Path, layout: Layout, pieces: bool) -> list[tuple[float, float]]:
    """Losses and gradient norms of a few steps in fp8 from drawn weights, float32 around the products."""
    samples = make_samples(4 * layout.micro_batch, 1, SEQ, VOCAB, packed=False)
    with in_pieces() if pieces else nullcontext(), patch.object(overlap, "MIN_PIECE_TOKENS", 1):
        engine = engine_for(folder, layout, SEQ, 4 // layout.dp, weights="random", fp8=True)
        batch = local_batch(samples, layout, engine.groups.at.dp)
        return [train_step(engine, batch, 1e-3, 1.0) for _ in range(STEPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose products all have sizes that fp8 allows, on two and on four ranks."""
    return tiny_config(tmp_path_factory.mktemp("fp8") / "model", **MODEL)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, folder: Path) -> list[tuple[float, float]]:
    """What one process gives."""
    return ranks.run(1, run_steps, folder, Layout(), False)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sample], Reference]:
    """A small Llama and what transformers gives for it in float32."""
    place = tmp_path_factory.mktemp("fp8-reference")
    model, samples = tiny_llama(place / "model", head_dim=16), make_samples(2, 1, SEQ, VOCAB, packed=False)
    return model, samples, make_reference(model, samples, place / "reference.safetensors")


def verify_in_fp8(
    rank: int, model: Path, samples: list[Sample], reference: Reference, layout: Layout, scale: float
) -> str | None:
    """The first difference of a layout in fp8, its weights' scales off by a factor in backward."""
    right = fp8.weight_by_columns

    def wrong(weight: Tensor) -> fp8.Fp8Matrix:
        matrix = right(weight)
        return fp8.Fp8Matrix(matrix.values, matrix.inverse_scale * scale)

    with patch("triweave.layers.fp8_linear.weight_by_columns", wrong):
        engine = engine_for(model, layout, SEQ, len(samples), fp8=True)
        batch = local_batch(samples, layout, 0, engine.groups.at.cp)
        return compare_with_reference(engine, batch, reference, in_fp8(Tolerance())).first_difference


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, cp=2)], ids=["tp2-pp2", "tp2-cp2"])
def test_verify_in_fp8(
    ranks: Ranks, reference: tuple[Path, list[Sample], Reference], layout: Layout, scale: float
) -> None:
    """A layout in fp8 passes beside transformers in float32; with scales twice too large in backward it does not.

    Context-parallel ranks are held against this alone: each casts its own tokens with its own scale, so that numbers
    below a scale's normal ones are rounded otherwise than in one process, which layers after them enlarge.
    """
    for found in ranks.run(4, verify_in_fp8, *reference, layout, scale):
        assert (found is None) == (scale == 1.0)


def losses(rank: int, folder: Path, fp8: bool) -> list[float]:
    """Losses of a model that learns one small text by heart."""
    layout, samples = Layout(micro_batch=4), make_samples(1, 4, SEQ, VOCAB, packed=False)
    engine = engine_for(folder, layout, SEQ, 1, weights="random", dtype="bfloat16", fp8=fp8)
    batch = local_batch(samples, layout, 0)
    return [train_step(engine, batch, 2e-3, 1.0)[0] for _ in range(120)]


def test_a_model_learns_alike(ranks: Ranks, folder: Path) -> None:
    """Over a hundred steps the loss falls in fp8 as it does in bf16."""
    exact, ours = (torch.tensor(ranks.run(1, losses, folder, in_fp8)[0]) for in_fp8 in (False, True))
    assert exact[-1] < 0.1 * exact[0]
    assert (ours - exact).abs().max() < 0.03 * exact[0]


LAYOUTS = {
    "tp2": (Layout(tp=2), False),
    "tp2-pieces": (Layout(tp=2), True),
    "tp2-gathered": (Layout(tp=2, keep_gathered=True), True),
    "tp2-nosp": (Layout(tp=2, sequence_parallel=False), False),
    "dp2-none": (Layout(dp=2, shard="none"), False),
    "dp2-gradients": (Layout(dp=2, shard="gradients"), False),
    "dp2-full": (Layout(dp=2, shard="full"), False),
    "pp2-zero-bubble-recompute": (Layout(pp=2, schedule="zero-bubble", recompute=("norm", "swiglu")), False),
    "tp2-pp2-zero-bubble": (Layout(tp=2, pp=2, schedule="zero-bubble"), False),
    "tp2-dp2-full-recompute-pieces": (Layout(tp=2, dp=2, shard="full", recompute=("layer",)), True),
}


@pytest.mark.parametrize(("layout", "pieces"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_train_as_one_process(
    ranks: Ranks, folder: Path, alone: list[tuple[float, float]], layout: Layout, pieces: bool
) -> None:
    """Losses and gradient norms of steps in fp8 are the same on every axis, products whole or in pieces."""
    (first, second), *later = ranks.run(layout.world_size, run_steps, folder, layout, pieces)
    assert all([first, second] == steps for steps in later), "every rank reports the same"
    # A sum in another order differs in float32's last bit, and may then be rounded to fp8's next number. The first
    # step has none such; after it Adam has gone by the signs of gradients, be they as small as that bit.
    assert first == pytest.approx(alone[0], rel=1e-6)
    assert second == pytest.approx(alone[1], rel=2e-3)
