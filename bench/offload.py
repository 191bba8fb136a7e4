"""Offload on one GPU: what a step takes and holds with activations on the host, beside what the planner says.

    python bench/offload.py              # one GPU: layers of Llama-3-8B at 8,192 tokens and of 70B at 4,096
    python bench/offload.py --small      # a rehearsal on the CPU, where nothing is told of memory and little of time

Each row is an engine of its own and the same numbers: losses must be equal to the bit. `alone` is what copies of
256 MiB between pinned memory and the GPU reach, out and back, one way at a time. The first step makes the host memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import replace

import torch
from check_planner import run_of

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
) -> tuple[float, float, float, int]:
    """First loss, seconds of the first step, of a step (median), and the most that was allocated."""
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
    return loss, first_s, statistics.median(times), peak


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
    heads += ["peak GiB", "planned", "equal"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    wrong = False
    for case, (model, num_layers, seq) in cases.items():
        spec, plain = replace(model, num_hidden_layers=num_layers, max_position_embeddings=seq), None
        for recompute, offload in WAYS:
            layout = Layout(recompute=recompute, offload=offload, layers=(num_layers,))
            loss, first_s, seconds, peak = measure(spec, layout, seq, device, 3 if small else 8)
            plain = plain or (loss, seconds)
            sizes = layer_offloaded(sizes_of(spec, layout, seq, "bfloat16", OURS), OURS)
            # The last layer's are still there when its backward comes: they go out, and nothing comes back.
            moved = sum(sizes.values()) * num_layers * MICRO_BATCHES / 1e9
            (planned,) = predict_memory(spec, layout, seq_len=seq, num_micro_batches=MICRO_BATCHES)
            told = f"{peak / GIB:.3f} | {planned.peak_allocated_bytes / GIB:.3f}" if peak else "- | -"
            wrong |= loss != plain[0]
            print(
                f"| {case}, seq {seq} | {' '.join(recompute) or '-'} | {' '.join(offload) or '-'} | {first_s:.1f}"
                f" | {seconds:.4f} | {seconds / plain[1]:.3f} | {moved:.2f} | {told}"
                f" | {'yes' if loss == plain[0] else 'NO'} |",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
