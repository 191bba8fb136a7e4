"""Published measurements as inputs of the time model: one CSV row to a model, a layout, a machine and a stack.

Reads what was run, never what was measured. A row that cannot be priced says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from triweave.cluster import CATALOGUE, Cluster
from triweave.layout import Layout, Recompute, Shard, even_layers
from triweave.planner.machine import Machine, Precision, machine
from triweave.planner.time_shapes import Decoder
from triweave.planner.time_stack import Stack
from triweave.planner.time_stacks import stack_of_source

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """What a row ran: the arguments of `predict_step`."""

    decoder: Decoder
    layout: Layout
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: Precision
    stack: Stack
    on: Machine


GPU_NAMES = (
    ("gb200", "gb200-186gb"),
    # What the driver of a GB200 shows: its compute capability and 184 GiB.
    ("blackwell-sm100-184gib", "gb200-186gb"),
    ("b200", "b200-180gb"),
    ("h200", "h200-141gb"),
    ("h100", "h100-80gb"),
    ("a100-sxm-40gb", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("a800", "a100-80gb"),
)
"""How a row's `gpu_type` begins, and what the catalogue calls it; first match wins."""

NETWORKS = (
    ("mosaicml", 25e9),
    ("vTrain repo data/ground_truth_multi", 12.5e9),
    ("4x100Gb RoCE", 6.25e9),
    ("InternLM", 6.25e9),
    ("arXiv2311.05610", 25e9),
)
"""Bytes a second of network for one GPU, by what the source says of its nodes."""


def run_of_row(row: Row) -> Run | str:
    """The run that a row describes, or the reason why it cannot be priced."""
    missing = [key for key in ("layers", "hidden", "ffn", "heads", "seq", "gpus", "mbs", "tp", "pp") if not row[key]]
    if missing:
        return f"does not say {', '.join(missing)}"
    gpu = next((name for start, name in GPU_NAMES if row["gpu_type"].lower().startswith(start)), None)
    if gpu is None:
        return f"no measured speeds for {row['gpu_type']}"
    if "fp4" in row["precision"]:
        return f"no measured rate for products in {row['precision']}"
    gpus, tp, pp = int(row["gpus"]), int(row["tp"]), int(row["pp"])
    cp = int(row["cp"] or 1)
    if gpus % (tp * pp * cp):
        return f"{gpus} GPUs are no multiple of tp {tp} x pp {pp} x cp {cp}"
    dp, vpp, micro_batch = gpus // (tp * pp * cp), int(row["vpp"] or 1), int(row["mbs"])
    if row["dp"] and int(row["dp"]) != dp:
        return f"says dp {row['dp']} where {gpus} GPUs leave {dp}"
    global_batch = int(row["gbs"] or dp * micro_batch)
    if global_batch % (dp * micro_batch):
        return f"global batch {global_batch} is no multiple of dp {dp} x micro-batch {micro_batch}"
    micro_batches = global_batch // (dp * micro_batch)
    if vpp > 1 and micro_batches % pp:
        return f"{micro_batches} micro-batches are no multiple of {pp} pipeline ranks"
    heads, hidden = int(row["heads"]), int(row["hidden"])
    model = row["model"]
    decoder = Decoder(
        int(row["layers"]),
        hidden,
        int(row["ffn"]),
        heads,
        int(row["kv_heads"] or heads),
        hidden // heads,
        int(row["vocab"] or 51200),
        gated=not model.startswith(("gpt", "mpt", "opt")),
    )
    if decoder.layers < pp * vpp:
        return f"{decoder.layers} layers for {pp * vpp} stages"
    stack = stack_of_source(row["source"], row["precision"], row["recompute"])
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        dp=dp,
        micro_batch=micro_batch,
        sequence_parallel=row["sp"] == "1" or (row["sp"] == "" and stack.sequence_parallel),
        schedule="interleaved" if vpp > 1 else "1f1b",
        shard=_shard(row["zero"]),
        recompute=_recompute(row["recompute"]),
        layers=_layers(decoder, pp * vpp, stack),
    )
    # An NVLink domain of GB200 holds 72 GPUs; jobs take 64 of them.
    per_node = min(64 if gpu == "gb200-186gb" else int(row["gpus_per_node"] or 8), gpus)
    cluster = Cluster(-(-gpus // per_node), per_node, CATALOGUE[gpu])
    on = machine("h100-96gb-500w" if "500W" in row["gpu_type"] or row["source"].startswith("torchao") else gpu)
    network = next((rate for start, rate in NETWORKS if start in row["source"]), None)
    if network is not None:
        on = _with_network(on, network)
    precision: Precision = "fp8" if "fp8" in row["precision"] else "bf16"
    return Run(decoder, layout, cluster, int(row["seq"]), global_batch, precision, stack, on)


@lru_cache(maxsize=64)
def _with_network(on: Machine, rate: float) -> Machine:
    return replace(on, nic_bytes_per_s=rate)


def _shard(zero: str) -> Shard:
    if zero in ("3", "zero3", "fsdp_zero3"):
        return "full"
    if zero in ("2", "zero2"):
        return "gradients"
    return "optimizer" if zero in ("1", "zero1") else "none"


def _recompute(text: str) -> tuple[Recompute, ...]:
    if text.startswith(("full", "every_layer")) and "block" not in text:
        return ("layer",)
    return ()


def _layers(decoder: Decoder, stages: int, stack: Stack) -> tuple[int, ...]:
    """Layers of each stage as the stack cuts them."""
    if stack.split == "layers" or stages == 1:
        return even_layers(decoder.layers, stages)
    # Embedding, layers, final norm and head as modules of one list, cut evenly.
    counts = list(even_layers(decoder.layers + 3, stages))
    counts[0] -= 1
    counts[-1] -= 2
    return tuple(counts)


def step_s_of_row(row: Row) -> float | None:
    """The measured step, from the step time or from the tokens a second; None where there is neither."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tflops_per_gpu"] and "2104.04473" in row["source"]:
        return _from_hardware_flops(row)
    if not row["tokens_per_s_per_gpu"] or not row["seq"] or not row["gpus"]:
        return None
    gpus = int(row["gpus"])
    batch = row["gbs"]
    if not batch and row["mbs"]:
        batch = str(int(row["mbs"]) * gpus // (int(row["tp"]) * int(row["pp"]) * int(row["cp"] or 1)))
    if not batch:
        return None
    return int(batch) * int(row["seq"]) / (gpus * float(row["tokens_per_s_per_gpu"]))


def _from_hardware_flops(row: Row) -> float:
    """Narayanan et al. (2104.04473) print FLOP/s, the recomputed forward counted; their equation 3 gives the step."""
    batch, seq, layers, hidden = (int(row[key]) for key in ("gbs", "seq", "layers", "hidden"))
    vocab = int(row["vocab"])
    flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    return flops / (int(row["gpus"]) * float(row["tflops_per_gpu"]) * 1e12)
