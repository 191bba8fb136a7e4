"""Tensor-parallel communication behind products: what is hidden, what is not, and whether the results are right.

    python bench/overlap.py          # the GPUs of one host: TP over all of them; writes runs/overlap.json
    python bench/overlap.py --small                 # two CPU processes, messages in place of copy engines

Sections, each on its own: a failure is printed and the next begins. `copies`: what the copy engines do, alone and
beside a matrix product. `right`: results against plain collectives, and the same bits 20 times over while ranks are
held up at random. `products`: each product alone (nothing communicated), with collectives, overlapped. `layers`: a
whole decoder layer, forward and backward, in the same three ways. `beside` and `parts`: where the exposed time comes
from (`bench/exposure.py`). `trace`: one overlapped layer for a trace viewer.
A section that takes longer than `--limit` seconds is taken for a hang, and ends the run; the table is printed still.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from exposure import beside, parts
from measuring import DTYPE, Bench, Watchdog
from result_file import result_file
from stand_ins import Alone, HeldUp
from torch import Tensor, nn

from triweave.catalogue import find_model
from triweave.config.schema import RuntimeConfig
from triweave.gradients import main_grad
from triweave.groups import Group
from triweave.layers.attention import choose_kernel
from triweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.swiglu import SwiGLU
from triweave.layers.tensor_parallel import TensorParallel
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec
from triweave.overlap import exchange_bytes
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.start_ranks import run_ranks
from triweave.transport.copy_engine import CopyEngines, copy_engines
from triweave.transport.interface import Transport
from triweave.transport.messages import Messages
from triweave.transport.plain import Collectives

REPEATS = 20
KEPT = "overlapped, inputs kept"
"""Overlapped as well, and gathered inputs kept for backward (`layout.keep_gathered`)."""
MIB = 2**20


# --- three ways -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model at a sequence length."""

    name: str
    spec: ModelSpec
    seq: int

    def slice_shape(self, tp: int) -> tuple[int, int, int]:
        return self.seq // tp, 1, self.spec.hidden_size


def shapes(small: bool) -> list[Shape]:
    if small:
        return [Shape("tiny", ModelSpec(1024, 128, 256, 2, 8, 8, 16, max_position_embeddings=8192), 128)]
    eight, seventy = (find_model(f"meta-llama/Llama-3.1-{size}") for size in ("8B", "70B"))
    return [Shape("8B", eight, 8192), Shape("8B", eight, 4096), Shape("70B", seventy, 4096)]


