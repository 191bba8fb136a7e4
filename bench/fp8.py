"""fp8 against bf16 on one GPU: every product of a layer with its casts, whole layers, and whether a model learns alike.

    python bench/fp8.py                      # one GPU: products, layers, 300 steps of a small Llama; the tables last
    python bench/fp8.py --only layers        # or `products`, `casts`, `loss`
    python bench/fp8.py --small              # a rehearsal on the CPU, in Triton's interpreter where there is one

Times are medians as in `bench/kernel_timing.py`; layers take turns call by call. Errors are Frobenius norms relative to
what bf16 gives.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import kernel_timing as common  # sets Triton's interpreter up before triweave's kernels are defined
import torch
from kernel_timing import (
    DEVICE,
    DTYPE,
    HAS_KERNELS,
    LAYERS,
    SMALL,
    median_ms,
    medians_by_turns,
    over_buffers,
    random,
    rotation_of,
)
from torch import Tensor

from triweave.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run
from triweave.config.validate import ResolvedRun
from triweave.gradients import add_product, begin_sum, main_grad
from triweave.layers import fp8, fp8_linear
from triweave.layers.attention import choose_kernel
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout
from triweave.llama import DecoderLayer, StageInput
from triweave.model_spec import ModelSpec
from triweave.training.engine import build_engine
from triweave.training.step import Batch, train_step

SETS = ("products", "casts", "layers", "loss")


@contextmanager
def kernels() -> Iterator[None]:
    """Inside, everything that has kernels uses them, on the CPU too."""
    with common.kernels(True), patch.object(fp8, "uses_kernels", lambda _: HAS_KERNELS):
        yield


@contextmanager
def fast_gradients(fast: bool) -> Iterator[None]:
    """Inside, gradients are summed in the tensor cores, or in float32."""
    with ExitStack() as stack:
        for module in (fp8, fp8_linear):
            stack.enter_context(patch.object(module, "FAST_GRADIENTS", fast))
        yield


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


# --- products ---------------------------------------------------------------------------------------------------------


def products_of(spec: ModelSpec) -> list[tuple[str, int, int]]:
    """Name, input and output features of a layer's four products."""
    attention = spec.num_attention_heads * spec.head_dim
    return [
        ("qkv", spec.hidden_size, attention + 2 * spec.num_key_value_heads * spec.head_dim),
        ("o", attention, spec.hidden_size),
        ("gate and up", spec.hidden_size, 2 * spec.intermediate_size),
        ("down", spec.intermediate_size, spec.hidden_size),
    ]


def product_rows(title: str, tokens: int, spec: ModelSpec) -> list[str]:
    """Twelve products: bf16, fp8 with all that belongs to it, and its parts."""
    rows = []
    for name, inner, outer in products_of(spec):
        x, weight, grad = random(tokens, inner), random(outer, inner), 1e-3 * random(tokens, outer)
        total = torch.zeros(outer, inner, device=DEVICE)
        weight.main_grad = total  # type: ignore[attr-defined]
        x_rows, x_columns = fp8.both_ways(x, fp8.VALUES)
        grad_rows, grad_columns = fp8.both_ways(grad, fp8.GRADIENTS)
        w_rows, w_columns = fp8.weight_by_rows(weight), fp8.weight_by_columns(weight)

        def summed(
            fast: bool, w: Tensor = weight, a: fp8.Fp8Matrix = grad_columns, b: fp8.Fp8Matrix = x_columns
        ) -> None:
            with fast_gradients(fast):
                fp8.add_weight_gradient(w, a, b)

        def error_of_sum(fast: bool, expected: Tensor, w: Tensor = weight, total: Tensor = total) -> float:
            """Of two additions, the first of which begins the sum."""
            begin_sum(w)
            summed(fast)
            summed(fast)
            return relative(total / 2, expected)

        # What is cast, the two operands, and the product in bf16.
        kinds: list[tuple[str, Callable[[], object], fp8.Fp8Matrix, fp8.Fp8Matrix, Callable[[], Tensor]]] = [
            ("output", lambda x=x: fp8.both_ways(x, fp8.VALUES), x_rows, w_rows, lambda x=x, w=weight: x @ w.t()),
            (
                "input gradient",
                lambda g=grad: fp8.both_ways(g, fp8.GRADIENTS),
                grad_rows,
                w_columns,
                lambda g=grad, w=weight: g @ w,
            ),
        ]
        flops = 2 * tokens * inner * outer
        for kind, cast, a, b, exact in kinds:

            def multiply(fast: bool, a: fp8.Fp8Matrix = a, b: fp8.Fp8Matrix = b) -> Tensor:
                return fp8.multiply(a, b, DTYPE, fast=fast)

            expected = exact()
            errors = [relative(multiply(fast), expected) for fast in (True, False)]
            times = [median_ms([lambda fast=fast: multiply(fast)]) for fast in (True, False)]
            rows.append(
                product_row(f"{title} | {name} {kind}", flops, median_ms([exact]), times, median_ms([cast]), errors)
            )
        expected = grad.t() @ x
        errors = [error_of_sum(fast, expected) for fast in (True, False)]
        times = [median_ms([lambda fast=fast: summed(fast)]) for fast in (True, False)]
        bf16_ms = median_ms([lambda g=grad, x=x, w=weight: add_product(w, g, x)])
        rows.append(product_row(f"{title} | {name} weight gradient, added", flops, bf16_ms, times, 0.0, errors))
    return rows


