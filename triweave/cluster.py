"""Machines in numbers: how many nodes, how many GPUs on each, what one GPU can do, and how they are wired."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from triweave.errors import InputError, Problem, closest, nearest_number

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of accelerator and the links of the node it is usually sold in; datasheet figures."""

    name: str
    memory_bytes: int
    """As sold."""
    peak_flops: float
    """Dense bf16 FLOP/s."""
    usable_bytes: int = 0
    """What the driver gives to programs, before any context: `torch.cuda.get_device_properties().total_memory`."""
    peak_fp8_flops: float = 0.0
    """Dense fp8 FLOP/s; 0 where there is none."""
    memory_bandwidth: float = 0.0
    """Bytes a second."""
    num_sms: int = 0
    """Streaming multiprocessors."""
    nvlink_bandwidth: float = 0.0
    """Bytes a second of one GPU in one direction; 0 where GPUs talk over PCIe."""
    nvlink_domain: int = 8
    """GPUs that NVLink joins; wider than the largest of `node_sizes`, it joins nodes (GB200 NVL72)."""
    nic_bandwidth: float = 0.0
    """Network bytes a second of one GPU in one direction, in the node it is usually sold in."""
    pcie_bandwidth: float = 0.0
    """Bytes a second to the host in one direction."""
    node_sizes: tuple[int, ...] = ()
    """GPUs of the nodes that it is sold and rented in; empty where any number is possible."""
    context_bytes: int = 0
    """What a CUDA context with PyTorch's kernels takes before the first tensor."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`num_nodes` nodes of `gpus_per_node` equal GPUs; ranks are numbered node by node."""

    num_nodes: int
    gpus_per_node: int
    gpu: Gpu
    rails: int = 0
    """Network ports of a node; 0 is one a GPU."""

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.gpus_per_node

    @property
    def nvlink_domain(self) -> int:
        """Neighbouring ranks that NVLink joins: a node's GPUs, or those of several nodes of an NVL72 rack."""
        if self.gpu.nvlink_bandwidth == 0:
            return 1
        if self.gpu.nvlink_domain <= max(self.gpu.node_sizes, default=0):
            # The switch sits in the node: two nodes with half of the GPUs each are not joined.
            return self.gpus_per_node
        whole_nodes = self.gpu.nvlink_domain // self.gpus_per_node * self.gpus_per_node
        return min(self.world_size, max(self.gpus_per_node, whole_nodes))

    @property
    def num_rails(self) -> int:
        """Network ports of a node."""
        return self.rails or self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus_per_node}x{self.gpu.name}"


def _gpu(
    name: str,
    *,
    gib: float,
    usable_gib: float,
    tflops: float,
    fp8: float,
    tbps: float,
    sms: int,
    nvlink: float,
    nic_gbit: float,
    pcie: float,
    domain: int = 8,
    node_sizes: tuple[int, ...] = (1, 2, 4, 8),
    context_mib: int = 500,
) -> Gpu:
    """Datasheet units: GiB, dense TFLOP/s, TB/s, GB/s one way, Gbit/s of the node's ports per GPU."""
    return Gpu(
        name,
        int(gib * GIB),
        tflops * 1e12,
        usable_bytes=int(usable_gib * GIB),
        peak_fp8_flops=fp8 * 1e12,
        memory_bandwidth=tbps * 1e12,
        num_sms=sms,
        nvlink_bandwidth=nvlink * 1e9,
        nvlink_domain=domain,
        node_sizes=node_sizes,
        nic_bandwidth=nic_gbit / 8 * 1e9,
        pcie_bandwidth=pcie * 1e9,
        context_bytes=context_mib * 2**20,
    )


