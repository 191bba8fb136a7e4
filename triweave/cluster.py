"""Machines in numbers: how many nodes, how many GPUs on each, and what one GPU can do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triweave.errors import InputError, Problem, closest


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of accelerator. `peak_flops` is dense bf16 FLOP/s as its datasheet states it; memory in bytes."""

    name: str
    memory_bytes: int
    peak_flops: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`num_nodes` nodes of `gpus_per_node` equal GPUs; ranks are numbered node by node."""

    num_nodes: int
    gpus_per_node: int
    gpu: Gpu

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus_per_node}x{self.gpu.name}"


# Datasheet figures: memory in GB (10^9 or 2^30 as sold, taken as 2^30), dense bf16 TFLOP/s.
CATALOGUE: dict[str, Gpu] = {
    name: Gpu(name, gib * 2**30, tflops * 1e12)
    for name, gib, tflops in (
        ("a100-40gb", 40, 312.0),
        ("a100-80gb", 80, 312.0),
        ("h100-80gb", 80, 989.0),
        ("h200-141gb", 141, 989.0),
        ("b200-180gb", 180, 2250.0),
        ("gb200-186gb", 186, 2500.0),
        ("cpu", 0, 0.0),
    )
}


def parse_cluster(text: str) -> Cluster:
    """Read `NODESxGPUSxGPU`, as in `4x8xh100-80gb`; `1x6xcpu` is six processes on one host.

    Raises:
        InputError: the text has another form, or names a GPU that the catalogue does not hold.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([a-z][\w.-]*)", text.strip().lower())
    if match is None:
        raise InputError(Problem("cluster", text, "must be NODESxGPUSxGPU", "4x8xh100-80gb"))
    nodes, per_node, name = int(match[1]), int(match[2]), match[3]
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        near = closest(name, list(CATALOGUE)) or next((gpu for gpu in CATALOGUE if gpu.startswith(name)), None)
        nearest = f"{nodes}x{per_node}x{near}" if near else None
        raise InputError(Problem("cluster", text, f"names a GPU that is not one of {known}", nearest))
    return Cluster(nodes, per_node, CATALOGUE[name])


def peak_flops_of(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by the name its driver gives (`NVIDIA H100 80GB HBM3`), None if it is not known."""
    lowered = device_name.lower()
    for name in ("gb200", "b200", "h200", "h100", "a100"):
        if name in lowered:
            return next(gpu.peak_flops for key, gpu in CATALOGUE.items() if key.startswith(name))
    return None