def product_row(
    what: str, flops: int, bf16_ms: float, times_ms: list[float], casts_ms: float, errors: list[float]
) -> str:
    """A product with its casts; of pairs the first is summed fast, the second exactly."""
    fast_ms, exact_ms = times_ms
    row = (
        f"{what} | {bf16_ms:.3f} | {fast_ms:.3f} | {exact_ms:.3f} | {casts_ms:.3f}"
        f" | {bf16_ms / (fast_ms + casts_ms):.2f} | {bf16_ms / (exact_ms + casts_ms):.2f}"
        f" | {flops / bf16_ms / 1e9:.0f} | {flops / fast_ms / 1e9:.0f} | {flops / exact_ms / 1e9:.0f}"
        f" | {errors[0]:.4f} | {errors[1]:.4f}"
    )
    print(row, flush=True)
    return row


# --- casts ------------------------------------------------------------------------------------------------------------


def cast_rows() -> list[str]:
    """Bandwidth of the casts by the size of their tiles; GB/s counts one reading, and a byte for each result."""
    if not HAS_KERNELS:
        return []
    from triweave.kernels import fp8 as kernel

    rows, shapes = [], [(32, 64)] if SMALL else [(8192, 4096), (8192, 14336), (8192, 28672)]
    for tokens, features in shapes:
        size = tokens * features
        ms = over_buffers(kernel.largest_magnitudes, lambda t=tokens, f=features: (random(t, f),))
        rows.append(f"{tokens} x {features} | largest magnitude | {ms:.4f} | {2 * size / ms / 1e6:.0f}")
        for block in ((64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (256, 64, 8)):
            for wanted in ((True, True), (False, True), (True, False)):
                names = ("_TILE_TOKENS", "_TILE_FEATURES", "_TILE_WARPS")
                with ExitStack() as stack:
                    for key, value in zip(names, block, strict=True):
                        stack.enter_context(patch.object(kernel, key, value))

                    def cast(x: Tensor, amax: Tensor, wanted: tuple[bool, bool] = wanted) -> object:
                        return kernel.cast(x, amax, fp8.VALUES, rows=wanted[0], columns=wanted[1])

                    top = torch.full((), 5.0, device=DEVICE)
                    ms = over_buffers(cast, lambda t=tokens, f=features, top=top: (random(t, f), top))
                moved = (2 + sum(wanted)) * size
                what = " and ".join(name for name, asked in zip(("rows", "columns"), wanted, strict=True) if asked)
                rows.append(
                    f"{tokens} x {features} | {what}, tile and warps {block} | {ms:.4f} | {moved / ms / 1e6:.0f}"
                )
        print(*rows[-19:], sep="\n", flush=True)
    return rows


# --- layers -----------------------------------------------------------------------------------------------------------


def layer_run(
    tokens: int, spec: ModelSpec, *, in_fp8: bool, fast: bool = True, keep_weights: bool = True
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A layer's forward and backward; and the changes it makes and its gradients, of the first."""
    torch.manual_seed(1)
    layer = DecoderLayer(spec, TensorParallel(), choose_kernel("auto", DEVICE), (), fp8=in_fp8).to(DEVICE, DTYPE)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.data.fill_(1)
    x, upstream = random(tokens, 1, spec.hidden_size).requires_grad_(), 1e-3 * random(tokens, 1, spec.hidden_size)
    rotation = rotation_of(tokens, spec.head_dim)

    def step() -> Tensor:
        x.grad = None
        if not keep_weights:
            for parameter in layer.parameters():
                fp8.forget_casts(parameter, changed=True)
        with fast_gradients(fast):
            y: Tensor = layer(x, rotation, None)
            y.backward(upstream)
        return y.detach()

    output = step()
    assert x.grad is not None
    # Without what went past the layer, which would hide the rest.
    changes = [output - x.detach(), x.grad - upstream]
    return step, [*changes, *(main_grad(parameter).clone() for parameter in layer.parameters())]


def layer_rows(title: str, tokens: int, spec: ModelSpec) -> list[str]:
    """The layer in bf16 and in fp8: weights cast once and kept, or at each use; both ways to sum gradients."""
    base, expected = layer_run(tokens, spec, in_fp8=False)
    steps, errors = {"bf16": base}, {}
    for fast in (False, True):
        for keep in (True, False):
            when = "once a step" if keep else "every time"
            name = f"gradients summed {'fast' if fast else 'exactly'}, weights cast {when}"
            steps[name], results = layer_run(tokens, spec, in_fp8=True, fast=fast, keep_weights=keep)
            errors[name] = [relative(*pair) for pair in zip(results, expected, strict=True)]
    ms = medians_by_turns(steps)
    rows = [
        f"{title} | {name} | {ms['bf16']:.3f} | {ms[name]:.3f} | {ms['bf16'] / ms[name]:.3f}"
        f" | {off[0]:.4f} | {off[1]:.4f} | {max(off[2:]):.4f}"
        for name, off in errors.items()
    ]
    print(*rows, sep="\n", flush=True)
    return rows


# --- loss -------------------------------------------------------------------------------------------------------------


def markov_text(vocab: int, count: int, seed: int) -> Tensor:
    """Tokens of a chain: the last one and whether the one before it is odd say which four may come next."""
    generator = torch.Generator().manual_seed(seed)
    states = min(vocab, 512)
    successors = torch.randint(0, vocab, (states, 4), generator=generator)
    choices = torch.multinomial(torch.tensor([0.5, 0.25, 0.15, 0.1]), count, replacement=True, generator=generator)
    text: list[int] = []
    before, last, half = 0, 1, states // 2
    table, picks = successors.tolist(), choices.tolist()
    for pick in picks:
        before, last = last, table[last % half + half * (before % 2)][pick]
        text.append(last)
    return torch.tensor(text)


def losses(spec: ModelSpec, seq: int, batch: int, steps: int, *, in_fp8: bool, micro_batches: int = 1) -> list[float]:
    """The loss of every step, from weights and text that depend on nothing else."""
    layout = Layout(micro_batch=batch // micro_batches, layers=(spec.num_hidden_layers,))
    run = Run(
        model=ModelConfig(path="", weights="random", fp8=in_fp8, dtype="bfloat16"),
        data=DataConfig(train=("",), seq_len=seq),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    engine = build_engine(ResolvedRun(run, spec, layout, None, micro_batches, 1), DEVICE)
    text = markov_text(spec.vocab_size, steps * batch * seq + 1, 7).to(DEVICE)
    positions = torch.arange(seq, device=DEVICE).unsqueeze(1).expand(seq, layout.micro_batch)
    found = []
    for step in range(steps):
        part = text[step * batch * seq : (step + 1) * batch * seq + 1]
        tokens, targets = (t.view(batch, seq).t() for t in (part[:-1], part[1:]))
        inputs = [StageInput(t.contiguous(), positions) for t in tokens.chunk(micro_batches, 1)]
        work = Batch(inputs, [t.contiguous() for t in targets.chunk(micro_batches, 1)], batch * seq)
        rate = (1e-2 if SMALL else 1e-3) * min(1.0, (step + 1) / max(1, steps // 10))
        found.append(train_step(engine, work, rate, 1.0)[0])
    return found


def loss_rows() -> list[str]:
    """The same model in bf16, in bf16 whose sums are cut otherwise (what rounding alone does), and in fp8."""
    spec = ModelSpec(49152, 1024, 2816, 8, 8, 4, 128, rope_theta=10000.0, max_position_embeddings=1024)
    seq, batch, steps, window = 1024, 8, 300, 20
    if SMALL:
        spec, seq, batch, steps, window = ModelSpec(64, 32, 48, 2, 4, 2, 8), 16, 8, 36, 6
    base = losses(spec, seq, batch, steps, in_fp8=False)
    runs = {
        "bf16": base,
        "bf16, two micro-batches": losses(spec, seq, batch, steps, in_fp8=False, micro_batches=2),
        "fp8": losses(spec, seq, batch, steps, in_fp8=True),
        "fp8, two micro-batches": losses(spec, seq, batch, steps, in_fp8=True, micro_batches=2),
    }
    with fast_gradients(False):
        runs["fp8, gradients summed exactly"] = losses(spec, seq, batch, steps, in_fp8=True)
    marks = [0, *(steps * k // 6 - 1 for k in range(1, 7))]

    def smooth(values: list[float]) -> list[float]:
        sums = [0.0]
        for value in values:
            sums.append(sums[-1] + value)
        return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]

    rows = [
        f"run | loss at step {', '.join(str(mark + 1) for mark in marks)} | mean of the last {window} | largest gap"
    ]
    for name, found in runs.items():
        gap = max(abs(a - b) for a, b in zip(smooth(found), smooth(base), strict=True))
        shown = ", ".join(f"{found[mark]:.4f}" for mark in marks)
        rows.append(f"{name} | {shown} | {smooth(found)[-1]:.4f} | {gap:.4f}")
        if not all(math.isfinite(value) for value in found):
            rows.append(f"wrong: {name} is not finite")
    if not base[-1] < base[0] - 0.5:
        rows.append("wrong: bf16 has learned nothing")
    return [*rows, f"gaps are of means of {window} steps, to bf16"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--only", action="append", choices=SETS, help="may be given more than once")
    options = parser.parse_args()
    wanted = options.only or SETS
    where = "CPU" if SMALL else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, kernels {'used' if HAS_KERNELS else 'missing: no Triton'}")
    tables: list[list[str]] = []
    with kernels():
        if "products" in wanted:
            with torch.no_grad():
                rows = [row for shape in LAYERS for row in product_rows(*shape)]
            head = (
                "shape | product | bf16 ms | fp8 fast ms | fp8 exact ms | casts ms | times, fast | times, exact"
                " | bf16 TFLOP/s | fast | exact | error, fast | error, exact"
            )
            tables.append([head, *rows])
        if "casts" in wanted:
            with torch.no_grad():
                tables.append(["tensor | cast | ms | GB/s", *cast_rows()])
        if "layers" in wanted:
            head = (
                "layer, both ways | how | bf16 ms | fp8 ms | times | error: output | input gradient | weight gradients"
            )
            tables.append([head, *(row for shape in LAYERS for row in layer_rows(*shape))])
    if "loss" in wanted:  # not inside: the interpreter would take minutes
        tables.append(loss_rows())
    for table in tables:
        print("", *table, sep="\n")
    return 1 if any("wrong:" in row for table in tables for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
