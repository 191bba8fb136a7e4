"""A machine profile: what was measured of one kind of GPU and its links, as a file that `plan` and `predict` read.

A profile holds measurements and says nothing of how they combine; `profile_machine` makes a `Machine` of it. `triweave
probe` writes one. Times are in seconds, sizes in bytes, each a median of repeated runs on random data, on the slowest
rank. YAML or JSON, read strictly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from triweave.cluster import CATALOGUE, nearest_gpu
from triweave.errors import InputError, Problem
from triweave.layout import Recompute, Shard
from triweave.planner.machine import Precision

VERSION = 2

Point = tuple[int, float]
"""`[bytes, seconds]`."""
MatmulPoint = tuple[int, int, int, float]
"""`[m, n, k, seconds]` of `[m, k] x [k, n]`."""
AttentionPoint = tuple[int, int, int, int, int, float, float]
"""`[batch, seq, heads, kv_heads, head_dim, forward seconds, backward seconds]`, causal, bf16."""
LayerPoint = tuple[int, int, int, int, int, int, int, int, float, float]
"""`[tp, batch, seq, hidden, ffn, heads, kv_heads, head_dim, forward seconds, backward seconds]`."""

AttentionKernel = Literal["cudnn", "flash2", "flash3", "torch"]
"""`torch` is what PyTorch takes where none of the others computes, as on a CPU."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Span = Literal["node", "cluster"]
"""Whether all ranks sit in one node, or each in a node of its own."""
Operation = Literal[
    "layer norms",
    "norm backward",
    "rotary",
    "rotary backward",
    "swiglu",
    "swiglu backward",
    "loss",
    "loss backward",
    "lookup",
    "lookup backward",
    "add",
    "norm of gradients",
    "adamw",
    "copy",
    "fp8 amax",
    "fp8 cast",
]
"""What this package's layers and optimizer do between products, kernel by kernel; `time_trainer` says what each moves.
`layer norms` are the two norms of a layer with its two additions."""
Copied = Literal["slice", "gather", "reduce_scatter", "all_reduce"]
"""What copy engines carry: one slice from a peer, or flat buffers of all ranks."""
Beside = Literal["copies", "buffers", "collectives"]
"""Slices by copy engines; gradient sums by copy engines, with the additions; NCCL's kernels."""


@dataclass(frozen=True, slots=True)
class MatmulTable:
    """Products of one precision and one order of operands (`time_matmul.Operands`), at the speed of a long run."""

    precision: Precision
    operands: Literal["NT", "NN", "TN"]
    """Forward, input gradient, or weight gradient: in bf16 the last is added to a float32 sum."""
    m_n_k_seconds: tuple[MatmulPoint, ...]


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """One attention kernel."""

    kernel: AttentionKernel
    shape_forward_backward_seconds: tuple[AttentionPoint, ...]