# Memory, rates and links: NVIDIA's datasheets (A100 2021, H100 2023, H200 2024, DGX B200 and GB200 NVL72 2024);
# NVLink 3, 4 and 5 carry 300, 450 and 900 GB/s one way. Ports of a node: DGX A100 8 x 200 Gbit/s, DGX H100, H200, B200
# and GB200 400 Gbit/s a GPU. Usable memory: `total_memory` as PyTorch's out-of-memory messages print it for these
# cards. Context: what nvidia-smi shows after a first kernel, CUDA 12 with lazy loading.
CATALOGUE: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "a100-40gb",
            gib=40,
            usable_gib=39.39,
            tflops=312,
            fp8=0,
            tbps=1.555,
            sms=108,
            nvlink=300,
            nic_gbit=200,
            pcie=32,
        ),
        _gpu(
            "a100-80gb",
            gib=80,
            usable_gib=79.15,
            tflops=312,
            fp8=0,
            tbps=2.039,
            sms=108,
            nvlink=300,
            nic_gbit=200,
            pcie=32,
        ),
        _gpu(
            "a100-pcie-40gb",
            gib=40,
            usable_gib=39.39,
            tflops=312,
            fp8=0,
            tbps=1.555,
            sms=108,
            nvlink=0,
            nic_gbit=100,
            pcie=32,
        ),
        _gpu(
            "a100-pcie-80gb",
            gib=80,
            usable_gib=79.15,
            tflops=312,
            fp8=0,
            tbps=1.935,
            sms=108,
            nvlink=0,
            nic_gbit=100,
            pcie=32,
        ),
        _gpu(
            "h100-80gb",
            gib=80,
            usable_gib=79.11,
            tflops=989,
            fp8=1979,
            tbps=3.35,
            sms=132,
            nvlink=450,
            nic_gbit=400,
            pcie=64,
        ),
        _gpu(
            "h200-141gb",
            gib=141,
            usable_gib=139.72,
            tflops=989,
            fp8=1979,
            tbps=4.8,
            sms=132,
            nvlink=450,
            nic_gbit=400,
            pcie=64,
        ),
        _gpu(
            "b200-180gb",
            gib=180,
            usable_gib=178.35,
            tflops=2250,
            fp8=4500,
            tbps=8.0,
            sms=148,
            nvlink=900,
            nic_gbit=400,
            pcie=64,
        ),
        _gpu(
            "gb200-186gb",
            gib=186,
            usable_gib=184.0,
            tflops=2500,
            fp8=5000,
            tbps=8.0,
            sms=148,
            nvlink=900,
            nic_gbit=400,
            pcie=64,
            domain=72,
            node_sizes=(1, 2, 4),
        ),
        Gpu("cpu", 0, 0.0),
    )
}


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """A GPU in a cluster file: one of the catalogue, or its own figures."""

    name: str
    memory_gib: float | None = None
    """As the driver reports it."""
    bf16_tflops: float | None = None
    """Dense."""
    fp8_tflops: float | None = None
    """Dense."""
    memory_tb_per_s: float | None = None
    sms: int | None = None
    nvlink_gb_per_s: float | None = None
    """One direction."""
    nvlink_domain: int | None = None
    nic_gbit_per_s: float | None = None
    """Of one GPU, one direction."""
    pcie_gb_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A cluster file: `nodes`, `gpus_per_node`, `rails` and a `gpu`."""

    nodes: int
    gpus_per_node: int
    gpu: GpuConfig
    rails: int | None = None


def parse_cluster(text: str) -> Cluster:
    """Read `NODESxGPUSxGPU`, as in `4x8xh100-80gb`; `1x6xcpu` is six processes on one host.

    Raises:
        InputError: the text has another form, names a GPU that the catalogue does not hold, or a node that such a GPU
            is not sold in. A cluster file may describe any node.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([a-z][\w.-]*)", text.strip().lower())
    if match is None:
        raise InputError(Problem("cluster", text, "must be NODESxGPUSxGPU", "4x8xh100-80gb"))
    nodes, per_node, name = int(match[1]), int(match[2]), match[3]
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        near = nearest_gpu(name)
        sizes = CATALOGUE[near].node_sizes if near else ()
        nearest = f"{nodes}x{nearest_number(per_node, sizes or (per_node,))}x{near}" if near else None
        raise InputError(Problem("cluster", text, f"names a GPU that is not one of {known}", nearest))
    gpu = CATALOGUE[name]
    if gpu.node_sizes and per_node not in gpu.node_sizes:
        few = ", ".join(map(str, gpu.node_sizes[:-1]))
        whole = f"{gpu.nvlink_domain} NVLink joins across nodes" if gpu.nvlink_domain > max(gpu.node_sizes) else ""
        rule = (
            f"has {per_node} GPUs in a node: {name} comes with {few} or {gpu.node_sizes[-1]}"
            f"{f' ({whole})' if whole else ''}; a cluster file may describe another node"
        )
        raise InputError(Problem("cluster", text, rule, f"{nodes}x{nearest_number(per_node, gpu.node_sizes)}x{name}"))
    return Cluster(nodes, per_node, gpu)


