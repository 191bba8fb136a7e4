"""Offload on one GPU: what a step takes and holds with activations on the host, beside what the planner says.

    python bench/offload.py              # one GPU: layers of Llama-3-8B at 8,192 tokens and of 70B at 4,096
    python bench/offload.py --small      # a rehearsal on the CPU, where nothing is told of memory and little of time

Each row is an engine of its own and the same numbers: losses must be equal to the bit. `alone` is what copies of
256 MiB between pinned memory and the GPU reach, out and back, one way at a time. The first step makes the host memory.

A step more is watched, whose time does not count: what copies reach beside what computes, and how long the host stands
in the calls that start them. Slow copies tell of the bus or of the memory, a host that stands of copies that are not
asynchronous, and neither of a GPU that does not run both at once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from check_planner import run_of
from torch import Tensor

from triweave.catalogue import find_model
from triweave.dryrun.batch import make_batch
from triweave.dryrun.on_gpu import fill_on_device
from triweave.layout import Layout, Offload, Recompute
from triweave.model_spec import ModelSpec
from triweave.offload import Copies
from triweave.pinned import give_back, host_memory
from triweave.planner.assumptions import OURS
from triweave.planner.memory import predict_memory
from triweave.planner.memory_stage import layer_offloaded
from triweave.planner.sizes import sizes_of
from triweave.training.engine import build_engine
from triweave.training.step import train_step

GIB, MICRO_BATCHES = 2**30, 2
WAYS: tuple[tuple[tuple[Recompute, ...], tuple[Offload, ...]], ...] = (
    ((), ()),
    (("layer",), ()),
    ((), ("mlp",)),
    ((), ("attention", "mlp")),
    (("norm", "swiglu"), ("mlp",)),
    (("layer",), ("layer",)),
)


@dataclass
class Watched:
    """The copies of a step."""

    bytes: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Of those out (True) and back."""
    events: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    host_s: float = 0.0
    """In the calls that start them."""

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Watch those that are started inside."""
        copy = Copies._copy

        def watched(copies: Copies, to: Tensor, source: Tensor) -> None:
            # Both on the copies' own stream, which is current here: what a copy waits for is before them.
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            called = time.perf_counter()
            copy(copies, to, source)
            self.host_s += time.perf_counter() - called
            end.record()
            out = to.device.type == "cpu"
            self.bytes[out] += to.nbytes
            self.events.append((out, begin, end))

        with patch.object(Copies, "_copy", watched):
            yield

    def told(self) -> str:
        """GB/s out and back, and milliseconds of the host a copy."""
        if not self.events:
            return "- | - | -"
        seconds = {True: 0.0, False: 0.0}
        for out, begin, end in self.events:
            seconds[out] += begin.elapsed_time(end) / 1e3
        rates = (f"{self.bytes[out] / seconds[out] / 1e9:.1f}" if seconds[out] else "-" for out in (True, False))
        return " | ".join((*rates, f"{1e3 * self.host_s / len(self.events):.3f}"))


def alone(device: torch.device, size: int) -> tuple[float, float]:
    """GB/s from the device and to it."""
    host, there = host_memory(size, device), torch.empty(size, dtype=torch.uint8, device=device)
    copies, rates = Copies(device), []
    for to, source in ((host, there), (there, host)):
        times = []
        for _ in range(8):
            _finish(device)
            begin = time.perf_counter()
            copies.start(to, source)
            _finish(device)
            times.append(time.perf_counter() - begin)
        rates.append(size / statistics.median(times) / 1e9)
    give_back(host, device)
    return rates[0], rates[1]


def measure(
    spec: ModelSpec, layout: Layout, seq: int, device: torch.device, steps: int
) -> tuple[float, float, float, int, Watched]:
    """First loss, seconds of the first step, of a step (median), the most that was allocated, and a step's copies."""
    run = run_of(spec, layout, seq, MICRO_BATCHES)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    engine = build_engine(run, device, lambda units: fill_on_device(units, spec))
    batch = make_batch(run, device)
    begin, times = time.perf_counter(), []
    loss, _ = train_step(engine, batch, 0.0, 1.0)
    first_s = time.perf_counter() - begin
    for _ in range(steps):
        _finish(device)
        begin = time.perf_counter()
        again, _ = train_step(engine, batch, 0.0, 1.0)
        times.append(time.perf_counter() - begin)
        assert again == loss
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    watched = Watched()
    with watched.copies():
        train_step(engine, batch, 0.0, 1.0)
    _finish(device)
    return loss, first_s, statistics.median(times), peak, watched


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a rehearsal on the CPU")
    small = parser.parse_args().small
    device = torch.device("cpu" if small else "cuda")
    cases = {"8B, 8 layers": (find_model("llama-3-8b"), 8, 8192), "70B, 3 layers": (find_model("llama-3-70b"), 3, 4096)}
    if small:
        cases = {"tiny, 4 layers": (ModelSpec(512, 128, 352, 4, 4, 2, 32, max_position_embeddings=4096), 4, 256)}
    if small:
        torch.set_num_threads(1)
    name = "CPU" if small else torch.cuda.get_device_name(device)
    out, back = alone(device, 2**24 if small else 2**28)
    print(f"{name}, torch {torch.__version__}: copies alone {out:.1f} GB/s out, {back:.1f} GB/s back\n")
    heads = ["case", "recompute", "offload", "first step s", "step s", "of plain", "moved GB a step, each way"]
    heads += ["out GB/s", "back GB/s", "host ms a copy", "peak GiB", "planned", "equal"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    wrong = False
    for case, (model, num_layers, seq) in cases.items():
        spec, plain = replace(model, num_hidden_layers=num_layers, max_position_embeddings=seq), None
        for recompute, offload in WAYS:
            layout = Layout(recompute=recompute, offload=offload, layers=(num_layers,))
            loss, first_s, seconds, peak, watched = measure(spec, layout, seq, device, 3 if small else 8)
            plain = plain or (loss, seconds)
            sizes = layer_offloaded(sizes_of(spec, layout, seq, "bfloat16", OURS), OURS)
            # The last layer's are still there when its backward comes: they go out, and nothing comes back.
            moved = sum(sizes.values()) * num_layers * MICRO_BATCHES / 1e9
            (planned,) = predict_memory(spec, layout, seq_len=seq, num_micro_batches=MICRO_BATCHES)
            told = f"{peak / GIB:.3f} | {planned.peak_allocated_bytes / GIB:.3f}" if peak else "- | -"
            wrong |= loss != plain[0]
            print(
                f"| {case}, seq {seq} | {' '.join(recompute) or '-'} | {' '.join(offload) or '-'} | {first_s:.1f}"
                f" | {seconds:.4f} | {seconds / plain[1]:.3f} | {moved:.2f} | {watched.told()} | {told}"
                f" | {'yes' if loss == plain[0] else 'NO'} |",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
