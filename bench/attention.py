"""Causal attention kernels on the GPU at hand, over the layout that the layers use: time, TFLOP/s and error of each.

    python bench/attention.py            # one GPU
    python bench/attention.py --small    # CPU: torch's own kernel alone, a rehearsal

Queries, keys and values are views of one `[seq, batch, (heads + 2 kv_heads) * head_dim]` product, as in a layer.
TFLOP/s count the causal half; backward is 2.5 times the forward's FLOPs. Errors are against float64-accumulated
attention of the same inputs on a short sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from result_file import result_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`[seq, batch, heads, head_dim]` queries, keys and values to the same shape."""

SHAPES = {  # seq, batch, heads, kv heads
    "8B seq 8192": (8192, 1, 32, 8),
    "8B TP 2 seq 8192": (8192, 1, 16, 4),
    "8B seq 4096 batch 2": (4096, 2, 32, 8),
    "70B TP 8 seq 8192": (8192, 1, 8, 1),
    "70B TP 8 seq 4096": (4096, 1, 8, 1),
    "70B TP 2 seq 4096": (4096, 1, 32, 4),
}
HEAD_DIM = 128


def torch_kernel(backend: SDPBackend | None) -> Kernel:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3)

    return attend


class _FlashAttention4(torch.autograd.Function):
    """The kernels of the `flash-attn-4` package, called as they are."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out, lse = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, lse = ctx.saved_tensors
        grads = _flash_attn_bwd(q, k, v, out, grad.transpose(0, 1), lse, causal=True)[:3]
        return tuple(g.transpose(0, 1) for g in grads)


def kernels(device: torch.device) -> dict[str, Kernel]:
    if device.type == "cpu":
        return {"torch on cpu": torch_kernel(None)}
    found = {
        "cudnn": torch_kernel(SDPBackend.CUDNN_ATTENTION),
        "flash (built in)": torch_kernel(SDPBackend.FLASH_ATTENTION),
    }
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception as missing:
        print(f"flash-attn-4 is not usable here: {missing!r}"[:300], flush=True)
    else:
        found["flash-attn-4"] = _FlashAttention4.apply
    return found


def seconds(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median of timed calls, after as many to warm up."""
    times = []
    for _ in range(2 * repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return statistics.median(times[repeats:])


def inputs(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    seq, batch, heads, kv_heads = shape
    product = torch.randn(seq, batch, heads + 2 * kv_heads, HEAD_DIM, device=device, dtype=dtype)
    views = product.split((heads, kv_heads, kv_heads), dim=2)
    return tuple(view.detach().requires_grad_() for view in views)


def error(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Relative error of the output and of the worst gradient, on 512 tokens."""
    q, k, v = inputs((512, 1, 8, 2), device, dtype)
    grad = torch.randn_like(q)
    exact = [t.detach().double().cpu().requires_grad_() for t in (q, k, v)]
    reference = torch_kernel(SDPBackend.MATH)(*exact)
    wanted = torch.autograd.grad(reference, exact, grad.double().cpu())
    out = kernel(q, k, v)
    got = torch.autograd.grad(out, (q, k, v), grad)

    def relative(a: Tensor, b: Tensor) -> float:
        return float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm())

    return relative(out, reference), max(relative(a, b) for a, b in zip(got, wanted, strict=True))


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = {"tiny": (256, 1, 8, 2)} if small else SHAPES
    for name, kernel in kernels(device).items():
        try:
            errors = error(kernel, device, dtype)
        except Exception as failed:
            print(f"{name} failed: {failed!r}"[:1500], flush=True)
            continue
        for label, shape in shapes.items():
            seq, batch, heads, _ = shape
            q, k, v = inputs(shape, device, dtype)
            out = kernel(q, k, v)
            grad = torch.randn_like(out)

            def forward(kernel: Kernel = kernel, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                with torch.no_grad():
                    kernel(q, k, v)

            def backward(out: Tensor = out, grad: Tensor = grad, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

            flops = 2 * seq * seq * heads * HEAD_DIM * batch  # two products, half of each under the causal mask
            forward_s, backward_s = (seconds(f, device, 3 if small else 12) for f in (forward, backward))
            yield {
                "kernel": name,
                "shape": label,
                "forward_ms": forward_s * 1e3,
                "forward_tflops": flops / forward_s / 1e12,
                "backward_ms": backward_s * 1e3,
                "backward_tflops": 2.5 * flops / backward_s / 1e12,
                "error": errors[0],
                "gradient_error": errors[1],
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=result_file, default="runs/attention.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.small else "cpu")
    rows = []
    print("kernel | shape | forward ms (TFLOP/s) | backward ms (TFLOP/s) | error | gradient error")
    for row in measure(device, options.small):
        rows.append(row)
        options.out.write_text(json.dumps(rows, indent=1))
        print(
            f"{row['kernel']} | {row['shape']} | {row['forward_ms']:.3f} ({row['forward_tflops']:.0f})"
            f" | {row['backward_ms']:.3f} ({row['backward_tflops']:.0f})"
            f" | {row['error']:.1e} | {row['gradient_error']:.1e}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
