"""A whole Llama layer on one GPU: what it gains by the kernels, and what its products and its attention take of it.

python bench/layer.py                      # one GPU: experiments, then the table
python bench/layer.py --small              # a rehearsal on the CPU, in Triton's interpreter where there is one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from kernel_timing import (
    DEVICE,
    DTYPE,
    LAYERS,
    SMALL,
    kernels,
    largest_error,
    median_ms,
    random,
    rotation_of,
    say_where,
    verdict,
)
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from triweave.gradients import add_product
from triweave.layers.attention import attend, choose_kernel
from triweave.layers.tensor_parallel import TensorParallel
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec


def layer_run(tokens: int, spec: ModelSpec, *, use_kernels: bool) -> tuple[float, tuple[Tensor, Tensor]]:
    """Forward and backward of a decoder layer, weight gradients added in float32, nothing recomputed.

    Returns the milliseconds, and the output and the input's gradient, of the same numbers whatever computes.
    """
    torch.manual_seed(1)
    layer = DecoderLayer(spec, TensorParallel(), choose_kernel("auto", DEVICE), ()).to(DEVICE, DTYPE)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02)
    x, upstream = random(tokens, 1, spec.hidden_size).requires_grad_(), random(tokens, 1, spec.hidden_size)
    rotation = rotation_of(tokens, spec.head_dim)

    def step() -> Tensor:
        x.grad = None
        y: Tensor = layer(x, rotation, None)
        y.backward(upstream)
        return y.detach()

    with kernels(use_kernels):
        output = step()
        assert x.grad is not None
        return median_ms([step], 3 if SMALL else 11), (output, x.grad.clone())


def products_ms(tokens: int, spec: ModelSpec) -> float:
    """The layer's four products alone: output, input gradient, and weight gradient added to its float32 sum."""
    qkv = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    sizes = [
        (spec.hidden_size, qkv),
        (spec.num_attention_heads * spec.head_dim, spec.hidden_size),
        (spec.hidden_size, 2 * spec.intermediate_size),
        (spec.intermediate_size, spec.hidden_size),
    ]
    total = 0.0
    for inner, outer in sizes:
        x, weight, grad = random(tokens, inner), random(outer, inner), random(tokens, outer)

        def both(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
            linear(x, weight)
            torch.mm(grad, weight)
            add_product(weight, grad, x)

        total += median_ms([both])
    return total


def attention_ms(tokens: int, spec: ModelSpec, *, strided: bool) -> float:
    """Attention alone, forward and backward: on views of one product's output, or on copies heads first."""
    heads, kv_heads, d = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    kernel = choose_kernel("auto", DEVICE)
    q, k, v = random(tokens, 1, heads + 2 * kv_heads, d).split((heads, kv_heads, kv_heads), dim=2)
    if not strided:
        q, k, v = (t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for t in (q, k, v))
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    assert not strided or inputs[0].stride(0) == (heads + 2 * kv_heads) * d
    upstream = random(tokens, 1, heads, d)
    return median_ms([lambda: torch.autograd.grad(attend(*inputs, None, kernel), inputs, upstream)])


def weight_gradient_product(name: str, tokens: int, outer: int, inner: int) -> None:
    """(a) The weight gradient added by the product itself in float32, against the product alone in bf16."""
    grad, x = random(tokens, outer), random(tokens, inner)
    total = torch.zeros(outer, inner, device=DEVICE)
    ways: dict[str, Callable[[], object]] = {
        "addmm into float32": lambda: torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total),
        "product in bf16": lambda: grad.t() @ x,
        "product in bf16, then add": lambda: total.add_(grad.t() @ x),
    }
    for what, run in ways.items():
        ms = median_ms([run])
        print(f"weight gradient {name}: {what} {ms:.3f} ms, {2 * tokens * outer * inner / ms / 1e9:.0f} TFLOP/s")


def attention_layouts() -> None:
    """(b) cuDNN on strided views against contiguous tensors, results compared."""
    for name, tokens, spec in LAYERS:
        views, copies = (attention_ms(tokens, spec, strided=strided) for strided in (True, False))
        print(f"attention {name}: forward and backward on views {views:.3f} ms, heads first {copies:.3f} ms")
    qkv = random(256, 2, 6, 64)
    q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.split((4, 1, 1), dim=2))
    copied = scaled_dot_product_attention(*(t.contiguous() for t in (q, k, v)), is_causal=True, enable_gqa=True)
    viewed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    print(f"attention on views differs from that on copies by {largest_error(viewed, copied.double()):.1e}")


def flash_implementations() -> None:
    """(c) Which FlashAttention this torch can be switched to."""
    names = getattr(torch.nn.attention, "list_flash_attention_impls", lambda: "no such list in this torch")()
    print(f"flash attention implementations: {names}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a rehearsal on the CPU")
    parser.parse_args()
    torch.manual_seed(0)
    say_where()
    flash_implementations()
    attention_layouts()
    if not SMALL:  # the CPU has no such product
        weight_gradient_product("8B gate and up", 8192, 28672, 4096)
        weight_gradient_product("8B down", 8192, 4096, 14336)
    wrong = []
    rows = ["", "layer, both ways | differ by | kernels ms | torch ms | products ms | attention ms | the rest ms"]
    for name, tokens, spec in LAYERS:
        (ours, results), (plain, expected) = (layer_run(tokens, spec, use_kernels=use) for use in (True, False))
        difference = largest_error(results, tuple(t.double() for t in expected))
        if not difference <= 2e-2:
            wrong.append(f"layer {name}")
        products, attention = products_ms(tokens, spec), attention_ms(tokens, spec, strided=True)
        rows.append(
            f"{name} | {difference:.1e} | {ours:.3f} | {plain:.3f} | {products:.3f} | {attention:.3f}"
            f" | {ours - products - attention:.3f}"
        )
        print(rows[-1], flush=True)
    return verdict(rows, wrong)


if __name__ == "__main__":
    sys.exit(main())