@dataclass(frozen=True, slots=True)
class OperationCurve:
    """One operation of the trainer, by the bytes that it reads and writes."""

    operation: Operation
    bytes_seconds: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """One collective over a group of some size; bytes are those of the whole tensor."""

    kind: Collective
    ranks: int
    span: Span
    bytes_seconds: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """One message from a rank to another."""

    span: Span
    bytes_seconds: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class CopyCurve:
    """What copy engines carry inside a node, by the bytes of one slice or of one rank's whole buffer."""

    what: Copied
    ranks: int
    bytes_seconds: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Seconds that products lose for each second in which something else moves data beside them."""

    beside: Beside
    seconds_lost_per_second: float


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the host needs to issue a layer of the trainer, many in a row and each so small that no GPU holds it up."""

    tp: int
    """Tensor-parallel ranks, sequence parallel."""
    shard: Shard | None
    """What two or more data-parallel ranks share out; None for one."""
    recompute: tuple[Recompute, ...]
    forward_seconds: float
    backward_input_seconds: float
    """With what is recomputed; all of backward where `shard` says that ranks share."""
    backward_weight_seconds: float
    precision: Precision = "bf16"
    """Of the layers' products: in fp8 their operands are cast."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of GPU, as it was measured."""

    version: Literal[2]
    gpu: str
    """Its name in the cluster catalogue."""
    torch: str
    """Version of PyTorch, with its CUDA."""
    date: str
    source: str
    """Who measured it, how, and on what."""
    gpu_model: str = ""
    """As the driver calls it."""
    num_gpus: int = 0
    """Of one node, measured together."""
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    power_limit_watts: float | None = None
    max_sm_clock_mhz: float | None = None
    sustained_sm_clock_mhz: float | None = None
    """Read while the last products ran."""
    burst_tflops: float | None = None
    """Of one large product on a card that was idle before, beside what it keeps up."""
    back_to_back_tflops: float | None = None
    """Of the same product again and again for seconds, and nothing else; `matmul` has it in a step's mixture."""
    nic_gbit_per_s: float | None = None
    """Network of one GPU, one direction, where messages between nodes were measured; None: as its kind is sold."""
    parts: tuple[str, ...] = ()
    """What of `triweave probe` was measured to its end; the rest it measures when it is run again."""
    matmul: tuple[MatmulTable, ...] = ()
    attention: tuple[AttentionTable, ...] = ()
    memory_bytes_seconds: tuple[Point, ...] = ()
    """Operations bound by memory bandwidth, whatever they are, by the bytes that they read and write."""
    operations: tuple[OperationCurve, ...] = ()
    host_copy_bytes_seconds: tuple[Point, ...] = ()
    """Copies between pinned host memory and the GPU, one way."""
    collectives: tuple[CollectiveCurve, ...] = ()
    point_to_point: tuple[LinkCurve, ...] = ()
    copies: tuple[CopyCurve, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    layers: tuple[LayerPoint, ...] = ()
    """Whole layers of the trainer, nothing recomputed: what its parts are held against."""
    hosts: tuple[HostCost, ...] = ()
    launch_seconds: float | None = None
    """What the host needs to launch one kernel."""


def read_profile(path: Path) -> Profile:
    """Read a profile strictly.

    Raises:
        InputError: no such file, an unknown key, a value of another kind, another version, or a table that cannot have
            been measured; every problem at once, with file and line where it has one.
    """
    from triweave.config.load import load  # Only who has a profile waits for what reads files.

    profile = load(Profile, path, called="profile")
    problems = list(profile_problems(profile))
    if problems:
        raise InputError(Problem(one.key, one.value, one.rule, one.nearest, str(path)) for one in problems)
    return profile


def profile_problems(profile: Profile) -> Iterator[Problem]:
    """What no measurement can have given: a GPU that is not in the catalogue, times or sizes that are not positive."""
    if profile.gpu not in CATALOGUE:
        rule = f"is not one of {', '.join(CATALOGUE)}"
        yield Problem("gpu", profile.gpu, rule, nearest_gpu(profile.gpu))
    for name, points in _tables(profile):
        for number, point in enumerate(points):
            if not all(0 < value < float("inf") for value in point):
                yield Problem(f"{name}[{number}]", _listed(point), "must hold sizes and seconds above 0")
    for name, curve in _curves(profile):
        sizes = [size for size, _ in curve]
        if not sizes:
            yield Problem(name, "[]", "must hold at least 1 point, and holds 0")
        if any(after <= before for before, after in pairwise(sizes)):
            yield Problem(name, _listed(sizes), "must go from smaller to larger sizes", _listed(sorted(set(sizes))))
    for key in ("collectives", "copies"):
        for number, one in enumerate(getattr(profile, key)):
            if one.ranks < 2:
                yield Problem(f"{key}[{number}].ranks", one.ranks, "must be at least 2", "2")
    for number, slowdown in enumerate(profile.slowdowns):
        lost = slowdown.seconds_lost_per_second
        if not 0 <= lost < float("inf"):
            yield Problem(f"slowdowns[{number}].seconds_lost_per_second", lost, "must be at least 0", "0.0")
    for number, host in enumerate(profile.hosts):
        for key in ("forward_seconds", "backward_input_seconds", "backward_weight_seconds"):
            if not 0 <= (seconds := getattr(host, key)) < float("inf"):
                yield Problem(f"hosts[{number}].{key}", seconds, "must be at least 0", "0.0")
    if profile.num_gpus < 0:
        yield Problem("num_gpus", profile.num_gpus, "must be at least 0", "0")
    port = profile.nic_gbit_per_s
    if port is not None and not 0 < port < float("inf"):
        yield Problem("nic_gbit_per_s", port, "must be above 0")
    launch = profile.launch_seconds
    if launch is not None and not 0 <= launch < float("inf"):
        yield Problem("launch_seconds", launch, "must be at least 0", "0.0")


def _tables(profile: Profile) -> Iterator[tuple[str, Sequence[Sequence[float]]]]:
    for i, table in enumerate(profile.matmul):
        yield f"matmul[{i}].m_n_k_seconds", table.m_n_k_seconds
    for i, kernel in enumerate(profile.attention):
        yield f"attention[{i}].shape_forward_backward_seconds", kernel.shape_forward_backward_seconds
    yield "layers", profile.layers
    yield from _curves(profile)


def _curves(profile: Profile) -> Iterator[tuple[str, Sequence[Point]]]:
    for key in ("memory_bytes_seconds", "host_copy_bytes_seconds"):
        if getattr(profile, key):
            yield key, getattr(profile, key)
    for key in ("operations", "collectives", "point_to_point", "copies"):
        for i, curve in enumerate(getattr(profile, key)):
            yield f"{key}[{i}].bytes_seconds", curve.bytes_seconds


def profile_text(profile: Profile) -> str:
    """The YAML file of a profile; `read_profile` gives the same one back."""
    lines: list[str] = []
    for field in fields(profile):
        value = getattr(profile, field.name)
        if value != field.default:
            lines += _key(field.name, value)
    return "\n".join([*lines, ""])


def _key(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, tuple):
        yield f"{name}: {_scalar(value)}"
    elif value and all(isinstance(item, str) for item in value):
        yield f"{name}: [{', '.join(map(_scalar, value))}]"
    elif not value:
        yield f"{name}: []"
    else:
        yield f"{name}:"
        for item in value:
            yield from _item(item)


def _item(item: Any) -> Iterator[str]:
    if not is_dataclass(item):
        yield f"  - {_listed(item)}"
        return
    inner = [line for field in fields(item) for line in _key(field.name, getattr(item, field.name))]
    yield f"  - {inner[0]}"
    yield from (f"    {line}" for line in inner[1:])


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _listed(point: Sequence[float]) -> str:
    return f"[{', '.join(map(repr, point))}]"
