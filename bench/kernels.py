"""The kernels of a Llama layer on one GPU: right, and how near the memory's speed.

    python bench/kernels.py                    # one GPU: every kernel; the table last
    python bench/kernels.py --tune             # also other launch shapes of the kernels, to see what is left
    python bench/kernels.py --small            # a rehearsal on the CPU, in Triton's interpreter where there is one

GB/s counts the bytes that must move, not those that do. Errors are Frobenius norms relative to float64, of 512 rows.
What a whole layer gains by them is `bench/layer.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch
from kernel_timing import (
    DEVICE,
    DTYPE,
    HAS_KERNELS,
    SMALL,
    kernels,
    largest_error,
    median_ms,
    over_buffers,
    random,
    rotation_of,
    say_where,
    verdict,
)
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from triweave.config.schema import OptimizerConfig
from triweave.layers import cross_entropy, norm, rotary, swiglu
from triweave.layers.rotary import Rotation, rotate_queries_and_keys

LARGEST_ERROR = 2.0**-7 if SMALL else 2.0**-8
"""The interpreter cuts bits off where a GPU rounds."""


@dataclass(frozen=True)
class Shape:
    """One rank's part of a layer."""

    name: str
    tokens: int
    norm_tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


SHAPES = [
    Shape("8B TP 1", 8192, 8192, 4096, 32, 8, 128, 14336, 128256),
    Shape("8B TP 2", 8192, 4096, 4096, 16, 4, 128, 7168, 64128),
    Shape("70B TP 8", 8192, 1024, 8192, 8, 1, 128, 3584, 16032),
]
if SMALL:
    SHAPES = [Shape("tiny", 6, 6, 48, 4, 2, 8, 40, 100)]


@dataclass(frozen=True)
class Operation:
    """One kernel beside what eager torch did before it.

    `run` is the layers' own function, which is either by `kernels`; `before` what stood in the layers before there were
    kernels; `exact` the formula in float64. All take the inputs and give one tensor or several.
    """

    name: str
    make: Callable[[int], tuple[Tensor, ...]]
    """Inputs by the number of tokens."""
    tokens: int
    moved_bytes: int
    """A token."""
    run: Callable[..., object]
    before: Callable[..., object]
    exact: Callable[..., object]


def norm_operations(s: Shape) -> list[Operation]:
    h, eps = s.hidden, 1e-5

    def gradients(grad: Tensor, beside: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            normed = rms_norm(x, weight.shape, weight, eps)
        grad_x, grad_weight = torch.autograd.grad(normed, (x, weight), grad)
        return grad_x + beside, grad_weight

    def add(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + update
        return stream, rms_norm(stream, weight.shape, weight, eps)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, eps)

    return [
        Operation(
            "norm",
            lambda t: (random(t, 1, h), random(h)),
            s.norm_tokens,
            4 * h,
            lambda x, w: norm._normalize(x, w, eps),
            one,
            one,
        ),
        Operation(
            "add, norm",
            lambda t: (random(t, 1, h), random(t, 1, h), random(h)),
            s.norm_tokens,
            8 * h,
            lambda x, u, w: norm._add_and_normalize(x, u, w, eps),
            add,
            # The norm is of the stream as stored; of the exact sum it would differ by that rounding.
            lambda x, u, w: (x + u, one((x + u).to(DTYPE).double(), w)),
        ),
        Operation(
            "norm backward",
            lambda t: (random(t, 1, h), random(t, 1, h), random(t, 1, h), random(h)),
            s.norm_tokens,
            8 * h,
            lambda g, b, x, w: norm._backward(g, b, x, w, eps),
            gradients,
            gradients,
        ),
    ]


def swiglu_operations(s: Shape) -> list[Operation]:
    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1)

    def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
        saved = type("Context", (), {"saved_tensors": (gate_up,), "for_fp8": False})
        return swiglu._SwiGLU.backward(saved, grad)[0]

    f = s.ffn
    return [
        Operation("swiglu", lambda t: (random(t, 1, 2 * f),), s.tokens, 6 * f, swiglu.swiglu, product, product),
        Operation(
            "swiglu backward",
            lambda t: (random(t, 1, f), random(t, 1, 2 * f)),
            s.tokens,
            10 * f,
            backward,
            gradient,
            gradient,
        ),
    ]


