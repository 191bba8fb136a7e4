"""AdamW (Loshchilov and Hutter 1711.05101) and the weights in their working precision, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.config.schema import OptimizerConfig
from triweave.kernels.dispatch import launch
from triweave.kernels.language import tl, triton

_BLOCK, _WARPS = 2048, 8


def adamw_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    rates: Tensor,
    config: OptimizerConfig,
    *,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update masters and moments in place, and write the new weights.

    30 bytes an element, with moments in bfloat16 22; torch's fused kernel, which writes the divided gradient back, and
    a cast after it take 42. Arithmetic is float32: masters follow the moments as they are before they are rounded.

    Args:
        master: float32 `[numel]`.
        exp_avg: first moment `[numel]`, float32 or bfloat16.
        exp_avg_sq: second moment, likewise.
        gradient: float32 `[numel]`, as reduced; it is read only.
        weight: `[numel]` in the working precision, overwritten; None where masters alone are kept.
        rates: from `step_rates`.
        config: betas and eps.
        learning_rate: of this step, for the decay.
        weight_decay: of these parameters.
    """
    numel = master.numel()
    beta1, beta2 = config.betas
    launch(
        _adamw,
        (triton.cdiv(numel, _BLOCK),),
        master,
        exp_avg,
        exp_avg_sq,
        gradient,
        master if weight is None else weight,
        rates,
        numel,
        1.0 - learning_rate * weight_decay,
        beta1,
        beta2,
        config.eps,
        WRITES_WEIGHT=weight is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def step_rates(step: Tensor, divisor: Tensor | None, learning_rate: float, config: OptimizerConfig) -> Tensor:
    """What depends on the step alone, float32 `[3]` where it is read: nothing waits for the GPU.

    Powers near 1 are taken in float64, as torch does: at step 1 the second correction is 1 - beta2, of which float32
    would keep four digits.

    Args:
        step: of this update, from 1.
        divisor: float32 scalar that gradients are divided by first; not a number to change nothing.
        learning_rate: of this step.
        config: betas.

    Returns:
        Learning rate over the first bias correction, square root of the second, and one over the divisor.
    """
    count = step.double()
    beta1, beta2 = config.betas
    scale = torch.ones_like(count) if divisor is None else divisor.double()
    return torch.stack(
        [learning_rate / (1 - beta1**count), (1 - beta2**count).sqrt(), 1 / scale.reshape(count.shape)]
    ).float()


@triton.jit
def _adamw(
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    gradient: tl.tensor,
    weight: tl.tensor,
    rates: tl.tensor,
    numel: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    WRITES_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    step_size, correction, scale = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    # A step whose gradient is no number changes nothing. Compared as a block: Triton's interpreter (3.9) takes what a
    # comparison of two scalars gives for a float32.
    whole = tl.broadcast_to(scale, [BLOCK])
    inside = inside & (whole == whole)
    g = tl.load(gradient + at, mask=inside, other=0.0) * scale
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(master + at, mask=inside, other=0.0)
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * decay - step_size * m / (tl.sqrt(v) / correction + eps)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(master + at, p, mask=inside)
    if WRITES_WEIGHT:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask=inside)
