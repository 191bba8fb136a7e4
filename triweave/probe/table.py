"""What a profile says, on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from triweave.cluster import CATALOGUE, Cluster
from triweave.planner.profile import Profile
from triweave.planner.profile_layers import held_layers
from triweave.planner.profile_machine import machine_from_profile

GB = 1e9


def to_text(profile: Profile) -> Iterator[str]:
    """The machine, then a line for each kind of measurement that there is."""
    clocks = [
        f"{profile.power_limit_watts:.0f} W" if profile.power_limit_watts else "",
        f"{profile.max_sm_clock_mhz:.0f} MHz at most" if profile.max_sm_clock_mhz else "",
        f"{profile.sustained_sm_clock_mhz:.0f} MHz in the middle of products" if profile.sustained_sm_clock_mhz else "",
    ]
    versions = [f"torch {profile.torch}", f"NCCL {profile.nccl}" if profile.nccl else ""]
    yield ", ".join(filter(None, [f"{profile.num_gpus} x {profile.gpu_model} ({profile.gpu})", *versions, *clocks]))
    yield from (*_products(profile), *_attention(profile), *_curves(profile), *_rest(profile))


def _products(profile: Profile) -> Iterator[str]:
    names = {"NT": "forward", "NN": "input gradient", "TN": "weight gradient"}
    for table in profile.matmul:
        rates = sorted(2e-12 * m * n * k / seconds for m, n, k, seconds in table.m_n_k_seconds)
        middle, most = rates[len(rates) // 2], rates[-1]
        yield (
            f"{f'{table.precision} {names[table.operands]}':24} {middle:8.1f} TFLOP/s in the middle,"
            f" {most:.1f} at best, of {len(rates)} shapes"
        )

    if profile.burst_tflops and profile.back_to_back_tflops:
        yield (
            f"{'one large product':24} {profile.burst_tflops:8.1f} TFLOP/s when the card was idle before,"
            f" {profile.back_to_back_tflops:.1f} back to back"
        )


def _attention(profile: Profile) -> Iterator[str]:
    for table in profile.attention:
        points = table.shape_forward_backward_seconds
        batch, seq, heads, kv_heads, head_dim, forward_s, backward_s = max(points, key=lambda point: point[5])
        flops = 2e-12 * batch * heads * head_dim * seq * seq
        yield (
            f"{f'attention, {table.kernel}':24} {flops / forward_s:8.1f} TFLOP/s forward,"
            f" {2.5 * flops / backward_s:.1f} backward, causal, at {batch} x {seq}, {heads} heads of {head_dim} and"
            f" {kv_heads}; {len(points)} shapes"
        )


def _curves(profile: Profile) -> Iterator[str]:
    for operation in profile.operations:
        yield _rate(operation.operation, operation.bytes_seconds[-1])
    for collective in profile.collectives:
        size, seconds = collective.bytes_seconds[-1]
        factor = (2 if collective.kind == "all_reduce" else 1) * (collective.ranks - 1) / collective.ranks
        yield _rate(f"{collective.kind} of {collective.ranks}", (size, seconds), factor, "on the bus")
    for link in profile.point_to_point:
        yield _rate("message", link.bytes_seconds[-1])
    for copy in profile.copies:
        yield _rate(f"copy engines, {copy.what} of {copy.ranks}", copy.bytes_seconds[-1])
    if profile.host_copy_bytes_seconds:
        yield _rate("host copy", profile.host_copy_bytes_seconds[-1])


def _rate(name: str, point: tuple[int, float], factor: float = 1.0, what: str = "") -> str:
    size, seconds = point
    return f"{name:24} {factor * size / seconds / GB:8.1f} GB/s {what and what + ' '}at {size / 2**20:.4g} MiB"


def _rest(profile: Profile) -> Iterator[str]:
    for slowdown in profile.slowdowns:
        lost = slowdown.seconds_lost_per_second
        yield f"{f'products beside {slowdown.beside}':32} lose {lost:.3f} s a second"
    yield from _layers(profile)
    for host in profile.hosts:
        what = "+".join(host.recompute) or "nothing"
        what = f"fp8, {what}" if host.precision == "fp8" else what
        among = f"dp, {host.shard}" if host.shard is not None else f"tp {host.tp}"
        backward = host.backward_input_seconds + host.backward_weight_seconds
        yield (
            f"{f'host, {among}, {what} again':40} {1e3 * host.forward_seconds:8.2f} ms forward,"
            f" {1e3 * backward:.2f} backward a layer"
        )
    if profile.launch_seconds is not None:
        yield f"{'launch of a kernel':24} {1e6 * profile.launch_seconds:8.1f} us"


def _layers(profile: Profile) -> Iterator[str]:
    """Whole layers, and on a GPU how far the sum of their parts is from them."""
    gpu = CATALOGUE[profile.gpu]
    priced: list[str] = [""] * len(profile.layers)
    if gpu.peak_flops and {"gemm", "attention", "memory"} <= set(profile.parts):
        parts = replace(profile, layers=())
        machine = machine_from_profile(parts, Cluster(1, max(1, profile.num_gpus), gpu))
        for number, held in enumerate(held_layers(profile, machine)):
            ahead, back = (of / took - 1 for of, took in zip(held.priced, held.measured, strict=True))
            waits = ", waits for the host" if held.waits_for_host else ""
            priced[number] = f"; its parts {100 * ahead:+.1f} % and {100 * back:+.1f} %{waits}"
    for (tp, batch, seq, hidden, _, heads, _, _, *seconds), beside in zip(profile.layers, priced, strict=True):
        forward, backward = (1e3 * one for one in seconds)
        yield (
            f"layer, tp {tp}, {batch} x {seq}, hidden {hidden}, {heads} heads: {forward:.2f} ms forward,"
            f" {backward:.2f} backward{beside}"
        )
