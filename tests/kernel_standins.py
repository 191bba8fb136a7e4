"""Stand-ins for the Triton kernels: the same functions in torch, float64 inside, one rounding at the end.

They let the layers' kernel path run where there is neither a GPU nor Triton. What they compute on the way is hidden
from dispatch modes, as what a kernel holds in registers is from the allocator: only results are seen to be made.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from triweave.kernels import dispatch
from triweave.kernels.noted import note_amax

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
"""Whether the Triton kernels run on the CPU."""

OPERATIONS = ("norm", "swiglu", "rotary", "cross_entropy", "fp8")


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + head_dim/2) turned by their angle."""
    first, second = x.chunk(2, -1)
    c, s = (table.double().chunk(2, -1)[0] for table in (cos, sin))
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    with _disable_current_modes():
        out.copy_(torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), eps))
    return out


def add_and_normalize(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream = x + update
    return stream, normalize(stream, weight, eps)


def norm_backward(
    grad_normed: Tensor, grad_stream: Tensor | None, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    grad, grad_weight = torch.empty_like(stream), torch.empty_like(weight, dtype=torch.float32)
    with _disable_current_modes(), torch.enable_grad():
        x, w = stream.double().requires_grad_(), weight.double().requires_grad_()
        normed = torch.nn.functional.rms_norm(x, w.shape, w, eps)
        ours, of_weight = torch.autograd.grad(normed, (x, w), grad_normed.double())
        grad.copy_(ours if grad_stream is None else ours + grad_stream)
        grad_weight.copy_(of_weight)
    return grad, grad_weight


def swiglu_forward(gate_up: Tensor, *, notes: bool = False) -> Tensor:
    product = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    with _disable_current_modes():
        gate, up = gate_up.double().chunk(2, -1)
        product.copy_(torch.nn.functional.silu(gate) * up)
        if notes:
            note_amax(product, product.abs().amax().float())
    return product


def swiglu_backward(grad: Tensor, gate_up: Tensor, *, notes: bool = False) -> Tensor:
    result = torch.empty_like(gate_up)
    with _disable_current_modes(), torch.enable_grad():
        x = gate_up.double().requires_grad_()
        gate, up = x.chunk(2, -1)
        result.copy_(torch.autograd.grad(torch.nn.functional.silu(gate) * up, x, grad.double())[0])
        if notes:
            note_amax(result, result.abs().amax().float())
    return result


def rotate_in_place(heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> None:
    with _disable_current_modes():
        part = heads[:, :, :num_rotated]
        part.copy_(rotated(part.double(), cos, sin))


def gather_rotated_back(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = grad_q.shape[2] + 2 * grad_k.shape[2]
    gathered = grad_q.new_empty((*grad_q.shape[:2], heads * grad_q.shape[-1]))
    with _disable_current_modes():
        turned = [rotated(grad.double(), cos, -sin) for grad in (grad_q, grad_k)]
        gathered.copy_(torch.cat((*turned, grad_v.double()), dim=2).flatten(2))
    return gathered


def logit_statistics(logits: Tensor, local_targets: Tensor, num_valid: int) -> tuple[Tensor, Tensor, Tensor]:
    highest, total, target = torch.empty((3, *logits.shape[:-1]), dtype=torch.float32)
    with _disable_current_modes():
        scores = logits.double()
        scores[..., num_valid:] = -torch.inf
        highest.copy_(scores.amax(-1))
        finite = highest.masked_fill(highest == -torch.inf, 0).unsqueeze(-1)
        total.copy_((scores - finite).exp().sum(-1))
        here = (local_targets >= 0) & (local_targets < logits.shape[-1])
        column = local_targets.masked_fill(~here, 0).unsqueeze(-1)
        target.copy_(logits.gather(-1, column).squeeze(-1).masked_fill(~here, 0))
    return highest, total, target


def logits_to_gradient(
    logits: Tensor, local_targets: Tensor, num_valid: int, highest: Tensor, total: Tensor, scale: Tensor
) -> None:
    with _disable_current_modes():
        probability = (logits.double() - highest.unsqueeze(-1)).exp() / total.unsqueeze(-1)
        columns = torch.arange(logits.shape[-1])
        gradient = (probability - (columns == local_targets.unsqueeze(-1)).double()) * scale.unsqueeze(-1)
        logits.copy_(gradient.masked_fill(columns >= num_valid, 0))


def largest_magnitudes(x: Tensor) -> Tensor:
    return x.abs().flatten().float().sort().values[-2:]  # parts, of which one is the largest


def cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    exponent = math.floor(math.log2(torch.finfo(dtype).max / amax.max().item()))
    values = (x.double() * 2.0**exponent).float().to(dtype)
    scale = torch.tensor(2.0**-exponent)
    return values if rows else None, values.t().contiguous() if columns else None, scale


@contextmanager
def kernel_path(*, stand_ins: bool) -> Iterator[None]:
    """Inside, the layers call their kernels on whatever device: these stand-ins, or the Triton kernels themselves."""
    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(patch(f"triweave.layers.{name}.uses_kernels", lambda _: True))
        if stand_ins:
            module = ModuleType("stand-ins")
            module.__dict__.update(globals())
            stack.enter_context(patch.dict(sys.modules, {f"triweave.kernels.{name}": module for name in OPERATIONS}))
        yield


@contextmanager
def every_kernel() -> Iterator[Counter[str]]:
    """Inside, whatever asks takes the Triton kernels, in the interpreter; gives how often each was launched.

    Whoever asks has `uses_kernels` by its name: a module that begins to is found without being listed here.
    """
    launched: Counter[str] = Counter()
    asks, launch = dispatch.uses_kernels, dispatch.launch

    def counted(kernel: Any, *rest: Any, **options: Any) -> None:
        launched[f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"] += 1
        launch(kernel, *rest, **options)

    for name in (*OPERATIONS, "adamw", "partial_sums"):
        importlib.import_module(f"triweave.kernels.{name}")
    modules = [module for name, module in sys.modules.items() if name.startswith("triweave.")]
    with ExitStack() as stack:
        for module in modules:
            if getattr(module, "uses_kernels", None) is asks:
                stack.enter_context(patch.object(module, "uses_kernels", lambda _: True))
            if getattr(module, "launch", None) is launch:
                stack.enter_context(patch.object(module, "launch", counted))
        yield launched