def nearest_gpu(name: str) -> str | None:
    """The GPU of the catalogue that `name` was most likely meant to be, None if none is near."""
    return closest(name, list(CATALOGUE)) or next((gpu for gpu in CATALOGUE if gpu.startswith(name)), None)


def cluster_from_config(config: ClusterConfig, where: Path | None = None) -> Cluster:
    """The cluster of a cluster file.

    Raises:
        InputError: a number that is not positive, or a GPU of another name without its memory and speed.
    """
    place = None if where is None else str(where)
    problems: list[Problem] = []
    for key, value in (("nodes", config.nodes), ("gpus_per_node", config.gpus_per_node)):
        if value < 1:
            problems.append(Problem(key, value, "must be at least 1", "1", place))
    if config.rails is not None and config.rails < 1:
        problems.append(Problem("rails", config.rails, "must be at least 1", "1", place))
    given = config.gpu
    figures = {
        "usable_bytes": _scaled(given.memory_gib, GIB),
        "peak_flops": _scaled(given.bf16_tflops, 1e12),
        "peak_fp8_flops": _scaled(given.fp8_tflops, 1e12),
        "memory_bandwidth": _scaled(given.memory_tb_per_s, 1e12),
        "num_sms": given.sms,
        "nvlink_bandwidth": _scaled(given.nvlink_gb_per_s, 1e9),
        "nvlink_domain": given.nvlink_domain,
        "nic_bandwidth": _scaled(given.nic_gbit_per_s, 1e9 / 8),
        "pcie_bandwidth": _scaled(given.pcie_gb_per_s, 1e9),
    }
    for key, number in figures.items():
        if number is not None and number < 0:
            problems.append(Problem(f"gpu.{key}", number, "must not be negative", "0", place))
    known = CATALOGUE.get(given.name.lower())
    if known is None and (given.memory_gib is None or given.bf16_tflops is None):
        rule = "is not in the catalogue, so it needs memory_gib and bf16_tflops"
        problems.append(Problem("gpu.name", given.name, rule, closest(given.name.lower(), list(CATALOGUE)), place))
    if problems:
        raise InputError(problems)
    usual = known or Gpu(given.name, int(given.memory_gib or 0) * GIB, 0.0, context_bytes=500 * 2**20)
    changed = {key: number for key, number in figures.items() if number is not None}
    if "usable_bytes" in changed:
        changed["usable_bytes"] = int(changed["usable_bytes"])
    gpu = replace(usual, **changed)  # type: ignore[arg-type]
    return Cluster(config.nodes, config.gpus_per_node, gpu, config.rails or 0)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def peak_flops_of(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by the name its driver gives (`NVIDIA H100 80GB HBM3`), None if it is not known."""
    lowered = device_name.lower()
    for name in ("gb200", "b200", "h200", "h100", "a100"):
        if name in lowered:
            return next(gpu.peak_flops for key, gpu in CATALOGUE.items() if key.startswith(name))
    return None
