"""What the benches of one GPU's kernels and layers share: how a call is timed, and with or without our kernels.

Times are medians by CUDA events over buffers that together are larger than the L2 cache; the host is let run ahead, so
that launching is not timed. `--small` rehearses on the CPU, in Triton's interpreter where there is one.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch
from torch import Tensor

SMALL = "--small" in sys.argv
if SMALL:
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

from measuring import in_turn  # noqa: E402

from triweave.layers import cross_entropy, norm, rotary, swiglu  # noqa: E402
from triweave.layers.rotary import Rotation, inverse_frequencies, make_rotation  # noqa: E402
from triweave.model_spec import ModelSpec  # noqa: E402

DEVICE = torch.device("cpu" if SMALL else "cuda")
DTYPE = torch.bfloat16
REPEATS = 3 if SMALL else 21
BEYOND_L2_BYTES = 1 << (16 if SMALL else 28)
HAS_KERNELS = find_spec("triton") is not None
LAYERS = [  # tokens, then what one rank has of the model
    ("8B TP 1, seq 8192", 8192, ModelSpec(128256, 4096, 14336, 1, 32, 8, 128, rope_theta=500000.0)),
    ("70B TP 8 alone, seq 4096", 4096, ModelSpec(128256, 8192, 3584, 1, 8, 1, 128, rope_theta=500000.0)),
    ("70B TP 8 alone, seq 8192", 8192, ModelSpec(128256, 8192, 3584, 1, 8, 1, 128, rope_theta=500000.0)),
]
if SMALL:
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


def medians_by_turns(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of one call of each, one call of each after the other (`measuring.in_turn`)."""
    if DEVICE.type == "cpu":
        return {name: median_ms([run]) for name, run in runs.items()}
    for run in list(runs.values()) * 3:
        run()
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in in_turn(runs, REPEATS, 10_000_000).items()}


def over_buffers(run: Callable[..., object], make: Callable[[], tuple[Tensor, ...]]) -> float:
    """Median milliseconds of `run` over as many sets of inputs as exceed the cache."""
    first = make()
    count = max(2, -(-BEYOND_L2_BYTES // sum(tensor.nbytes for tensor in first)))
    sets = [first, *(make() for _ in range(count - 1))]
    return median_ms([lambda inputs=inputs: run(*inputs) for inputs in sets])


def rotation_of(tokens: int, head_dim: int) -> Rotation:
    spec = ModelSpec(8, 8 * head_dim, 8, 1, 8, 8, head_dim)
    positions = torch.arange(tokens, device=DEVICE).unsqueeze(1)
    return make_rotation(inverse_frequencies(spec).to(DEVICE), positions, DTYPE)


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)  # type: ignore[return-value]


def largest_error(outputs: object, exact: object) -> float:
    """Largest Frobenius error of several tensors relative to float64's."""
    pairs = zip(as_tuple(outputs), as_tuple(exact), strict=True)
    return max(((ours.double() - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)


def verdict(rows: list[str], wrong: list[str]) -> int:
    """The end of what a bench prints, and its exit code."""
    print("\n".join(rows))
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def say_where() -> None:
    """The head of what a bench prints."""
    where = "CPU" if SMALL else torch.cuda.get_device_name()
    print(
        f"torch {torch.__version__}, {where}, kernels {'used' if HAS_KERNELS else 'missing: Triton is not installed'}"
    )
