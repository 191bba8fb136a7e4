"""The kernels of a Llama layer on one GPU: right, how near the memory's speed, and what a whole layer gains by them.

    python bench/kernels.py                    # one GPU: every kernel, the layer, the experiments; the table last
    python bench/kernels.py --tune             # also other launch shapes of the kernels, to see what is left
    python bench/kernels.py --small            # a rehearsal on the CPU, in Triton's interpreter where there is one

Times are medians by CUDA events over buffers that together are larger than the L2 cache; the host is let run ahead, so
that launching is not timed. GB/s counts the bytes that must move, not those that do. Errors are Frobenius norms
relative to float64, of 512 rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

SMALL = "--small" in sys.argv
if SMALL:
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

from triweave.gradients import add_product  # noqa: E402
from triweave.layers import cross_entropy, norm, rotary, swiglu  # noqa: E402
from triweave.layers.attention import attend, choose_kernel  # noqa: E402
from triweave.layers.rotary import Rotation, inverse_frequencies, make_rotation, rotate_queries_and_keys  # noqa: E402
from triweave.layers.tensor_parallel import TensorParallel  # noqa: E402
from triweave.llama import DecoderLayer  # noqa: E402
from triweave.model_spec import ModelSpec  # noqa: E402

DEVICE = torch.device("cpu" if SMALL else "cuda")
DTYPE = torch.bfloat16
REPEATS = 3 if SMALL else 21
BEYOND_L2_BYTES = 1 << (16 if SMALL else 28)
LARGEST_ERROR = 2.0**-7 if SMALL else 2.0**-8
"""The interpreter cuts bits off where a GPU rounds."""
HAS_KERNELS = find_spec("triton") is not None


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
LAYERS = [  # tokens, then what one rank has of the model
    ("8B TP 1, seq 8192", 8192, ModelSpec(128256, 4096, 14336, 1, 32, 8, 128, rope_theta=500000.0)),
    ("70B TP 8 alone, seq 4096", 4096, ModelSpec(128256, 8192, 3584, 1, 8, 1, 128, rope_theta=500000.0)),
    ("70B TP 8 alone, seq 8192", 8192, ModelSpec(128256, 8192, 3584, 1, 8, 1, 128, rope_theta=500000.0)),
]
if SMALL:
    SHAPES = [Shape("tiny", 6, 6, 48, 4, 2, 8, 40, 100)]
    LAYERS = [("tiny", 16, ModelSpec(100, 32, 48, 1, 4, 2, 8))]


@contextmanager
def kernels(use: bool) -> Iterator[None]:
    """Inside, the layers use their kernels, or plain torch."""
    with ExitStack() as stack:
        for module in (norm, swiglu, rotary, cross_entropy):
            stack.enter_context(patch.object(module, "uses_kernels", lambda _: use and HAS_KERNELS))
        yield


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


# --- time -------------------------------------------------------------------------------------------------------------


def median_ms(runs: list[Callable[[], object]], repeats: int = REPEATS) -> float:
    """Median milliseconds of one call, taking turns through `runs`, which differ in their buffers."""
    for run in runs[:2] * 2:
        run()
    if DEVICE.type == "cpu":
        times = []
        for index in range(repeats):
            begin = time.perf_counter()
            runs[index % len(runs)]()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # 0.1 s in which the host gets ahead
    for index, (begin, end) in enumerate(events):
        begin.record()
        runs[index % len(runs)]()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def over_buffers(run: Callable[..., object], make: Callable[[], tuple[Tensor, ...]]) -> float:
    """Median milliseconds of `run` over as many sets of inputs as exceed the cache."""
    first = make()
    count = max(2, -(-BEYOND_L2_BYTES // sum(tensor.nbytes for tensor in first)))
    sets = [first, *(make() for _ in range(count - 1))]
    return median_ms([lambda inputs=inputs: run(*inputs) for inputs in sets])


# --- the operations ---------------------------------------------------------------------------------------------------


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


def rotation_of(tokens: int, head_dim: int) -> Rotation:
    spec = ModelSpec(8, 8 * head_dim, 8, 1, 8, 8, head_dim)
    positions = torch.arange(tokens, device=DEVICE).unsqueeze(1)
    return make_rotation(inverse_frequencies(spec).to(DEVICE), positions, DTYPE)


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


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)  # type: ignore[return-value]


def largest_error(outputs: object, exact: object) -> float:
    """Largest Frobenius error of several tensors relative to float64's."""
    pairs = zip(as_tuple(outputs), as_tuple(exact), strict=True)
    return max(((ours.double() - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)


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


# --- a whole layer ----------------------------------------------------------------------------------------------------


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


# --- experiments ------------------------------------------------------------------------------------------------------


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
    where = "CPU" if SMALL else torch.cuda.get_device_name()
    print(
        f"torch {torch.__version__}, {where}, kernels {'used' if HAS_KERNELS else 'missing: Triton is not installed'}"
    )
    flash_implementations()
    attention_layouts()
    if not SMALL:  # the CPU has no such product
        weight_gradient_product("8B gate and up", 8192, 28672, 4096)
        weight_gradient_product("8B down", 8192, 4096, 14336)
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
    rows += ["", "layer, both ways | differ by | kernels ms | torch ms | products ms | attention ms | the rest ms"]
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
    print("\n".join(rows))
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
