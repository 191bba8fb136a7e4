"""What one kind of GPU and its links have been measured to do: the numbers that time is made of.

Datasheet figures (peaks, processors, ports) stand in the cluster catalogue alone and are taken from there. Only
measurements live here, each with its source; how they combine is in the `time_*` modules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log
from types import MappingProxyType
from typing import Literal

from triweave.cluster import CATALOGUE, Cluster, Gpu
from triweave.errors import InputError, Problem, closest
from triweave.layout import Recompute, Shard

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one collective by bytes of the whole tensor, measured; between points straight in logarithms.

    Beyond the largest point the last bandwidth holds; below the smallest the smallest time does (latency).
    """

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """Seconds for `size` bytes."""
        if size <= self.bytes[0]:
            return self.seconds[0]
        if size >= self.bytes[-1]:
            return self.seconds[-1] * size / self.bytes[-1]
        i = bisect_left(self.bytes, size)
        share = log(size / self.bytes[i - 1]) / log(self.bytes[i] / self.bytes[i - 1])
        return self.seconds[i - 1] * exp(share * log(self.seconds[i] / self.seconds[i - 1]))

    def times(self, factor: float) -> Curve:
        """The same, every size `factor` times as long."""
        return Curve(self.bytes, tuple(seconds * factor for seconds in self.seconds))


def curve_from_bus_bandwidth(ranks: int, points: tuple[tuple[float, float], ...]) -> Curve:
    """A curve from `(MiB, bus GB/s)` as NCCL's own tests print it: bus = bytes / time x 2(n - 1)/n."""
    factor = 2 * (ranks - 1) / ranks
    return Curve(
        tuple(mib * MIB for mib, _ in points),
        tuple(mib * MIB * factor / (bus * 1e9) for mib, bus in points),
    )


@dataclass(frozen=True, slots=True)
class Matmul:
    """One measured product `[m, k] x [k, n]` in bf16."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Attention:
    """One measured kernel of causal attention in bf16."""

    kernel: str
    batch: int
    seq: int
    heads: int
    head_dim: int
    forward_s: float
    backward_s: float


Precision = Literal["bf16", "fp8"]
"""What the layers' products are computed in."""

HostKey = tuple[int, Shard | None, tuple[Recompute, ...], Precision]
"""Tensor-parallel ranks; what data-parallel ranks share out, None where there are none; what is recomputed; and the
precision."""


