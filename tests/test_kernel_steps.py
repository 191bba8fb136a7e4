"""Whole steps by the Triton kernels where the engine calls them, on every axis, in Triton's interpreter.

What only GPUs run is seen here by a machine without one: `uses_kernels` says yes everywhere. transformers is the
judge of gradients, and the same engine by plain torch of what the optimizer makes of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_standins import INTERPRETED, every_kernel
from late_copies import late_copies
from parity import engine_for, in_pieces, local_batch, make_reference, make_samples, verify_on_rank
from ranks import Ranks
from tiny_configs import tiny_config
from tiny_models import tiny_llama
from torch import Tensor

from triweave.kernels import partial_sums, rotary
from triweave.layers import context_parallel
from triweave.layout import Layout
from triweave.training.step import train_step
from triweave.verify.compare import Verdict
from triweave.verify.reference import Reference, Sample

if not INTERPRETED:
    pytest.skip("no Triton interpreter: make test runs this file", allow_module_level=True)

SEQ, VOCAB = 8, 100
How = Callable[[], AbstractContextManager[None]]

LAYERS = {
    *("norm._forward", "norm._backward", "swiglu._forward", "swiglu._backward", "rotary._forward", "rotary._backward"),
    *("cross_entropy._statistics", "cross_entropy._gradient"),
}
"""Kernels of every forward and backward."""

FP8 = {"fp8._largest", "fp8._cast"}


def verified(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], reference: Reference, how: How
) -> tuple[Verdict, Counter[str]]:
    """The verdict on a layout by its kernels, and which of them this rank has launched."""
    with every_kernel() as launched:
        verdict = verify_on_rank(rank, folder, layout, samples, reference, how)
    return verdict, Counter(launched)


def sizes(layout: Layout) -> dict[str, Any]:
    """Of a model that is as small as a layout allows: the interpreter takes milliseconds a block of a kernel."""
    layers = 2 if layout.pp > 1 or layout.offload else 1
    return {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "vocab_size": VOCAB}


def samples_of(layout: Layout, seq: int = SEQ, *, packed: bool = False) -> list[Sample]:
    """As few micro-batches as the pipeline takes."""
    return make_samples(layout.pp * layout.dp, layout.micro_batch, seq, VOCAB, packed=packed)


def check(
    ranks: Ranks, tmp_path: Path, layout: Layout, packed: bool = False, how: How = nullcontext
) -> tuple[Verdict, Counter[str]]:
    """Ask transformers about a layout; the verdict, and what all ranks have launched."""
    folder = tiny_llama(tmp_path / "model", **sizes(layout))
    samples = samples_of(layout, packed=packed)
    reference = make_reference(folder, samples, tmp_path / "reference.safetensors")
    found = ranks.run(layout.world_size, verified, folder, layout, samples, reference, how)
    return found[0][0], sum((launched for _, launched in found), Counter())


LAYOUTS: dict[str, tuple[Layout, bool, How]] = {
    "one": (Layout(), False, nullcontext),
    "packed": (Layout(micro_batch=2), True, nullcontext),
    "recompute": (Layout(recompute=("norm", "swiglu", "attention")), False, nullcontext),
    "tp2": (Layout(tp=2), False, nullcontext),
    "tp2-nosp": (Layout(tp=2, sequence_parallel=False), False, nullcontext),
    "tp4-pieces": (Layout(tp=4), False, in_pieces),
    "pp2-zero-bubble": (Layout(pp=2, schedule="zero-bubble"), False, nullcontext),
    "dp2-full": (Layout(dp=2, shard="full", recompute=("layer",)), False, nullcontext),
    "cp2": (Layout(cp=2), False, nullcontext),
    "cp2-packed": (Layout(cp=2), True, nullcontext),
    "cp4": (Layout(cp=4), False, nullcontext),
    "offload": (Layout(offload=("attention", "mlp")), False, nullcontext),
}


@pytest.mark.parametrize(("layout", "packed", "how"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_kernels_compute_what_transformers_does(
    ranks: Ranks, tmp_path: Path, layout: Layout, packed: bool, how: How
) -> None:
    """Outputs, loss and gradients are transformers' where every operation that has a kernel runs as one."""
    verdict, launched = check(ranks, tmp_path, layout, packed, how)
    assert verdict.first_difference is None, (verdict.to_json(), verdict.outputs)
    assert launched.keys() >= LAYERS
    # Sums of three parts and more: four ranks' slices, and a query's shares of own, earlier and later keys.
    assert ("partial_sums._sum" in launched) == (layout.tp == 4 or (layout.cp > 1 and not packed))


# --- faults -----------------------------------------------------------------------------------------------------------


def adds_three(parts: list[Tensor]) -> Tensor:
    """As the kernel adds: parts that are not there are the first one again."""
    return partial_sums.sum_in_order(parts + parts[:1] * (3 - len(parts)))


def sums_by_the_kernel_alone() -> AbstractContextManager[Any]:
    """What a first run on GPUs found: context parallel gives the kernel sums of one part and of two as well."""
    return patch.object(context_parallel, "sum_parts", adds_three)