def overlapping(bench: Bench) -> Transport:
    """What hides communication on this machine, with room for the largest shape."""
    if bench.device.type != "cuda":
        return Messages(bench.group)
    tp = bench.group.size
    slice_bytes = max(2 * shape.seq * shape.spec.hidden_size // tp for shape in shapes(bench.small))
    bench.add(section="memory", exchange_mib=exchange_bytes(tp, slice_bytes) / MIB)
    return copy_engines(bench.group, bench.device, max(slice_bytes, 64 * MIB))


def ways(bench: Bench, overlapped: Transport) -> Iterator[tuple[str, TensorParallel]]:
    for name, transport in (
        ("alone", Alone(bench.group)),
        ("plain", Collectives(bench.group, True)),
        ("overlapped", overlapped),
        (KEPT, overlapped),
    ):
        yield name, TensorParallel(bench.group, True, name == KEPT, chosen=transport)


def fill(module: nn.Module, bench: Bench) -> None:
    """Put a module on the device, with the same weights on each call; ones in norms."""
    module.to(DTYPE).to_empty(device=bench.device)
    for number, parameter in enumerate(module.parameters()):
        drawn = bench.random(*parameter.shape, seed=number, std=0.02)
        parameter.data.copy_(drawn if parameter.dim() > 1 else torch.ones_like(drawn))


# --- sections ---------------------------------------------------------------------------------------------------------


def copies(bench: Bench, transport: Transport) -> None:
    """Copy engines alone, beside a product, and what the product loses by them."""
    if not isinstance(transport, CopyEngines):
        bench.add(section="copies", skipped=transport.name)
        return
    there, flags, stream = transport.staged[transport.peers[0]], transport.flags, transport.stream
    x, weight = bench.random(8192, 4096), bench.random(14336, 4096, seed=1)
    y = torch.empty(8192, 14336, device=bench.device, dtype=DTYPE)

    def product() -> None:
        torch.mm(x, weight.t(), out=y)

    def copies_ms(copy: Callable[[], None], *, beside: bool) -> float:
        """Time of one of ten copies on their own stream."""
        copy()
        bench.sync()
        for _ in range(6 * beside):
            product()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(10):
            copy()
        end.record(stream)
        torch.cuda.synchronize()
        return bench.worst(begin.elapsed_time(end) / 10)

    alone_ms = bench.milliseconds(product)
    for mib in (8, 16, 32, 64):
        size = mib * MIB
        here = torch.empty(size, dtype=torch.uint8, device=bench.device)
        copy = functools.partial(flags.copy, here.data_ptr(), there, size, stream.cuda_stream)
        pull_ms, beside_ms = copies_ms(copy, beside=False), copies_ms(copy, beside=True)
        slowed_ms = bench.milliseconds(lambda copy=copy: (copy(), product()))
        row = {"pull_gb_s": size / pull_ms / 1e6, "pull_beside_product_gb_s": size / beside_ms / 1e6}
        bench.add(section="copies", mib=mib, **row, product_ms=alone_ms, product_beside_pull_ms=slowed_ms)
    one, part = bench.random(bench.group.size, 1, 64), bench.random(bench.group.size, 1, 64, seed=2)

    def scatter() -> None:
        scattering = transport.scatter((bench.group.size, 1), 64, 1)
        for piece in scattering.pieces:
            scattering.send(piece, part[piece.start : piece.stop])
        scattering.finish()

    calls = {"gather": lambda: transport.gather(one, whole=True, other=1).finish(), "scatter": scatter}
    for name, call in calls.items():
        bench.add(section="copies", what=f"{name} of one token", ms=bench.milliseconds(call))


def right(bench: Bench, overlapped: Transport) -> None:
    """Two MLPs in a row: against collectives, then again and again with ranks held up."""
    shape = shapes(bench.small)[0]
    spec, tp = shape.spec, bench.group.size

    def results(transport: Transport) -> list[Tensor]:
        ours = TensorParallel(bench.group, True, chosen=transport)
        with torch.device("meta"):
            blocks = nn.ModuleList(
                SwiGLU(spec.hidden_size, spec.intermediate_size, ours, recompute=False) for _ in range(2)
            )
        fill(blocks, bench)
        x = bench.random(*shape.slice_shape(tp), seed=50).requires_grad_()
        y: Tensor = x
        for block in blocks:
            y = block(block.gate_up_proj(y))
        y.backward(bench.random(*shape.slice_shape(tp), seed=51))
        assert x.grad is not None
        return [y.detach(), x.grad, *(main_grad(parameter) for parameter in blocks.parameters())]

    plain, first = results(Collectives(bench.group, True)), results(overlapped)
    errors = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(first, plain, strict=True)]
    bench.add(section="right", what="worst relative error against collectives", value=bench.worst(max(errors)))
    if isinstance(overlapped, CopyEngines):
        uncut = replace(overlapped, piece_s=1.0)
        same = all(torch.equal(a, b) for a, b in zip(results(uncut), plain, strict=True))
        bench.add(section="right", what="products that are not cut equal collectives bit for bit", value=same)
    del plain
    different = 0
    for repeat in range(REPEATS):
        chance = random.Random(100 * repeat + bench.group.rank)  # noqa: S311 (no secret)
        streams = (overlapped.stream, torch.cuda.current_stream()) if isinstance(overlapped, CopyEngines) else ()
        again = results(HeldUp(overlapped, chance, streams))
        different += not all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    bench.add(section="right", what=f"repeats of {REPEATS} that differ in a bit", value=bench.worst(different))


