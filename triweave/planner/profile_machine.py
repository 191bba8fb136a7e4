"""From a machine profile to the `Machine` that time is priced on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log2
from pathlib import Path
from types import MappingProxyType

from triweave.cluster import CATALOGUE, Cluster, Gpu
from triweave.errors import InputError, Problem, closest
from triweave.planner.machine import MACHINES, Attention, Curve, Machine, Matmul, Trainer, host_rate
from triweave.planner.profile import Collective, Point, Profile, Span, read_profile
from triweave.planner.profile_layers import with_layers

_SHIPPED = Path(__file__).parent / "profiles"


def machine_from_profile(profile: Profile, cluster: Cluster) -> Machine:
    """The cluster's machine with what the profile measured in place of what is known of such GPUs.

    What the profile lacks stays as it is known; for a GPU of which nothing is known, the profile must hold products
    and an all-reduce inside a node. A profile of another GPU than the cluster's is carried over in shares of the two
    datasheets: `is_foreign` says so, and the range beside each step is to be widened.

    Raises:
        InputError: nothing is known of the GPU, and the profile lacks what it takes.
    """
    gpu = cluster.gpu
    if CATALOGUE[profile.gpu].peak_flops == 0:
        rule = "is a rehearsal that was measured on a CPU; it says nothing of a GPU"
        raise InputError(Problem("profile.gpu", profile.gpu, rule, gpu.name))
    own = CATALOGUE[profile.gpu]
    measured = _measured(profile, _known(profile, own), own)
    if not is_foreign(profile, cluster):
        # A cluster file that gives the node another network changes this; the rest was measured.
        network = gpu.nic_bandwidth * cluster.num_rails / cluster.gpus_per_node
        return with_layers(profile, replace(measured, nic_bytes_per_s=network))
    return _carried_over(measured, own, gpu, cluster)


def is_foreign(profile: Profile, cluster: Cluster) -> bool:
    """Whether the profile is of another GPU than the cluster's."""
    return profile.gpu != cluster.gpu.name


def profile_of(words: str) -> Profile:
    """The profile of `--profile`: a file, or the name of one that comes with the package.

    Raises:
        InputError: no such file and no such name, or a file that is not a profile.
    """
    shipped = {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}
    if words in shipped:
        return read_profile(shipped[words])
    if not words or not Path(words).exists():
        rule = f"is neither a file nor one of the profiles that come with the package: {', '.join(shipped)}"
        raise InputError(Problem("profile", words or '""', rule, closest(words, list(shipped))))
    return read_profile(Path(words))


def _known(profile: Profile, gpu: Gpu) -> Machine:
    """What is known of a profile's GPU without it; of a GPU of which nothing is, its datasheet and usual shares."""
    if profile.gpu in MACHINES:
        return MACHINES[profile.gpu]
    forwards = [point for table in profile.matmul if table.precision == "bf16" for point in table.m_n_k_seconds]
    if not forwards or not _inside(profile, "all_reduce"):
        rule = "has no measured speeds of its own, so its profile needs matmul points and an all_reduce in a node"
        raise InputError(Problem("gpu", profile.gpu, rule))
    return Machine(
        profile.gpu,
        gpu.peak_flops,
        gpu.peak_fp8_flops or None,
        gpu.num_sms,
        max(2.0 * m * n * k / seconds for m, n, k, seconds in forwards) / gpu.peak_flops,
        0.0,
        0.9 * gpu.memory_bandwidth,
        0.85,
        MappingProxyType(_inside(profile, "all_reduce")),
        gpu.nic_bandwidth,
        host_bytes_per_s=host_rate(gpu),
    )


def _measured(profile: Profile, known: Machine, gpu: Gpu) -> Machine:
    gathers = _inside(profile, "all_gather")
    scatters = _inside(profile, "reduce_scatter")
    sends = [curve.bytes_seconds for curve in profile.point_to_point if curve.span == "node"]
    products: Mapping[tuple[str, str], tuple[Matmul, ...]] = MappingProxyType(
        {
            (table.precision, table.operands): tuple(Matmul(*point) for point in table.m_n_k_seconds)
            for table in profile.matmul
        }
    )
    return replace(
        _with_network(profile, known, gpu),
        matmuls=() if products else known.matmuls,
        products=products,
        attentions=tuple(
            Attention(table.kernel, batch, seq, heads, head_dim, forward, backward)
            for table in profile.attention
            for batch, seq, heads, _, head_dim, forward, backward in table.shape_forward_backward_seconds
        ),
        hbm_bytes_per_s=max(
            (size / seconds for size, seconds in profile.memory_bytes_seconds), default=known.hbm_bytes_per_s
        ),
        nvlink_all_reduce=MappingProxyType({**known.nvlink_all_reduce, **_inside(profile, "all_reduce")}),
        # One curve stands for both halves of an all-reduce: the mean of what was measured of them.
        nvlink_gather=MappingProxyType(
            {**known.nvlink_gather, **scatters, **gathers}
            | {ranks: _mean(gathers[ranks], scatters[ranks]) for ranks in gathers.keys() & scatters.keys()}
        ),
        nvlink_send=_curve(sends[0]) if sends else known.nvlink_send,
        trainer=_trainer(profile),
    )


