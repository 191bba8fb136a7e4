"""What the host pays on this machine for each thing that a layer asks of it, one by one.

    python bench/host_primitives.py            # one GPU, ten seconds
    python bench/host_primitives.py --small    # what a CPU has of it, a rehearsal

With the counts of `bench/host_layer.py` this says where the host's time of a layer goes. Tensors are so small that the
GPU is never waited for; a call is timed over many, and the median of several rounds is told.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from host_calls import REPEATS
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from triweave.gradients import add_product
from triweave.kernels import norm
from triweave.kernels.dispatch import uses_kernels
from triweave.layers.attention import BACKENDS
from triweave.transport.stream_flags import Flag, StreamFlags, cuda_driver, flag_bytes

ROUNDS = 7
AT_ONCE = REPEATS // 10
"""Fewer than what a GPU's queue of launches holds."""


class Identity(torch.autograd.Function):
    """An autograd function that does nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def of_torch(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """What any device has."""
    x = torch.randn(16, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    out = torch.empty(16, 64, device=device, dtype=torch.bfloat16)
    leaf = torch.zeros(16, 64, device=device, requires_grad=True)
    grad = torch.ones_like(leaf)
    q, k, v = (torch.randn(1, 2, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    backends = list(BACKENDS.values())
    yield "view", lambda: x.view(4, 4, 64)
    yield "slice", lambda: x[4:8]
    yield "new_empty", lambda: x.new_empty(16, 64)
    yield "x + y", lambda: x + x
    yield "mm", lambda: torch.mm(x, w, out=out)
    yield "weight gradient added in float32", lambda: add_product(w, x, x)
    yield "autograd function, forward", lambda: Identity.apply(leaf)
    yield "autograd function, forward and backward", lambda: torch.autograd.backward(Identity.apply(leaf), grad)

    def choice() -> None:
        with sdpa_kernel(backends, set_priority=True):
            pass

    def attention() -> Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    attended = attention()
    upstream = torch.ones_like(attended)
    yield "choice of attention's kernel", choice
    yield "attention with that choice", attention
    yield "attention's backward", lambda: torch.autograd.grad(attended, (q, k, v), upstream, retain_graph=True)


def of_cuda(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Kernels, streams, events, flags and copies."""
    x, update = (torch.randn(16, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight, stream, normed = torch.ones(64, device=device, dtype=torch.bfloat16), x.clone(), x.clone()
    constants = {"ADD": True, "BLOCK": 64, "num_warps": 1}
    arguments = (x, update, stream, normed, weight, 64, 1e-5)
    if uses_kernels(x):
        kernel = norm._forward
        compiled = kernel[(16,)](*arguments, **constants)
        yield "Triton kernel", lambda: kernel[(16,)](*arguments, **constants)
        yield (
            "the same, already found",
            lambda: compiled[(16, 1, 1)](*arguments, constants["ADD"], constants["BLOCK"]),
        )
    products, side, event = torch.cuda.current_stream(), torch.cuda.Stream(device), torch.cuda.Event()
    yield "current_stream", torch.cuda.current_stream
    yield "event made and recorded", lambda: torch.cuda.Event().record(products)
    yield "event recorded", lambda: event.record(products)
    yield "event waited for", lambda: side.wait_event(event)
    places = torch.zeros(flag_bytes(2), dtype=torch.uint8, device=device)
    flags = StreamFlags(cuda_driver(), (places.data_ptr(),) * 2, 0)
    # A flag of its own, told and waited for: as on two ranks, of which none is late.
    signal = flags.signal(flags.raising(Flag.STAGED, [0]), flags.awaiting(Flag.STAGED, [0]))
    yield "flags told and waited for", lambda: flags.run(signal, side.cuda_stream)
    yield "copy by the driver", lambda: flags.copy(stream.data_ptr(), x.data_ptr(), x.nbytes, side.cuda_stream)
    yield "copy by torch", lambda: stream.copy_(x)


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call."""
    found = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        for _ in range(AT_ONCE):
            call()
        found.append(1e6 * (time.perf_counter() - begin) / AT_ONCE)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="on the CPU")
    device = torch.device("cpu" if parser.parse_args().small else "cuda")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device if device.type == 'cpu' else torch.cuda.get_device_name()}")
    print("what | us of the host")
    for name, call in (*of_torch(device), *(of_cuda(device) if device.type == "cuda" else ())):
        print(f"{name} | {microseconds(call, device):.2f}", flush=True)


if __name__ == "__main__":
    main()