def products(bench: Bench, overlapped: Transport) -> None:
    """Each product of a layer, forward and backward."""
    tp = bench.group.size
    for shape in shapes(bench.small):
        spec = shape.spec
        qkv = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim // tp
        wide = {
            "gate_up": (ColumnParallelLinear, spec.hidden_size, 2 * spec.intermediate_size // tp),
            "down": (RowParallelLinear, spec.intermediate_size // tp, spec.hidden_size),
            "qkv": (ColumnParallelLinear, spec.hidden_size, qkv),
            "o": (RowParallelLinear, spec.num_attention_heads * spec.head_dim // tp, spec.hidden_size),
        }
        for name, (kind, features, out_features) in wide.items():
            column = kind is ColumnParallelLinear
            times: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
            for way, ours in ways(bench, overlapped):
                with torch.device("meta"):
                    layer = kind(features, out_features, ours)
                fill(layer, bench)
                x = bench.random(shape.seq // tp if column else shape.seq, 1, features, seed=9).requires_grad_()
                with torch.no_grad():
                    times["forward"][way] = bench.milliseconds(lambda layer=layer, x=x: layer(x))
                y = layer(x)
                grad = bench.random(*y.shape, seed=10)
                times["backward"][way] = bench.milliseconds(
                    lambda y=y, x=x, grad=grad: torch.autograd.grad(y, x, grad, retain_graph=True)
                )
                del layer, x, y, grad
            for direction, ms in times.items():
                bench.add(section="products", model=shape.name, seq=shape.seq, what=f"{name} {direction}", **ms)


def decoder_layer(bench: Bench, shape: Shape, ours: TensorParallel) -> Callable[[], None]:
    """One layer's forward and backward."""
    spec = shape.spec
    with torch.device("meta"):
        layer = DecoderLayer(spec, ours, choose_kernel("auto", bench.device), ())
    fill(layer, bench)
    positions = torch.arange(shape.seq, device=bench.device).unsqueeze(1)
    rotation = make_rotation(inverse_frequencies(spec).to(bench.device), positions, DTYPE)
    x = bench.random(*shape.slice_shape(ours.size), seed=60)
    grad = bench.random(*shape.slice_shape(ours.size), seed=61)

    def step() -> None:
        layer(x.detach().requires_grad_(), rotation, None).backward(grad)

    return step


def layers(bench: Bench, overlapped: Transport) -> None:
    """A whole layer: the figure that counts, and the time that the host needs to issue it."""
    for shape in shapes(bench.small):
        steps = {way: decoder_layer(bench, shape, ours) for way, ours in ways(bench, overlapped)}
        ms = bench.by_turns(steps)
        host = {f"{way}_host": bench.host_milliseconds(step) for way, step in steps.items()}
        exposed = {f"{way}_exposed": ms[way] / ms["alone"] - 1 for way in ("plain", "overlapped", KEPT)}
        bench.add(section="layers", model=shape.name, seq=shape.seq, **ms, **exposed, **host)


def trace(bench: Bench, overlapped: Transport) -> None:
    """What ran when, on rank 0."""
    if bench.device.type != "cuda":
        return
    from torch.profiler import ProfilerActivity, profile

    step = decoder_layer(bench, shapes(bench.small)[0], TensorParallel(bench.group, True, chosen=overlapped))
    for _ in range(3):
        step()
    bench.sync()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    if bench.group.rank == 0:
        profiler.export_chrome_trace(str(bench.out.with_suffix(".trace.json.gz")))


def layer_parts(bench: Bench, overlapped: Transport) -> None:
    """What each part of communication adds to a layer."""
    for shape in shapes(bench.small):

        def layer(transport: Transport, shape: Shape = shape) -> Callable[[], None]:
            return decoder_layer(bench, shape, TensorParallel(bench.group, True, chosen=transport))

        parts(bench, overlapped, layer, model=shape.name, seq=shape.seq)


SECTIONS = {
    "copies": copies,
    "beside": beside,
    "right": right,
    "products": products,
    "layers": layers,
    "parts": layer_parts,
    "trace": trace,
}


def measure(options: argparse.Namespace, process: Process) -> int:
    """All sections on this rank."""
    watchdog = Watchdog(options.limit)
    watchdog.begin("start")
    threading.Thread(target=watchdog.watch, daemon=True).start()
    runtime = RuntimeConfig(device="cpu" if options.small else "cuda", timeout_s=int(options.limit))
    device = choose_device(runtime, process)
    failed = 0
    with process_group(process, device, runtime.timeout_s):
        group = Group(tuple(range(process.world_size)), process.rank, dist.group.WORLD)
        bench = Bench(group, device, options.small, options.out, watchdog)
        bench.sync()
        overlapped = overlapping(bench)
        for name in options.sections.split(","):
            watchdog.begin(name)
            try:
                SECTIONS[name](bench, overlapped)
            except Exception:
                failed = 1
                print(f"FAILED on rank {process.rank}: {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            bench.sync()
    watchdog.deadline = float("inf")
    return failed


def show(rows: list[dict[str, Any]]) -> None:
    """Everything found, one line each."""
    for row in rows:
        if row["section"] in ("memory", "copies", "right", "beside", "parts"):
            told = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "section")
            print(f"{row['section']:8} " + ", ".join(told))
    print(
        "what | alone ms | collectives ms | overlapped ms | inputs kept ms | exposed: collectives | overlapped | kept"
    )
    for row in rows:
        if row["section"] in ("products", "layers"):
            alone, plain, ours, kept = row["alone"], row["plain"], row["overlapped"], row[KEPT]
            print(
                f"{row['model']} seq {row['seq']} {row.get('what', 'whole layer')} | {alone:.3f} | {plain:.3f} |"
                f" {ours:.3f} | {kept:.3f} | {plain / alone - 1:.1%} | {ours / alone - 1:.1%} | {kept / alone - 1:.1%}"
                + (
                    f" | issued in {row['plain_host']:.3f} and {row['overlapped_host']:.3f} ms"
                    if "what" not in row
                    else ""
                )
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_file, default="runs/overlap.json")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ranks", type=int, default=0, help="left out, every GPU of this host; 2 with --small")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a section may take")
    options = parser.parse_args()
    if unknown := set(options.sections.split(",")) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    # Multicast needs the fabric manager to grant it, which not every host does, and nothing here uses it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    ranks = options.ranks or (2 if options.small else torch.cuda.device_count())
    if ranks < 2:
        parser.error("needs two GPUs; --small needs none")
    options.out.write_text("[]")
    code = run_ranks(ranks, functools.partial(measure, options))
    show(json.loads(options.out.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main())