def _trainer(profile: Profile) -> Trainer:
    return Trainer(
        MappingProxyType({one.operation: _curve(one.bytes_seconds) for one in profile.operations}),
        MappingProxyType({(one.what, one.ranks): _curve(one.bytes_seconds) for one in profile.copies}),
        MappingProxyType({one.beside: one.seconds_lost_per_second for one in profile.slowdowns}),
        hosts=MappingProxyType(
            {
                (one.tp, one.shard, one.recompute, one.precision): (
                    one.forward_seconds,
                    one.backward_input_seconds,
                    one.backward_weight_seconds,
                )
                for one in profile.hosts
            }
        ),
        collectives=frozenset(one.ranks for one in profile.collectives if one.span == "node"),
        host_copy=_curve(profile.host_copy_bytes_seconds) if profile.host_copy_bytes_seconds else None,
        launch_s=profile.launch_seconds,
    )


def _curve(points: tuple[Point, ...]) -> Curve:
    return Curve(*zip(*points, strict=True))


def _inside(profile: Profile, kind: Collective, span: Span = "node") -> dict[int, Curve]:
    return {
        curve.ranks: _curve(curve.bytes_seconds)
        for curve in profile.collectives
        if (curve.kind, curve.span) == (kind, span)
    }


def _mean(one: Curve, other: Curve) -> Curve:
    """Half way between two curves, at the sizes of the first."""
    pairs = zip(one.bytes, one.seconds, strict=True)
    return Curve(one.bytes, tuple((seconds + other(size)) / 2 for size, seconds in pairs))


def _with_network(profile: Profile, known: Machine, gpu: Gpu) -> Machine:
    """The machine with what was measured between nodes: the share of a port that messages reach, and latencies."""
    machine = known
    port = gpu.nic_bandwidth if profile.nic_gbit_per_s is None else profile.nic_gbit_per_s / 8 * 1e9
    messages = [curve.bytes_seconds for curve in profile.point_to_point if curve.span == "cluster"]
    if messages and port:
        rate = max(points[-1][0] / points[-1][1] for points in messages)
        size, seconds = min(points[0] for points in messages)
        machine = replace(machine, nic_efficiency=rate / port, nic_latency_s=max(0.0, seconds - size / rate))
    # Of the smallest sum over nodes nearly all is latency: two rounds a doubling of the nodes, as it is priced.
    sums = _inside(profile, "all_reduce", "cluster")
    if sums:
        nodes = min(sums)
        machine = replace(machine, nic_round_s=sums[nodes].seconds[0] / (2 * log2(nodes)))
    return machine


def _carried_over(measured: Machine, own: Gpu, gpu: Gpu, cluster: Cluster) -> Machine:
    link = (own.nvlink_bandwidth or own.pcie_bandwidth) / (gpu.nvlink_bandwidth or gpu.pcie_bandwidth)
    return replace(
        measured,
        name=gpu.name,
        peak_bf16=gpu.peak_flops,
        peak_fp8=gpu.peak_fp8_flops or None,
        sms=gpu.num_sms,
        hbm_bytes_per_s=measured.hbm_bytes_per_s * gpu.memory_bandwidth / own.memory_bandwidth,
        nvlink_all_reduce=MappingProxyType({n: curve.times(link) for n, curve in measured.nvlink_all_reduce.items()}),
        nvlink_gather=MappingProxyType({n: curve.times(link) for n, curve in measured.nvlink_gather.items()}),
        nvlink_send=measured.nvlink_send.times(link) if measured.nvlink_send is not None else None,
        nic_bytes_per_s=gpu.nic_bandwidth * cluster.num_rails / cluster.gpus_per_node,
        host_bytes_per_s=host_rate(gpu),
        # Products and kernels of another card say nothing of this one's shapes.
        matmuls=(),
        products=MappingProxyType({}),
        attentions=(),
        trainer=None,
    )