def shifted_values() -> AbstractContextManager[Any]:
    """Backward takes the gradient of the keys for that of the values too."""
    gather = rotary.gather_rotated_back
    return patch.object(rotary, "gather_rotated_back", lambda q, k, v, *angles: gather(q, k, k, *angles))


@pytest.mark.parametrize(
    ("fault", "layout", "named"),
    [
        (sums_by_the_kernel_alone, Layout(cp=2), "q_proj"),
        (shifted_values, Layout(), "v_proj"),
    ],
    ids=["sums", "values"],
)
def test_a_fault_on_the_kernels_path_is_named(
    ranks: Ranks, tmp_path: Path, fault: How, layout: Layout, named: str
) -> None:
    """A sum that counts a part three times, and a gradient put in another's place, are named."""
    verdict, _ = check(ranks, tmp_path, layout, how=fault)
    assert not verdict.passed
    assert named in verdict.worst_gradient[0]


# --- whole steps ------------------------------------------------------------------------------------------------------

Told = tuple[Tensor, Tensor]
"""Losses and gradient norms of some steps, and what they have changed the masters by."""


def after_steps(folder: Path, layout: Layout, samples: list[Sample], **model: Any) -> Told:
    """Two steps of this rank."""
    seq = samples[0].inputs.tokens.shape[0]
    engine = engine_for(folder, layout, seq, len(samples) // layout.dp, weights="random", **model)
    batch = local_batch(samples, layout, engine.groups.at.dp, engine.groups.at.cp)
    units = engine.sharding.units
    before = [unit.master.clone() for unit in units]
    told = [train_step(engine, batch, 1e-2, 1.0) for _ in range(2)]
    for unit in units:
        unit.gather()
        # The interpreter cuts bits off where a GPU rounds.
        weights = unit.weight[unit.shard_start : unit.shard_stop].float()
        torch.testing.assert_close(weights, unit.master, rtol=torch.finfo(unit.dtype).eps, atol=0)
    return torch.tensor(told), torch.cat([unit.master - former for unit, former in zip(units, before, strict=True)])


def both_ways(
    rank: int, folder: Path, layout: Layout, samples: list[Sample], how: How, model: dict[str, Any]
) -> tuple[Told, Told, Told, Counter[str]]:
    """Steps in float32 by torch, then as asked by torch and by kernels, and which kernels were launched."""
    with how():
        exact, plain = after_steps(folder, layout, samples), after_steps(folder, layout, samples, **model)
        with every_kernel() as launched:
            ours = after_steps(folder, layout, samples, **model)
    return exact, plain, ours, Counter(launched)


def apart(ours: Told, theirs: Told) -> list[float]:
    """How far two runs are from each other, of the Frobenius norm."""
    return [((mine - other).norm() / other.norm()).item() for mine, other in zip(ours, theirs, strict=True)]


STEPS: dict[str, tuple[Layout, How, dict[str, Any]]] = {
    "one": (Layout(), nullcontext, {}),
    "dp2-full": (Layout(dp=2, shard="full"), nullcontext, {}),
    "offload-pp2": (Layout(pp=2, offload=("layer",)), late_copies, {}),
    "bfloat16": (Layout(), nullcontext, {"dtype": "bfloat16"}),
    "tp4-pieces-bfloat16": (Layout(tp=4), in_pieces, {"dtype": "bfloat16"}),
    "dp2-gradients-bfloat16": (Layout(dp=2, shard="gradients"), nullcontext, {"dtype": "bfloat16"}),
    "moments": (Layout(dp=2), nullcontext, {"moments": "bfloat16"}),
    "fp8-tp2": (Layout(tp=2, recompute=("swiglu",)), nullcontext, {"dtype": "bfloat16", "fp8": True}),
}


@pytest.mark.parametrize(("layout", "how", "model"), STEPS.values(), ids=STEPS.keys())
def test_steps_by_kernels_are_steps_by_torch(
    ranks: Ranks, tmp_path: Path, layout: Layout, how: How, model: dict[str, Any]
) -> None:
    """Two steps by kernels, the optimizer's among them, lose and change what two steps by plain torch do.

    In float32 as far as AdamW tells small gradients from none. In fewer bits they may be three times as far from
    float32 as steps by torch are, or by two last bits, for the interpreter cuts off what a GPU rounds.
    """
    folder = tiny_config(tmp_path, **(sizes(layout) | {"hidden_size": 64, "intermediate_size": 96}))
    samples = samples_of(layout, 32 if model.get("fp8") else SEQ)
    for exact, plain, ours, launched in ranks.run(layout.world_size, both_ways, folder, layout, samples, how, model):
        assert launched.keys() >= {"adamw._adamw", *(FP8 if model.get("fp8") else ())}
        if model:
            for mine, theirs in zip(apart(ours, exact), apart(plain, exact), strict=True):
                assert mine < max(3 * theirs, 2 * torch.finfo(torch.bfloat16).eps)
        else:
            losses, changes = apart(ours, plain)
            assert losses < 1e-5
            assert changes < 1e-3
