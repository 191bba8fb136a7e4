"""What is between products, bound by memory: the layers' own operations by the bytes that the time model counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from triweave.config.schema import OptimizerConfig
from triweave.kernels.dispatch import uses_kernels
from triweave.layers import fp8
from triweave.layers.cross_entropy import vocab_parallel_cross_entropy
from triweave.layers.embedding import VocabParallelEmbedding
from triweave.layers.norm import ResidualRMSNorm
from triweave.layers.rotary import inverse_frequencies, make_rotation, rotate_queries_and_keys
from triweave.layers.swiglu import swiglu
from triweave.layers.tensor_parallel import TensorParallel
from triweave.planner.profile import Operation, OperationCurve, Point
from triweave.probe.session import Session
from triweave.probe.shapes import models
from triweave.probe.soak import Call, soak

HEAD_DIM = 128


class Timed(NamedTuple):
    """One operation at one size."""

    operation: Operation
    bytes: int
    call: Call


def measure_operations(session: Session) -> tuple[OperationCurve, ...]:
    """Every operation over the sizes that ranks have."""
    timed = [one for size in sizes(session.small) for make in _MAKERS for one in make(session, size)]
    seconds = soak(session, [one.call for one in timed], "operations bound by memory", rounds=10)
    curves: defaultdict[Operation, dict[int, float]] = defaultdict(dict)
    for one, took in zip(timed, seconds, strict=True):
        curves[one.operation][one.bytes] = round(took, 9)
    return tuple(OperationCurve(name, tuple(sorted(points.items()))) for name, points in curves.items())


def memory_curve(curves: tuple[OperationCurve, ...]) -> tuple[Point, ...]:
    """What a copy inside the GPU takes: for operations that are not measured one by one."""
    return next((curve.bytes_seconds for curve in curves if curve.operation == "copy"), ())


def sizes(small: bool) -> tuple[int, ...]:
    """Elements of the tensors that are read."""
    return (2**12, 2**14) if small else (2**20, 2**22, 2**24, 2**25, 2**26, 2**27)


def _copies(session: Session, numel: int) -> Iterator[Timed]:
    x, y = session.random(numel), session.random(numel)
    wide = session.random(numel, dtype=torch.float32)

    def norm() -> object:
        return vector_norm(wide.view(-1, 64), dim=1).square().sum()

    yield Timed("copy", 4 * numel, Call("memory", partial(torch.clone, x)))
    yield Timed("add", 6 * numel, Call("memory", lambda: x + y))
    yield Timed("norm of gradients", 4 * numel, Call("memory", norm))


def _norms(session: Session, numel: int) -> Iterator[Timed]:
    hidden = min(4096, numel // 16)
    with torch.device(session.device):
        norm = ResidualRMSNorm(hidden, 1e-5, TensorParallel()).to(session.dtype)
    norm.weight.data.fill_(1)
    x, update, grad, beside = (session.random(numel // hidden, 1, hidden) for _ in range(4))
    leaf = x.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            _, normed = norm(x)
            stream, _ = norm(x, update)
            total: Tensor = stream + normed
            return total

    def backward(given: tuple[Tensor, Tensor]) -> Any:
        return torch.autograd.grad(given, leaf, (beside, grad))

    yield Timed("layer norms", 18 * numel, Call("memory", forward))
    yield Timed("norm backward", 8 * numel, Call("memory", backward, lambda: norm(leaf, update)))


def _rotary(session: Session, numel: int) -> Iterator[Timed]:
    heads, kv_heads = (32, 8) if numel > 2**16 else (4, 2)
    width = HEAD_DIM if numel > 2**16 else 8
    tokens = max(16, numel // (heads * width))
    spec = models(session.small)[0]
    frequencies = inverse_frequencies(spec).to(session.device)[: width // 2]
    rotation = make_rotation(frequencies, torch.arange(tokens, device=session.device).unsqueeze(1), session.dtype)
    qkv = session.random(tokens, 1, (heads + 2 * kv_heads) * width)
    leaf = qkv.clone().requires_grad_()
    upstream = tuple(session.random(tokens, 1, count, width) for count in (heads, kv_heads, kv_heads))

    def forward() -> Any:
        with torch.no_grad():
            return rotate_queries_and_keys(qkv, rotation, heads, kv_heads)

    def backward(given: tuple[Tensor, ...]) -> Any:
        return torch.autograd.grad(given, leaf, upstream)

    yield Timed("rotary", 4 * tokens * (heads + kv_heads) * width, Call("memory", forward))
    again = Call("memory", backward, lambda: rotate_queries_and_keys(leaf, rotation, heads, kv_heads))
    yield Timed("rotary backward", 4 * qkv.numel(), again)


def _swiglu(session: Session, numel: int) -> Iterator[Timed]:
    width = min(14336, numel // 16)
    tokens = numel // width
    gate_up, grad = session.random(tokens, 1, 2 * width), session.random(tokens, 1, width)
    leaf = gate_up.clone().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return swiglu(gate_up)

    def backward(product: Tensor) -> Any:
        return torch.autograd.grad(product, leaf, grad)

    yield Timed("swiglu", 6 * tokens * width, Call("memory", forward))
    yield Timed("swiglu backward", 10 * tokens * width, Call("memory", backward, lambda: swiglu(leaf)))


def _ends(session: Session, numel: int) -> Iterator[Timed]:
    spec, tp = models(session.small)[0], TensorParallel()
    rows, hidden = min(32064, spec.vocab_size), min(spec.hidden_size, numel // 16)
    tokens = max(16, numel // hidden)
    with torch.device(session.device):
        table = VocabParallelEmbedding(rows, hidden, tp).to(session.dtype)
    table.weight.data.normal_()
    words = torch.randint(0, rows, (tokens, 1), device=session.device)
    upstream = session.random(tokens, 1, hidden)

    def look_up() -> Tensor:
        with torch.no_grad():
            found: Tensor = table(words)
            return found

    def add_rows(found: Tensor) -> None:
        found.backward(upstream)

    yield Timed("lookup", 4 * tokens * hidden, Call("memory", look_up))
    yield Timed("lookup backward", 26 * tokens * hidden, Call("memory", add_rows, lambda: table(words)))
    tokens = max(16, 4 * numel // rows)
    targets = torch.randint(0, rows, (tokens, 1), device=session.device)
    logits = session.random(tokens, 1, rows)

    def loss() -> Tensor:
        with torch.no_grad():
            return vocab_parallel_cross_entropy(logits, targets, rows, tp)

    def graph() -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        return vocab_parallel_cross_entropy(leaf, targets, rows, tp), leaf

    def gradient(given: tuple[Tensor, Tensor]) -> Any:
        # Logits are overwritten by their gradient: numbers of another size, and as many.
        return torch.autograd.grad(*given)

    yield Timed("loss", 2 * tokens * rows, Call("memory", loss))
    yield Timed("loss backward", 4 * tokens * rows, Call("memory", gradient, graph))


def _optimizer(session: Session, numel: int) -> Iterator[Timed]:
    config = OptimizerConfig()
    master, gradient = (session.random(numel, dtype=torch.float32) for _ in range(2))
    weight = master.to(session.dtype)
    moments = torch.zeros_like(master), torch.zeros_like(master)
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient
    adamw = torch.optim.AdamW([parameter], lr=1e-5, fused=True)

    def fused() -> None:
        adamw.step()
        weight.copy_(master)

    update: Callable[[], None] = fused
    if uses_kernels(master):
        from triweave.kernels.adamw import adamw_step, step_rates

        rates = step_rates(torch.ones((), device=session.device), None, 1e-5, config)
        given = (master, *moments, gradient, weight, rates, config)
        update = partial(adamw_step, *given, learning_rate=1e-5, weight_decay=0.1)

    def step() -> None:
        with torch.no_grad():
            update()

    yield Timed("adamw", 30 * numel, Call("memory", step))


def _fp8(session: Session, numel: int) -> Iterator[Timed]:
    width = min(4096, numel // 16)
    x = session.random(numel // width, width)
    amax = torch.full((), 5.0, device=session.device)
    if not uses_kernels(x):
        return
    from triweave.kernels.fp8 import cast, largest_magnitudes

    yield Timed("fp8 amax", 2 * numel, Call("memory", partial(largest_magnitudes, x)))
    yield Timed("fp8 cast", 4 * numel, Call("memory", partial(cast, x, amax, fp8.VALUES, rows=True, columns=True)))


_MAKERS = (_copies, _norms, _rotary, _swiglu, _ends, _optimizer, _fp8)