@dataclass(frozen=True, slots=True, eq=False)
class Trainer:
    """This package's trainer on one kind of machine, each part as far as a profile holds it."""

    operations: Mapping[str, Curve] = field(default_factory=lambda: MappingProxyType({}))
    """Operations bound by memory, by name (`profile.Operation`) and the bytes that they move."""
    copies: Mapping[tuple[str, int], Curve] = field(default_factory=lambda: MappingProxyType({}))
    """What copy engines carry (`profile.Copied`) by ranks."""
    slowdowns: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """What products lose beside what moves data (`profile.Beside`), as a share of the time that this takes."""
    hosts: Mapping[HostKey, tuple[float, float, float]] = field(default_factory=lambda: MappingProxyType({}))
    """What the host needs to issue a layer's forward and the halves of its backward, with what runs again."""
    layer_ratios: Mapping[int, tuple[tuple[float, float, float], ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Measured over priced time of whole layers, by tensor-parallel ranks: share of products, ratio forward, backward.

    Products draw more power than what is between them, and under the power limit the fewer a layer has, the higher the
    clock at which it runs them: tables are of one mixture, layers of theirs.
    """
    collectives: frozenset[int] = frozenset()
    """Ranks of the groups inside a node whose collectives were measured, by the calls that training makes."""
    host_copy: Curve | None = None
    """From host memory to the GPU."""
    launch_s: float | None = None
    """One kernel, on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """One kind of GPU in a node of its kind, in FLOP/s, bytes/s and seconds.

    Compared by identity: it is a key under which costs are remembered, and hashing its tables would cost more than
    they save.
    """

    name: str
    peak_bf16: float
    peak_fp8: float | None
    sms: int
    matmul_ceiling: float
    """Share of `peak_bf16` that the best large product reaches in back-to-back training on random data."""
    fp8_ceiling: float
    hbm_bytes_per_s: float
    """What a large copy reaches, read plus write."""
    hbm_kernel_share: float
    """Share of that which element-wise kernels reach."""
    nvlink_all_reduce: Mapping[int, Curve]
    """Measured all-reduce curves inside a node, by ranks."""
    nic_bytes_per_s: float
    """One GPU's share of its node's network, one direction."""
    nic_efficiency: float = 0.8
    nic_latency_s: float = 10e-6
    """One message between nodes."""
    nic_round_s: float = 50e-6
    """One doubling of the nodes of a collective: 32 GPUs on 4 nodes need 0.4 ms for what takes no bandwidth (NCCL
    tests, 16 MiB on 8 x 400 Gb EFA), InfiniBand about half."""
    matmuls: tuple[Matmul, ...] = field(default=())
    nvlink_gather: Mapping[int, Curve] = field(default_factory=lambda: MappingProxyType({}))
    """Measured all-gather curves inside a node, by ranks (a reduce-scatter takes as long to 6 %); where there is none,
    a share of the all-reduce."""
    attentions: tuple[Attention, ...] = ()
    nvlink_send: Curve | None = None
    """One message between two ranks of a node; where it was not measured, their all-reduce."""
    products: Mapping[tuple[str, str], tuple[Matmul, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Products of this very machine by precision and order of operands; `matmuls` then is empty."""
    trainer: Trainer | None = None
    """What this package's trainer was measured to do; priced in its own stack alone."""
    host_bytes_per_s: float = 0.0
    """Copies between pinned host memory and the GPU, one way; 0 where nothing is known."""

    @property
    def hbm_kernel_bytes_per_s(self) -> float:
        """Bytes a second that element-wise kernels move."""
        return self.hbm_bytes_per_s * self.hbm_kernel_share


# All-reduce on A100 NVLink: vTrain's NCCL table (MICRO'24): points at 1 to 64 MiB, and its fit above 32 MB.
_A100_8 = Curve((MIB, 4 * MIB, 16 * MIB, 64 * MIB, 1024 * MIB), (93e-6, 96e-6, 232e-6, 580e-6, 8.21e-3))
_A100_4 = Curve((MIB, 4 * MIB, 16 * MIB, 64 * MIB, 1024 * MIB), (80e-6, 85e-6, 220e-6, 574e-6, 7.28e-3))
_A100_2 = Curve((MIB, 4 * MIB, 16 * MIB, 64 * MIB, 1024 * MIB), (60e-6, 70e-6, 190e-6, 447e-6, 5.51e-3))

# Hopper: eight GPUs of an H200 node with NVLS (published NCCL tests); two GPUs without it, measured for this project.
_H_8 = curve_from_bus_bandwidth(8, ((1, 40), (4, 107), (16, 220), (64, 347), (256, 436), (1024, 464), (16384, 482)))
_H_4 = curve_from_bus_bandwidth(4, ((1, 35), (4, 80), (16, 185), (64, 290), (256, 360), (1024, 390)))
_H_2 = curve_from_bus_bandwidth(2, ((1, 27), (4, 49), (16, 144), (64, 220), (256, 286), (1024, 327)))

# All-gather of two H200 GPUs, measured for this project beside the all-reduce (bus = bytes / time x (n - 1)/n).
_H_GATHER_2 = Curve(
    tuple(mib * MIB for mib in (1, 4, 16, 64, 256, 1024)), (32e-6, 85e-6, 90e-6, 177e-6, 576e-6, 2.028e-3)
)

# Blackwell: published NCCL tests (64 MiB and 1 GiB in one node); smaller sizes by the H200 node's shape.
_B_8 = curve_from_bus_bandwidth(8, ((1, 45), (4, 120), (16, 250), (64, 401), (256, 600), (1024, 723)))
_B_4 = curve_from_bus_bandwidth(4, ((1, 40), (4, 95), (16, 215), (64, 350), (256, 500), (1024, 600)))
_B_2 = curve_from_bus_bandwidth(2, ((1, 30), (4, 60), (16, 180), (64, 300), (256, 420), (1024, 520)))

# F.linear in bf16 on H200, median of 12 to 20 runs on random data, measured for this project.
_H200_MATMULS = tuple(
    Matmul(m, n, k, ms * 1e-3)
    for m, n, k, ms in (
        (4096, 1280, 8192, 0.154),
        (4096, 8192, 1024, 0.118),
        (4096, 7168, 8192, 0.621),
        (4096, 8192, 3584, 0.327),
        (4096, 16032, 8192, 1.395),
        (4096, 14336, 8192, 1.242),
        (4096, 28672, 8192, 2.790),
        (8192, 28672, 4096, 2.884),
        (8192, 14336, 4096, 1.496),
        (8192, 4096, 14336, 1.440),
        (8192, 6144, 4096, 0.637),
        (8192, 4096, 4096, 0.428),
        (8192, 8192, 8192, 1.639),
    )
)


_HOST_COPY_SHARE = 0.86
"""Of the bus's datasheet rate, what copies from pinned memory reach: 54.8 GB/s of PCIe 5.0 x16 on an H200 (256 MiB,
`triweave probe`); on other cards it is taken for the same."""


def host_rate(gpu: Gpu) -> float:
    """Bytes a second that copies between pinned host memory and `gpu` are taken to reach, one way."""
    return _HOST_COPY_SHARE * gpu.pcie_bandwidth


def _curves(two: Curve, four: Curve, eight: Curve) -> Mapping[int, Curve]:
    return MappingProxyType({2: two, 4: four, 8: eight})


def _machine(
    name: str,
    *,
    matmul_ceiling: float,
    hbm: float,
    curves: Mapping[int, Curve],
    fp8_ceiling: float = 0.0,
    kernel_share: float = 0.85,
    matmuls: tuple[Matmul, ...] = (),
    gather: Mapping[int, Curve] | None = None,
    gpu: str | None = None,
) -> Machine:
    """Measurements (`hbm` in bytes/s) beside the datasheet of `gpu`, by default of the same name."""
    sheet = CATALOGUE[gpu or name]
    return Machine(
        name,
        sheet.peak_flops,
        sheet.peak_fp8_flops or None,
        sheet.num_sms,
        matmul_ceiling,
        fp8_ceiling,
        hbm,
        kernel_share,
        curves,
        sheet.nic_bandwidth,
        matmuls=matmuls,
        nvlink_gather=gather if gather is not None else MappingProxyType({}),
        host_bytes_per_s=host_rate(sheet),
    )


_AMPERE_LINKS, _HOPPER_LINKS = _curves(_A100_2, _A100_4, _A100_8), _curves(_H_2, _H_4, _H_8)
_BLACKWELL_LINKS = _curves(_B_2, _B_4, _B_8)
_HOPPER_GATHER = MappingProxyType({2: _H_GATHER_2})

# Ceilings: machine-learning-engineering's best products (271, 794, 1745, 1822 TFLOP/s). Hopper's own products here
# reach 775 for a short while and 640 to 690 once the card is at its power limit; training is the latter.
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        made.name: made
        for made in (
            _machine("a100-80gb", matmul_ceiling=0.79, hbm=1.75e12, curves=_AMPERE_LINKS),
            _machine("a100-40gb", matmul_ceiling=0.79, hbm=1.35e12, curves=_AMPERE_LINKS),
            _machine(
                "h100-80gb",
                matmul_ceiling=0.66,
                fp8_ceiling=0.55,
                hbm=2.98e12,
                curves=_HOPPER_LINKS,
                gather=_HOPPER_GATHER,
            ),
            # torchtitan's Grand Teton parts: HBM2e, 500 W. Its own bf16 run at batch 2 sets the ceiling.
            _machine(
                "h100-96gb-500w",
                gpu="h100-80gb",
                matmul_ceiling=0.48,
                fp8_ceiling=0.43,
                hbm=2.1e12,
                curves=_HOPPER_LINKS,
                gather=_HOPPER_GATHER,
            ),
            _machine(
                "h200-141gb",
                matmul_ceiling=0.74,
                fp8_ceiling=0.64,
                hbm=4.27e12,
                curves=_HOPPER_LINKS,
                gather=_HOPPER_GATHER,
                matmuls=_H200_MATMULS,
            ),
            _machine(
                "b200-180gb",
                matmul_ceiling=0.48,
                fp8_ceiling=0.54,
                hbm=7.1e12,
                kernel_share=0.8,
                curves=_BLACKWELL_LINKS,
            ),
            _machine(
                "gb200-186gb",
                matmul_ceiling=0.48,
                fp8_ceiling=0.54,
                hbm=7.1e12,
                kernel_share=0.8,
                curves=_BLACKWELL_LINKS,
            ),
        )
    }
)
"""By the GPU names of the cluster catalogue, and one card of which only published runs know."""


def machine(name: str) -> Machine:
    """The machine of a GPU name of the catalogue.

    Raises:
        InputError: nothing has been measured for that name.
    """
    if name not in MACHINES:
        rule = f"has no measured speeds; known are {', '.join(MACHINES)}"
        raise InputError(Problem("cluster", name, rule, closest(name, list(MACHINES))))
    return MACHINES[name]


def machine_of(cluster: Cluster) -> Machine:
    """The machine of a cluster's GPU, its measurements scaled where a cluster file gives the card other figures.

    Raises:
        InputError: nothing has been measured for that GPU.
    """
    return _machine_of(cluster.gpu, cluster.num_rails / cluster.gpus_per_node)


@lru_cache(maxsize=256)
def _machine_of(gpu: Gpu, ports_per_gpu: float) -> Machine:
    known = machine(gpu.name)
    usual = CATALOGUE[gpu.name]
    if gpu == usual and ports_per_gpu == 1:
        return known
    link = (usual.nvlink_bandwidth or usual.pcie_bandwidth) / (gpu.nvlink_bandwidth or gpu.pcie_bandwidth)
    return replace(
        known,
        peak_bf16=gpu.peak_flops,
        peak_fp8=gpu.peak_fp8_flops or None,
        sms=gpu.num_sms,
        hbm_bytes_per_s=known.hbm_bytes_per_s * gpu.memory_bandwidth / usual.memory_bandwidth,
        nvlink_all_reduce=MappingProxyType({n: curve.times(link) for n, curve in known.nvlink_all_reduce.items()}),
        nvlink_gather=MappingProxyType({n: curve.times(link) for n, curve in known.nvlink_gather.items()}),
        nic_bytes_per_s=gpu.nic_bandwidth * ports_per_gpu,
        host_bytes_per_s=host_rate(gpu),
        # Products of another card say nothing of this one.
        matmuls=known.matmuls if gpu.peak_flops == usual.peak_flops else (),
    )