def rotary_operations(s: Shape) -> list[Operation]:
    parts = (s.heads, s.kv_heads, s.kv_heads)

    def make(tokens: int) -> tuple[Tensor, ...]:
        rotation = rotation_of(tokens, s.head_dim)
        return random(tokens, 1, sum(parts) * s.head_dim), rotation.cos, rotation.sin

    def make_gradients(tokens: int) -> tuple[Tensor, ...]:
        rotation = rotation_of(tokens, s.head_dim)
        return (*(random(tokens, 1, count, s.head_dim) for count in parts), rotation.cos, rotation.sin)

    def copied(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (sum(parts), -1)).split(parts, dim=2)
        rotation = Rotation(cos, sin)
        return rotation(q), rotation(k), v.contiguous()

    def in_place(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return rotate_queries_and_keys(qkv, Rotation(cos, sin), *parts[:2])

    def gathered(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        saved = type("Context", (), {"rotation": Rotation(cos, sin)})
        return rotary._RotateInPlace.backward(saved, q, k, v)[0]

    def concatenated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        back = Rotation(cos, -sin)
        return torch.cat((back(q), back(k), v), dim=2).flatten(2)

    d, rotated = s.head_dim, s.heads + s.kv_heads
    return [
        Operation("rotary", make, s.tokens, 4 * rotated * d, in_place, copied, copied),
        Operation(
            "rotary backward", make_gradients, s.tokens, 4 * sum(parts) * d, gathered, concatenated, concatenated
        ),
    ]


def loss_operations(s: Shape) -> list[Operation]:
    def make(tokens: int) -> tuple[Tensor, ...]:
        return 3 * random(tokens, 1, s.vocab), torch.randint(0, s.vocab, (tokens, 1), device=DEVICE)

    def in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        top, total, target = cross_entropy._statistics(logits, targets, s.vocab)
        cross_entropy._to_gradient(logits, targets, s.vocab, top, total, torch.full_like(top, 0.5))
        return total.log() + top - target, logits

    def copied(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
        scores = logits.to(wide, copy=True)
        scores.sub_(scores.amax(-1, keepdim=True))
        target = scores.gather(-1, targets.unsqueeze(-1))
        probabilities = scores.exp_()
        total = probabilities.sum(-1)
        gradient = probabilities.div_(total.unsqueeze(-1))
        gradient.scatter_add_(-1, targets.unsqueeze(-1), -torch.ones_like(target))
        return total.log() - target.squeeze(-1), gradient.to(logits.dtype).mul_(0.5)

    return [Operation("loss, both ways", make, s.tokens, 6 * s.vocab, in_place, copied, copied)]


def measure(operation: Operation) -> dict[str, float]:
    """Errors of both, milliseconds of both, and bandwidth."""
    inputs = operation.make(min(512, operation.tokens))
    exact = operation.exact(*(t.double() if t.is_floating_point() else t for t in inputs))
    before = largest_error(operation.before(*(t.clone() for t in inputs)), exact)
    with kernels(True):
        error = largest_error(operation.run(*(t.clone() for t in inputs)), exact)
        ms = over_buffers(operation.run, lambda: operation.make(operation.tokens))
    before_ms = over_buffers(operation.before, lambda: operation.make(operation.tokens))
    moved = operation.moved_bytes * operation.tokens
    return {"error": error, "before_error": before, "ms": ms, "before_ms": before_ms, "gb_s": moved / ms / 1e6}


def operations(s: Shape) -> list[Operation]:
    return [*norm_operations(s), *swiglu_operations(s), *rotary_operations(s), *loss_operations(s)]


def adamw_rows() -> Iterator[str]:
    """The optimizer's step over one buffer, by how both moments are stored."""
    from triweave.kernels.adamw import adamw_step, step_rates

    numel, config = 2**13 if SMALL else 2**27, OptimizerConfig()
    rates = step_rates(torch.ones((), device=DEVICE), None, 1e-5, config)
    master, gradient = (random(numel, dtype=torch.float32) for _ in range(2))
    weight = master.to(DTYPE)
    for dtype in (torch.float32, torch.bfloat16):
        moments = [torch.zeros_like(master, dtype=dtype) for _ in range(2)]
        moved = sum(2 * t.nbytes for t in (master, *moments)) + gradient.nbytes + weight.nbytes

        def step(moments: list[Tensor] = moments) -> None:
            adamw_step(master, *moments, gradient, weight, rates, config, learning_rate=1e-5, weight_decay=0.1)

        ms = median_ms([step])
        yield f"{numel} elements, moments in {dtype}: {ms:.4f} ms, {moved / ms / 1e6:.0f} GB/s"


def tune() -> None:
    """Other launch shapes of the kernels whose best one is a matter of trial."""
    from triweave.kernels import cross_entropy as k_loss
    from triweave.kernels import norm as k_norm
    from triweave.kernels import rotary as k_rotary
    from triweave.kernels import swiglu as k_swiglu

    trials: dict[str, list[list[tuple[object, str, object]]]] = {
        "norm backward": [
            [(k_norm, "PROGRAMS_PER_PROCESSOR", programs), (k_norm, "_warps", lambda _, w=warps: w)]
            for programs in (1, 2, 3, 4)
            for warps in (4, 8, 16)
        ],
        "add, norm": [[(k_norm, "_warps", lambda _, w=warps: w)] for warps in (4, 8, 16)],
        "rotary": [[(k_rotary, "_WARPS", warps)] for warps in (1, 2, 4, 8)],
        "rotary backward": [[(k_rotary, "_WARPS", warps)] for warps in (1, 2, 4, 8)],
    }
    for name, module in (("swiglu", k_swiglu), ("swiglu backward", k_swiglu), ("loss, both ways", k_loss)):
        trials[name] = [
            [(module, "_BLOCK", block), (module, "_WARPS", warps)]
            for block in (1024, 2048, 4096, 8192)
            for warps in (4, 8)
        ]
    for shape in (SHAPES[0], SHAPES[-1]):
        for operation in operations(shape):
            for changes in trials.get(operation.name, []):
                with ExitStack() as stack:
                    stack.enter_context(kernels(True))
                    told = []
                    for module, attribute, value in changes:
                        stack.enter_context(patch.object(module, attribute, value))
                        told.append(f"{attribute} {value(0) if callable(value) else value}")
                    ms = over_buffers(operation.run, lambda op=operation: op.make(op.tokens))
                print(f"tune {shape.name}: {operation.name}: {', '.join(told)}: {ms:.4f} ms", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--tune", action="store_true", help="time other launch shapes too")
    options = parser.parse_args()
    torch.manual_seed(0)
    say_where()
    if options.tune and HAS_KERNELS:
        tune()
    wrong = []
    rows = ["", "shape | operation | error | before | ms | before | times | GB/s"]
    for shape in SHAPES:
        for operation in operations(shape):
            with torch.no_grad():
                found = measure(operation)
            if not found["error"] <= LARGEST_ERROR:
                wrong.append(f"{shape.name} {operation.name}")
            rows.append(
                f"{shape.name} | {operation.name} | {found['error']:.1e} | {found['before_error']:.1e}"
                f" | {found['ms']:.4f} | {found['before_ms']:.4f} | {found['before_ms'] / found['ms']:.1f}"
                f" | {found['gb_s']:.0f}"
            )
            print(rows[-1], flush=True)
    if HAS_KERNELS:
        rows += ["", "AdamW", *adamw_rows()]
    return verdict(rows, wrong)


if __name__ == "__main__":
    sys.exit(main())
