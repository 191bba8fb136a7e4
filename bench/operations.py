"""What single operations of a layer reach: the constants that the time model takes for them, measured.

    python bench/operations.py      # one GPU; writes runs/operations.json
    python bench/operations.py --small                    # CPU, a rehearsal

Three questions. How much of a copy's bandwidth do element-wise kernels reach on whole tensors, on halves of a tensor
and with a broadcast operand (`time_operations.STRIDED_SHARE`). What does a weight gradient cost that is added to a
float32 sum, beside one written in bf16 (`time_matmul.OPERAND_RATE`). How fast is a product alone, back to back for
seconds, and with equal pauses between (power).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from measuring import wait
from result_file import result_file
from torch import Tensor
from torch.nn.functional import linear, silu

from triweave.gradients import add_product

REPEATS = 20


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of single calls, each waited for."""
    times = []
    for _ in range(3 + REPEATS):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def sustained(call: Callable[[], object], device: torch.device, for_s: float, pause: float) -> float:
    """Mean seconds of a call over `for_s` seconds, the last half of them, resting `pause` times as long in between."""
    once = seconds(call, device)
    count = max(4, round(for_s / (once * (1 + pause))))
    chunk = max(1, round(0.02 / once))
    busy, calls = 0.0, 0
    for i in range(0, count, chunk):
        begin = time.perf_counter()
        for _ in range(chunk):
            call()
        wait(device)
        took = time.perf_counter() - begin
        if i >= count // 2:
            busy, calls = busy + took, calls + chunk
        if pause:
            time.sleep(pause * took)
    return busy / calls


def element_wise(tokens: int, width: int, device: torch.device) -> dict[str, float]:
    """GB/s of one kernel each, over bf16 `[tokens, width]`."""
    both = torch.randn(tokens, 2 * width, device=device, dtype=torch.bfloat16)
    gate, up = both.chunk(2, dim=-1)
    x, y = gate.contiguous(), up.contiguous()
    heads = x.view(tokens, 1, -1, 128)
    cos = torch.randn(tokens, 1, 1, 128, device=device, dtype=torch.bfloat16)
    size = x.numel() * x.element_size() / 1e9
    calls: dict[str, tuple[float, Callable[[], Tensor]]] = {
        "copy": (2, x.clone),
        "silu, whole": (2, lambda: silu(x)),
        "silu, half of a tensor": (2, lambda: silu(gate)),
        "product, whole": (3, lambda: x * y),
        "product with half of a tensor": (3, lambda: x * up),
        "product with a broadcast operand": (2, lambda: heads * cos),
        "halves side by side": (4, lambda: torch.cat((x, y), dim=-1)),
    }
    return {name: passes * size / seconds(call, device) for name, (passes, call) in calls.items()}


def products(tokens: int, n: int, k: int, device: torch.device, for_s: float) -> dict[str, float]:
    """TFLOP/s of a linear layer's forward, and of its weight gradient in two ways."""
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    grad = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
    weight.main_grad = torch.zeros(n, k, device=device, dtype=torch.float32)  # type: ignore[attr-defined]
    flops = 2e-12 * tokens * n * k

    def forward() -> Tensor:
        return linear(x, weight)

    return {
        "forward, alone": flops / seconds(forward, device),
        "forward, back to back": flops / sustained(forward, device, for_s, 0.0),
        "forward, half of the time": flops / sustained(forward, device, for_s, 1.0),
        "weight gradient in bf16": flops / seconds(lambda: grad.t() @ x, device),
        "weight gradient added in float32": flops / seconds(lambda: add_product(weight, grad, x), device),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, default="runs/operations.json")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small or not torch.cuda.is_available() else "cuda")
    shapes = [(64, 256, 128)] if options.small else [(8192, 28672, 4096), (8192, 4096, 14336), (4096, 57344, 8192)]
    told: dict[str, object] = {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        told["device"] = torch.cuda.get_device_name(device)
    told["element-wise GB/s"] = element_wise(64 if options.small else 8192, 256 if options.small else 14336, device)
    with torch.no_grad():
        for tokens, n, k in shapes:
            told[f"{tokens}x{n}x{k} TFLOP/s"] = products(tokens, n, k, device, 0.05 if options.small else 4.0)
    options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
