"""What a decoder layer costs the host, forward and backward, without a GPU: microseconds, and what it calls.

    python bench/host_layer.py                 # one rank, and TP 2 with products in pieces by copy engines

The layers run as on a GPU, by kernels and copy engines, with tensors so small that nothing but the host's work is left.
Streams, events and the driver only count (`bench/host_calls.py`). Where Triton is installed its own Python runs too, up
to where a compiled kernel would be handed to the driver; elsewhere a launch is nothing. What is timed besides the
package's own code and torch's is the CPU's arithmetic on tiny matrices, in place of a launch by cuBLAS.

Microseconds are CPU time of this thread, the fastest of many rounds. Compare with other figures of the same machine.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from host_calls import Counted, engines
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triweave.kernels.language import HAS_TRITON, triton
from triweave.layers.attention import BACKENDS, AttentionKernel
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec

SEQ, ROUNDS, AT_ONCE = 4, 60, 10
SPEC = ModelSpec(64, 16, 16, 1, 2, 1, 8)


class Operations(TorchDispatchMode):
    """Counts the operations that reach a device, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def gpu_path(launches: Counter[str]) -> Iterator[None]:
    """Inside, the layers call their kernels on CPU tensors, and launches end before the driver."""
    with ExitStack() as stack:
        for name in ("norm", "swiglu", "rotary"):
            stack.enter_context(patch(f"triweave.layers.{name}.uses_kernels", lambda _: True))
        if HAS_TRITON:
            former = triton.runtime.driver._active
            triton.runtime.driver.set_active(driver_that_counts(launches))
            stack.callback(lambda: setattr(triton.runtime.driver, "_active", former))
        else:
            for name in ("norm", "swiglu", "rotary"):
                stack.enter_context(patch(f"triweave.kernels.{name}.launch", lambda *_, **__: launches.update(["all"])))
        yield


def driver_that_counts(launches: Counter[str]) -> Any:
    """Triton's driver of an H200 that is not there: kernels are compiled for it and not run."""
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
    )
    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=utils,
        launcher_cls=lambda source, _: lambda *__: launches.update([source.fn.__name__]),
    )


def layer_passes(tp: int, counted: Counted) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Forward and backward of a layer on one of `tp` ranks."""
    transport = engines(tp, counted, room=SEQ * SPEC.hidden_size * 4) if tp > 1 else None
    parallel = TensorParallel(transport.group, True, chosen=transport) if transport else TensorParallel()
    layer = DecoderLayer(SPEC, parallel, AttentionKernel(tuple(BACKENDS.values())), ())
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02)
    x = torch.randn(SEQ // tp, 1, SPEC.hidden_size, requires_grad=True)
    rotation = make_rotation(inverse_frequencies(SPEC), torch.arange(SEQ).unsqueeze(1), torch.float32)
    upstream = torch.randn(SEQ // tp, 1, SPEC.hidden_size)

    def backward(y: Tensor) -> None:
        x.grad = None
        torch.autograd.backward(y, upstream)

    return lambda: layer(x, rotation, None), backward


def microseconds(forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> tuple[float, float]:
    """Of one forward and one backward."""
    best = [float("inf"), float("inf")]
    gc.disable()
    for _ in range(ROUNDS):
        begin = time.thread_time_ns()
        outputs = [forward() for _ in range(AT_ONCE)]
        middle = time.thread_time_ns()
        for output in outputs:
            backward(output)
        end = time.thread_time_ns()
        best = [min(best[0], middle - begin), min(best[1], end - middle)]
    gc.enable()
    return best[0] / AT_ONCE / 1e3, best[1] / AT_ONCE / 1e3


def python_calls(run: Callable[[], object]) -> int:
    """Calls of Python functions in `run`."""
    count = 0

    def tracer(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tracer)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def nodes(output: Tensor) -> int:
    """Nodes of the graph that backward walks."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)


def main() -> None:
    torch.set_num_threads(1)
    print("ranks | pass | us | calls in Python | torch operations | driver: flags, copies, events | kernels | nodes")
    told = []
    launches = Counter[str]()  # one for all: what is compiled goes on counting there
    for tp in (1, 2):
        counted = Counted()
        current = patch("torch.cuda.current_stream", lambda counted=counted: counted)
        event = patch("torch.cuda.Event", lambda counted=counted: counted)
        cut = patch("triweave.overlap.pays_to_cut", lambda *_: True)
        with gpu_path(launches), current, event, cut:
            forward, backward = layer_passes(tp, counted)
            for _ in range(3):
                backward(forward())
            times = microseconds(forward, backward)
            for name, us in zip(("forward", "backward"), times, strict=True):
                output, run = forward(), forward
                if name == "backward":
                    run = partial(backward, output)
                counted.calls.clear()
                launches.clear()
                with Operations() as operations:
                    run()
                driver = ", ".join(str(counted.calls[kind]) for kind in ("flags", "copies", "events"))
                kernels = sum(launches.values())
                output = forward()
                calls = python_calls(forward if name == "forward" else partial(backward, output))
                total = sum(operations.seen.values())
                print(f"{tp} | {name} | {us:.1f} | {calls} | {total} | {driver} | {kernels} | {nodes(forward())}")
                told.append(f"TP {tp}, {name}: " + ", ".join(f"{n} {op}" for op, n in operations.seen.most_common()))
    print("\n" + "\n".join(told))


if __name__ == "__main__":
    main()
